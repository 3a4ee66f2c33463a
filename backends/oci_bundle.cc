// SPDX-License-Identifier: Apache-2.0
#include "backends/oci_bundle.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using nlohmann::json;

// /etc/passwd and /etc/group of an image are read whole; larger ones are refused.
constexpr uint64_t kMaxAccountFile = 16 << 20;

constexpr std::string_view kDefaultPath =
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// A file of the image, or "" if there is none.
absl::StatusOr<std::string> ReadInRoot(const std::string& rootfs, const char* path) {
  ASSIGN_OR_RETURN(const UniqueFd root, OpenFile(rootfs, O_PATH | O_DIRECTORY));
  open_how how = {.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK, .resolve = RESOLVE_IN_ROOT};
  const UniqueFd fd(static_cast<int>(::syscall(SYS_openat2, root.get(), path, &how, sizeof(how))));
  if (!fd.valid()) {
    if (errno == ENOENT || errno == ENOTDIR) return std::string();
    return ErrnoStatus(errno, fmt::format("open {} of the image", path));
  }
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get()));
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

std::optional<uint32_t> ParseId(std::string_view text) {
  uint32_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return id;
}

// passwd(5): name:password:uid:gid:...; group(5): name:password:gid:member,member
using Table = std::vector<std::vector<std::string_view>>;

Table ParseTable(std::string_view text, size_t fields) {
  Table table;
  for (const std::string_view line : Split(text, '\n')) {
    std::vector<std::string_view> row = Split(line, ':');
    if (row.size() >= fields) table.push_back(std::move(row));
  }
  return table;
}

// The row whose name, or whose number in column 2, is `key`.
const std::vector<std::string_view>* FindRow(const Table& table, std::string_view key) {
  const auto named =
      std::find_if(table.begin(), table.end(), [key](const auto& row) { return row[0] == key; });
  if (named != table.end()) return &*named;
  const auto numbered =
      std::find_if(table.begin(), table.end(), [key](const auto& row) { return row[2] == key; });
  return numbered == table.end() ? nullptr : &*numbered;
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

json Capabilities() {
  const json set = {"CAP_AUDIT_WRITE", "CAP_CHOWN",     "CAP_DAC_OVERRIDE", "CAP_FOWNER",
                    "CAP_FSETID",      "CAP_KILL",      "CAP_MKNOD",        "CAP_NET_BIND_SERVICE",
                    "CAP_NET_RAW",     "CAP_SETFCAP",   "CAP_SETGID",       "CAP_SETPCAP",
                    "CAP_SETUID",      "CAP_SYS_CHROOT"};
  return {{"bounding", set}, {"effective", set}, {"permitted", set}};
}

}  // namespace

absl::StatusOr<User> ResolveUser(const std::string& rootfs, std::string_view user) {
  if (user.empty()) user = "0";
  const std::vector<std::string_view> parts = Split(user, ':');
  if (parts.size() > 2) {
    return absl::InvalidArgumentError(fmt::format("user '{}' of the image has two colons", user));
  }
  ASSIGN_OR_RETURN(const std::string passwd_text, ReadInRoot(rootfs, "etc/passwd"));
  ASSIGN_OR_RETURN(const std::string group_text, ReadInRoot(rootfs, "etc/group"));
  const Table groups = ParseTable(group_text, 4);
  const Table accounts = ParseTable(passwd_text, 4);

  User result;
  const std::vector<std::string_view>* account = FindRow(accounts, parts[0]);
  const std::optional<uint32_t> uid = ParseId(account != nullptr ? (*account)[2] : parts[0]);
  if (!uid.has_value()) {
    return absl::NotFoundError(
        fmt::format("user '{}' of the image is not in its /etc/passwd", parts[0]));
  }
  result.uid = *uid;
  if (account != nullptr) result.gid = ParseId((*account)[3]).value_or(0);
  if (parts.size() == 2) {
    const std::vector<std::string_view>* group = FindRow(groups, parts[1]);
    const std::optional<uint32_t> gid = ParseId(group != nullptr ? (*group)[2] : parts[1]);
    if (!gid.has_value()) {
      return absl::NotFoundError(
          fmt::format("group '{}' of the image is not in its /etc/group", parts[1]));
    }
    result.gid = *gid;
    return result;
  }
  // Without a group in `user`, the account is a member of what /etc/group says.
  if (account == nullptr) return result;
  for (const std::vector<std::string_view>& group : groups) {
    const std::vector<std::string_view> members = Split(group[3], ',');
    const std::optional<uint32_t> gid = ParseId(group[2]);
    const bool member = std::find(members.begin(), members.end(), (*account)[0]) != members.end();
    if (member && gid.has_value() && *gid != result.gid) result.additional_gids.push_back(*gid);
  }
  return result;
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
  ASSIGN_OR_RETURN(const User user, ResolveUser(options.rootfs, image.user));

  std::vector<std::string> environment = image.environment;
  const bool has_path =
      std::any_of(environment.begin(), environment.end(),
                  [](const std::string& entry) { return entry.starts_with("PATH="); });
  if (!has_path) environment.emplace_back(kDefaultPath);
  if (options.terminal) environment.emplace_back("TERM=xterm");

  const json config = {
      {"ociVersion", "1.0.2"},
      {"hostname", options.hostname},
      {"process",
       {{"terminal", options.terminal},
        {"user", {{"uid", user.uid}, {"gid", user.gid}, {"additionalGids", user.additional_gids}}},
        {"args", arguments},
        {"env", environment},
        {"cwd", image.working_directory.empty() ? "/" : image.working_directory},
        {"capabilities", Capabilities()},
        {"noNewPrivileges", false}}},
      {"root", {{"path", options.rootfs}, {"readonly", false}}},
      {"mounts", Mounts()},
      {"linux",
       {{"namespaces",
         json::array(
             {{{"type", "pid"}}, {{"type", "mount"}}, {{"type", "ipc"}}, {{"type", "uts"}}})},
        {"maskedPaths",
         {"/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
          "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
          "/sys/firmware"}},
        {"readonlyPaths",
         {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}}}},
  };
  return config.dump(2, ' ', false, json::error_handler_t::replace);
}

}  // namespace lamina::backends
