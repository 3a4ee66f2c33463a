// SPDX-License-Identifier: Apache-2.0
//
// What the tests of the importers share: a sink that keeps content in memory, a writer of tar
// archives header by header, and a text form of trees, so that tests compare lines of text.
#ifndef LAMINA_TESTS_EROFS_IMPORT_TESTING_H_
#define LAMINA_TESTS_EROFS_IMPORT_TESTING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "erofs/import.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Keeps content block after block, as a data device would, and fails the test if it is not called
// as ContentSink says.
class RecordingSink : public ContentSink {
 public:
  absl::Status BeginFile(uint64_t size) override;
  absl::Status Append(std::span<const std::byte> data) override;
  absl::Status AppendHole(uint64_t length) override;
  absl::StatusOr<std::vector<Extent>> EndFile() override;

  // The content of a file as its extents give it; zeros elsewhere.
  std::string Read(const Inode& inode) const;
  // Holes of all files together.
  uint64_t hole_bytes() const { return hole_bytes_; }

 private:
  std::string device_;
  std::vector<Extent> extents_;
  uint64_t size_ = 0;
  uint64_t position_ = 0;
  uint64_t hole_bytes_ = 0;
  bool in_file_ = false;
};

// Forgets content and counts it.
class CountingSink : public ContentSink {
 public:
  absl::Status BeginFile(uint64_t size) override;
  absl::Status Append(std::span<const std::byte> data) override;
  absl::Status AppendHole(uint64_t length) override;
  absl::StatusOr<std::vector<Extent>> EndFile() override;

  uint64_t bytes = 0;
  uint64_t hole_bytes = 0;
};

// The fields of a header block. Those not given are as a plain empty file of root has them.
struct TarFields {
  std::string name;
  char type = '0';
  uint64_t mode = 0644;
  uint64_t uid = 0;
  uint64_t gid = 0;
  int64_t mtime = 0;
  std::string link;
  uint64_t major = 0;
  uint64_t minor = 0;
  std::string content;
  // In place of the numbers: all bytes of the field as they shall be.
  std::string raw_size;
  std::string raw_mtime;
  std::string raw_uid;
  bool gnu = false;
  std::string prefix;
};

class TarWriter {
 public:
  TarWriter& Add(const TarFields& fields);
  TarWriter& File(std::string name, std::string content = "");
  TarWriter& Directory(std::string name, uint64_t mode = 0755);
  TarWriter& Symlink(std::string name, std::string target);
  TarWriter& HardLink(std::string name, std::string target);
  // An extended header for what follows; type 'g' for a global one.
  TarWriter& Pax(const std::vector<std::pair<std::string, std::string>>& records, char type = 'x');
  // Bytes as they are, padded to whole blocks.
  TarWriter& Raw(std::string_view bytes);
  // Adds the end of the archive and gives all of it.
  std::string Finish();
  // What there is so far, without an end.
  const std::string& bytes() const { return archive_; }

 private:
  std::string archive_;
};

// A header block alone, with a right checksum. `change` may alter it before that is computed.
std::string TarHeaderBlock(const TarFields& fields, uint64_t size);
// Puts the right checksum into the header block at the start of `block`.
void SetTarChecksum(std::string& block);
std::string PaxRecord(std::string_view key, std::string_view value);

// Imports an archive that is in memory, given in pieces of at most `piece` bytes.
absl::StatusOr<Tree> ImportBytes(std::string_view archive, ContentSink& sink,
                                 size_t piece = size_t{1} << 20);

struct DescribeOptions {
  bool root = true;
  bool mtime = true;
  bool extents = false;
};
// One line for each name, in the order of a walk: path, type, mode, owner, time, size, the first
// name of a hard link, target, device, xattrs, content (its digest if it is long).
std::string Describe(const Tree& tree, const RecordingSink& sink, const DescribeOptions& = {});

// Finds a path; fails the test and gives an empty inode if it is not there.
const Inode& At(const Tree& tree, std::string_view path);
bool Exists(const Tree& tree, std::string_view path);
// The value of an xattr, or "(none)".
std::string XattrOf(const Inode& inode, std::string_view name);

// Runs a shell command; fails the test with its output unless it succeeds. Gives its output.
std::string Shell(const std::string& command);
// Writes a file for a shell command to use.
void WriteTestFile(const std::string& path, std::string_view content);

// Imports archives; content is in `sink_`.
class TarImportFixture : public ::testing::Test {
 protected:
  Tree Import(std::string_view archive) {
    absl::StatusOr<Tree> tree = ImportBytes(archive, sink_);
    EXPECT_TRUE(tree.ok()) << tree.status();
    return tree.ok() ? *std::move(tree) : Tree();
  }
  std::string Error(std::string_view archive) {
    absl::StatusOr<Tree> tree = ImportBytes(archive, sink_);
    EXPECT_FALSE(tree.ok());
    return tree.ok() ? "" : std::string(tree.status().message());
  }

  RecordingSink sink_;
};

}  // namespace lamina::erofs

#endif  // LAMINA_TESTS_EROFS_IMPORT_TESTING_H_
