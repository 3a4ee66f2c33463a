// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/guest_kernel.h"

#include <sys/stat.h>
#include <unistd.h>

#include <absl/strings/str_split.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

constexpr const char* kVariable = "LAMINA_GUEST_KERNEL";
constexpr const char* kDefaultPlace = "/var/cache/lamina/guest-kernel";
constexpr uint64_t kMaxModuleList = 16 << 20;
constexpr uint64_t kMaxProgram = 64 << 20;

struct WantedModule {
  const char* name;
  const char* set;
  bool needed;
};
constexpr WantedModule kWanted[] = {
    {"virtio_pci", "", true},
    {"virtio_console", "", true},
    {"virtio_pmem", "", true},
    {"nd_pmem", "", true},
    {"erofs", "", true},
    {"overlay", "", true},
    {"virtio_balloon", "", true},
    {"ext4", kDiskModules, true},
    {"virtio_blk", kDiskModules, true},
    {"virtio_mmio", kVsockModules, false},
    {"vmw_vsock_virtio_transport", kVsockModules, false},
};

// "kernel/drivers/char/virtio_console.ko.xz" gives "virtio_console".
std::string ModuleName(std::string_view path) {
  std::string name(path.substr(path.rfind('/') + 1));
  name.resize(std::min(name.size(), name.find(".ko")));
  std::ranges::replace(name, '-', '_');
  return name;
}

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

// Where in the list of a directory's files the newest version is, if there is any.
std::string Newest(const std::string& directory, std::string_view prefix) {
  std::string newest;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.starts_with(prefix) &&
        (newest.empty() || ::strverscmp(newest.c_str(), name.c_str()) < 0)) {
      newest = name;
    }
  }
  return newest;
}

// What changes when a file does.
absl::StatusOr<std::string> Stamp(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  return fmt::format("{} {} {} {}.{}\n", path, info.st_ino, info.st_size, info.st_mtim.tv_sec,
                     info.st_mtim.tv_nsec);
}

absl::StatusOr<std::string> MakeInitramfs(const GuestKernel& kernel, const std::string& agent) {
  ASSIGN_OR_RETURN(const std::vector<GuestModule> modules, GuestModules(kernel));
  std::string archive;
  ASSIGN_OR_RETURN(const std::string program, ReadFileToString(agent, kMaxProgram));
  AppendCpioEntry(archive, "init", S_IFREG | 0700, program);
  AppendCpioEntry(archive, "modules", S_IFDIR | 0700, "");
  std::set<std::string> directories{"modules"};
  for (size_t index = 0; index < modules.size(); ++index) {
    const auto& [file, set] = modules[index];
    ASSIGN_OR_RETURN(const std::string content,
                     ReadFileToString(kernel.modules + "/" + file, kMaxProgram));
    const std::string directory = set.empty() ? "modules" : "modules/" + set;
    if (directories.insert(directory).second) {
      AppendCpioEntry(archive, directory, S_IFDIR | 0700, "");
    }
    // The agent loads them in the order of their names.
    const std::string name = file.substr(file.rfind('/') + 1);
    AppendCpioEntry(archive, fmt::format("{}/{:03}-{}", directory, index, name), S_IFREG | 0600,
                    content);
  }
  AppendCpioEnd(archive);
  return archive;
}

}  // namespace

absl::StatusOr<GuestKernel> FindGuestKernel() {
  const char* given = std::getenv(kVariable);
  const std::string place = given != nullptr && *given != 0 ? given : kDefaultPlace;
  const std::string image = Newest(place + "/boot", "vmlinuz-");
  if (image.empty()) {
    return absl::FailedPreconditionError(
        fmt::format("no kernel for virtual machines: {}/boot/vmlinuz-* is not there "
                    "(tools/guest-kernel gets one; {} names another place)",
                    place, kVariable));
  }
  const std::string version = image.substr(std::string_view("vmlinuz-").size());
  GuestKernel kernel{.image = place + "/boot/" + image,
                     .modules = place + "/lib/modules/" + version};
  if (::access((kernel.modules + "/modules.dep").c_str(), R_OK) != 0) {
    return absl::FailedPreconditionError(fmt::format(
        "the kernel for virtual machines has no {}/modules.dep: run depmod --basedir {}",
        kernel.modules, place));
  }
  const std::string plain = place + "/boot/vmlinux-" + version;
  if (::access(plain.c_str(), R_OK) == 0) kernel.image = plain;
  return kernel;
}

absl::StatusOr<std::vector<GuestModule>> GuestModules(const GuestKernel& kernel) {
  // modules.dep(5): "module: what it depends on, directly or not, in the order to take it away".
  ASSIGN_OR_RETURN(const std::string dependencies,
                   ReadFileToString(kernel.modules + "/modules.dep", kMaxModuleList));
  std::map<std::string, std::vector<std::string>> order;  // by name, the module itself last
  for (const std::string& line : Lines(dependencies)) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    std::vector<std::string> files = absl::StrSplit(parts.second, ' ', absl::SkipEmpty());
    std::ranges::reverse(files);
    files.push_back(parts.first);
    order[ModuleName(parts.first)] = std::move(files);
  }
  const absl::StatusOr<std::string> builtin =
      ReadFileToString(kernel.modules + "/modules.builtin", kMaxModuleList);
  std::set<std::string> built_in;
  for (const std::string& line : Lines(builtin.value_or(""))) built_in.insert(ModuleName(line));

  std::vector<GuestModule> modules;
  for (const auto& [name, set, needed] : kWanted) {
    const auto found = order.find(name);
    if (found == order.end()) {
      if (!needed || built_in.contains(name)) continue;
      return absl::FailedPreconditionError(
          fmt::format("the kernel {} has no {}", kernel.image, name));
    }
    for (const std::string& file : found->second) {
      // What is in another optional set may not be loaded.
      const auto is_there = [&](const GuestModule& other) {
        return other.file == file && (other.set.empty() || other.set == set);
      };
      if (std::ranges::none_of(modules, is_there)) modules.push_back({file, set});
    }
  }
  return modules;
}

absl::StatusOr<std::string> GetInitramfs(const GuestKernel& kernel, const std::string& agent,
                                         const std::string& directory) {
  std::string key;
  for (const std::string& path : {kernel.modules + "/modules.dep", agent}) {
    ASSIGN_OR_RETURN(const std::string stamp, Stamp(path), "initramfs");
    key += stamp;
  }
  const std::string path =
      fmt::format("{}/initramfs-{}", directory, Digest::Of(AsBytes(key)).Hex().substr(0, 16));
  if (::access(path.c_str(), R_OK) == 0) return path;
  ASSIGN_OR_RETURN(const std::string archive, MakeInitramfs(kernel, agent), "initramfs");
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "make directory " + directory);
  }
  RETURN_IF_ERROR(WriteFileAtomically(path, archive, 0600), "initramfs");
  return path;
}

// Linux, Documentation/driver-api/early-userspace/buffer-format.rst.
void AppendCpioEntry(std::string& archive, std::string_view name, uint32_t mode,
                     std::string_view content) {
  constexpr size_t kAlignment = 4;
  const auto pad = [&archive] {
    archive.append((kAlignment - archive.size() % kAlignment) % kAlignment, '\0');
  };
  const uint32_t links = S_ISDIR(mode) ? 2 : 1;
  constexpr uint32_t kNone = 0;
  // magic, inode, mode, uid, gid, links, mtime, size, four device numbers, size of the name, checksum
  archive += fmt::format(
      "070701{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}"
      "{:08x}{:08x}",
      archive.size(), mode, kNone, kNone, links, kNone, content.size(), kNone, kNone, kNone, kNone,
      name.size() + 1, kNone);
  archive += name;
  archive.push_back('\0');
  pad();
  archive += content;
  pad();
}

void AppendCpioEnd(std::string& archive) { AppendCpioEntry(archive, "TRAILER!!!", 0, ""); }

}  // namespace lamina::backends
