// SPDX-License-Identifier: Apache-2.0
//
// What compare_trees reads of a file or directory, with the system calls that programs use for it.
// Functions take a directory descriptor and a name in it, and do not follow symbolic links.
#ifndef LAMINA_TESTS_COMPARE_FILE_VIEW_H_
#define LAMINA_TESTS_COMPARE_FILE_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::compare {

inline constexpr size_t kReadSize = 1 << 20;

// Escapes what a terminal cannot show; long values are cut.
std::string Printable(std::string_view bytes);

absl::StatusOr<UniqueFd> OpenAt(int directory, const std::string& name, int flags);
absl::StatusOr<std::string> ReadLink(int directory, const std::string& name);
absl::StatusOr<std::map<std::string, std::string>> ReadXattrs(int directory,
                                                              const std::string& name);

// An entry as getdents64(2) gives it.
struct ListedName {
  std::string name;
  unsigned char type = 0;  // DT_*
  int64_t next = 0;        // d_off: where the following entry is
  bool operator<(const ListedName& other) const { return name < other.name; }
};
// All entries from the start, "." and ".." included, in the order of the file system.
absl::StatusOr<std::vector<ListedName>> ListDirectory(int directory);
// Seeks to the start and to a sample of positions, and says what is wrong with what is listed
// there; empty if nothing is.
absl::StatusOr<std::string> CheckSeeking(int directory, const std::vector<ListedName>& names);

// Bytes [begin, end) of a file.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  bool operator==(const Range&) const = default;
};
// Where SEEK_DATA and SEEK_HOLE say that there is data, and what is wrong with their answers (empty
// if nothing is): positions that go back or past the end, holes that do not read as zeros.
struct Segments {
  std::vector<Range> data;
  std::string problem;
};
absl::StatusOr<Segments> ReadSegments(int file, uint64_t size);
std::vector<Range> Union(const std::vector<Range>& a, const std::vector<Range>& b);

}  // namespace lamina::compare

#endif  // LAMINA_TESTS_COMPARE_FILE_VIEW_H_
