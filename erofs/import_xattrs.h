// SPDX-License-Identifier: Apache-2.0
//
// Which extended attributes a file keeps when it is imported. The same rules hold for archives and
// directories, so that both give the same tree.
#ifndef LAMINA_EROFS_IMPORT_XATTRS_H_
#define LAMINA_EROFS_IMPORT_XATTRS_H_

#include <array>
#include <string>
#include <string_view>

#include "erofs/tree.h"

namespace lamina::erofs {

// The xattrs that overlayfs keeps for itself: trusted.*, and user.* when mounted with "userxattr"
// (kernel documentation, filesystems/overlayfs.rst).
inline constexpr std::array<std::string_view, 2> kOverlayPrefixes = {"trusted.overlay.",
                                                                     "user.overlay."};
inline constexpr std::string_view kOpaqueXattr = "trusted.overlay.opaque";

// Brings the xattrs of a new inode, whose type and mode are set, into the form that the kernel
// would have kept, sorted by name:
//  - only user.*, trusted.*, security.* and POSIX ACLs stay. Other name spaces (com.apple.*, ...)
//    are dropped, as extraction on Linux would.
//  - trusted.overlay.*, user.overlay.* and trusted.lamina.* are dropped: they are instructions for
//    stacking layers, such as to show another directory in place of this one, and a layer must not
//    give any. Opaque directories come from ".wh..wh..opq" alone.
//  - user.* is kept on regular files and directories only, a default ACL on directories only, and
//    no ACL on a symbolic link (xattr(7), acl(5)).
//  - the permission bits become those of the access ACL, which goes if it says nothing more.
// Fails with kInvalidArgument on names and values that no file can have, and on invalid ACLs.
absl::Status NormalizeXattrs(Inode& inode);

// The same for an inode of an overlayfs' upper directory, whose marks begin with `prefix`, one of
// kOverlayPrefixes. An opaque directory gets kOpaqueXattr, and a whiteout of the xattr form becomes a
// character device 0:0. kFailedPrecondition, naming the xattr, if the inode is not all of the file.
absl::Status NormalizeUpperXattrs(Inode& inode, std::string_view prefix);

// Adds an xattr or changes its value; keeps the order.
void SetXattr(Inode& inode, std::string_view name, std::string_view value);

// A path or name as it can be put into a message: control bytes and invalid UTF-8 as \xNN.
std::string PrintableName(std::string_view name);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_IMPORT_XATTRS_H_
