// SPDX-License-Identifier: Apache-2.0
//
// Which system calls programs in containers and calls may make. What is neither allowed nor denied
// here does not exist for them (ENOSYS), as on an older kernel: new calls stay out until they are
// looked at.
#ifndef LAMINA_BACKENDS_SECCOMP_PROFILE_H_
#define LAMINA_BACKENDS_SECCOMP_PROFILE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>

namespace lamina::backends {

// Names as libseccomp knows them; some do not exist on every architecture.
std::span<const char* const> AllowedCalls();
// Calls that reach beyond a sandbox: they fail with EPERM, or end a stateless call.
std::span<const char* const> DeniedCalls();

// Flags of clone(2) that make namespaces; with any of them it is denied. clone3(2) hides its flags
// from filters and so does not exist: C libraries then use clone.
inline constexpr uint64_t kNamespaceFlags = 0x7e020000;
// The last address family that socket(2) may be given: those behind it reach the kernel's
// cryptography or the hypervisor (AF_ALG, AF_VSOCK).
inline constexpr uint64_t kLastAddressFamily = 37;

// The same as `linux.seccomp` of the OCI runtime specification.
nlohmann::json SeccompForContainers();

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_SECCOMP_PROFILE_H_
