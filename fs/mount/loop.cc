// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/loop.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace lamina::fs {
namespace {

// Another process may take the free device between LOOP_CTL_GET_FREE and LOOP_CONFIGURE. Losing
// this often in a row means that something else is wrong.
constexpr int kAttempts = 64;

}  // namespace

absl::StatusOr<LoopDevice> LoopDevice::Attach(const std::string& file, bool writable) {
  const int access = writable ? O_RDWR : O_RDONLY;
  ASSIGN_OR_RETURN(const UniqueFd backing, OpenFile(file, access));
  ASSIGN_OR_RETURN(const UniqueFd control, OpenFile("/dev/loop-control", O_RDWR));
  loop_config config{};
  config.fd = static_cast<uint32_t>(backing.get());
  config.block_size = 4096;
  // With direct I/O content is not cached a second time, under the loop device. The kernel leaves
  // it where the backing file has none.
  config.info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
  if (!writable) config.info.lo_flags |= LO_FLAGS_READ_ONLY;
  // For losetup(8) only; the array's last byte stays NUL.
  std::copy_n(file.begin(), std::min<size_t>(file.size(), LO_NAME_SIZE - 1),
              config.info.lo_file_name);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) return ErrnoStatus(errno, "find a free loop device");
    std::string path = fmt::format("/dev/loop{}", number);
    ASSIGN_OR_RETURN(UniqueFd device, OpenFile(path, access), "loop device for {}", file);
    if (::ioctl(device.get(), LOOP_CONFIGURE, &config) == 0) {
      return LoopDevice(std::move(path), std::move(device));
    }
    if (errno != EBUSY) return ErrnoStatus(errno, fmt::format("attach {} to {}", file, path));
  }
  return absl::UnavailableError(
      fmt::format("attach {}: other processes took {} loop devices first", file, kAttempts));
}

}  // namespace lamina::fs
