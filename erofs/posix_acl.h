// SPDX-License-Identifier: Apache-2.0
//
// POSIX access control lists in the two forms in which they come: text as in tar archives (acl(5),
// long and short form) and the value of the system.posix_acl_* xattrs (linux/posix_acl_xattr.h).
#ifndef LAMINA_EROFS_POSIX_ACL_H_
#define LAMINA_EROFS_POSIX_ACL_H_

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::erofs {

inline constexpr std::string_view kAccessAclXattr = "system.posix_acl_access";
inline constexpr std::string_view kDefaultAclXattr = "system.posix_acl_default";

struct AclEntry {
  // Values and order are the kernel's.
  enum class Tag : uint16_t {
    kOwner = 0x01,
    kUser = 0x02,
    kOwningGroup = 0x04,
    kGroup = 0x08,
    kMask = 0x10,
    kOther = 0x20,
  };
  Tag tag = Tag::kOwner;
  uint32_t id = 0xffffffff;  // of a user or group; all ones for the other tags
  uint16_t permissions = 0;  // rwx bits: 4, 2, 1
  auto operator<=>(const AclEntry&) const = default;
};

// A valid ACL: sorted, the three base entries once each, no user or group twice, and a mask if
// there is any user or group.
using PosixAcl = std::vector<AclEntry>;

// Users and groups must have numbers: "user:1000:r-x", or with a name before it as libarchive
// writes ("user:joe:r-x:1000"). Of bare names only "root" is understood, because what others stand
// for depends on the machine. Fails if the result is not valid.
absl::StatusOr<PosixAcl> ParseAclText(std::string_view text);

absl::StatusOr<PosixAcl> ParseAclXattr(std::string_view value);
std::string FormatAclXattr(const PosixAcl& acl);

// The nine permission bits that a file with this access ACL shows.
uint16_t AclMode(const PosixAcl& acl);
// Whether the ACL says no more than AclMode does. The kernel does not keep such an access ACL.
bool IsMinimal(const PosixAcl& acl);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_POSIX_ACL_H_
