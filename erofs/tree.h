// SPDX-License-Identifier: Apache-2.0
//
// A file tree in memory: what a layer or a whole image contains, with the places of file content
// but not the content itself. Every importer (tar archive, directory, merge of layers) fills one,
// and the builder writes one as EROFS metadata. Everything a Linux file system knows of a file is
// here except atime, ctime and birth time, which EROFS does not carry.
//
// A Tree belongs to one thread at a time. It is made for a million files: some 300 bytes each.
#ifndef LAMINA_EROFS_TREE_H_
#define LAMINA_EROFS_TREE_H_

#include <sys/stat.h>
#include <sys/types.h>

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::erofs {

inline constexpr uint32_t kBlockSize = 4096;
inline constexpr uint32_t kMaxNameLength = 255;

struct Timestamp {
  int64_t seconds = 0;  // since the epoch; may be negative
  uint32_t nanoseconds = 0;
  auto operator<=>(const Timestamp&) const = default;
};

// One extended attribute under its full name ("user.comment", "security.capability",
// "system.posix_acl_access"); the value is the bytes that getxattr(2) returns.
struct Xattr {
  std::string name;
  std::string value;
  auto operator<=>(const Xattr&) const = default;
};

// A run of file content in consecutive blocks of a data device. Extents of a file are ascending and
// do not overlap; what lies between them is a hole. `offset` is a multiple of the block size, and
// so is `length` except in the last extent of a file, whose last block ends in zeros on the device.
struct Extent {
  uint64_t offset = 0;  // in the file, bytes
  uint64_t length = 0;  // bytes
  uint16_t device = 0;  // slot in the image's device table, from 1; 0 is the metadata itself
  uint32_t block = 0;   // first block on that device
  auto operator<=>(const Extent&) const = default;
};

using InodeIndex = uint32_t;

struct Inode {
  uint16_t mode = 0;  // type and permissions, as in st_mode
  uint32_t uid = 0;
  uint32_t gid = 0;
  Timestamp mtime;
  uint64_t size = 0;            // regular files; ignored for other types
  dev_t rdev = 0;               // character and block devices
  std::string target;           // symbolic links
  std::vector<Extent> extents;  // regular files
  std::vector<Xattr> xattrs;    // sorted by name, names unique

  bool is_directory() const { return S_ISDIR(mode); }
  bool is_regular() const { return S_ISREG(mode); }
  bool is_symlink() const { return S_ISLNK(mode); }
  // The two forms of an overlayfs whiteout: a character device 0:0 (kernel documentation,
  // filesystems/overlayfs.rst). The xattr form is not produced.
  bool is_whiteout() const { return S_ISCHR(mode) && rdev == 0; }
};

struct DirectoryEntry {
  std::string_view name;  // owned by the tree, valid until the entry is removed
  InodeIndex inode;
};

class Tree {
 public:
  static constexpr InodeIndex kRoot = 0;

  // Starts with the root directory alone: mode 0755, owner 0:0, mtime 0.
  Tree();
  Tree(Tree&&) noexcept;
  Tree& operator=(Tree&&) noexcept;
  ~Tree();

  // References stay valid as long as the tree. A directory must stay a directory, and nothing else
  // may become one.
  const Inode& inode(InodeIndex index) const;
  Inode& inode(InodeIndex index);
  // Names that lead to the inode (for directories: 1). Unlinked inodes have 0.
  uint32_t link_count(InodeIndex index) const;
  // Inodes ever made, unlinked ones included: indices are below this.
  InodeIndex inode_limit() const;

  // The entry `name` of a directory, or nothing.
  std::optional<InodeIndex> Find(InodeIndex directory, std::string_view name) const;
  // All entries of a directory, sorted by the bytes of the name (as EROFS wants them).
  std::vector<DirectoryEntry> Entries(InodeIndex directory) const;
  size_t entry_count(InodeIndex directory) const;
  // The directory that holds a directory; the root's is the root.
  InodeIndex Parent(InodeIndex directory) const;
  // The path of `name` in a directory, for messages: "/usr/bin/env". Searches, so it is slow; the
  // start of a very long path is cut off.
  std::string PathOf(InodeIndex directory, std::string_view name) const;

  // Adds an inode under a new name. Fails with kInvalidArgument if the name is empty, ".", "..",
  // has a '/' or NUL or more than 255 bytes, with kAlreadyExists if it is taken.
  absl::StatusOr<InodeIndex> Create(InodeIndex directory, std::string_view name, Inode inode);
  // Adds a further name for an inode that is not a directory (kInvalidArgument otherwise).
  absl::Status Link(InodeIndex directory, std::string_view name, InodeIndex target);
  // Removes a name, and all below it if it is a directory. Removing what is not there does nothing.
  // What was removed takes memory until Compact().
  void Remove(InodeIndex directory, std::string_view name);

  // Names there are, and names that were removed since the last Compact().
  size_t name_count() const;
  size_t removed_name_count() const;
  // Gives back the memory of what was removed. Inodes keep their order but get new indices; views of
  // names and references to inodes are not valid any more.
  void Compact();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_TREE_H_
