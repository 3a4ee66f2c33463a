// SPDX-License-Identifier: Apache-2.0
#include "erofs/layer_loader.h"

#include <dirent.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "erofs/chunk_map.h"
#include "erofs/import_xattrs.h"
#include "erofs/merge.h"
#include "erofs/tree_memory.h"

namespace lamina::erofs {
namespace {

bool IsOverlayXattr(const Xattr& xattr) {
  return std::any_of(std::begin(kOverlayPrefixes), std::end(kOverlayPrefixes),
                     [&](std::string_view prefix) { return xattr.name.starts_with(prefix); });
}

// What only has a meaning between layers.
bool IsLayerXattr(const Xattr& xattr) {
  return IsOverlayXattr(xattr) || xattr.name == kImpliedXattr;
}

bool IsImplied(const Inode& inode) {
  return std::any_of(inode.xattrs.begin(), inode.xattrs.end(),
                     [](const Xattr& xattr) { return xattr.name == kImpliedXattr; });
}

// The value of an overlayfs xattr, or nothing.
std::optional<std::string_view> OverlayXattr(const Inode& inode, std::string_view name) {
  for (const Xattr& xattr : inode.xattrs) {
    for (const std::string_view prefix : kOverlayPrefixes) {
      if (xattr.name.starts_with(prefix) && xattr.name.substr(prefix.size()) == name) {
        return xattr.value;
      }
    }
  }
  return std::nullopt;
}

// A whiteout is a character device 0:0, or an empty file with an xattr (since kernel 6.7).
bool IsAnyWhiteout(const Inode& inode) {
  return inode.is_whiteout() ||
         (inode.is_regular() && inode.size == 0 && OverlayXattr(inode, "whiteout").has_value());
}

// Of the other values, "x" only says that the directory has whiteouts of the second form.
bool IsOpaque(const Inode& inode) { return OverlayXattr(inode, "opaque") == "y"; }

class Loader {
 public:
  // Without a slot, overlay semantics are off. With `marks` the tree is of this layer alone, and
  // keeps what it says of lower ones.
  Loader(const Reader& reader, std::optional<uint16_t> slot, Tree& tree, uint64_t& memory,
         LayerMarks* marks = nullptr)
      : reader_(reader),
        slot_(slot),
        marks_(marks),
        tree_(tree),
        memory_(memory),
        loaded_(reader.image_size() / 32 + 1, kNotLoaded) {}

  absl::Status Load();

 private:
  struct Directory {
    InodeInfo info;
    InodeIndex index;
    Nid parent;
    bool fresh;  // nothing of lower layers is in it
  };

  static constexpr InodeIndex kNotLoaded = 0xFFFFFFFF;
  static constexpr InodeIndex kWhiteout = 0xFFFFFFFE;

  absl::Status LoadDirectory(const Directory& directory);
  absl::Status LoadEntry(const Directory& directory, const Reader::Entry& entry);
  absl::Status LoadFile(const Directory& directory, const Reader::Entry& entry,
                        const InodeInfo& info);
  absl::Status LoadSubdirectory(const Directory& parent, const Reader::Entry& entry,
                                const InodeInfo& info);
  absl::StatusOr<Inode> LoadInode(const InodeInfo& info);
  // Gives a directory its attributes, without what only has a meaning between layers, but for the mark
  // of an opaque one in the tree of one layer.
  void SetInode(InodeIndex directory, Inode inode);
  absl::Status LoadExtents(const InodeInfo& info, Inode& inode);
  // Nothing of overlayfs' is taken from an image as it is, redirects least of all.
  void DropLayerXattrs(Inode& inode) const;

  // Account for metadata that belongs to one inode alone, and for what many can refer to. Without
  // the limits a small hostile image could make any number of inodes out of the same bytes.
  absl::Status Claim(uint64_t bytes);
  absl::Status Copy(uint64_t bytes);
  // Accounts for memory of the tree.

  const Reader& reader_;
  const std::optional<uint16_t> slot_;
  LayerMarks* const marks_;
  Tree& tree_;
  uint64_t& memory_;
  std::vector<InodeIndex> loaded_;  // by nid
  std::vector<Directory> pending_;  // directories still to be read
  uint64_t claimed_ = 0;
  uint64_t copied_ = 0;
};

absl::Status Loader::Load() {
  ASSIGN_OR_RETURN(const InodeInfo info, reader_.ReadInode(reader_.root()), "/");
  ASSIGN_OR_RETURN(Inode root, LoadInode(info), "/");
  if (slot_.has_value() && IsOpaque(root)) {
    for (const DirectoryEntry& entry : tree_.Entries(Tree::kRoot)) {
      tree_.Remove(Tree::kRoot, entry.name);
    }
  }
  if (marks_ != nullptr) {
    marks_->implied_root = IsImplied(root);
    marks_->opaque_root = IsOpaque(root);
  }
  if (!slot_.has_value() || !IsImplied(root)) SetInode(Tree::kRoot, std::move(root));
  loaded_[info.nid] = Tree::kRoot;
  pending_.push_back({info, Tree::kRoot, info.nid, tree_.entry_count(Tree::kRoot) == 0});
  while (!pending_.empty()) {
    const Directory directory = pending_.back();
    pending_.pop_back();
    RETURN_IF_ERROR(LoadDirectory(directory));
  }
  return absl::OkStatus();
}

absl::Status Loader::LoadDirectory(const Directory& directory) {
  RETURN_IF_ERROR(Claim(directory.info.size), "directory {}", directory.info.nid);
  std::string_view previous;
  absl::Status status;
  RETURN_IF_ERROR(reader_.ReadDirectory(directory.info, 0, [&](const Reader::Entry& entry) {
    if (entry.name <= previous) {
      status = absl::DataLossError(fmt::format("directory {}: \"{}\" after \"{}\"",
                                               directory.info.nid, entry.name, previous));
      return false;
    }
    previous = entry.name;
    status = LoadEntry(directory, entry);
    if (status.ok()) return true;
    status = Annotate(status, tree_.PathOf(directory.index, entry.name));
    return false;
  }));
  return status;
}

absl::Status Loader::LoadEntry(const Directory& directory, const Reader::Entry& entry) {
  if (entry.name == "." || entry.name == "..") {
    const Nid expected = entry.name == "." ? directory.info.nid : directory.parent;
    if (entry.nid == expected) return absl::OkStatus();
    return absl::DataLossError(fmt::format("leads to inode {} instead of {}", entry.nid, expected));
  }
  ASSIGN_OR_RETURN(const InodeInfo info, reader_.ReadInode(entry.nid));
  if (entry.type != DT_UNKNOWN && entry.type != IFTODT(info.mode)) {
    return absl::DataLossError(
        fmt::format("entry of type {} for mode {:o}", entry.type, info.mode));
  }
  const bool is_new = loaded_[entry.nid] == kNotLoaded;
  if (info.is_directory()) {
    if (is_new) return LoadSubdirectory(directory, entry, info);
    return absl::DataLossError(fmt::format("directory {} in two places", entry.nid));
  }
  if (!directory.fresh) tree_.Remove(directory.index, entry.name);
  if (is_new) return LoadFile(directory, entry, info);
  if (loaded_[entry.nid] == kWhiteout) return absl::OkStatus();
  RETURN_IF_ERROR(ChargeTree(memory_, kEntryMemory + entry.name.size()));
  return tree_.Link(directory.index, entry.name, loaded_[entry.nid]);
}

absl::Status Loader::LoadFile(const Directory& directory, const Reader::Entry& entry,
                              const InodeInfo& info) {
  ASSIGN_OR_RETURN(Inode inode, LoadInode(info));
  if (slot_.has_value() && IsAnyWhiteout(inode)) {
    if (marks_ == nullptr) {
      loaded_[entry.nid] = kWhiteout;
      return absl::OkStatus();
    }
    inode = Inode{.mode = S_IFCHR};
  }
  DropLayerXattrs(inode);
  RETURN_IF_ERROR(ChargeTree(memory_, EntryMemory(inode, entry.name) + XattrMemory(inode)));
  ASSIGN_OR_RETURN(loaded_[entry.nid], tree_.Create(directory.index, entry.name, std::move(inode)));
  return absl::OkStatus();
}

absl::Status Loader::LoadSubdirectory(const Directory& parent, const Reader::Entry& entry,
                                      const InodeInfo& info) {
  ASSIGN_OR_RETURN(Inode inode, LoadInode(info));
  std::optional<InodeIndex> lower;
  if (!parent.fresh) lower = tree_.Find(parent.index, entry.name);
  const bool over_directory = lower.has_value() && tree_.inode(*lower).is_directory();
  const bool joins = over_directory && !IsOpaque(inode);
  if (over_directory && IsImplied(inode)) inode = tree_.inode(*lower);
  if (marks_ != nullptr && IsImplied(inode)) marks_->implied_directories = true;
  RETURN_IF_ERROR(ChargeTree(memory_, EntryMemory(inode, entry.name) + XattrMemory(inode)));
  Directory directory = {.info = info, .parent = parent.info.nid, .fresh = !joins};
  if (joins) {
    directory.index = *lower;
  } else {
    if (lower.has_value()) tree_.Remove(parent.index, entry.name);
    ASSIGN_OR_RETURN(directory.index,
                     tree_.Create(parent.index, entry.name, Inode{.mode = inode.mode}));
  }
  SetInode(directory.index, std::move(inode));
  loaded_[info.nid] = directory.index;
  pending_.push_back(directory);
  return absl::OkStatus();
}

void Loader::DropLayerXattrs(Inode& inode) const {
  if (!slot_.has_value()) return;
  std::erase_if(inode.xattrs, IsLayerXattr);
}

void Loader::SetInode(InodeIndex directory, Inode inode) {
  const bool marked = marks_ != nullptr && IsOpaque(inode);
  DropLayerXattrs(inode);
  if (marked) SetXattr(inode, kOpaqueXattr, "y");
  tree_.inode(directory) = std::move(inode);
}

absl::StatusOr<Inode> Loader::LoadInode(const InodeInfo& info) {
  Inode inode = {.mode = info.mode,
                 .uid = info.uid,
                 .gid = info.gid,
                 .mtime = info.mtime,
                 .size = info.is_regular() ? info.size : 0,
                 .rdev = info.rdev};
  if (info.xattr_size > 0) {
    ASSIGN_OR_RETURN(inode.xattrs, reader_.ReadXattrs(info));
    for (const Xattr& xattr : inode.xattrs) {
      RETURN_IF_ERROR(Copy(xattr.name.size() + xattr.value.size()));
    }
  }
  if (info.is_symlink()) {
    RETURN_IF_ERROR(Copy(info.size));
    ASSIGN_OR_RETURN(inode.target, reader_.ReadLink(info));
  }
  if (info.is_regular()) RETURN_IF_ERROR(LoadExtents(info, inode));
  return inode;
}

absl::Status Loader::LoadExtents(const InodeInfo& info, Inode& inode) {
  // Before anything is made of them: an extent takes more memory than an entry.
  if (const uint64_t entries = reader_.ChunkEntries(info); entries > kMaxChunkEntries) {
    return absl::ResourceExhaustedError(fmt::format(
        "inode {}: chunk index of {} entries, at most {}", info.nid, entries, kMaxChunkEntries));
  }
  RETURN_IF_ERROR(Claim(reader_.ChunkIndexSize(info)), "inode {}", info.nid);
  ASSIGN_OR_RETURN(inode.extents, reader_.ReadExtents(info));
  if (!slot_.has_value()) return absl::OkStatus();
  for (Extent& extent : inode.extents) {
    if (extent.device != 1) {
      return absl::InvalidArgumentError(
          fmt::format("inode {}: content on device {}, but a layer has only device 1", info.nid,
                      extent.device));
    }
    extent.device = *slot_;
  }
  return absl::OkStatus();
}

absl::Status Loader::Claim(uint64_t bytes) {
  if (bytes > reader_.image_size() - claimed_) {
    return absl::DataLossError(
        fmt::format("directories and chunk indexes overlap or leave the image: {} bytes after {} "
                    "in an image of {}",
                    bytes, claimed_, reader_.image_size()));
  }
  claimed_ += bytes;
  return absl::OkStatus();
}

absl::Status Loader::Copy(uint64_t bytes) {
  constexpr uint64_t kFactor = 64;
  constexpr uint64_t kAlways = 16u << 20;
  copied_ += bytes;
  if (copied_ > kAlways && copied_ / kFactor > reader_.image_size()) {
    return absl::ResourceExhaustedError(
        fmt::format("xattrs and symbolic links take {} bytes in an image of {}", copied_,
                    reader_.image_size()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LoadImage(const Reader& reader, Tree& tree) {
  uint64_t memory = 0;
  return Loader(reader, std::nullopt, tree, memory).Load();
}

absl::Status OverlayImage(const Reader& reader, uint16_t slot, Tree& tree, uint64_t& memory) {
  return Loader(reader, slot, tree, memory).Load();
}

absl::Status LoadLayer(const Reader& reader, Tree& tree, LayerMarks& marks) {
  uint64_t memory = 0;
  return Loader(reader, /*slot=*/1, tree, memory, &marks).Load();
}

absl::StatusOr<Tree> ReadTree(const Reader& reader) {
  Tree tree;
  RETURN_IF_ERROR(LoadImage(reader, tree), "read EROFS image");
  return tree;
}

}  // namespace lamina::erofs
