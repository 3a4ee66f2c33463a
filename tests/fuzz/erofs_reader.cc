// SPDX-License-Identifier: Apache-2.0
//
// Opens arbitrary bytes as an EROFS image and walks all of it with every call of Reader. What can
// be read as a tree is built and must read back the same. Checksums are passed over: the author of
// a hostile image would set them right.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "chunkstore/base/file.h"
#include "erofs/builder.h"
#include "erofs/format.h"
#include "erofs/merge.h"
#include "erofs/reader.h"

namespace lamina::erofs {
namespace {

constexpr size_t kMaxInodes = 2000;

void Require(bool condition) {
  if (!condition) std::abort();
}

void ClearChecksumFlag(std::string& image) {
  const size_t at = kSuperOffset + offsetof(SuperBlock, feature_compat);
  if (image.size() > at) image[at] = static_cast<char>(image[at] & ~kFeatureCompatChecksum);
}

void UseFile(const Reader& reader, const InodeInfo& file) {
  uint64_t offset = 0;
  for (int i = 0; i < 1000 && offset < file.size; ++i) {
    const absl::StatusOr<Mapped> mapped = reader.Map(file, offset);
    if (!mapped.ok()) return;
    Require(mapped->length > 0 && mapped->length <= file.size - offset);
    if (mapped->kind == Mapped::Kind::kDevice && mapped->device == 0) {
      Require(reader.ImageBytes(mapped->offset, mapped->length).ok());
    }
    offset += mapped->length;
  }
}

// Returns the inodes that a directory leads to.
std::vector<Nid> UseDirectory(const Reader& reader, const InodeInfo& directory) {
  std::vector<Nid> nids;
  uint64_t last_position = 0;
  reader
      .ReadDirectory(directory, 0,
                     [&](const Reader::Entry& entry) {
                       Require(!entry.name.empty() && entry.name.size() <= kMaxNameLength);
                       Require(nids.empty() || entry.position > last_position);
                       Require(entry.next > entry.position);
                       last_position = entry.position;
                       nids.push_back(entry.nid);
                       reader.Lookup(directory, entry.name).status().IgnoreError();
                       return nids.size() < kMaxInodes;
                     })
      .IgnoreError();
  reader.ReadDirectory(directory, last_position + 5, [](const Reader::Entry&) { return false; })
      .IgnoreError();
  return nids;
}

void Walk(const Reader& reader) {
  std::vector<Nid> pending = {reader.root()};
  std::unordered_set<Nid> seen;
  while (!pending.empty() && seen.size() < kMaxInodes) {
    const Nid nid = pending.back();
    pending.pop_back();
    if (!seen.insert(nid).second) continue;
    const absl::StatusOr<InodeInfo> inode = reader.ReadInode(nid);
    if (!inode.ok()) continue;
    const absl::StatusOr<std::vector<Xattr>> xattrs = reader.ReadXattrs(*inode);
    if (xattrs.ok()) {
      for (const Xattr& xattr : *xattrs) {
        Require(reader.GetXattr(*inode, xattr.name).value() == xattr.value);
      }
    }
    if (inode->is_symlink()) reader.ReadLink(*inode).status().IgnoreError();
    if (inode->is_regular()) UseFile(reader, *inode);
    if (inode->is_directory()) {
      for (const Nid child : UseDirectory(reader, *inode)) pending.push_back(child);
    }
  }
}

bool SameInode(const Inode& a, const Inode& b) {
  return a.mode == b.mode && a.uid == b.uid && a.gid == b.gid && a.mtime == b.mtime &&
         a.size == b.size && a.rdev == b.rdev && a.target == b.target && a.extents == b.extents &&
         a.xattrs == b.xattrs;
}

void RequireSameTree(const Tree& a, const Tree& b) {
  std::vector<std::pair<InodeIndex, InodeIndex>> pending = {{Tree::kRoot, Tree::kRoot}};
  while (!pending.empty()) {
    const auto [left, right] = pending.back();
    pending.pop_back();
    Require(SameInode(a.inode(left), b.inode(right)));
    Require(a.link_count(left) == b.link_count(right));
    const std::vector<DirectoryEntry> entries = a.Entries(left);
    Require(entries.size() == b.entry_count(right));
    for (const DirectoryEntry& entry : entries) {
      const std::optional<InodeIndex> other = b.Find(right, entry.name);
      Require(other.has_value());
      pending.emplace_back(entry.inode, *other);
    }
  }
}

void Rebuild(const Reader& reader) {
  const absl::StatusOr<Tree> tree = ReadTree(reader);
  if (!tree.ok()) return;
  // Fails on what we do not write: content in the image itself, devices of unknown length.
  const absl::StatusOr<std::string> image = BuildImage(*tree, {.devices = reader.devices()});
  if (!image.ok()) return;
  const Reader again = Reader::Open(AsBytes(*image)).value();
  RequireSameTree(*tree, ReadTree(again).value());
}

}  // namespace
}  // namespace lamina::erofs

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lamina::erofs;
  std::string image(reinterpret_cast<const char*>(data), size);
  ClearChecksumFlag(image);
  const absl::StatusOr<Reader> reader = Reader::Open(lamina::AsBytes(image));
  if (!reader.ok()) return 0;
  Walk(*reader);
  Rebuild(*reader);
  const Reader* layers[] = {&*reader, &*reader};
  MergeLayers(layers).status().IgnoreError();
  return 0;
}
