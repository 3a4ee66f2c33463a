// SPDX-License-Identifier: Apache-2.0
#include <absl/container/flat_hash_set.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "erofs/chunk_map.h"
#include "erofs/file_content.h"
#include "erofs/format.h"
#include "erofs/import.h"
#include "erofs/import_xattrs.h"
#include "erofs/merge.h"
#include "erofs/posix_acl.h"
#include "erofs/tar_reader.h"
#include "erofs/tree_memory.h"

namespace lamina::erofs {
namespace {

constexpr std::string_view kWhiteoutPrefix = ".wh.";
constexpr std::string_view kWhiteoutMetaPrefix = ".wh..wh.";
// Where aufs keeps files with several names: archives made from it have the content here, and the names
// as links to it.
constexpr std::string_view kAufsLinks = ".wh..wh.plnk";
constexpr std::string_view kOpaqueWhiteout = ".wh..wh..opq";

// PATH_MAX of Linux counts the NUL at the end.
constexpr size_t kMaxPathLength = 4095;
// Directories below each other; no path that the kernel takes has more. Symbolic links in an
// archive could be used to go deeper.
constexpr size_t kMaxDepth = kMaxPathLength / 2 + 1;
// Of the chunk indexes of all files: those of files without holes have one entry, or one for each piece
// that was there before.
constexpr uint64_t kMaxIndexBytes = 128 << 20;
// As the kernel (path_resolution(7)), and how many names may be looked up for one entry.
constexpr int kMaxSymlinks = 40;
constexpr size_t kMaxSteps = 2 * kMaxPathLength;

// `path` without empty and "." parts and with ".." taken back, from the root on: neither a leading
// slash nor any ".." leads out of it. This is done on the text alone, as containerd does. Empty for
// the root itself.
std::string CleanPath(std::string_view path) {
  std::string clean;
  while (!path.empty()) {
    const size_t slash = std::min(path.find('/'), path.size());
    const std::string_view part = path.substr(0, slash);
    path.remove_prefix(std::min(slash + 1, path.size()));
    if (part == "..") {
      const size_t last = clean.rfind('/');
      clean.resize(last == clean.npos ? 0 : last);
    } else if (!part.empty() && part != ".") {
      if (!clean.empty()) clean += '/';
      clean += part;
    }
  }
  return clean;
}

struct SplitPath {
  std::string_view parent;  // empty for the root
  std::string_view name;    // empty if the path is the root itself
};

SplitPath Split(std::string_view clean_path) {
  const size_t slash = clean_path.rfind('/');
  if (slash == clean_path.npos) return {{}, clean_path};
  return {clean_path.substr(0, slash), clean_path.substr(slash + 1)};
}

class TarImporter {
 public:
  TarImporter(const TarReadFunction& read, ContentSink& sink) : reader_(read), sink_(sink) {}

  absl::StatusOr<Tree> Run();

 private:
  absl::Status Add(TarEntry& entry);
  // Notes a whiteout (applied at the end) and says so, or returns false for an ordinary name.
  absl::StatusOr<bool> AddWhiteout(std::string_view path);
  absl::Status SetRoot(TarEntry& entry);
  absl::Status AddHardLink(const TarEntry& entry, InodeIndex parent, std::string_view name);
  absl::Status AddInode(TarEntry& entry, InodeIndex parent, std::string_view name);
  absl::StatusOr<std::vector<Extent>> StoreContent(const TarEntry& entry);
  // Makes the directory what its entry says. It keeps xattrs that the entry does not mention.
  void UpdateDirectory(InodeIndex directory, Inode inode);

  // The directory at `path`, looked up in the tree as a process with this root would: symbolic
  // links are followed and stay inside.
  enum class Walk {
    kFind,                  // what is missing is kNotFound
    kCreate,                // what is missing is made
    kCreateUnlessReplaced,  // and a link or file on the path is kFailedPrecondition
  };
  absl::StatusOr<InodeIndex> ResolveDirectory(std::string_view path, Walk walk);
  absl::StatusOr<InodeIndex> WalkTo(std::string_view path, Walk walk);

  void Remove(InodeIndex parent, std::string_view name);
  absl::Status ApplyWhiteouts();
  absl::Status ChargeIndex(const Inode& file);

  TarReader reader_;
  ContentSink& sink_;
  Tree tree_;
  // Whiteouts hide what lower layers have, never what this layer has, wherever in the archive it
  // comes. So they are applied when all entries are there.
  std::vector<std::pair<InodeIndex, std::string>> whiteouts_;
  std::vector<InodeIndex> opaque_directories_;
  // Directories without an entry of their own so far.
  absl::flat_hash_set<InodeIndex> implied_directories_ = {Tree::kRoot};
  uint64_t memory_ = 0;
  uint64_t index_bytes_ = 0;
  // Most entries have the same parent as the one before.
  std::string last_path_;
  std::optional<InodeIndex> last_directory_;
};

absl::StatusOr<Tree> TarImporter::Run() {
  for (;;) {
    ASSIGN_OR_RETURN(std::optional<TarEntry> entry, reader_.Next());
    if (!entry) break;
    RETURN_IF_ERROR(Add(*entry), "tar entry \"{}\"", PrintableName(entry->path));
  }
  RETURN_IF_ERROR(reader_.Drain());
  if (tree_.Find(Tree::kRoot, kAufsLinks)) Remove(Tree::kRoot, kAufsLinks);
  RETURN_IF_ERROR(ApplyWhiteouts());
  for (const InodeIndex directory : implied_directories_) {
    SetXattr(tree_.inode(directory), kImpliedXattr, "y");
  }
  return std::move(tree_);
}

absl::Status TarImporter::Add(TarEntry& entry) {
  // Also for entries that are not kept: a global header gives each the same xattrs anew.
  RETURN_IF_ERROR(ChargeTree(memory_, XattrMemory(entry.inode)));
  if (entry.path.size() > kMaxPathLength) {
    return absl::InvalidArgumentError(
        fmt::format("path of {} bytes, at most {}", entry.path.size(), kMaxPathLength));
  }
  const std::string path = CleanPath(entry.path);
  if (path.empty()) return SetRoot(entry);
  ASSIGN_OR_RETURN(const bool is_whiteout, AddWhiteout(path));
  if (is_whiteout) return absl::OkStatus();

  const auto [parent_path, name] = Split(path);
  ASSIGN_OR_RETURN(const InodeIndex parent, ResolveDirectory(parent_path, Walk::kCreate));
  if (entry.hard_link) return AddHardLink(entry, parent, name);
  return AddInode(entry, parent, name);
}

absl::StatusOr<bool> TarImporter::AddWhiteout(std::string_view path) {
  if (path.find(kWhiteoutPrefix) == path.npos) return false;
  if (path == kAufsLinks || path.starts_with(fmt::format("{}/", kAufsLinks))) return false;
  const auto [parent_path, name] = Split(path);
  for (std::string_view rest = parent_path; !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find('/'));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    // Directories of aufs for its own use, such as .wh..wh.orph.
    if (part.starts_with(kWhiteoutMetaPrefix)) return true;
    if (part.starts_with(kWhiteoutPrefix)) {
      return absl::InvalidArgumentError("a whiteout cannot be a directory");
    }
  }
  if (!name.starts_with(kWhiteoutPrefix)) return false;
  if (name.starts_with(kWhiteoutMetaPrefix) && name != kOpaqueWhiteout) return true;

  const absl::StatusOr<InodeIndex> found = WalkTo(parent_path, Walk::kCreateUnlessReplaced);
  // Some builders list all that was in a directory which this layer replaces by something else. The
  // replacement hides it already.
  if (absl::IsFailedPrecondition(found.status())) return true;
  ASSIGN_OR_RETURN(const InodeIndex parent, found);
  RETURN_IF_ERROR(ChargeTree(memory_, kEntryMemory + name.size()));
  if (name == kOpaqueWhiteout) {
    opaque_directories_.push_back(parent);
    return true;
  }
  const std::string_view hidden = name.substr(kWhiteoutPrefix.size());
  if (hidden.empty() || hidden == "." || hidden == "..") {
    return absl::InvalidArgumentError("whiteout of no name");
  }
  whiteouts_.emplace_back(parent, hidden);
  return true;
}

absl::Status TarImporter::SetRoot(TarEntry& entry) {
  if (entry.hard_link || !entry.inode.is_directory()) {
    return absl::InvalidArgumentError("the root can only be a directory");
  }
  RETURN_IF_ERROR(NormalizeXattrs(entry.inode));
  RETURN_IF_ERROR(ChargeTree(memory_, kEntryMemory));
  UpdateDirectory(Tree::kRoot, std::move(entry.inode));
  return absl::OkStatus();
}

absl::Status TarImporter::AddHardLink(const TarEntry& entry, InodeIndex parent,
                                      std::string_view name) {
  const std::string target_path = CleanPath(*entry.hard_link);
  const std::string context = fmt::format("hard link to \"{}\"", PrintableName(*entry.hard_link));
  const auto [target_parent_path, target_name] = Split(target_path);
  ASSIGN_OR_RETURN(const InodeIndex target_parent,
                   ResolveDirectory(target_parent_path, Walk::kFind), "{}", context);
  const std::optional<InodeIndex> target = tree_.Find(target_parent, target_name);
  if (!target) return absl::NotFoundError(context + ": not in the archive before this entry");
  if (tree_.inode(*target).is_directory()) {
    return absl::InvalidArgumentError(context + ": is a directory");
  }
  // A name linked to itself stays, as with GNU tar.
  if (tree_.Find(parent, name) == target) return absl::OkStatus();
  Remove(parent, name);
  if (tree_.link_count(*target) == 0) {
    return absl::InvalidArgumentError(context + ": lies below the name that it replaces");
  }
  RETURN_IF_ERROR(ChargeTree(memory_, kEntryMemory + name.size()));
  return tree_.Link(parent, name, *target);
}

absl::Status TarImporter::AddInode(TarEntry& entry, InodeIndex parent, std::string_view name) {
  Inode& inode = entry.inode;
  RETURN_IF_ERROR(NormalizeXattrs(inode));
  if (inode.is_symlink() && (inode.target.empty() || inode.target.size() > kMaxPathLength)) {
    return absl::InvalidArgumentError(
        fmt::format("symbolic link with a target of {} bytes", inode.target.size()));
  }
  if (inode.is_regular() && inode.size > 0) {
    ASSIGN_OR_RETURN(inode.extents, StoreContent(entry));
    RETURN_IF_ERROR(ChargeIndex(inode));
  }
  RETURN_IF_ERROR(ChargeTree(memory_, EntryMemory(inode, name)));

  const std::optional<InodeIndex> existing = tree_.Find(parent, name);
  if (existing && inode.is_directory() && tree_.inode(*existing).is_directory()) {
    UpdateDirectory(*existing, std::move(inode));
    return absl::OkStatus();
  }
  if (existing) Remove(parent, name);
  return tree_.Create(parent, name, std::move(inode)).status();
}

absl::StatusOr<std::vector<Extent>> TarImporter::StoreContent(const TarEntry& entry) {
  ASSIGN_OR_RETURN(FileContent content, FileContent::Begin(sink_, entry.inode.size));
  uint64_t position = 0;
  for (const SparseRun& run : entry.runs) {
    RETURN_IF_ERROR(content.AppendHole(run.offset - position));
    for (uint64_t left = run.length; left > 0;) {
      ASSIGN_OR_RETURN(const std::span<const std::byte> part, reader_.ReadContent(left));
      RETURN_IF_ERROR(content.Append(part));
      left -= part.size();
    }
    position = run.offset + run.length;
  }
  return content.Finish();
}

void TarImporter::UpdateDirectory(InodeIndex directory, Inode inode) {
  implied_directories_.erase(directory);
  Inode& existing = tree_.inode(directory);
  for (Xattr& xattr : existing.xattrs) {
    if (xattr.name == kAccessAclXattr || xattr.name == kDefaultAclXattr) continue;
    const bool mentioned =
        std::any_of(inode.xattrs.begin(), inode.xattrs.end(),
                    [&](const Xattr& other) { return other.name == xattr.name; });
    if (!mentioned) SetXattr(inode, xattr.name, xattr.value);
  }
  existing = std::move(inode);
}

absl::StatusOr<InodeIndex> TarImporter::ResolveDirectory(std::string_view path, Walk walk) {
  if (last_directory_ && last_path_ == path) return *last_directory_;
  ASSIGN_OR_RETURN(const InodeIndex directory, WalkTo(path, walk));
  last_path_ = path;
  last_directory_ = directory;
  return directory;
}

absl::StatusOr<InodeIndex> TarImporter::WalkTo(std::string_view path, Walk walk) {
  std::vector<InodeIndex> directories = {Tree::kRoot};
  std::string rest(path);
  size_t begin = 0;  // of what is still to walk in `rest`
  int symlinks = 0;
  for (size_t steps = 0; begin < rest.size(); ++steps) {
    if (steps > kMaxSteps || directories.size() > kMaxDepth) {
      return absl::InvalidArgumentError("path leads too deep");
    }
    const size_t end = std::min(rest.find('/', begin), rest.size());
    const std::string_view part = std::string_view(rest).substr(begin, end - begin);
    begin = end + 1;
    if (part.empty() || part == ".") continue;
    if (part == "..") {
      if (directories.size() > 1) directories.pop_back();
      continue;
    }
    const InodeIndex directory = directories.back();
    std::optional<InodeIndex> next = tree_.Find(directory, part);
    if (!next) {
      if (walk == Walk::kFind) {
        return absl::NotFoundError(fmt::format("no directory \"{}\"", PrintableName(part)));
      }
      Inode implied;
      implied.mode = S_IFDIR | 0755;
      RETURN_IF_ERROR(ChargeTree(memory_, EntryMemory(implied, part)));
      ASSIGN_OR_RETURN(next, tree_.Create(directory, part, std::move(implied)));
      implied_directories_.insert(*next);
    }
    const Inode& inode = tree_.inode(*next);
    if (inode.is_directory()) {
      directories.push_back(*next);
    } else if (walk == Walk::kCreateUnlessReplaced) {
      return absl::FailedPreconditionError("its directory was replaced");
    } else if (!inode.is_symlink()) {
      return absl::InvalidArgumentError(
          fmt::format("\"{}\" on its path is not a directory", PrintableName(part)));
    } else if (++symlinks > kMaxSymlinks) {
      return absl::InvalidArgumentError("too many symbolic links on its path");
    } else {
      if (inode.target.starts_with('/')) directories.resize(1);
      rest = begin < rest.size() ? fmt::format("{}/{}", inode.target, rest.substr(begin))
                                 : inode.target;
      begin = 0;
    }
  }
  return directories.back();
}

void TarImporter::Remove(InodeIndex parent, std::string_view name) {
  last_directory_.reset();
  tree_.Remove(parent, name);
}

absl::Status TarImporter::ApplyWhiteouts() {
  for (InodeIndex directory : opaque_directories_) {
    SetXattr(tree_.inode(directory), kOpaqueXattr, "y");
  }
  for (const auto& [directory, name] : whiteouts_) {
    if (tree_.link_count(directory) == 0) continue;
    const std::optional<InodeIndex> existing = tree_.Find(directory, name);
    if (!existing) {
      Inode whiteout;
      whiteout.mode = S_IFCHR;
      RETURN_IF_ERROR(tree_.Create(directory, name, std::move(whiteout)).status(),
                      "whiteout \"{}\"", PrintableName(name));
    } else if (tree_.inode(*existing).is_directory()) {
      // The lower directory is gone, so nothing of it may show in the one that replaces it: neither
      // its content, nor its attributes if this one has none of its own.
      SetXattr(tree_.inode(*existing), kOpaqueXattr, "y");
      implied_directories_.erase(*existing);
    }
  }
  return absl::OkStatus();
}

// A few bytes in the middle of a file that is all hole else make an index of up to 128 MiB.
absl::Status TarImporter::ChargeIndex(const Inode& file) {
  index_bytes_ += ShapeOfChunks(file).entries * sizeof(ChunkIndex);
  if (index_bytes_ <= kMaxIndexBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      fmt::format("the archive's large files with holes take more than {} bytes of chunk indexes",
                  kMaxIndexBytes));
}

}  // namespace

absl::StatusOr<Tree> ImportTar(const TarReadFunction& read, ContentSink& sink) {
  return TarImporter(read, sink).Run();
}

}  // namespace lamina::erofs
