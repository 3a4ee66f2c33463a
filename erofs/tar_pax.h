// SPDX-License-Identifier: Apache-2.0
//
// Extended headers of tar archives (POSIX pax): records "LENGTH KEY=VALUE\n" that replace or add to
// the fields of a header block. Values are bytes: nothing is converted between character sets.
#ifndef LAMINA_EROFS_TAR_PAX_H_
#define LAMINA_EROFS_TAR_PAX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "erofs/tree.h"

namespace lamina::erofs {

// A run of bytes of a sparse file that the archive holds.
struct SparseRun {
  uint64_t offset = 0;
  uint64_t length = 0;
};

// More runs than this in one file are refused: it bounds the memory that a map takes.
inline constexpr size_t kMaxSparseRuns = 1 << 20;

// And more xattrs: listxattr(2) gives 64 KiB of names at the most, of 8 bytes and up.
inline constexpr size_t kMaxPaxXattrs = 8192;

// "123", "-1.5" and the like, to nanoseconds, rounded down.
absl::StatusOr<Timestamp> ParsePaxTime(std::string_view text);

// Digits only.
absl::StatusOr<uint64_t> ParsePaxNumber(std::string_view text);

// What the extended headers of an entry say, in the types that are used from then on.
class PaxFields {
 public:
  // Takes in the records of one extended header; later ones replace earlier ones of the same key. A
  // key with an empty value counts as not given (POSIX), except that an xattr may be empty. Unknown
  // keys are ignored.
  absl::Status Parse(std::string_view records);

  // Whether something is set that belongs to one file only, and so not in a global header.
  bool describes_one_file() const;
  // A copy with all but the xattrs and ACLs, which TakeXattrs adds from where they are.
  PaxFields WithoutXattrs() const;
  // Gives the xattrs and ACLs together away, under the names that the kernel knows, sorted. Those
  // that are not given come from `globals`.
  absl::StatusOr<std::vector<Xattr>> TakeXattrs(const PaxFields& globals);
  // Bytes of names and values of the xattrs and ACLs.
  uint64_t xattr_bytes() const;

  std::optional<std::string> path;
  std::optional<std::string> link_path;
  std::optional<uint64_t> size;
  std::optional<uint64_t> uid;
  std::optional<uint64_t> gid;
  std::optional<Timestamp> mtime;

  // GNU sparse files. In formats 0.0 and 0.1 the map is here, in 1.0 it precedes the content.
  std::optional<std::string> sparse_path;
  std::optional<uint64_t> sparse_size;
  std::optional<uint64_t> sparse_major;
  std::optional<uint64_t> sparse_minor;
  std::optional<std::vector<SparseRun>> sparse_map;

 private:
  absl::Status Apply(std::string_view key, std::string_view value);
  absl::Status ApplySparse(std::string_view key, std::string_view value);
  absl::Status ParseSparseMap(std::string_view value);

  std::map<std::string, std::string, std::less<>> xattrs_;             // SCHILY.xattr
  std::map<std::string, std::string, std::less<>> libarchive_xattrs_;  // LIBARCHIVE.xattr
  std::optional<std::string> access_acl_;
  std::optional<std::string> default_acl_;
  std::optional<uint64_t> sparse_offset_;  // of a run whose length is in the next record
};

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_TAR_PAX_H_
