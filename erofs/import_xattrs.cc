// SPDX-License-Identifier: Apache-2.0
#include "erofs/import_xattrs.h"

#include <absl/strings/escaping.h>
#include <linux/limits.h>

#include <algorithm>
#include <array>

#include "erofs/posix_acl.h"

namespace lamina::erofs {
namespace {

constexpr std::array<std::string_view, 3> kNamespaces = {"user.", "trusted.", "security."};
constexpr std::string_view kLaminaPrefix = "trusted.lamina.";
// Marks of overlayfs that say nothing of the merged tree (Linux, fs/overlayfs/overlayfs.h).
constexpr std::array<std::string_view, 6> kPrivateMarks = {"origin", "impure", "nlink",
                                                           "upper",  "uuid",   "protattr"};

bool StartsWithAny(std::string_view name, const auto& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [name](std::string_view prefix) { return name.starts_with(prefix); });
}

bool IsKept(const Inode& inode, std::string_view name) {
  if (name == kAccessAclXattr) return !inode.is_symlink();
  if (name == kDefaultAclXattr) return inode.is_directory();
  if (StartsWithAny(name, kOverlayPrefixes) || name.starts_with(kLaminaPrefix)) return false;
  if (name.starts_with("user.")) return inode.is_regular() || inode.is_directory();
  return StartsWithAny(name, kNamespaces);
}

absl::Status Check(const Xattr& xattr) {
  const std::string_view name = xattr.name;
  const bool is_prefix = std::ranges::find(kNamespaces, name) != std::end(kNamespaces);
  if (name.size() > XATTR_NAME_MAX || name.find('\0') != name.npos || is_prefix) {
    return absl::InvalidArgumentError(
        fmt::format("xattr \"{}\": not a possible name", PrintableName(name)));
  }
  if (xattr.value.size() > XATTR_SIZE_MAX) {
    return absl::InvalidArgumentError(fmt::format("xattr \"{}\" of {} bytes (at most {})",
                                                  PrintableName(name), xattr.value.size(),
                                                  XATTR_SIZE_MAX));
  }
  return absl::OkStatus();
}

// Puts an ACL into effect; says whether the xattr is needed to keep it.
absl::StatusOr<bool> ApplyAcl(Inode& inode, Xattr& xattr) {
  ASSIGN_OR_RETURN(const PosixAcl acl, ParseAclXattr(xattr.value), "{}", xattr.name);
  xattr.value = FormatAclXattr(acl);
  if (xattr.name == kDefaultAclXattr) return true;
  inode.mode = static_cast<uint16_t>((inode.mode & ~0777) | AclMode(acl));
  return !IsMinimal(acl);
}

}  // namespace

absl::Status NormalizeXattrs(Inode& inode) {
  std::vector<Xattr> kept;
  for (Xattr& xattr : inode.xattrs) {
    if (!IsKept(inode, xattr.name)) continue;
    RETURN_IF_ERROR(Check(xattr));
    if (xattr.name == kAccessAclXattr || xattr.name == kDefaultAclXattr) {
      ASSIGN_OR_RETURN(const bool needed, ApplyAcl(inode, xattr));
      if (!needed) continue;
    }
    kept.push_back(std::move(xattr));
  }
  std::sort(kept.begin(), kept.end());
  kept.shrink_to_fit();
  inode.xattrs = std::move(kept);
  return absl::OkStatus();
}

absl::Status NormalizeUpperXattrs(Inode& inode, std::string_view prefix) {
  bool opaque = false;
  bool whiteout = false;
  for (const Xattr& xattr : inode.xattrs) {
    if (!xattr.name.starts_with(prefix)) continue;
    const std::string_view mark = std::string_view(xattr.name).substr(prefix.size());
    if (mark == "opaque") {
      // The value "x" only says that there are whiteouts of the xattr form in it.
      opaque = inode.is_directory() && xattr.value == "y";
    } else if (mark == "whiteout") {
      whiteout = inode.is_regular() && inode.size == 0;
    } else if (std::ranges::find(kPrivateMarks, mark) == kPrivateMarks.end()) {
      // "metacopy": the content is below. "redirect": so are the entries, under another name. Those
      // of an overlayfs on this one ("overlay.opaque") would need another meaning.
      return absl::FailedPreconditionError(
          fmt::format("xattr \"{}\" of overlayfs: a layer cannot have what it refers to",
                      PrintableName(xattr.name)));
    }
  }
  if (whiteout || inode.is_whiteout()) {
    inode = Inode();
    inode.mode = S_IFCHR;
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(NormalizeXattrs(inode));
  if (opaque) SetXattr(inode, kOpaqueXattr, "y");
  return absl::OkStatus();
}

void SetXattr(Inode& inode, std::string_view name, std::string_view value) {
  auto place = std::lower_bound(
      inode.xattrs.begin(), inode.xattrs.end(), name,
      [](const Xattr& xattr, std::string_view wanted) { return xattr.name < wanted; });
  if (place != inode.xattrs.end() && place->name == name) {
    place->value = value;
  } else {
    inode.xattrs.insert(place, {std::string(name), std::string(value)});
  }
}

std::string PrintableName(std::string_view name) {
  return absl::Utf8SafeCHexEscape({name.data(), name.size()});
}

}  // namespace lamina::erofs
