// SPDX-License-Identifier: Apache-2.0
//
// Reads EROFS images from memory: images of Lamina and those that mkfs.erofs makes. The bytes are
// not trusted: every offset, count and length is checked before it is used, and what is wrong is
// named in the error with its position. A Reader is immutable after Open and may be used by any
// number of threads; it borrows the bytes, which must outlive it and not change.
#ifndef LAMINA_EROFS_READER_H_
#define LAMINA_EROFS_READER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "erofs/builder.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Number of an inode on disk: its offset from the start of the metadata area in units of 32 bytes.
// It is also st_ino in the kernel's view of the image.
using Nid = uint64_t;

// An inode as read from disk. A small value: copy it freely.
struct InodeInfo {
  Nid nid = 0;
  uint16_t mode = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint32_t links = 0;
  Timestamp mtime;
  uint64_t size = 0;
  dev_t rdev = 0;

  bool is_directory() const { return S_ISDIR(mode); }
  bool is_regular() const { return S_ISREG(mode); }
  bool is_symlink() const { return S_ISLNK(mode); }

  // Where the parts of the inode lie; for the reader's own use.
  uint8_t layout = 0;
  uint32_t raw_union = 0;      // start block, chunk format or device number
  uint64_t header_offset = 0;  // of the inode, bytes from the start of the image
  uint32_t inode_size = 0;     // 32 or 64
  uint32_t xattr_size = 0;     // bytes of the xattr area after it
};

// Where a part of a file's content is.
struct Mapped {
  enum class Kind { kHole, kDevice };
  Kind kind = Kind::kHole;
  uint16_t device = 0;  // 0: this image itself, else a slot of devices()
  uint64_t offset = 0;  // byte offset on that device
  uint64_t length = 0;  // bytes from the asked offset on for which this holds; > 0
};

class Reader {
 public:
  // Checks superblock (checksum included, if the image has one), device table and root inode.
  // Fails with kUnimplemented for an incompatible feature it does not know, by name or bit.
  static absl::StatusOr<Reader> Open(std::span<const std::byte> image);

  Nid root() const { return root_; }
  // A length of 0 is not known: mkfs.erofs 1.5 leaves it out.
  const std::vector<Device>& devices() const { return devices_; }
  uint64_t inode_count() const { return inode_count_; }  // as the superblock has it
  uint32_t block_size() const { return block_size_; }
  uint64_t blocks() const { return blocks_; }
  uint64_t image_size() const { return image_.size(); }  // of the bytes given to Open
  std::array<uint8_t, 16> uuid() const { return uuid_; }

  absl::StatusOr<InodeInfo> ReadInode(Nid nid) const;

  // Finds a name in a directory by binary search: kNotFound if it is not there.
  absl::StatusOr<Nid> Lookup(const InodeInfo& directory, std::string_view name) const;

  struct Entry {
    std::string_view name;  // into the image
    Nid nid = 0;
    uint8_t type = 0;       // DT_* value of readdir(3)
    uint64_t position = 0;  // where this entry is, for later calls
    uint64_t next = 0;      // where the following entry is
  };
  // Calls `visit` for the entries from `position` on (0 is the start; "." and ".." are included),
  // until it returns false or the directory ends.
  absl::Status ReadDirectory(const InodeInfo& directory, uint64_t position,
                             const std::function<bool(const Entry&)>& visit) const;

  absl::StatusOr<std::string> ReadLink(const InodeInfo& symlink) const;

  // All xattrs, sorted by name. ACLs come under their system.posix_acl_* names; what is in name
  // spaces that Linux would not list is left out.
  absl::StatusOr<std::vector<Xattr>> ReadXattrs(const InodeInfo& inode) const;
  // One of them, or nothing.
  absl::StatusOr<std::optional<std::string>> GetXattr(const InodeInfo& inode,
                                                      std::string_view name) const;

  // Where the content at `offset` (< size) is. kUnimplemented for compressed inodes.
  absl::StatusOr<Mapped> Map(const InodeInfo& file, uint64_t offset) const;
  // All of a file's content as extents (adjacent ones joined, holes left out). Besides what Map
  // fails on, kUnimplemented for content that is not in whole blocks of kBlockSize, such as inline
  // tails.
  absl::StatusOr<std::vector<Extent>> ReadExtents(const InodeInfo& file) const;
  // Entries and bytes of chunk index that the file claims, which is what ReadExtents goes through.
  uint64_t ChunkEntries(const InodeInfo& file) const;
  uint64_t ChunkIndexSize(const InodeInfo& file) const;

  // Bytes of the image itself (device 0); fails if they are outside.
  absl::StatusOr<std::span<const std::byte>> ImageBytes(uint64_t offset, uint64_t length) const;

 private:
  struct LongPrefix {
    uint8_t base = 0;
    std::string_view infix;
  };
  struct DirectoryBlock;
  using XattrVisitor = std::function<bool(std::string_view prefix, std::string_view infix,
                                          std::string_view suffix, std::string_view value)>;

  Reader() = default;

  absl::Status ReadSuperBlock();
  absl::Status ReadDeviceTable(uint64_t offset, uint64_t count);
  absl::Status ReadLongPrefixes(uint64_t offset, uint64_t count);

  template <typename T>
  absl::StatusOr<T> ReadStruct(uint64_t offset) const;

  // Content of a directory or symbolic link, which must lie in the image in one piece.
  absl::StatusOr<std::span<const std::byte>> ReadContent(const InodeInfo& inode, uint64_t offset,
                                                         uint64_t length) const;
  absl::StatusOr<Mapped> MapChunk(const InodeInfo& file, uint64_t offset) const;
  // Checks that a range of a device exists; resolves unified addresses to their device.
  absl::StatusOr<Mapped> Resolve(const InodeInfo& file, Mapped mapped) const;

  absl::StatusOr<DirectoryBlock> ReadDirectoryBlock(const InodeInfo& directory,
                                                    uint64_t block) const;

  // Visits the xattrs of an inode until `visit` returns false.
  absl::Status VisitXattrs(const InodeInfo& inode, const XattrVisitor& visit) const;
  // Visits one xattr, which must end before `end`; `offset` moves behind it. False to stop.
  absl::StatusOr<bool> VisitXattr(uint64_t& offset, uint64_t end, const XattrVisitor& visit) const;

  std::span<const std::byte> image_;
  uint32_t block_size_ = 0;
  uint64_t blocks_ = 0;
  uint64_t meta_offset_ = 0;   // bytes
  uint64_t xattr_offset_ = 0;  // bytes
  uint64_t inode_count_ = 0;
  Timestamp build_time_;
  Nid root_ = 0;
  std::vector<Device> devices_;
  std::vector<uint32_t> unified_blocks_;  // for each device: where it starts, or 0
  std::vector<LongPrefix> long_prefixes_;
  std::array<uint8_t, 16> uuid_{};
};

template <typename T>
absl::StatusOr<T> Reader::ReadStruct(uint64_t offset) const {
  ASSIGN_OR_RETURN(const auto bytes, ImageBytes(offset, sizeof(T)));
  T object;
  std::memcpy(&object, bytes.data(), sizeof(T));
  return object;
}

// The whole image as a Tree; walks every inode, so it is also a full check of the metadata. Hard
// links become one inode. Fails on loops, on a nid that is a directory in two places, and with
// kUnimplemented on content that a Tree cannot describe (compressed, or inline in the metadata).
absl::StatusOr<Tree> ReadTree(const Reader& reader);

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_READER_H_
