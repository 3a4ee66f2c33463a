// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/blob_fs.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>

#include "fs/mount/blob_reply.h"
#include "fs/mount/fuse_session.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::ReadStats;

// Inode numbers: the root is FUSE_ROOT_ID; directory n is n << 16, and the file of its slot s is
// (n << 16) + s; blobs/ is 2, and a file in it has the highest bit and the first 63 bits of the blob's
// key. A process of another version may be asked about them: they must stay as they are.
constexpr unsigned kSlotBits = 16;
constexpr uint64_t kMaxSlot = (1 << kSlotBits) - 1;
constexpr uint64_t kMaxId = (uint64_t{1} << (63 - kSlotBits)) - 1;
constexpr fuse_ino_t kSharedDirectory = 2;
constexpr uint64_t kSharedBit = uint64_t{1} << 63;
constexpr std::string_view kSharedName = "blobs";
constexpr uint64_t kMaxFolio = 2 << 20;  // of the page cache

// Attributes never change. Names go only by Remove, which tells the kernel.
constexpr double kBlobTimeout = 24 * 60 * 60;

struct File {
  std::shared_ptr<Blob> blob;
  std::shared_ptr<ReadStats> stats;
  uint64_t size = 0;  // of the blob's data file
};

struct Files {
  std::vector<File> files;  // slot 1 is files[0]
  bool removed = false;
};

// A file in blobs/.
struct SharedFile {
  Digest key;
  File file;
  size_t directories = 0;  // slots that have the blob
};

fuse_ino_t SharedInode(const Digest& key) {
  uint64_t bits = 0;
  for (size_t index = 0; index < sizeof(bits); ++index) bits = bits << 8 | key.bytes[index];
  return bits >> 1 | kSharedBit;
}

// As it is written in names: no sign, no leading zeros, not 0.
std::optional<uint64_t> ParseNumber(std::string_view name) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  const bool is_number = error == std::errc() && end == name.data() + name.size();
  if (!is_number || number == 0 || name.front() == '0') return std::nullopt;
  return number;
}

absl::StatusOr<Files> MakeFiles(BlobFs::Directory directory) {
  if (directory.id == 0 || directory.id > kMaxId) {
    return absl::InvalidArgumentError(fmt::format("image number {} is out of range", directory.id));
  }
  if (directory.blobs.size() > kMaxSlot) {
    return absl::InvalidArgumentError(fmt::format("image {}: {} blobs, more than {}", directory.id,
                                                  directory.blobs.size(), kMaxSlot));
  }
  if (directory.stats == nullptr) directory.stats = std::make_shared<ReadStats>();
  Files files;
  for (std::shared_ptr<Blob>& blob : directory.blobs) {
    ASSIGN_OR_RETURN(const uint64_t size, FileSize(blob->data_fd()), "image {}", directory.id);
    files.files.push_back({std::move(blob), directory.stats, size});
  }
  return files;
}

class BlobFsImpl final : public BlobFs {
 public:
  static absl::StatusOr<std::unique_ptr<BlobFs>> Start(const std::string& mountpoint);
  static absl::StatusOr<std::unique_ptr<BlobFs>> TakeOver(const std::string& mountpoint,
                                                          FuseHandover handover,
                                                          std::vector<Directory> directories,
                                                          std::vector<Directory> removed);

  absl::Status Add(Directory directory) override;
  void Remove(uint64_t id) override;
  bool InUse(uint64_t id) override;
  const std::string& mountpoint() const override { return session_->mountpoint(); }

  int device() const override { return session_->device(); }
  bool has_new_device() const override { return session_->has_new_device(); }
  std::string state() const override { return session_->state(); }
  void LeaveMounted() override { session_->LeaveMounted(); }

 private:
  static fuse_lowlevel_ops Operations();
  static FuseSession::Options SessionOptions(const std::string& mountpoint);
  static BlobFsImpl& Of(fuse_req_t request) {
    return *static_cast<BlobFsImpl*>(FuseSession::Of(request).owner());
  }

  void Lookup(fuse_req_t request, fuse_ino_t parent, std::string_view name);
  void GetAttributes(fuse_req_t request, fuse_ino_t inode);
  void Open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info);
  void Read(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset);
  void ReadDirectory(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset);
  bool KernelHas(uint64_t id, size_t slots);
  bool KernelHasShared(const std::vector<Digest>& keys);

  // With mutex_ held.
  absl::Status AddFiles(uint64_t id, Files files);
  Files TakeFiles(std::map<uint64_t, Files>::iterator directory);

  // All below: with mutex_ held, shared will do.
  const Files* FindDirectory(fuse_ino_t inode) const;
  const File* FindFile(fuse_ino_t inode) const;
  std::optional<fuse_ino_t> FindName(fuse_ino_t parent, std::string_view name) const;
  std::optional<struct stat> Attributes(fuse_ino_t inode) const;
  std::vector<std::pair<std::string, fuse_ino_t>> List(fuse_ino_t inode) const;

  std::shared_mutex mutex_;
  std::map<uint64_t, Files> directories_;    // by id; removed ones stay while in use
  std::map<fuse_ino_t, SharedFile> shared_;  // blobs of all directories
  std::unique_ptr<FuseSession> session_;     // last: ends before what it serves
};

FuseSession::Options BlobFsImpl::SessionOptions(const std::string& mountpoint) {
  FuseSession::Options options;
  options.mount.mountpoint = mountpoint;
  options.mount.source = "lamina-blobs";
  options.mount.subtype = "lamina";
  options.capabilities = FUSE_CAP_SPLICE_WRITE;
  return options;
}

absl::StatusOr<std::unique_ptr<BlobFs>> BlobFsImpl::Start(const std::string& mountpoint) {
  auto self = std::make_unique<BlobFsImpl>();
  ASSIGN_OR_RETURN(self->session_,
                   FuseSession::Start(SessionOptions(mountpoint), Operations(), self.get()));
  return self;
}

absl::StatusOr<std::unique_ptr<BlobFs>> BlobFsImpl::TakeOver(const std::string& mountpoint,
                                                             FuseHandover handover,
                                                             std::vector<Directory> directories,
                                                             std::vector<Directory> removed) {
  auto self = std::make_unique<BlobFsImpl>();
  for (std::vector<Directory>* list : {&directories, &removed}) {
    for (Directory& directory : *list) {
      const uint64_t id = directory.id;
      ASSIGN_OR_RETURN(Files files, MakeFiles(std::move(directory)));
      files.removed = list == &removed;
      RETURN_IF_ERROR(self->AddFiles(id, std::move(files)));
    }
  }
  ASSIGN_OR_RETURN(self->session_,
                   FuseSession::TakeOver(SessionOptions(mountpoint), std::move(handover),
                                         Operations(), self.get()));
  return self;
}

absl::Status BlobFsImpl::Add(Directory directory) {
  const uint64_t id = directory.id;
  ASSIGN_OR_RETURN(Files files, MakeFiles(std::move(directory)));
  std::lock_guard lock(mutex_);
  return AddFiles(id, std::move(files));
}

absl::Status BlobFsImpl::AddFiles(uint64_t id, Files files) {
  if (directories_.contains(id)) {
    return absl::AlreadyExistsError(fmt::format("image {}: its blobs are served already", id));
  }
  for (const File& file : files.files) {
    const Digest key = file.blob->descriptor().Key();
    const auto other = shared_.find(SharedInode(key));
    if (other != shared_.end() && other->second.key != key) {
      return absl::AlreadyExistsError(
          fmt::format("image {}: blob {} has the inode number of blob {}", id,
                      file.blob->descriptor().digest.ToString(),
                      other->second.file.blob->descriptor().digest.ToString()));
    }
  }
  for (const File& file : files.files) {
    const Digest key = file.blob->descriptor().Key();
    ++shared_.try_emplace(SharedInode(key), SharedFile{key, file}).first->second.directories;
  }
  directories_.emplace(id, std::move(files));
  return absl::OkStatus();
}

Files BlobFsImpl::TakeFiles(std::map<uint64_t, Files>::iterator directory) {
  Files files = std::move(directory->second);
  directories_.erase(directory);
  for (const File& file : files.files) {
    const auto shared = shared_.find(SharedInode(file.blob->descriptor().Key()));
    if (--shared->second.directories == 0) shared_.erase(shared);
  }
  return files;
}

void BlobFsImpl::Remove(uint64_t id) {
  {
    std::lock_guard lock(mutex_);
    const auto directory = directories_.find(id);
    if (directory == directories_.end()) return;
    directory->second.removed = true;
  }
  // Without the lock: the kernel may wait for a lookup of ours before it lets go of the name.
  session_->ForgetEntry(FUSE_ROOT_ID, fmt::format("{}", id));
}

bool BlobFsImpl::InUse(uint64_t id) {
  size_t slots = 0;
  std::vector<Digest> last;  // shared files that no other directory has
  {
    std::shared_lock lock(mutex_);
    const auto directory = directories_.find(id);
    if (directory == directories_.end()) return false;
    if (!directory->second.removed) return true;
    slots = directory->second.files.size();
    std::map<Digest, uint64_t> counts;  // an image may have a layer twice
    for (const File& file : directory->second.files) ++counts[file.blob->descriptor().Key()];
    for (const auto& [key, count] : counts) {
      if (shared_.at(SharedInode(key)).directories == count) last.push_back(key);
    }
  }
  if (KernelHas(id, slots) || KernelHasShared(last)) return true;
  Files unused;  // let go of outside the lock
  std::lock_guard lock(mutex_);
  const auto directory = directories_.find(id);
  if (directory == directories_.end()) return false;
  unused = TakeFiles(directory);
  return false;
}

// Names that nobody uses are forgotten on the way, and with them their inodes: those left are open.
bool BlobFsImpl::KernelHas(uint64_t id, size_t slots) {
  const fuse_ino_t directory = id << kSlotBits;
  for (size_t slot = 1; slot <= slots; ++slot) {
    session_->ForgetEntry(directory, fmt::format("{}", slot));
    if (session_->KernelHas(directory + slot)) return true;
  }
  return session_->KernelHas(directory);
}

bool BlobFsImpl::KernelHasShared(const std::vector<Digest>& keys) {
  for (const Digest& key : keys) {
    session_->ForgetEntry(kSharedDirectory, key.Hex());
    if (session_->KernelHas(SharedInode(key))) return true;
  }
  return false;
}

const Files* BlobFsImpl::FindDirectory(fuse_ino_t inode) const {
  const auto directory = directories_.find(inode >> kSlotBits);
  return directory == directories_.end() ? nullptr : &directory->second;
}

const File* BlobFsImpl::FindFile(fuse_ino_t inode) const {
  if ((inode & kSharedBit) != 0) {
    const auto shared = shared_.find(inode);
    return shared == shared_.end() ? nullptr : &shared->second.file;
  }
  const Files* directory = FindDirectory(inode);
  const uint64_t slot = inode & kMaxSlot;
  if (directory == nullptr || slot == 0 || slot > directory->files.size()) return nullptr;
  return &directory->files[slot - 1];
}

std::optional<fuse_ino_t> BlobFsImpl::FindName(fuse_ino_t parent, std::string_view name) const {
  if (parent == FUSE_ROOT_ID && name == kSharedName) return kSharedDirectory;
  if (parent == kSharedDirectory) {
    for (const auto& [inode, shared] : shared_) {
      if (shared.key.Hex() == name) return inode;
    }
    return std::nullopt;
  }
  const auto number = ParseNumber(name);
  if (!number) return std::nullopt;
  if (parent == FUSE_ROOT_ID) {
    const auto directory = directories_.find(*number);
    if (directory == directories_.end() || directory->second.removed) return std::nullopt;
    return *number << kSlotBits;
  }
  if (*number > kMaxSlot || (parent & kMaxSlot) != 0) return std::nullopt;
  if (FindFile(parent + *number) == nullptr) return std::nullopt;
  return parent + *number;
}

std::optional<struct stat> BlobFsImpl::Attributes(fuse_ino_t inode) const {
  struct stat info {};
  info.st_ino = inode;
  if (const File* file = FindFile(inode)) {
    info.st_mode = S_IFREG | 0400;
    info.st_nlink = 1;
    info.st_size = static_cast<off_t>(file->size);
    info.st_blocks = static_cast<blkcnt_t>(file->size / 512);
    return info;
  }
  const bool is_directory = inode == FUSE_ROOT_ID || inode == kSharedDirectory ||
                            ((inode & kMaxSlot) == 0 && FindDirectory(inode) != nullptr);
  if (!is_directory) return std::nullopt;
  info.st_mode = S_IFDIR | 0500;
  info.st_nlink = 2;
  return info;
}

void BlobFsImpl::Lookup(fuse_req_t request, fuse_ino_t parent, std::string_view name) {
  fuse_entry_param entry{};
  {
    std::shared_lock lock(mutex_);
    const auto inode = FindName(parent, name);
    if (inode) {
      entry.ino = *inode;
      entry.attr = *Attributes(*inode);
    }
  }
  if (entry.ino == 0) {  // not cached by the kernel: it may be added any time
    ::fuse_reply_err(request, ENOENT);
    return;
  }
  entry.attr_timeout = kBlobTimeout;
  entry.entry_timeout = kBlobTimeout;
  ::fuse_reply_entry(request, &entry);
}

void BlobFsImpl::GetAttributes(fuse_req_t request, fuse_ino_t inode) {
  std::optional<struct stat> info;
  {
    std::shared_lock lock(mutex_);
    info = Attributes(inode);
  }
  if (info) {
    ::fuse_reply_attr(request, &*info, kBlobTimeout);
  } else {
    ::fuse_reply_err(request, ENOENT);
  }
}

void BlobFsImpl::Open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  bool found = false;
  {
    std::shared_lock lock(mutex_);
    found = FindFile(inode) != nullptr;
  }
  if (!found) {
    ::fuse_reply_err(request, ENOENT);
    return;
  }
  if ((inode & kSharedBit) != 0) {
    info->keep_cache = 1;  // content never changes: others' pages stay
  } else {
    info->direct_io = 1;
  }
  info->noflush = 1;
  ::fuse_reply_open(request, info);
}

void BlobFsImpl::Read(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset) {
  ContentPiece piece;
  std::shared_ptr<ReadStats> stats;
  {
    std::shared_lock lock(mutex_);
    const File* file = FindFile(inode);
    if (file == nullptr) {
      ::fuse_reply_err(request, EIO);
      return;
    }
    const uint64_t start = std::min(static_cast<uint64_t>(offset), file->size);
    piece = {file->blob, start, std::min<uint64_t>(size, file->size - start)};
    stats = file->stats;
  }
  ReplyWithContent(request, std::span(&piece, 1), stats);
  if ((inode & kSharedBit) == 0) return;
  // The pages of a shared file are kept for all who map it, so those of the data file, with the same
  // bytes, are of no more use. What was only just fetched is not written back yet, and stays. Large folios
  // go only as a whole, so with the last of their bytes.
  const uint64_t begin = piece.offset / kMaxFolio * kMaxFolio;
  ::posix_fadvise(piece.blob->data_fd(), static_cast<off_t>(begin),
                  static_cast<off_t>(piece.offset + piece.length - begin), POSIX_FADV_DONTNEED);
}

std::vector<std::pair<std::string, fuse_ino_t>> BlobFsImpl::List(fuse_ino_t inode) const {
  std::vector<std::pair<std::string, fuse_ino_t>> names{{".", inode}, {"..", FUSE_ROOT_ID}};
  if (inode == FUSE_ROOT_ID) {
    names.emplace_back(kSharedName, kSharedDirectory);
    for (const auto& [id, files] : directories_) {
      if (!files.removed) names.emplace_back(fmt::format("{}", id), id << kSlotBits);
    }
  } else if (inode == kSharedDirectory) {
    for (const auto& [number, shared] : shared_) names.emplace_back(shared.key.Hex(), number);
  } else if (const Files* directory = FindDirectory(inode)) {
    for (uint64_t slot = 1; slot <= directory->files.size(); ++slot) {
      names.emplace_back(fmt::format("{}", slot), inode + slot);
    }
  }
  return names;
}

void BlobFsImpl::ReadDirectory(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset) {
  std::vector<std::pair<std::string, fuse_ino_t>> names;
  {
    std::shared_lock lock(mutex_);
    names = List(inode);
  }
  std::vector<char> buffer(size);
  size_t used = 0;
  for (size_t i = static_cast<size_t>(offset); i < names.size(); ++i) {
    const auto& [name, number] = names[i];
    struct stat info {};
    info.st_ino = number;
    const bool is_directory = i < 2 || inode == FUSE_ROOT_ID;
    info.st_mode = is_directory ? S_IFDIR : S_IFREG;
    const size_t needed = ::fuse_add_direntry(request, buffer.data() + used, size - used,
                                              name.c_str(), &info, static_cast<off_t>(i + 1));
    if (needed > size - used) break;
    used += needed;
  }
  ::fuse_reply_buf(request, buffer.data(), used);
}

fuse_lowlevel_ops BlobFsImpl::Operations() {
  fuse_lowlevel_ops operations{};
  operations.lookup = [](fuse_req_t request, fuse_ino_t parent, const char* name) {
    Of(request).Lookup(request, parent, name);
  };
  operations.getattr = [](fuse_req_t request, fuse_ino_t inode, fuse_file_info*) {
    Of(request).GetAttributes(request, inode);
  };
  operations.open = [](fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
    Of(request).Open(request, inode, info);
  };
  operations.readdir = [](fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset,
                          fuse_file_info*) {
    Of(request).ReadDirectory(request, inode, size, offset);
  };
  operations.read = [](fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset,
                       fuse_file_info*) { Of(request).Read(request, inode, size, offset); };
  return operations;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlobFs>> BlobFs::Start(const std::string& mountpoint) {
  return BlobFsImpl::Start(mountpoint);
}

std::string BlobFs::SharedPath(const std::string& mountpoint,
                               const chunkstore::LayerDescriptor& layer) {
  return fmt::format("{}/{}/{}", mountpoint, kSharedName, layer.Key().Hex());
}

absl::StatusOr<std::unique_ptr<BlobFs>> BlobFs::TakeOver(const std::string& mountpoint,
                                                         FuseHandover handover,
                                                         std::vector<Directory> directories,
                                                         std::vector<Directory> removed) {
  return BlobFsImpl::TakeOver(mountpoint, std::move(handover), std::move(directories),
                              std::move(removed));
}

}  // namespace lamina::fs
