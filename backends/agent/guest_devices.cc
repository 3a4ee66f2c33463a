// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/guest_devices.h"

#include <fcntl.h>
#include <linux/module.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>

#include "backends/agent/pseudo_file.h"

namespace lamina::agent {
namespace {

using std::chrono::steady_clock;

// Drivers find their devices in the background.
constexpr std::chrono::seconds kPatience{60};
constexpr useconds_t kPause = 2000;

std::vector<std::string> Names(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename());
  }
  std::ranges::sort(names);
  return names;
}

bool WaitUntil(const std::function<bool()>& condition) {
  const auto deadline = steady_clock::now() + kPatience;
  while (!condition()) {
    if (steady_clock::now() > deadline) return false;
    ::usleep(kPause);
  }
  return true;
}

// The place on the bus of a device whose path in /sys goes through a virtio device:
// ".../0000:00:03.1/virtio4/ndbus2/..." gives "0000:00:03.1".
std::string PlaceOf(const std::string& path) {
  const size_t virtio = path.find("/virtio");
  if (virtio == std::string::npos) return path;
  const size_t slash = path.rfind('/', virtio - 1);
  return path.substr(slash + 1, virtio - slash - 1);
}

}  // namespace

absl::Status LoadModules(const std::string& directory) {
  for (const std::string& name : Names(directory)) {
    if (name.find(".ko") == std::string::npos) continue;  // a directory
    ASSIGN_OR_RETURN(const UniqueFd file,
                     OpenFile(fmt::format("{}/{}", directory, name), O_RDONLY));
    const int flags = name.ends_with(".ko") ? 0 : MODULE_INIT_COMPRESSED_FILE;
    if (::syscall(SYS_finit_module, file.get(), "", flags) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, "load module " + name);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> FindPmemDevices(size_t count) {
  std::vector<std::pair<std::string, std::string>> found;  // place, device
  const bool all = WaitUntil([&] {
    found.clear();
    for (const std::string& name : Names("/sys/block")) {
      if (!name.starts_with("pmem")) continue;
      std::error_code error;
      const std::string path = std::filesystem::canonical("/sys/block/" + name, error);
      if (!error && ::access(("/dev/" + name).c_str(), F_OK) == 0) {
        found.emplace_back(PlaceOf(path), "/dev/" + name);
      }
    }
    return found.size() >= count;
  });
  if (!all || found.size() != count) {
    return absl::InternalError(
        fmt::format("{} persistent memory devices, and not {}", found.size(), count));
  }
  std::ranges::sort(found);
  std::vector<std::string> devices;
  for (auto& [place, device] : found) devices.push_back(std::move(device));
  return devices;
}

absl::StatusOr<UniqueFd> OpenSerialPort(const std::string& name) {
  const std::string directory = "/sys/class/virtio-ports";
  std::string port;
  const bool found = WaitUntil([&] {
    for (const std::string& candidate : Names(directory)) {
      if (ReadPseudoFile(fmt::format("{}/{}/name", directory, candidate)) == name + "\n") {
        port = "/dev/" + candidate;
        return ::access(port.c_str(), F_OK) == 0;
      }
    }
    return false;
  });
  if (!found) return absl::NotFoundError(fmt::format("there is no serial port '{}'", name));
  return OpenFile(port, O_RDWR);
}

std::string KernelParameter(const std::string& key) {
  std::string line = fmt::format(" {}", ReadPseudoFile("/proc/cmdline"));
  std::ranges::replace(line, '\n', ' ');
  const std::string wanted = fmt::format(" {}=", key);
  const size_t at = line.find(wanted);
  if (at == std::string::npos) return "";
  const size_t begin = at + wanted.size();
  return line.substr(begin, line.find(' ', begin) - begin);
}

}  // namespace lamina::agent
