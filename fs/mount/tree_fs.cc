// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/tree_fs.h"

#include <dirent.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <optional>
#include <utility>

#include "erofs/reader.h"
#include "fs/mount/blob_reply.h"
#include "fs/mount/fuse_session.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::ReadStats;
using erofs::InodeInfo;
using erofs::Nid;

// An image never changes: as good as for ever.
constexpr double kTreeTimeout = 365.0 * 24 * 60 * 60;

// Every request is answered from the image alone: this side keeps no open files, no directory
// streams and no counted inodes.
class TreeFsImpl final : public TreeFs {
 public:
  // Takes over if there is a handover.
  static absl::StatusOr<std::unique_ptr<TreeFs>> Start(Options options,
                                                       std::optional<FuseHandover> handover);
  explicit TreeFsImpl(erofs::Reader reader) : reader_(std::move(reader)) {}
  bool ended() const override { return session_->ended(); }
  int device() const override { return session_->device(); }
  bool has_new_device() const override { return session_->has_new_device(); }
  std::string state() const override { return session_->state(); }
  void LeaveMounted() override { session_->LeaveMounted(); }

 private:
  // A data device of the image.
  struct Device {
    std::shared_ptr<Blob> blob;
    uint64_t size = 0;  // of its data file
  };

  static fuse_lowlevel_ops Operations();
  static const TreeFsImpl& Of(fuse_req_t request) {
    return *static_cast<TreeFsImpl*>(FuseSession::Of(request).owner());
  }
  absl::Status SetDevices(std::vector<std::shared_ptr<Blob>> blobs);

  void Lookup(fuse_req_t request, fuse_ino_t parent, std::string_view name) const;
  void GetAttributes(fuse_req_t request, fuse_ino_t number) const;
  void ReadLink(fuse_req_t request, fuse_ino_t number) const;
  void ReadDirectory(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                     bool with_attributes) const;
  void Read(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset) const;
  void Seek(fuse_req_t request, fuse_ino_t number, off_t offset, int whence) const;
  void GetXattr(fuse_req_t request, fuse_ino_t number, std::string_view name, size_t size) const;
  void ListXattrs(fuse_req_t request, fuse_ino_t number, size_t size) const;
  void StatFs(fuse_req_t request) const;

  Nid NidOf(fuse_ino_t number) const;
  fuse_ino_t NumberOf(Nid nid) const;
  absl::StatusOr<InodeInfo> Inode(fuse_ino_t number) const;
  struct stat Attributes(const InodeInfo& inode) const;
  absl::StatusOr<fuse_entry_param> Entry(Nid nid) const;
  absl::StatusOr<ContentPiece> Piece(const InodeInfo& file, uint64_t offset, uint64_t length) const;

  const erofs::Reader reader_;
  std::vector<Device> devices_;  // slot 1 is devices_[0]
  std::shared_ptr<ReadStats> stats_;
  std::unique_ptr<FuseSession> session_;  // last: ends before what it serves
};

void ReplyError(fuse_req_t request, const absl::Status& status) {
  // What is wrong with an image is EIO; only answers to legitimate questions have their own number.
  const bool expected = absl::IsNotFound(status) || absl::IsUnimplemented(status);
  if (!absl::IsNotFound(status)) {
    spdlog::warn("image request failed: {}", std::string(status.message()));
  }
  ::fuse_reply_err(request, expected ? StatusToErrno(status) : EIO);
}

// Answers getxattr(2) and listxattr(2): size 0 asks for the length.
void ReplyXattr(fuse_req_t request, std::string_view value, size_t size) {
  if (size == 0) {
    ::fuse_reply_xattr(request, value.size());
  } else if (value.size() > size) {
    ::fuse_reply_err(request, ERANGE);
  } else {
    ::fuse_reply_buf(request, value.data(), value.size());
  }
}

absl::StatusOr<std::unique_ptr<TreeFs>> TreeFsImpl::Start(Options options,
                                                          std::optional<FuseHandover> handover) {
  ASSIGN_OR_RETURN(erofs::Reader reader, erofs::Reader::Open(options.metadata), "mount {}",
                   options.source);
  auto self = std::make_unique<TreeFsImpl>(std::move(reader));
  RETURN_IF_ERROR(self->SetDevices(std::move(options.blobs)), "mount {}", options.source);
  self->stats_ =
      options.stats != nullptr ? std::move(options.stats) : std::make_shared<ReadStats>();
  FuseSession::Options session;
  session.mount.mountpoint = std::move(options.mountpoint);
  session.mount.source = std::move(options.source);
  session.mount.subtype = "lamina";
  session.mount.allow_other = MayAllowOther();
  session.mount.privileged_files = ::geteuid() == 0;
  // With POSIX ACLs the kernel asks for them and decides by them, as it does for EROFS.
  session.capabilities = FUSE_CAP_SPLICE_WRITE | FUSE_CAP_POSIX_ACL | FUSE_CAP_CACHE_SYMLINKS |
                         FUSE_CAP_NO_OPEN_SUPPORT | FUSE_CAP_NO_OPENDIR_SUPPORT;
  if (handover.has_value()) {
    ASSIGN_OR_RETURN(self->session_, FuseSession::TakeOver(session, *std::move(handover),
                                                           Operations(), self.get()));
  } else {
    ASSIGN_OR_RETURN(self->session_, FuseSession::Start(session, Operations(), self.get()));
  }
  return self;
}

absl::Status TreeFsImpl::SetDevices(std::vector<std::shared_ptr<Blob>> blobs) {
  const size_t wanted = reader_.devices().size();
  if (blobs.size() != wanted) {
    return absl::InvalidArgumentError(
        fmt::format("the image has {} devices, {} blobs were given", wanted, blobs.size()));
  }
  for (std::shared_ptr<Blob>& blob : blobs) {
    ASSIGN_OR_RETURN(const uint64_t size, FileSize(blob->data_fd()));
    devices_.push_back({std::move(blob), size});
  }
  return absl::OkStatus();
}

// FUSE wants 1 for the root and does not allow 0. st_ino is the nid, as in the kernel's EROFS.
Nid TreeFsImpl::NidOf(fuse_ino_t number) const {
  return number == FUSE_ROOT_ID ? reader_.root() : number - 2;
}

fuse_ino_t TreeFsImpl::NumberOf(Nid nid) const {
  return nid == reader_.root() ? FUSE_ROOT_ID : nid + 2;
}

absl::StatusOr<InodeInfo> TreeFsImpl::Inode(fuse_ino_t number) const {
  return reader_.ReadInode(NidOf(number));
}

struct stat TreeFsImpl::Attributes(const InodeInfo& inode) const {
  const uint64_t block_size = reader_.block_size();
  struct stat info {};
  info.st_ino = inode.nid;
  info.st_mode = inode.mode;
  info.st_nlink = inode.links;
  info.st_uid = inode.uid;
  info.st_gid = inode.gid;
  info.st_rdev = inode.rdev;
  info.st_size = static_cast<off_t>(inode.size);
  info.st_blksize = static_cast<blksize_t>(block_size);
  const uint64_t blocks = inode.size / block_size + (inode.size % block_size != 0);
  info.st_blocks = static_cast<blkcnt_t>(blocks * (block_size / 512));
  info.st_mtim.tv_sec = inode.mtime.seconds;
  info.st_mtim.tv_nsec = inode.mtime.nanoseconds;
  info.st_atim = info.st_mtim;
  info.st_ctim = info.st_mtim;
  return info;
}

absl::StatusOr<fuse_entry_param> TreeFsImpl::Entry(Nid nid) const {
  ASSIGN_OR_RETURN(const InodeInfo inode, reader_.ReadInode(nid));
  fuse_entry_param entry{};
  entry.ino = NumberOf(nid);
  entry.attr = Attributes(inode);
  entry.attr_timeout = kTreeTimeout;
  entry.entry_timeout = kTreeTimeout;
  return entry;
}

void TreeFsImpl::Lookup(fuse_req_t request, fuse_ino_t parent, std::string_view name) const {
  if (name.size() > erofs::kMaxNameLength) {
    ::fuse_reply_err(request, ENAMETOOLONG);
    return;
  }
  const auto directory = Inode(parent);
  if (!directory.ok()) return ReplyError(request, directory.status());
  const auto nid = reader_.Lookup(*directory, name);
  if (absl::IsNotFound(nid.status())) {
    fuse_entry_param absent{};  // inode 0: the kernel remembers that there is no such name
    absent.entry_timeout = kTreeTimeout;
    ::fuse_reply_entry(request, &absent);
    return;
  }
  if (!nid.ok()) return ReplyError(request, nid.status());
  const auto entry = Entry(*nid);
  if (!entry.ok()) return ReplyError(request, entry.status());
  ::fuse_reply_entry(request, &*entry);
}

void TreeFsImpl::GetAttributes(fuse_req_t request, fuse_ino_t number) const {
  const auto inode = Inode(number);
  if (!inode.ok()) return ReplyError(request, inode.status());
  const struct stat info = Attributes(*inode);
  ::fuse_reply_attr(request, &info, kTreeTimeout);
}

void TreeFsImpl::ReadLink(fuse_req_t request, fuse_ino_t number) const {
  const auto inode = Inode(number);
  if (!inode.ok()) return ReplyError(request, inode.status());
  const auto target = reader_.ReadLink(*inode);
  if (!target.ok()) return ReplyError(request, target.status());
  ::fuse_reply_readlink(request, target->c_str());
}

void TreeFsImpl::ReadDirectory(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                               bool with_attributes) const {
  const auto directory = Inode(number);
  if (!directory.ok()) return ReplyError(request, directory.status());
  std::vector<char> buffer(size);
  size_t used = 0;
  absl::Status entry_status;
  const auto add = [&](const erofs::Reader::Entry& found) {
    const std::string name(found.name);
    const auto next = static_cast<off_t>(found.next);
    size_t needed = 0;
    // An inode number would count as a lookup, which "." and ".." are not.
    if (!with_attributes || name == "." || name == "..") {
      fuse_entry_param entry{};
      entry.attr.st_ino = found.nid;
      entry.attr.st_mode = DTTOIF(found.type);
      needed = with_attributes ? ::fuse_add_direntry_plus(request, buffer.data() + used,
                                                          size - used, name.c_str(), &entry, next)
                               : ::fuse_add_direntry(request, buffer.data() + used, size - used,
                                                     name.c_str(), &entry.attr, next);
    } else {
      const auto entry = Entry(found.nid);
      if (!entry.ok()) {
        entry_status = entry.status();
        return false;
      }
      needed = ::fuse_add_direntry_plus(request, buffer.data() + used, size - used, name.c_str(),
                                        &*entry, next);
    }
    if (needed > size - used) return false;
    used += needed;
    return true;
  };
  absl::Status status = reader_.ReadDirectory(*directory, static_cast<uint64_t>(offset), add);
  if (status.ok()) status = entry_status;
  // What was read before the damage is given out first; the next call will meet it again.
  if (!status.ok() && used == 0) return ReplyError(request, status);
  ::fuse_reply_buf(request, buffer.data(), used);
}

// The content at `offset`, at most `length` bytes of it.
absl::StatusOr<ContentPiece> TreeFsImpl::Piece(const InodeInfo& file, uint64_t offset,
                                               uint64_t length) const {
  ASSIGN_OR_RETURN(const erofs::Mapped mapped, reader_.Map(file, offset));
  ContentPiece piece;
  piece.length = std::min(length, mapped.length);
  if (mapped.kind == erofs::Mapped::Kind::kHole) return piece;
  if (mapped.device == 0) {
    ASSIGN_OR_RETURN(const auto bytes, reader_.ImageBytes(mapped.offset, piece.length));
    piece.memory = bytes.data();
    return piece;
  }
  if (mapped.device > devices_.size()) {
    return absl::DataLossError(fmt::format("inode {}: content on device {} of {}", file.nid,
                                           mapped.device, devices_.size()));
  }
  const Device& device = devices_[mapped.device - 1];
  if (mapped.offset > device.size || piece.length > device.size - mapped.offset) {
    return absl::DataLossError(
        fmt::format("inode {}: content at {} of device {}, which has {} bytes", file.nid,
                    mapped.offset, mapped.device, device.size));
  }
  piece.blob = device.blob;
  piece.offset = mapped.offset;
  return piece;
}

void TreeFsImpl::Read(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset) const {
  const auto inode = Inode(number);
  if (!inode.ok()) return ReplyError(request, inode.status());
  uint64_t position = static_cast<uint64_t>(offset);
  const uint64_t end =
      position + std::min<uint64_t>(size, inode->size - std::min(position, inode->size));
  std::vector<ContentPiece> pieces;
  while (position < end) {
    auto piece = Piece(*inode, position, end - position);
    if (!piece.ok()) return ReplyError(request, piece.status());
    position += piece->length;
    pieces.push_back(*std::move(piece));
  }
  ReplyWithContent(request, pieces, stats_);
}

void TreeFsImpl::Seek(fuse_req_t request, fuse_ino_t number, off_t offset, int whence) const {
  const auto inode = Inode(number);
  if (!inode.ok()) return ReplyError(request, inode.status());
  uint64_t position = static_cast<uint64_t>(offset);
  if (position >= inode->size) {
    ::fuse_reply_err(request, ENXIO);
    return;
  }
  const auto wanted =
      whence == SEEK_HOLE ? erofs::Mapped::Kind::kHole : erofs::Mapped::Kind::kDevice;
  while (position < inode->size) {
    const auto mapped = reader_.Map(*inode, position);
    if (!mapped.ok()) return ReplyError(request, mapped.status());
    if (mapped->kind == wanted) break;
    position += mapped->length;
  }
  if (position >= inode->size && whence == SEEK_DATA) {
    ::fuse_reply_err(request, ENXIO);
    return;
  }
  ::fuse_reply_lseek(request, static_cast<off_t>(std::min(position, inode->size)));
}

void TreeFsImpl::GetXattr(fuse_req_t request, fuse_ino_t number, std::string_view name,
                          size_t size) const {
  const auto inode = Inode(number);
  if (!inode.ok()) return ReplyError(request, inode.status());
  const auto value = reader_.GetXattr(*inode, name);
  if (!value.ok()) return ReplyError(request, value.status());
  if (!value->has_value()) {
    ::fuse_reply_err(request, ENODATA);
    return;
  }
  ReplyXattr(request, **value, size);
}

void TreeFsImpl::ListXattrs(fuse_req_t request, fuse_ino_t number, size_t size) const {
  const auto inode = Inode(number);
  if (!inode.ok()) return ReplyError(request, inode.status());
  const auto xattrs = reader_.ReadXattrs(*inode);
  if (!xattrs.ok()) return ReplyError(request, xattrs.status());
  // trusted.* is for privileged users only (xattr(7)). The kernel sees to it for values, but lists
  // of a FUSE file system it passes on as they are.
  const bool privileged = ::fuse_req_ctx(request)->uid == 0;
  std::string names;
  for (const erofs::Xattr& xattr : *xattrs) {
    if (!privileged && xattr.name.starts_with("trusted.")) continue;
    names += xattr.name;
    names += '\0';
  }
  ReplyXattr(request, names, size);
}

// As the kernel's EROFS has it: full, and no end of inodes.
void TreeFsImpl::StatFs(fuse_req_t request) const {
  struct statvfs info {};
  info.f_bsize = reader_.block_size();
  info.f_frsize = reader_.block_size();
  info.f_blocks = reader_.blocks();
  for (const erofs::Device& device : reader_.devices()) info.f_blocks += device.blocks;
  info.f_files = std::numeric_limits<uint64_t>::max();
  info.f_ffree = info.f_files - reader_.inode_count();
  info.f_namemax = erofs::kMaxNameLength;
  ::fuse_reply_statfs(request, &info);
}

fuse_lowlevel_ops TreeFsImpl::Operations() {
  fuse_lowlevel_ops operations{};
  operations.lookup = [](fuse_req_t request, fuse_ino_t parent, const char* name) {
    Of(request).Lookup(request, parent, name);
  };
  operations.getattr = [](fuse_req_t request, fuse_ino_t number, fuse_file_info*) {
    Of(request).GetAttributes(request, number);
  };
  operations.readlink = [](fuse_req_t request, fuse_ino_t number) {
    Of(request).ReadLink(request, number);
  };
  // ENOSYS means "succeeds, keep the cache, do not ask again" to kernels that support it: opening
  // and closing then stay in the kernel.
  operations.open = [](fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
    if (FuseSession::Of(request).has(FUSE_CAP_NO_OPEN_SUPPORT)) {
      ::fuse_reply_err(request, ENOSYS);
      return;
    }
    info->keep_cache = 1;
    ::fuse_reply_open(request, info);
  };
  operations.opendir = [](fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
    if (FuseSession::Of(request).has(FUSE_CAP_NO_OPENDIR_SUPPORT)) {
      ::fuse_reply_err(request, ENOSYS);
      return;
    }
    info->keep_cache = 1;
    info->cache_readdir = 1;
    ::fuse_reply_open(request, info);
  };
  operations.readdir = [](fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                          fuse_file_info*) {
    Of(request).ReadDirectory(request, number, size, offset, /*with_attributes=*/false);
  };
  operations.readdirplus = [](fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                              fuse_file_info*) {
    Of(request).ReadDirectory(request, number, size, offset, /*with_attributes=*/true);
  };
  operations.read = [](fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                       fuse_file_info*) { Of(request).Read(request, number, size, offset); };
  operations.lseek = [](fuse_req_t request, fuse_ino_t number, off_t offset, int whence,
                        fuse_file_info*) { Of(request).Seek(request, number, offset, whence); };
  operations.getxattr = [](fuse_req_t request, fuse_ino_t number, const char* name, size_t size) {
    Of(request).GetXattr(request, number, name, size);
  };
  operations.listxattr = [](fuse_req_t request, fuse_ino_t number, size_t size) {
    Of(request).ListXattrs(request, number, size);
  };
  operations.statfs = [](fuse_req_t request, fuse_ino_t) { Of(request).StatFs(request); };
  return operations;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TreeFs>> TreeFs::Start(Options options) {
  return TreeFsImpl::Start(std::move(options), std::nullopt);
}

absl::StatusOr<std::unique_ptr<TreeFs>> TreeFs::TakeOver(Options options, FuseHandover handover) {
  return TreeFsImpl::Start(std::move(options), std::move(handover));
}

}  // namespace lamina::fs
