// SPDX-License-Identifier: Apache-2.0
#include <absl/container/flat_hash_map.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "chunkstore/base/directory_names.h"
#include "chunkstore/base/file.h"
#include "erofs/file_content.h"
#include "erofs/import.h"
#include "erofs/import_xattrs.h"
#include "erofs/tree_memory.h"

namespace lamina::erofs {
namespace {

constexpr size_t kReadSize = 256 << 10;

// What a descriptor opened with O_PATH stands for, as a path that calls can take which do not work
// on such descriptors. It leads to that very file, also if its name was given to another since.
std::string PathOf(int fd) { return fmt::format("/proc/self/fd/{}", fd); }

absl::StatusOr<struct statx> Stat(int fd) {
  struct statx result {};
  const int flags = AT_EMPTY_PATH | AT_NO_AUTOMOUNT | AT_STATX_SYNC_AS_STAT;
  if (::statx(fd, "", flags, STATX_BASIC_STATS | STATX_MNT_ID, &result) != 0) {
    return ErrnoStatus(errno, "stat");
  }
  // Since Linux 5.8. Bind mounts of one file system cannot be told apart without.
  if ((result.stx_mask & STATX_MNT_ID) == 0) {
    return absl::UnimplementedError("stat: the kernel does not tell which mount a file is on");
  }
  return result;
}

Inode MakeInode(const struct statx& stat) {
  Inode inode;
  inode.mode = stat.stx_mode;
  if (inode.is_symlink()) inode.mode = S_IFLNK | 0777;
  inode.uid = stat.stx_uid;
  inode.gid = stat.stx_gid;
  inode.mtime = {stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec};
  if (S_ISCHR(inode.mode) || S_ISBLK(inode.mode)) {
    inode.rdev = makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
  }
  return inode;
}

// The names in a directory but "." and "..", from the last to the first in byte order.
absl::StatusOr<std::vector<std::string>> ReadNamesBackwards(int fd) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, DirectoryNames(fd));
  std::sort(names.begin(), names.end(), std::greater<>());
  return names;
}

// Calls `get` (buffer, size) until the result fits its buffer, as listxattr and getxattr want it.
// No value if that fails with ENODATA or EOPNOTSUPP: there is nothing, or nothing any more.
template <typename Get>
absl::StatusOr<std::optional<std::string>> GetGrowing(std::string_view what, const Get& get) {
  std::string buffer(256, '\0');
  for (;;) {
    const ssize_t length = get(buffer.data(), buffer.size());
    if (length >= 0) {
      buffer.resize(static_cast<size_t>(length));
      return buffer;
    }
    if (errno == ENODATA || errno == EOPNOTSUPP) return std::nullopt;
    if (errno != ERANGE || buffer.size() > XATTR_SIZE_MAX) {
      return ErrnoStatus(errno, what);
    }
    buffer.resize(buffer.size() * 4);
  }
}

// The xattrs of what a descriptor is open for; `path` is empty, or leads to it if the descriptor was
// opened with O_PATH.
absl::StatusOr<std::vector<Xattr>> ReadXattrs(int fd, const std::string& path) {
  std::vector<Xattr> xattrs;
  ASSIGN_OR_RETURN(const std::optional<std::string> list,
                   GetGrowing("list xattrs", [&](char* buffer, size_t size) {
                     return path.empty() ? ::flistxattr(fd, buffer, size)
                                         : ::listxattr(path.c_str(), buffer, size);
                   }));
  for (std::string_view rest = list ? *list : std::string_view(); !rest.empty();) {
    const std::string name(rest.substr(0, rest.find('\0')));
    rest.remove_prefix(std::min(name.size() + 1, rest.size()));
    ASSIGN_OR_RETURN(std::optional<std::string> value,
                     GetGrowing(fmt::format("read xattr \"{}\"", PrintableName(name)),
                                [&](char* buffer, size_t size) {
                                  return path.empty()
                                             ? ::fgetxattr(fd, name.c_str(), buffer, size)
                                             : ::getxattr(path.c_str(), name.c_str(), buffer, size);
                                }));
    if (value) xattrs.push_back({name, std::move(*value)});
  }
  return xattrs;
}

absl::StatusOr<std::string> ReadLinkTarget(int fd) {
  std::string target(PATH_MAX, '\0');
  const ssize_t length = ::readlinkat(fd, "", target.data(), target.size());
  if (length < 0) return ErrnoStatus(errno, "read symbolic link");
  target.resize(static_cast<size_t>(length));
  return target;
}

// Where the data begins that is at or after `offset`; `size` if there is none.
absl::StatusOr<uint64_t> FindData(int fd, uint64_t offset, uint64_t size) {
  const off_t found = ::lseek(fd, static_cast<off_t>(offset), SEEK_DATA);
  if (found >= 0) return std::min(static_cast<uint64_t>(found), size);
  if (errno == ENXIO) return size;
  // File systems without holes: all is data.
  if (errno == EINVAL) return offset;
  return ErrnoStatus(errno, "look for data");
}

// Where the data ends that is at `offset`.
absl::StatusOr<uint64_t> FindHole(int fd, uint64_t offset, uint64_t size) {
  const off_t found = ::lseek(fd, static_cast<off_t>(offset), SEEK_HOLE);
  if (found >= 0) return std::min(static_cast<uint64_t>(found), size);
  if (errno == EINVAL || errno == ENXIO) return size;
  return ErrnoStatus(errno, "look for a hole");
}

// Small files that take as much room as they have content are not searched for holes. One with a hole
// and as much room for something else would only have zeros there.
bool HasNoHoles(const struct statx& stat) {
  constexpr uint64_t kSmall = 64 << 10;
  constexpr uint64_t kStatBlock = 512;
  return stat.stx_size <= kSmall && stat.stx_blocks * kStatBlock >= stat.stx_size;
}

using FileId = std::pair<uint64_t, uint64_t>;  // device, inode

FileId IdOf(const struct statx& stat) {
  return {makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino};
}

// Equal versions of a file have equal content, as far as the file system notes times: see IsSettled.
struct FileVersion {
  uint64_t size = 0;
  Timestamp modified;
  Timestamp changed;
  bool operator==(const FileVersion&) const = default;
};

FileVersion VersionOf(const struct statx& stat) {
  return {stat.stx_size,
          {stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec},
          {stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec}};
}

// True if whatever changes a file after `start` gives it another time than the one it has. File
// systems may note times in steps of the kernel's clock, which are 10 ms at the most.
bool IsSettled(const FileVersion& version, const timespec& start) {
  constexpr int64_t kStep = 20'000'000;
  constexpr int64_t kSecond = 1'000'000'000;
  const int64_t seconds = start.tv_sec - version.changed.seconds;
  const int64_t nanoseconds = start.tv_nsec - int64_t{version.changed.nanoseconds};
  return seconds > 1 || (seconds >= 0 && seconds * kSecond + nanoseconds >= kStep);
}

// File systems that change a file's times at the first store to a mapped page since that was written
// back. tmpfs does not.
bool NotesStores(const std::string& path) {
  struct statfs info {};
  if (::statfs(path.c_str(), &info) != 0) return false;
  const auto type = static_cast<uint32_t>(info.f_type);
  return type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC;
}

// Content that the sink has already.
struct StoredContent {
  FileVersion version;
  std::vector<Extent> extents;
};
using StoredFiles = absl::flat_hash_map<FileId, StoredContent>;

class DirectoryImporter {
 public:
  // What is imported.
  enum class Kind {
    kTree,
    kUpper,        // of an overlayfs
    kUpperMoving,  // which changes meanwhile: only for the content to be stored
  };
  // `mark_prefix` and `stored` are for uppers. The former is one of kOverlayPrefixes. What is stored
  // and has not changed is not read, and with kUpperMoving what is read is added.
  explicit DirectoryImporter(ContentSink& sink, Kind kind = Kind::kTree,
                             std::string_view mark_prefix = {}, StoredFiles* stored = nullptr)
      : sink_(sink), kind_(kind), mark_prefix_(mark_prefix), stored_(stored), buffer_(kReadSize) {}

  absl::StatusOr<Tree> Run(const std::string& path);

 private:
  // A directory that is being walked.
  struct Level {
    InodeIndex inode;
    std::string name;
    std::vector<std::string> names;  // still to visit, the next one at the end
    FileId id;
  };

  // Adds the next name of the innermost level, and makes it the innermost if it is a directory.
  absl::Status Visit(const std::string& name);
  absl::Status Enter(InodeIndex inode, const std::string& name, UniqueFd fd,
                     const struct statx& stat);
  // Goes back to the parent of the innermost level.
  absl::Status Leave();

  // `fd` is opened with O_PATH; `file` is the same for reading, or not valid.
  absl::Status SetAttributes(int fd, const UniqueFd& file, Inode& inode) const;
  absl::Status SetContent(int fd, UniqueFd file, struct statx stat, Inode& inode);
  // Returns how far it came: `end`, or where the file ends meanwhile.
  absl::StatusOr<uint64_t> CopyData(int fd, uint64_t begin, uint64_t end, FileContent& content);
  // The path of `name` in the innermost level, from the root of the import.
  std::string PathFor(std::string_view name) const;

  ContentSink& sink_;
  const Kind kind_;
  const std::string_view mark_prefix_;
  StoredFiles* const stored_;
  std::vector<std::byte> buffer_;
  Tree tree_;
  uint64_t memory_ = 0;  // see tree_memory.h
  // Only the innermost directory is open, so that depth costs no descriptors; the way back is "..".
  std::vector<Level> levels_;
  UniqueFd current_;
  uint64_t mount_ = 0;
  absl::flat_hash_map<FileId, InodeIndex> hard_links_;
};

absl::StatusOr<Tree> DirectoryImporter::Run(const std::string& path) {
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_PATH | O_DIRECTORY));
  ASSIGN_OR_RETURN(const struct statx stat, Stat(fd.get()), "{}", path);
  mount_ = stat.stx_mnt_id;
  Inode& root = tree_.inode(Tree::kRoot);
  root = MakeInode(stat);
  RETURN_IF_ERROR(SetAttributes(fd.get(), UniqueFd(), root), "{}", path);
  RETURN_IF_ERROR(Enter(Tree::kRoot, path, std::move(fd), stat), "{}", path);

  while (!levels_.empty()) {
    std::vector<std::string>& names = levels_.back().names;
    if (names.empty()) {
      RETURN_IF_ERROR(Leave());
      continue;
    }
    const std::string name = std::move(names.back());
    names.pop_back();
    // On failure the levels are as they were before the visit.
    RETURN_IF_ERROR(Visit(name), "{}", PrintableName(PathFor(name)));
  }
  return std::move(tree_);
}

absl::Status DirectoryImporter::Visit(const std::string& name) {
  const InodeIndex parent = levels_.back().inode;
  UniqueFd fd(::openat(current_.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid() && errno == ENOENT && kind_ == Kind::kUpperMoving) return absl::OkStatus();
  if (!fd.valid()) return ErrnoStatus(errno, "open");
  ASSIGN_OR_RETURN(const struct statx stat, Stat(fd.get()));
  Inode inode = MakeInode(stat);
  // What is mounted here is not part of the tree; the mount point itself, a directory or a file,
  // stays as an empty one.
  if (stat.stx_mnt_id != mount_) {
    RETURN_IF_ERROR(ChargeTree(memory_, EntryMemory(inode, name)));
    return tree_.Create(parent, name, std::move(inode)).status();
  }

  const bool may_be_linked = stat.stx_nlink > 1 && !inode.is_directory();
  if (may_be_linked) {
    auto known = hard_links_.find(IdOf(stat));
    if (known != hard_links_.end()) {
      RETURN_IF_ERROR(ChargeTree(memory_, kEntryMemory + name.size()));
      return tree_.Link(parent, name, known->second);
    }
  }
  UniqueFd file;
  if (inode.is_regular() && stat.stx_size > 0 && kind_ == Kind::kTree) {
    ASSIGN_OR_RETURN(file, OpenFile(PathOf(fd.get()), O_RDONLY));
  }
  RETURN_IF_ERROR(SetAttributes(fd.get(), file, inode));
  if (inode.is_symlink()) {
    ASSIGN_OR_RETURN(inode.target, ReadLinkTarget(fd.get()));
  } else if (inode.is_regular()) {
    RETURN_IF_ERROR(SetContent(fd.get(), std::move(file), stat, inode));
  }
  RETURN_IF_ERROR(ChargeTree(memory_, EntryMemory(inode, name) + XattrMemory(inode)));
  const bool is_directory = inode.is_directory();
  ASSIGN_OR_RETURN(const InodeIndex index, tree_.Create(parent, name, std::move(inode)));
  if (may_be_linked) hard_links_.emplace(IdOf(stat), index);
  return is_directory ? Enter(index, name, std::move(fd), stat) : absl::OkStatus();
}

absl::Status DirectoryImporter::Enter(InodeIndex inode, const std::string& name, UniqueFd fd,
                                      const struct statx& stat) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, ReadNamesBackwards(fd.get()));
  levels_.push_back({inode, name, std::move(names), IdOf(stat)});
  current_ = std::move(fd);
  return absl::OkStatus();
}

absl::Status DirectoryImporter::Leave() {
  if (levels_.size() == 1) {
    levels_.clear();
    return absl::OkStatus();
  }
  UniqueFd parent(::openat(current_.get(), "..", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!parent.valid()) return ErrnoStatus(errno, PrintableName(PathFor("..")));
  ASSIGN_OR_RETURN(const struct statx stat, Stat(parent.get()), "{}", PrintableName(PathFor("..")));
  if (IdOf(stat) != levels_[levels_.size() - 2].id) {
    if (kind_ == Kind::kUpperMoving) {  // the rest is read when nothing moves
      levels_.clear();
      return absl::OkStatus();
    }
    return absl::AbortedError(
        fmt::format("{}: directory was moved while it was read", PrintableName(PathFor(""))));
  }
  levels_.pop_back();
  current_ = std::move(parent);
  return absl::OkStatus();
}

absl::Status DirectoryImporter::SetAttributes(int fd, const UniqueFd& file, Inode& inode) const {
  ASSIGN_OR_RETURN(inode.xattrs,
                   file.valid() ? ReadXattrs(file.get(), "") : ReadXattrs(fd, PathOf(fd)));
  return kind_ == Kind::kTree ? NormalizeXattrs(inode) : NormalizeUpperXattrs(inode, mark_prefix_);
}

absl::Status DirectoryImporter::SetContent(int fd, UniqueFd file, struct statx stat, Inode& inode) {
  const bool moving = kind_ == Kind::kUpperMoving;
  timespec start{};
  if (moving) {
    ::clock_gettime(CLOCK_REALTIME_COARSE, &start);
    ASSIGN_OR_RETURN(file, OpenFile(PathOf(fd), O_RDONLY));
    // Mapped pages that were written to are no longer writable then, so that another store to them is
    // noted in the file's times. All three flags: every page, also those being written (Linux 5.2).
    ::sync_file_range(
        file.get(), 0, 0,
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    ASSIGN_OR_RETURN(stat, Stat(fd));
  }
  inode.size = stat.stx_size;
  if (inode.size == 0) return absl::OkStatus();
  const FileVersion version = VersionOf(stat);
  if (stored_ != nullptr && !moving) {
    const auto stored = stored_->find(IdOf(stat));
    if (stored != stored_->end() && stored->second.version == version) {
      inode.extents = stored->second.extents;
      return absl::OkStatus();
    }
  }
  if (!file.valid()) {
    ASSIGN_OR_RETURN(file, OpenFile(PathOf(fd), O_RDONLY));
  }
  ASSIGN_OR_RETURN(FileContent content, FileContent::Begin(sink_, inode.size));
  const bool is_whole = HasNoHoles(stat);
  for (uint64_t position = 0; position < inode.size;) {
    uint64_t data = position;
    if (!is_whole) {
      ASSIGN_OR_RETURN(data, FindData(file.get(), position, inode.size));
    }
    RETURN_IF_ERROR(content.AppendHole(data - position));
    if (data == inode.size) break;
    uint64_t hole = inode.size;
    if (!is_whole) {
      ASSIGN_OR_RETURN(hole, FindHole(file.get(), data, inode.size));
    }
    ASSIGN_OR_RETURN(position, CopyData(file.get(), data, hole, content));
    if (position == hole) continue;
    if (moving) break;
    return absl::AbortedError(fmt::format("file shrank to {} bytes while it was read", position));
  }
  ASSIGN_OR_RETURN(const struct statx after, Stat(fd));
  const FileVersion now = VersionOf(after);
  if (!moving && (now.size != version.size || now.modified != version.modified)) {
    return absl::AbortedError(
        fmt::format("file changed while it was read, from {} bytes to {}", version.size, now.size));
  }
  ASSIGN_OR_RETURN(inode.extents, content.Finish());
  if (moving && now == version && IsSettled(version, start)) {
    stored_->insert_or_assign(IdOf(stat), StoredContent{version, inode.extents});
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DirectoryImporter::CopyData(int fd, uint64_t begin, uint64_t end,
                                                     FileContent& content) {
  while (begin < end) {
    const auto wanted = static_cast<size_t>(std::min<uint64_t>(end - begin, buffer_.size()));
    const ssize_t length = ::pread(fd, buffer_.data(), wanted, static_cast<off_t>(begin));
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return ErrnoStatus(errno, fmt::format("read at byte {}", begin));
    if (length == 0) break;
    RETURN_IF_ERROR(content.Append(std::span(buffer_).first(static_cast<size_t>(length))));
    begin += static_cast<uint64_t>(length);
  }
  return begin;
}

std::string DirectoryImporter::PathFor(std::string_view name) const {
  std::string path;
  for (const Level& level : levels_) path += level.name + '/';
  return path.append(name);
}

}  // namespace

absl::StatusOr<Tree> ImportDirectory(const std::string& path, ContentSink& sink) {
  return DirectoryImporter(sink).Run(path);
}

absl::StatusOr<Tree> ImportUpper(const std::string& path, ContentSink& sink,
                                 const UpperOptions& options) {
  using Kind = DirectoryImporter::Kind;
  const std::string_view prefix = kOverlayPrefixes[options.user_xattrs ? 1 : 0];
  StoredFiles stored;
  if (options.pause != nullptr) {
    if (NotesStores(path)) {
      RETURN_IF_ERROR(
          DirectoryImporter(sink, Kind::kUpperMoving, prefix, &stored).Run(path).status());
    }
    RETURN_IF_ERROR(options.pause());
  }
  return DirectoryImporter(sink, Kind::kUpper, prefix, &stored).Run(path);
}

}  // namespace lamina::erofs
