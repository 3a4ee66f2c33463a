// SPDX-License-Identifier: Apache-2.0
#include "backends/oci_bundle.h"

#include <absl/strings/escaping.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <nlohmann/json.hpp>
#include <tuple>

#include "backends/seccomp_profile.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using nlohmann::json;

// /etc/passwd and /etc/group of an image are read whole; larger ones are refused.
constexpr uint64_t kMaxAccountFile = 16 << 20;

constexpr std::string_view kDefaultPath =
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// The largest id, as of Docker. All ones means "no change" to setresuid(2), and runs as root.
constexpr uint32_t kMaxId = 0x7fffffff;

// A file of the image, or "" if there is none.
absl::StatusOr<std::string> ReadInRoot(const std::string& rootfs, const char* path) {
  ASSIGN_OR_RETURN(const UniqueFd root, OpenFile(rootfs, O_PATH | O_DIRECTORY));
  // O_PATH: opening a device or FIFO may already do something, or wait. The image chose its type.
  open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT};
  const UniqueFd place(
      static_cast<int>(::syscall(SYS_openat2, root.get(), path, &how, sizeof(how))));
  if (!place.valid()) {
    if (errno == ENOENT || errno == ENOTDIR) return std::string();
    return ErrnoStatus(errno, fmt::format("open {} of the image", path));
  }
  struct stat info {};
  if (::fstat(place.get(), &info) != 0) return ErrnoStatus(errno, fmt::format("fstat {}", path));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(fmt::format("{} of the image is not a regular file", path));
  }
  ASSIGN_OR_RETURN(const UniqueFd fd,
                   OpenFile(fmt::format("/proc/self/fd/{}", place.get()), O_RDONLY),
                   "{} of the image", path);
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > kMaxAccountFile) {
    return absl::ResourceExhaustedError(fmt::format("{} of the image has {} bytes", path, size));
  }
  std::string text(size, '\0');
  RETURN_IF_ERROR(ReadFull(fd.get(), 0, std::as_writable_bytes(std::span(text))), "{} of the image",
                  path);
  return text;
}

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// `what` names the id in errors.
absl::StatusOr<uint32_t> ParseId(std::string_view text, std::string_view what) {
  uint32_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  if (!IsNumber(text) || error != std::errc() || id > kMaxId) {
    return absl::InvalidArgumentError(
        fmt::format("{} '{}' is not a number from 0 to {}", what, text, kMaxId));
  }
  return id;
}

// passwd(5): name:password:uid:gid:gecos:home:shell; group(5): name:password:gid:member,member
using Row = std::vector<std::string_view>;
using Table = std::vector<Row>;

Table ParseTable(std::string_view text, size_t fields) {
  Table table;
  for (const std::string_view line : Split(text, '\n')) {
    Row row = Split(line, ':');
    if (row.size() >= fields) table.push_back(std::move(row));
  }
  return table;
}

// The first row whose number, in column 2, is `key`, or whose name is if that is not a number.
const Row* FindRow(const Table& table, std::string_view key) {
  const size_t column = IsNumber(key) ? 2 : 0;
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const Row& row) { return row[column] == key; });
  return found == table.end() ? nullptr : &*found;
}

absl::StatusOr<uint32_t> ResolveGroup(const Table& groups, std::string_view group) {
  if (const Row* row = FindRow(groups, group); row != nullptr) {
    return ParseId((*row)[2], fmt::format("group '{}' of the image: gid", group));
  }
  if (IsNumber(group)) return ParseId(group, "group of the image");
  return absl::NotFoundError(
      fmt::format("group '{}' of the image is not in its /etc/group", group));
}

// The variable of that name, which ends with "=".
std::vector<std::string>::iterator FindVariable(std::vector<std::string>& environment,
                                                std::string_view name) {
  return std::ranges::find_if(environment,
                              [name](const auto& entry) { return entry.starts_with(name); });
}

// A configuration for crun is JSON, which has no way to write other bytes. Where it has a NUL, crun ends
// the text.
absl::Status CheckText(const std::string& text, std::string_view what) {
  if (text.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        fmt::format("{} \"{}\" has a NUL", what, absl::CHexEscape(text)));
  }
  try {
    std::ignore = json(text).dump();
  } catch (const json::type_error&) {
    return absl::InvalidArgumentError(
        fmt::format("{} \"{}\" is not UTF-8: a container's configuration cannot have it", what,
                    absl::CHexEscape(text)));
  }
  return absl::OkStatus();
}

json Mount(std::string_view target, std::string_view type, std::vector<std::string> options) {
  return {{"destination", target}, {"type", type}, {"source", type}, {"options", options}};
}

json Mounts() {
  return json::array({
      Mount("/proc", "proc", {"nosuid", "noexec", "nodev"}),
      Mount("/dev", "tmpfs", {"nosuid", "strictatime", "mode=755", "size=65536k"}),
      Mount("/dev/pts", "devpts",
            {"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}),
      Mount("/dev/shm", "tmpfs", {"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}),
      Mount("/dev/mqueue", "mqueue", {"nosuid", "noexec", "nodev"}),
      Mount("/sys", "sysfs", {"nosuid", "noexec", "nodev", "ro"}),
  });
}

json DefaultCapabilities() {
  const json set = {"CAP_AUDIT_WRITE", "CAP_CHOWN",     "CAP_DAC_OVERRIDE", "CAP_FOWNER",
                    "CAP_FSETID",      "CAP_KILL",      "CAP_MKNOD",        "CAP_NET_BIND_SERVICE",
                    "CAP_NET_RAW",     "CAP_SETFCAP",   "CAP_SETGID",       "CAP_SETPCAP",
                    "CAP_SETUID",      "CAP_SYS_CHROOT"};
  return {{"bounding", set}, {"effective", set}, {"permitted", set}};
}

constexpr uint64_t Bit(int capability) { return uint64_t{1} << capability; }

// On a tmpfs, so that nothing of it is left in the image or in what the container writes.
constexpr const char* kAgentInside = "/dev/.lamina-agent";

// After that of /dev.
json AgentMount(const std::string& agent) {
  return {{"destination", kAgentInside},
          {"type", "bind"},
          {"source", agent},
          {"options", {"bind", "ro", "nosuid", "nodev"}}};
}

// A rule is what makes the runtime write any; it adds those of the devices that every container has. Its
// root may make device nodes.
json NoDevices() { return json::array({{{"allow", false}, {"access", "rwm"}}}); }

json MaskedPaths() {
  return {"/proc/acpi",
          "/proc/asound",
          "/proc/interrupts",
          "/proc/kcore",
          "/proc/keys",
          "/proc/latency_stats",
          "/proc/timer_list",
          "/proc/timer_stats",
          "/proc/sched_debug",
          "/proc/scsi",
          "/sys/devices/virtual/powercap",
          "/sys/firmware"};
}

json ReadOnlyPaths() {
  return {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"};
}

}  // namespace

absl::StatusOr<User> ResolveUser(const std::string& rootfs, std::string_view user) {
  const Row parts = Split(user, ':');
  if (parts.size() > 2) {
    return absl::InvalidArgumentError(fmt::format("user '{}' of the image has two colons", user));
  }
  const std::string_view name = parts[0].empty() ? "0" : parts[0];
  ASSIGN_OR_RETURN(const std::string passwd_text, ReadInRoot(rootfs, "etc/passwd"));
  ASSIGN_OR_RETURN(const std::string group_text, ReadInRoot(rootfs, "etc/group"));
  const Table accounts = ParseTable(passwd_text, 4);
  const Table groups = ParseTable(group_text, 3);

  User result;
  const Row* account = FindRow(accounts, name);
  if (account != nullptr) {
    const std::string of_user = fmt::format("user '{}' of the image", name);
    ASSIGN_OR_RETURN(result.uid, ParseId((*account)[2], of_user + ": uid"));
    ASSIGN_OR_RETURN(result.gid, ParseId((*account)[3], of_user + ": gid"));
    if (account->size() > 5 && !(*account)[5].empty()) result.home = (*account)[5];
  } else if (IsNumber(name)) {
    ASSIGN_OR_RETURN(result.uid, ParseId(name, "user of the image"));
  } else {
    return absl::NotFoundError(
        fmt::format("user '{}' of the image is not in its /etc/passwd", name));
  }
  if (parts.size() == 2 && !parts[1].empty()) {
    ASSIGN_OR_RETURN(result.gid, ResolveGroup(groups, parts[1]));
    return result;
  }
  // Without a group in `user`, the account is a member of what /etc/group says.
  if (account == nullptr) return result;
  for (const Row& group : groups) {
    if (group.size() < 4) continue;
    const Row members = Split(group[3], ',');
    if (std::find(members.begin(), members.end(), (*account)[0]) == members.end()) continue;
    ASSIGN_OR_RETURN(const uint32_t gid,
                     ParseId(group[2], fmt::format("group '{}' of the image: gid", group[0])));
    if (gid != result.gid) result.additional_gids.push_back(gid);
  }
  return result;
}

absl::StatusOr<std::vector<std::string>> WithVariables(std::vector<std::string> environment,
                                                       const std::vector<std::string>& added) {
  for (const std::string& entry : added) {
    const size_t equals = entry.find('=');
    if (equals == 0 || equals == std::string::npos || entry.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError(
          fmt::format("'{}' is no variable: NAME=value is", absl::CHexEscape(entry)));
    }
    const auto there = FindVariable(environment, std::string_view(entry).substr(0, equals + 1));
    if (there != environment.end()) {
      *there = entry;
    } else {
      environment.push_back(entry);
    }
  }
  for (const std::string& entry : environment) RETURN_IF_ERROR(CheckText(entry, "variable"));
  return environment;
}

absl::StatusOr<std::vector<std::string>> ProgramEnvironment(std::vector<std::string> environment,
                                                            const std::vector<std::string>& added,
                                                            const User& user) {
  ASSIGN_OR_RETURN(environment, WithVariables(std::move(environment), added));
  if (FindVariable(environment, "PATH=") == environment.end()) {
    environment.emplace_back(kDefaultPath);
  }
  // crun would look it up in the image's /etc/passwd, opening whatever that is.
  if (FindVariable(environment, "HOME=") == environment.end()) {
    RETURN_IF_ERROR(CheckText(user.home, "home directory"));
    environment.push_back("HOME=" + user.home);
  }
  return environment;
}

absl::StatusOr<std::string> BundleConfig(const BundleOptions& options) {
  const oci::ImageConfig& image = options.config;
  std::vector<std::string> arguments = image.entrypoint;
  const std::vector<std::string>& command =
      options.command.empty() ? image.command : options.command;
  arguments.insert(arguments.end(), command.begin(), command.end());
  if (arguments.empty()) {
    return absl::InvalidArgumentError(
        "the image has no entrypoint and no command: say what to run after --");
  }
  for (const std::string& argument : arguments) RETURN_IF_ERROR(CheckText(argument, "argument"));
  RETURN_IF_ERROR(CheckText(options.agent, "path"));
  ASSIGN_OR_RETURN(const User user, ResolveUser(options.rootfs, image.user));

  ASSIGN_OR_RETURN(std::vector<std::string> environment,
                   ProgramEnvironment(image.environment, {}, user));
  if (options.terminal && FindVariable(environment, "TERM=") == environment.end()) {
    environment.emplace_back("TERM=xterm");
  }
  RETURN_IF_ERROR(CheckText(image.working_directory, "working directory"));

  arguments.insert(arguments.begin(), {kAgentInside, "--exec"});
  json mounts = Mounts();
  mounts.push_back(AgentMount(options.agent));

  const json config = {
      {"ociVersion", "1.0.2"},
      {"hostname", options.hostname},
      {"process",
       {{"terminal", options.terminal},
        {"user", {{"uid", user.uid}, {"gid", user.gid}, {"additionalGids", user.additional_gids}}},
        {"args", arguments},
        {"env", environment},
        {"cwd", image.working_directory.empty() ? "/" : image.working_directory},
        {"capabilities", DefaultCapabilities()},
        {"noNewPrivileges", false}}},
      {"root", {{"path", options.rootfs}, {"readonly", false}}},
      {"mounts", mounts},
      {"linux",
       {{"namespaces",
         json::array(
             {{{"type", "pid"}}, {{"type", "mount"}}, {{"type", "ipc"}}, {{"type", "uts"}}})},
        {"resources", {{"devices", NoDevices()}}},
        {"seccomp", SeccompForContainers()},
        {"maskedPaths", MaskedPaths()},
        {"readonlyPaths", ReadOnlyPaths()}}},
  };
  return config.dump(2);
}

const uint64_t kSandboxCapabilities = Bit(CAP_AUDIT_WRITE) | Bit(CAP_CHOWN) |
                                      Bit(CAP_DAC_OVERRIDE) | Bit(CAP_FOWNER) | Bit(CAP_FSETID) |
                                      Bit(CAP_KILL) | Bit(CAP_MKNOD) | Bit(CAP_NET_BIND_SERVICE) |
                                      Bit(CAP_NET_RAW) | Bit(CAP_SETFCAP) | Bit(CAP_SETGID) |
                                      Bit(CAP_SETPCAP) | Bit(CAP_SETUID) | Bit(CAP_SYS_CHROOT);

absl::StatusOr<std::string> SandboxBundleConfig(const SandboxBundleOptions& options) {
  std::vector<std::string> arguments = {kAgentInside};
  arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());

  json capabilities = DefaultCapabilities();
  for (json& set : capabilities) {
    set.push_back("CAP_LEASE");
    if (options.protect_agent) set.push_back("CAP_SYS_RESOURCE");
  }
  json mounts = Mounts();
  mounts.push_back(AgentMount(options.agent));
  json namespaces =
      json::array({{{"type", "pid"}}, {{"type", "mount"}}, {{"type", "ipc"}}, {{"type", "uts"}}});
  if (!options.host_network) namespaces.push_back({{"type", "network"}});

  json config = {
      {"ociVersion", "1.0.2"},
      {"hostname", options.hostname},
      {"process",
       {{"terminal", false},
        {"user", {{"uid", 0}, {"gid", 0}}},
        {"args", arguments},
        {"env", {kDefaultPath}},
        {"cwd", "/"},
        {"capabilities", capabilities},
        {"noNewPrivileges", false}}},
      {"root", {{"path", options.rootfs}, {"readonly", false}}},
      {"mounts", mounts},
      {"linux",
       {{"namespaces", namespaces},
        {"cgroupsPath", "/" + options.cgroup},
        {"resources", {{"devices", NoDevices()}}},
        {"seccomp", SeccompForContainers()},
        {"maskedPaths", MaskedPaths()},
        {"readonlyPaths", ReadOnlyPaths()}}},
  };
  // In place of the filter above, for who knows of it; whoever does not still has that.
  if (!options.compiled_filter.empty()) {
    config["annotations"] = {{"run.oci.seccomp_bpf_data", options.compiled_filter}};
  }
  // What runs out of memory should be killed itself, and hear of it from the agent.
  if (options.protect_agent) config["process"]["oomScoreAdj"] = -1000;
  try {
    return config.dump(2);
  } catch (const json::type_error&) {
    return absl::InvalidArgumentError(
        fmt::format("path \"{}\" is not UTF-8", absl::CHexEscape(options.rootfs)));
  }
}

}  // namespace lamina::backends
