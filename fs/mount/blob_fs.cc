// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/blob_fs.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "fs/mount/blob_reply.h"
#include "fs/mount/fuse_session.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::ReadStats;

// Inode numbers: the root is FUSE_ROOT_ID; directory number n is n << 16, and the file of its slot
// s is (n << 16) + s. Numbers of directories count up and are never used again.
constexpr unsigned kSlotBits = 16;
constexpr uint64_t kMaxSlot = (1 << kSlotBits) - 1;

// Attributes never change. Names go only by Remove, which tells the kernel.
constexpr double kTimeout = 24 * 60 * 60;

struct File {
  std::shared_ptr<Blob> blob;
  std::shared_ptr<ReadStats> stats;
  uint64_t size = 0;  // of the blob's data file
};

struct Directory {
  std::string id;
  std::vector<File> files;  // slot 1 is files[0]
  // Times that the kernel looked up the directory or a file in it and has not forgotten. The kernel
  // holds one for every open file.
  uint64_t lookups = 0;
  uint64_t open_files = 0;
  bool removed = false;
};

std::optional<uint64_t> ParseSlot(std::string_view name) {
  uint64_t slot = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), slot);
  const bool is_number = error == std::errc() && end == name.data() + name.size();
  if (!is_number || slot == 0 || name.front() == '0') return std::nullopt;
  return slot;
}

class BlobFsImpl final : public BlobFs {
 public:
  static absl::StatusOr<std::unique_ptr<BlobFs>> Start(const std::string& mountpoint);

  absl::Status Add(const std::string& id, std::vector<std::shared_ptr<Blob>> blobs,
                   std::shared_ptr<ReadStats> stats) override;
  void Remove(const std::string& id) override;
  uint64_t open_files(const std::string& id) const override;
  const std::string& mountpoint() const override { return mountpoint_; }

 private:
  static fuse_lowlevel_ops Operations();
  static BlobFsImpl& Of(fuse_req_t request) {
    return *static_cast<BlobFsImpl*>(FuseSession::Of(request).owner());
  }

  void Lookup(fuse_req_t request, fuse_ino_t parent, std::string_view name);
  void GetAttributes(fuse_req_t request, fuse_ino_t inode);
  void Open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info);
  void Release(fuse_ino_t inode);
  void ReadDirectory(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset);
  void Forget(fuse_ino_t inode, uint64_t count);

  // All below: with mutex_ held.
  Directory* FindDirectory(fuse_ino_t inode);
  File* FindFile(fuse_ino_t inode);
  std::optional<fuse_ino_t> FindName(fuse_ino_t parent, std::string_view name);
  std::optional<struct stat> Attributes(fuse_ino_t inode);
  std::vector<std::pair<std::string, fuse_ino_t>> List(fuse_ino_t inode);

  std::string mountpoint_;
  mutable std::mutex mutex_;
  std::map<std::string, uint64_t> numbers_;    // of directories that were not removed
  std::map<uint64_t, Directory> directories_;  // by number; removed ones stay while in use
  uint64_t next_number_ = 1;
  std::unique_ptr<FuseSession> session_;  // last: ends before what it serves
};

absl::StatusOr<std::unique_ptr<BlobFs>> BlobFsImpl::Start(const std::string& mountpoint) {
  auto self = std::make_unique<BlobFsImpl>();
  FuseSession::Options options;
  options.mount.mountpoint = mountpoint;
  options.mount.source = "lamina-blobs";
  options.mount.subtype = "lamina";
  options.capabilities = FUSE_CAP_SPLICE_WRITE;
  ASSIGN_OR_RETURN(self->session_, FuseSession::Start(options, Operations(), self.get()));
  self->mountpoint_ = self->session_->mountpoint();
  return self;
}

absl::Status BlobFsImpl::Add(const std::string& id, std::vector<std::shared_ptr<Blob>> blobs,
                             std::shared_ptr<ReadStats> stats) {
  if (id.empty() || id == "." || id == ".." || id.find('/') != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("mount id \"{}\" is not a file name", id));
  }
  if (blobs.size() > kMaxSlot) {
    return absl::InvalidArgumentError(
        fmt::format("mount {}: {} blobs, more than {}", id, blobs.size(), kMaxSlot));
  }
  if (stats == nullptr) stats = std::make_shared<ReadStats>();
  Directory directory{.id = id};
  for (std::shared_ptr<Blob>& blob : blobs) {
    ASSIGN_OR_RETURN(const uint64_t size, FileSize(blob->data_fd()), "mount {}", id);
    directory.files.push_back({std::move(blob), stats, size});
  }
  std::lock_guard lock(mutex_);
  if (!numbers_.emplace(id, next_number_).second) {
    return absl::AlreadyExistsError(fmt::format("mount {}: its blobs are served already", id));
  }
  directories_.emplace(next_number_++, std::move(directory));
  return absl::OkStatus();
}

void BlobFsImpl::Remove(const std::string& id) {
  Directory unused;  // let go of outside the lock
  {
    std::lock_guard lock(mutex_);
    const auto number = numbers_.find(id);
    if (number == numbers_.end()) return;
    const auto directory = directories_.find(number->second);
    numbers_.erase(number);
    directory->second.removed = true;
    if (directory->second.lookups == 0) {
      unused = std::move(directory->second);
      directories_.erase(directory);
    }
  }
  // Without the lock: the kernel may wait for a lookup of ours before it lets go of the name.
  session_->ForgetEntry(FUSE_ROOT_ID, id);
}

uint64_t BlobFsImpl::open_files(const std::string& id) const {
  std::lock_guard lock(mutex_);
  uint64_t count = 0;
  for (const auto& [number, directory] : directories_) {
    if (directory.id == id) count += directory.open_files;
  }
  return count;
}

Directory* BlobFsImpl::FindDirectory(fuse_ino_t inode) {
  const auto directory = directories_.find(inode >> kSlotBits);
  return directory == directories_.end() ? nullptr : &directory->second;
}

File* BlobFsImpl::FindFile(fuse_ino_t inode) {
  Directory* directory = FindDirectory(inode);
  const uint64_t slot = inode & kMaxSlot;
  if (directory == nullptr || slot == 0 || slot > directory->files.size()) return nullptr;
  return &directory->files[slot - 1];
}

std::optional<fuse_ino_t> BlobFsImpl::FindName(fuse_ino_t parent, std::string_view name) {
  if (parent == FUSE_ROOT_ID) {
    const auto number = numbers_.find(std::string(name));
    if (number == numbers_.end()) return std::nullopt;
    return number->second << kSlotBits;
  }
  const auto slot = ParseSlot(name);
  if (!slot || *slot > kMaxSlot || (parent & kMaxSlot) != 0) return std::nullopt;
  if (FindFile(parent + *slot) == nullptr) return std::nullopt;
  return parent + *slot;
}

std::optional<struct stat> BlobFsImpl::Attributes(fuse_ino_t inode) {
  struct stat info {};
  info.st_ino = inode;
  if (const File* file = FindFile(inode)) {
    info.st_mode = S_IFREG | 0400;
    info.st_nlink = 1;
    info.st_size = static_cast<off_t>(file->size);
    info.st_blocks = static_cast<blkcnt_t>(file->size / 512);
    return info;
  }
  const bool is_directory =
      inode == FUSE_ROOT_ID || ((inode & kMaxSlot) == 0 && FindDirectory(inode) != nullptr);
  if (!is_directory) return std::nullopt;
  info.st_mode = S_IFDIR | 0500;
  info.st_nlink = 2;
  return info;
}

void BlobFsImpl::Lookup(fuse_req_t request, fuse_ino_t parent, std::string_view name) {
  fuse_entry_param entry{};
  {
    std::lock_guard lock(mutex_);
    const auto inode = FindName(parent, name);
    if (inode) {
      entry.ino = *inode;
      entry.attr = *Attributes(*inode);
      ++FindDirectory(*inode)->lookups;
    }
  }
  if (entry.ino == 0) {  // not cached by the kernel: it may be added any time
    ::fuse_reply_err(request, ENOENT);
    return;
  }
  entry.attr_timeout = kTimeout;
  entry.entry_timeout = kTimeout;
  // The kernel does not take a lookup into account that it was not told of.
  if (::fuse_reply_entry(request, &entry) != 0) Forget(entry.ino, 1);
}

void BlobFsImpl::GetAttributes(fuse_req_t request, fuse_ino_t inode) {
  std::optional<struct stat> info;
  {
    std::lock_guard lock(mutex_);
    info = Attributes(inode);
  }
  if (info) {
    ::fuse_reply_attr(request, &*info, kTimeout);
  } else {
    ::fuse_reply_err(request, ENOENT);
  }
}

void BlobFsImpl::Open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  const File* file = nullptr;
  {
    std::lock_guard lock(mutex_);
    file = FindFile(inode);
    if (file != nullptr) ++FindDirectory(inode)->open_files;
  }
  if (file == nullptr) {
    ::fuse_reply_err(request, ENOENT);
    return;
  }
  // Stays valid: the kernel forgets the inode only after the last file on it is closed.
  info->fh = reinterpret_cast<uint64_t>(file);
  info->direct_io = 1;
  // The kernel does not release a file that it was not told of.
  if (::fuse_reply_open(request, info) != 0) Release(inode);
}

void BlobFsImpl::Release(fuse_ino_t inode) {
  std::lock_guard lock(mutex_);
  Directory* directory = FindDirectory(inode);
  if (directory != nullptr) --directory->open_files;
}

std::vector<std::pair<std::string, fuse_ino_t>> BlobFsImpl::List(fuse_ino_t inode) {
  std::vector<std::pair<std::string, fuse_ino_t>> names{{".", inode}, {"..", FUSE_ROOT_ID}};
  if (inode == FUSE_ROOT_ID) {
    for (const auto& [id, number] : numbers_) names.emplace_back(id, number << kSlotBits);
  } else if (const Directory* directory = FindDirectory(inode)) {
    for (uint64_t slot = 1; slot <= directory->files.size(); ++slot) {
      names.emplace_back(fmt::format("{}", slot), inode + slot);
    }
  }
  return names;
}

void BlobFsImpl::ReadDirectory(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset) {
  std::vector<std::pair<std::string, fuse_ino_t>> names;
  {
    std::lock_guard lock(mutex_);
    names = List(inode);
  }
  std::vector<char> buffer(size);
  size_t used = 0;
  for (size_t i = static_cast<size_t>(offset); i < names.size(); ++i) {
    const auto& [name, number] = names[i];
    struct stat info {};
    info.st_ino = number;
    info.st_mode = i < 2 || inode == FUSE_ROOT_ID ? S_IFDIR : S_IFREG;
    const size_t needed = ::fuse_add_direntry(request, buffer.data() + used, size - used,
                                              name.c_str(), &info, static_cast<off_t>(i + 1));
    if (needed > size - used) break;
    used += needed;
  }
  ::fuse_reply_buf(request, buffer.data(), used);
}

void BlobFsImpl::Forget(fuse_ino_t inode, uint64_t count) {
  Directory unused;  // let go of outside the lock
  std::lock_guard lock(mutex_);
  const auto found = directories_.find(inode >> kSlotBits);
  if (found == directories_.end()) return;  // the root
  Directory& directory = found->second;
  directory.lookups -= std::min(count, directory.lookups);
  if (directory.removed && directory.lookups == 0) {
    unused = std::move(directory);
    directories_.erase(found);
  }
}

fuse_lowlevel_ops BlobFsImpl::Operations() {
  fuse_lowlevel_ops operations{};
  operations.lookup = [](fuse_req_t request, fuse_ino_t parent, const char* name) {
    Of(request).Lookup(request, parent, name);
  };
  operations.forget = [](fuse_req_t request, fuse_ino_t inode, uint64_t count) {
    Of(request).Forget(inode, count);
    ::fuse_reply_none(request);
  };
  operations.forget_multi = [](fuse_req_t request, size_t count, fuse_forget_data* forgets) {
    for (size_t i = 0; i < count; ++i) Of(request).Forget(forgets[i].ino, forgets[i].nlookup);
    ::fuse_reply_none(request);
  };
  operations.getattr = [](fuse_req_t request, fuse_ino_t inode, fuse_file_info*) {
    Of(request).GetAttributes(request, inode);
  };
  operations.open = [](fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
    Of(request).Open(request, inode, info);
  };
  operations.release = [](fuse_req_t request, fuse_ino_t inode, fuse_file_info*) {
    Of(request).Release(inode);
    ::fuse_reply_err(request, 0);
  };
  operations.readdir = [](fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset,
                          fuse_file_info*) {
    Of(request).ReadDirectory(request, inode, size, offset);
  };
  operations.read = [](fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                       fuse_file_info* info) {
    const File& file = *reinterpret_cast<const File*>(info->fh);
    const uint64_t start = std::min(static_cast<uint64_t>(offset), file.size);
    const ContentPiece piece{file.blob, start, std::min<uint64_t>(size, file.size - start)};
    ReplyWithContent(request, std::span(&piece, 1), file.stats);
  };
  return operations;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlobFs>> BlobFs::Start(const std::string& mountpoint) {
  return BlobFsImpl::Start(mountpoint);
}

}  // namespace lamina::fs
