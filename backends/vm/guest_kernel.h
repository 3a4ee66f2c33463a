// SPDX-License-Identifier: Apache-2.0
//
// What a virtual machine boots: a kernel, and an initramfs with our agent and the kernel's modules.
#ifndef LAMINA_BACKENDS_VM_GUEST_KERNEL_H_
#define LAMINA_BACKENDS_VM_GUEST_KERNEL_H_

#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::backends {

struct GuestKernel {
  // boot/vmlinux-<version>, which machines start from sooner, or else boot/vmlinuz-<version>.
  std::string image;
  std::string modules;  // lib/modules/<version>, with modules.dep
};

// The kernel in the directory that the variable LAMINA_GUEST_KERNEL names, or in
// /var/cache/lamina/guest-kernel: laid out as Debian's packages are, as tools/guest-kernel makes it.
// kFailedPrecondition, saying what is missing and what to do, if there is none.
absl::StatusOr<GuestKernel> FindGuestKernel();

// Sets of modules that not all machines load: for a disk to write to, and for what is reached by vsock.
// In the initramfs each is a directory in /modules, which has the others.
inline constexpr char kDiskModules[] = "disk";
inline constexpr char kVsockModules[] = "vsock";
struct GuestModule {
  std::string file;  // path below GuestKernel::modules
  std::string set;   // or empty
  bool operator==(const GuestModule&) const = default;
};
// The modules that machines need, those that others depend on first. What is built into the kernel is
// none. kFailedPrecondition if the kernel cannot do what is needed.
absl::StatusOr<std::vector<GuestModule>> GuestModules(const GuestKernel& kernel);

// The path of the initramfs for a kernel and an agent; made in `directory`, which is made if missing,
// unless it is there. Any number of threads and processes may do so at once.
absl::StatusOr<std::string> GetInitramfs(const GuestKernel& kernel, const std::string& agent,
                                         const std::string& directory);

// One entry of a cpio archive in the format that kernels read (newc): a directory, or a file.
void AppendCpioEntry(std::string& archive, std::string_view name, uint32_t mode,
                     std::string_view content);
// What such an archive ends with.
void AppendCpioEnd(std::string& archive);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_GUEST_KERNEL_H_
