// SPDX-License-Identifier: Apache-2.0
//
// Prints how many bytes of the files below a directory are in the page cache.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "bench/page_cache.h"
#include "bench/tree_walk.h"
#include "chunkstore/base/file.h"

namespace lamina::bench {
namespace {

absl::StatusOr<uint64_t> CachedBytes(const std::string& root) {
  ASSIGN_OR_RETURN(const TreeList tree, WalkTree(root));
  uint64_t pages = 0;
  for (const TreeFile& file : tree.files) {
    ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(file.path, O_RDONLY));
    ASSIGN_OR_RETURN(const uint64_t here, PagesInCache(fd.get(), file.size), "{}", file.path);
    pages += here;
  }
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

int Main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: cached_pages DIRECTORY\n");
    return 2;
  }
  const absl::StatusOr<uint64_t> bytes = CachedBytes(argv[1]);
  if (!bytes.ok()) {
    fmt::print(stderr, "cached_pages: {}\n", std::string(bytes.status().message()));
    return 1;
  }
  fmt::print("{}\n", *bytes);
  return 0;
}

}  // namespace
}  // namespace lamina::bench

int main(int argc, char** argv) { return lamina::bench::Main(argc, argv); }
