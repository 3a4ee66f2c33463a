// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a tar archive. Whatever they are, ImportTar must end with a tree or an error, call
// the sink as ContentSink says, and give a tree whose parts fit together.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "erofs/import.h"
#include "erofs/tar_header.h"

namespace lamina::erofs {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

// Forgets content. Stops at a number of bytes, so that no input takes long.
class CheckingSink : public ContentSink {
 public:
  absl::Status BeginFile(uint64_t size) override {
    Require(!in_file_);
    in_file_ = true;
    size_ = size;
    position_ = 0;
    return absl::OkStatus();
  }

  absl::Status Append(std::span<const std::byte> data) override {
    Require(in_file_ && !data.empty() && data.size() <= size_ - position_);
    position_ += data.size();
    total_ += data.size();
    if (total_ > kMaxContent) return absl::ResourceExhaustedError("enough content for a test");
    return absl::OkStatus();
  }

  absl::Status AppendHole(uint64_t length) override {
    Require(in_file_ && length > 0 && length <= size_ - position_);
    Require(position_ % HoleUnit(size_) == 0);
    position_ += length;
    Require(position_ == size_ || position_ % HoleUnit(size_) == 0);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Extent>> EndFile() override {
    Require(in_file_ && position_ == size_);
    in_file_ = false;
    return std::vector<Extent>{{.offset = 0, .length = size_, .device = 1, .block = 0}};
  }

 private:
  static constexpr uint64_t kMaxContent = uint64_t{64} << 20;
  bool in_file_ = false;
  uint64_t size_ = 0;
  uint64_t position_ = 0;
  uint64_t total_ = 0;
};

void CheckTree(const Tree& tree) {
  std::vector<InodeIndex> directories = {Tree::kRoot};
  while (!directories.empty()) {
    const InodeIndex directory = directories.back();
    directories.pop_back();
    Require(tree.link_count(directory) == 1);
    for (const DirectoryEntry& entry : tree.Entries(directory)) {
      const Inode& inode = tree.inode(entry.inode);
      Require(tree.link_count(entry.inode) > 0);
      Require(!inode.is_symlink() || !inode.target.empty());
      Require(std::is_sorted(inode.xattrs.begin(), inode.xattrs.end()));
      if (inode.is_directory()) {
        Require(tree.Parent(entry.inode) == directory);
        directories.push_back(entry.inode);
      }
    }
  }
}

void Import(std::string_view archive) {
  auto read = [&](std::span<std::byte> into) -> absl::StatusOr<size_t> {
    const size_t length = archive.copy(reinterpret_cast<char*>(into.data()), into.size());
    archive.remove_prefix(length);
    return length;
  };
  CheckingSink sink;
  absl::StatusOr<Tree> tree = ImportTar(read, sink);
  if (tree.ok()) CheckTree(*tree);
}

// Gives all blocks that look like headers the checksum that they should have, without which no
// changed header would be looked into.
void RepairChecksums(std::string& archive) {
  for (size_t begin = 0; begin + kTarBlockSize <= archive.size(); begin += kTarBlockSize) {
    const auto in_block = [begin](TarField field) { return begin + field.offset; };
    if (archive.compare(in_block(kTarMagic), 5, "ustar") != 0) continue;
    archive.replace(in_block(kTarChecksum), kTarChecksum.length, kTarChecksum.length, ' ');
    uint32_t sum = 0;
    for (size_t i = 0; i < kTarBlockSize; ++i) sum += static_cast<uint8_t>(archive[begin + i]);
    archive.replace(in_block(kTarChecksum), 6, fmt::format("{:06o}", sum));
  }
}

}  // namespace
}  // namespace lamina::erofs

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string archive(reinterpret_cast<const char*>(data), size);
  lamina::erofs::Import(archive);
  lamina::erofs::RepairChecksums(archive);
  lamina::erofs::Import(archive);
  return 0;
}
