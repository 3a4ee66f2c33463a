// SPDX-License-Identifier: Apache-2.0
#include "backends/vm/accelerator.h"

#include <fcntl.h>
#include <linux/kvm.h>
#include <sys/ioctl.h>

#include <cerrno>
#include <cstring>

#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

// Whether the processor can run machines, as /proc/cpuinfo says.
bool HasVirtualization() {
  constexpr uint64_t kMaxInfo = 16 << 20;
  const absl::StatusOr<std::string> info = ReadFileToString("/proc/cpuinfo", kMaxInfo);
  if (!info.ok()) return false;
  const size_t begin = info->find("\nflags");
  if (begin == std::string::npos) return false;
  const std::string flags = info->substr(begin, info->find('\n', begin + 1) - begin) + " ";
  return flags.find(" vmx ") != std::string::npos || flags.find(" svm ") != std::string::npos;
}

}  // namespace

Accelerator FindAccelerator() {
  if (!HasVirtualization()) return {"tcg", "the processor has neither vmx nor svm"};
  const absl::StatusOr<UniqueFd> kvm = OpenFile("/dev/kvm", O_RDWR);
  if (!kvm.ok()) return {"tcg", std::string(kvm.status().message())};
  const UniqueFd machine(::ioctl(kvm->get(), KVM_CREATE_VM, 0));
  if (!machine.valid()) {
    return {"tcg", fmt::format("/dev/kvm makes no machine: {}", std::strerror(errno))};
  }
  return {"kvm", ""};
}

}  // namespace lamina::backends
