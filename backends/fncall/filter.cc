// SPDX-License-Identifier: Apache-2.0
#include "backends/fncall/filter.h"

#include <linux/seccomp.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <memory>

#include "backends/seccomp_profile.h"
#include "chunkstore/base/file.h"

namespace lamina::fncall {
namespace {

using Context = std::unique_ptr<void, void (*)(scmp_filter_ctx)>;

absl::Status AddRule(const Context& context, uint32_t action, const char* name,
                     const scmp_arg_cmp* argument = nullptr) {
  const int number = ::seccomp_syscall_resolve_name(name);
  if (number == __NR_SCMP_ERROR) return absl::OkStatus();  // newer than libseccomp
  const int failed = ::seccomp_rule_add_array(context.get(), action, number,
                                              argument == nullptr ? 0 : 1, argument);
  // -EDOM: not on this architecture.
  if (failed != 0 && failed != -EDOM) {
    return ErrnoStatus(-failed, fmt::format("filter for {}", name));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Filter> Filter::Make() {
  const Context context(::seccomp_init(SCMP_ACT_ERRNO(ENOSYS)), ::seccomp_release);
  if (context == nullptr) return absl::InternalError("seccomp_init failed");
  // A binary tree instead of a list; older libseccomps have no such thing.
  std::ignore = ::seccomp_attr_set(context.get(), SCMP_FLTATR_CTL_OPTIMIZE, 2);
  for (const char* name : backends::AllowedCalls()) {
    RETURN_IF_ERROR(AddRule(context, SCMP_ACT_ALLOW, name));
  }
  for (const char* name : backends::DeniedCalls()) {
    RETURN_IF_ERROR(AddRule(context, SCMP_ACT_KILL_PROCESS, name));
  }
  const scmp_arg_cmp no_namespaces =
      SCMP_A0_64(SCMP_CMP_MASKED_EQ, backends::kNamespaceFlags, uint64_t{0});
  RETURN_IF_ERROR(AddRule(context, SCMP_ACT_ALLOW, "clone", &no_namespaces));
  const scmp_arg_cmp families = SCMP_A0_64(SCMP_CMP_LE, backends::kLastAddressFamily, uint64_t{0});
  RETURN_IF_ERROR(AddRule(context, SCMP_ACT_ALLOW, "socket", &families));

  const UniqueFd file(::memfd_create("filter", MFD_CLOEXEC));
  if (!file.valid()) return ErrnoStatus(errno, "memfd_create");
  const int failed = ::seccomp_export_bpf(context.get(), file.get());
  if (failed != 0) return ErrnoStatus(-failed, "export the system call filter");
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(file.get()));
  std::vector<sock_filter> program(size / sizeof(sock_filter));
  if (program.empty() || program.size() > std::numeric_limits<uint16_t>::max()) {
    return absl::InternalError(fmt::format("a system call filter of {} bytes", size));
  }
  RETURN_IF_ERROR(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(program))));
  return Filter(std::move(program));
}

int Filter::Load() const {
  const sock_fprog program{.len = static_cast<uint16_t>(program_.size()),
                           .filter = const_cast<sock_filter*>(program_.data())};
  return ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0 ? 0 : errno;
}

}  // namespace lamina::fncall
