// SPDX-License-Identifier: Apache-2.0
//
// Collects the xattrs of an image that is being built and writes them: what several inodes have in
// common goes to the shared area once, the rest into the inodes.
#ifndef LAMINA_EROFS_XATTR_TABLE_H_
#define LAMINA_EROFS_XATTR_TABLE_H_

#include <absl/container/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "erofs/format.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Add all inodes, then Share once, then ask for sizes and write. Borrows the strings it is given.
class XattrTable {
 public:
  // The xattrs of one inode; valid for the table that made it.
  struct Set {
    uint32_t first = 0;
    uint32_t count = 0;
  };

  // Fails with kInvalidArgument on what EROFS cannot carry.
  absl::StatusOr<Set> Add(const std::vector<Xattr>& xattrs);

  // Decides what is shared.
  void Share();

  uint64_t shared_size() const { return shared_size_; }
  void WriteShared(std::byte* to) const;

  // The xattr area of an inode: its size (0 if there are no xattrs) and its bytes.
  uint32_t AreaSize(Set set) const;
  void WriteArea(Set set, std::byte* to) const;

 private:
  struct Entry {
    XattrName name;
    std::string_view value;
    uint32_t uses = 0;
    uint32_t shared_id = kNotShared;
  };
  static constexpr uint32_t kNotShared = 0xFFFFFFFF;

  static uint32_t EntrySize(const Entry& entry);
  static std::byte* WriteEntry(const Entry& entry, std::byte* to);

  // How many of a set are referred to in the shared area: as many as the header can count.
  uint32_t SharedCount(Set set) const;

  std::vector<Entry> entries_;        // distinct name and value, in the order of first appearance
  std::vector<uint32_t> references_;  // the sets: indices into entries_
  absl::flat_hash_map<std::pair<std::string_view, std::string_view>, uint32_t> index_;
  uint64_t shared_size_ = 0;
};

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_XATTR_TABLE_H_
