// SPDX-License-Identifier: Apache-2.0
#include "fs/image/layout_writer.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "chunkstore/base/json.h"
#include "fs/image/layout.h"

namespace lamina::fs {
namespace {

constexpr std::string_view kLockFile = "lock";
constexpr int kAttempts = 10;

std::string WithoutTrailingSlashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool Exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

absl::Status MakeDirectory(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0) return ErrnoStatus(errno, "create directory " + path);
  return absl::OkStatus();
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    return ErrnoStatus(errno, fmt::format("rename {} to {}", from, to));
  }
  return absl::OkStatus();
}

// Makes the names in a directory durable. File systems that cannot sync directories say EINVAL.
absl::Status SyncDirectory(const std::string& path) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY | O_DIRECTORY));
  if (::fsync(fd.get()) != 0 && errno != EINVAL) return ErrnoStatus(errno, "sync " + path);
  return absl::OkStatus();
}

absl::Status WriteNewFile(const std::string& path, std::string_view content) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_WRONLY | O_CREAT | O_EXCL));
  RETURN_IF_ERROR(WriteFull(fd.get(), 0, AsBytes(content)), "{}", path);
  if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, "sync " + path);
  return absl::OkStatus();
}

// True if `path` still names the file that is open as `fd`.
bool IsSameFile(const std::string& path, const UniqueFd& fd) {
  struct stat by_path {};
  struct stat by_fd {};
  return ::stat(path.c_str(), &by_path) == 0 && ::fstat(fd.get(), &by_fd) == 0 &&
         by_path.st_dev == by_fd.st_dev && by_path.st_ino == by_fd.st_ino;
}

absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) {
  std::error_code error;
  std::vector<std::string> names;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) return ErrnoStatus(error.value(), "list directory " + path);
  return names;
}

// Removes a staging directory that has no lock file. It comes first and anything else after it, so
// its owner died just after the making of the directory, or while removing it. (The lock cannot be on
// the directory: NFS gives exclusive locks only to what is open for writing.)
void RemoveUnlockedStaging(const std::string& path) {
  if (::rmdir(path.c_str()) == 0) return;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(path);
  if (!names.ok() || names->empty() || Exists(fmt::format("{}/{}", path, kLockFile))) return;
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

// Removes the staging directories in `parent` whose owners are gone. What cannot be removed stays
// for the next time.
void RemoveStaleStaging(const std::string& parent) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (!name.starts_with(kStagingPrefix)) continue;
    const std::string path = fmt::format("{}/{}", parent, name);
    const absl::StatusOr<UniqueFd> lock =
        OpenFile(fmt::format("{}/{}", path, kLockFile), O_RDWR | O_NOFOLLOW);
    if (absl::IsNotFound(lock.status())) {
      RemoveUnlockedStaging(path);
    } else if (!lock.ok()) {
      continue;
    } else if (TryLock(lock->get()).value_or(false)) {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  }
}

// Fails unless `directory` holds a layout, or nothing but staging directories.
absl::Status CheckDestination(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  bool empty = true;
  for (const std::string& name : names) {
    if (name == kLayoutFile) return absl::OkStatus();
    if (!name.starts_with(kStagingPrefix)) empty = false;
  }
  if (empty) return absl::OkStatus();
  return absl::FailedPreconditionError(fmt::format(
      "{} is not empty and not an OCI layout (it has no file '{}')", directory, kLayoutFile));
}

// What a commit has made so far, undone unless it is kept.
class Undo {
 public:
  ~Undo() {
    for (auto path = made_.rbegin(); path != made_.rend(); ++path) ::remove(path->c_str());
  }
  void Made(std::string path) { made_.push_back(std::move(path)); }
  void Keep() { made_.clear(); }

 private:
  std::vector<std::string> made_;
};

absl::Status MakeDirectoryIfMissing(const std::string& path, Undo& undo) {
  if (Exists(path)) return absl::OkStatus();
  RETURN_IF_ERROR(MakeDirectory(path));
  undo.Made(path);
  return absl::OkStatus();
}

// Opens the oci-layout file, made if it is missing, with an exclusive lock. One lock serialises all
// writers: the file is never replaced, and only its maker removes it, under the lock.
absl::StatusOr<UniqueFd> LockLayout(const std::string& directory, Undo& undo) {
  const std::string path = fmt::format("{}/{}", directory, kLayoutFile);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const bool missing = !Exists(path);
    ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDWR | (missing ? O_CREAT : 0)));
    while (::flock(fd.get(), LOCK_EX) != 0) {
      if (errno != EINTR) return ErrnoStatus(errno, "lock " + path);
    }
    if (!IsSameFile(path, fd)) continue;
    ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get()), "{}", path);
    if (size == 0) {
      undo.Made(path);
      RETURN_IF_ERROR(WriteFull(fd.get(), 0, AsBytes(kLayoutFileContent)), "{}", path);
      if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, "sync " + path);
      return fd;
    }
    ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, oci::kMaxDocumentSize));
    RETURN_IF_ERROR(CheckLayoutFile(text), "{}", path);
    return fd;
  }
  return absl::UnavailableError(fmt::format("{}: other writers keep removing it", path));
}

absl::StatusOr<std::string> ReadIndexOrEmpty(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFileToString(path, oci::kMaxDocumentSize);
  if (absl::IsNotFound(text.status())) return oci::Index().ToJson();
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LayoutWriter>> LayoutWriter::Create(std::string directory,
                                                                   std::string tag) {
  directory = WithoutTrailingSlashes(std::move(directory));
  const bool exists = Exists(directory);
  if (exists) RETURN_IF_ERROR(CheckDestination(directory));
  // A directory that exists may be a mount point: stage inside it, to be on the same file system.
  const std::string parent = exists ? directory : ParentOf(directory);
  RemoveStaleStaging(parent);
  ASSIGN_OR_RETURN(Staging staging, CreateStaging(parent));
  // Not make_unique: the constructor is private.
  std::unique_ptr<LayoutWriter> writer(
      new LayoutWriter(std::move(directory), std::move(tag), std::move(staging), exists));
  RETURN_IF_ERROR(MakeDirectory(writer->layout_));
  RETURN_IF_ERROR(MakeDirectory(writer->layout_ + "/blobs"));
  RETURN_IF_ERROR(MakeDirectory(fmt::format("{}/{}", writer->layout_, kBlobsDirectory)));
  return writer;
}

LayoutWriter::LayoutWriter(std::string directory, std::string tag, Staging staging, bool exists)
    : directory_(std::move(directory)),
      tag_(std::move(tag)),
      exists_(exists),
      staging_(std::move(staging)),
      layout_(staging_.directory.path() + "/layout") {}

absl::StatusOr<LayoutWriter::Staging> LayoutWriter::CreateStaging(const std::string& parent) {
  // Between the making of the directory and the lock, another writer may take it for stale.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    ASSIGN_OR_RETURN(TemporaryDirectory directory,
                     TemporaryDirectory::Create(parent, kStagingPrefix));
    const std::string path = fmt::format("{}/{}", directory.path(), kLockFile);
    absl::StatusOr<UniqueFd> lock = OpenFile(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (absl::IsNotFound(lock.status())) continue;
    RETURN_IF_ERROR(lock.status());
    ASSIGN_OR_RETURN(const bool locked, TryLock(lock->get()), "lock {}", path);
    if (!locked) continue;
    if (IsSameFile(path, *lock)) return Staging{*std::move(lock), std::move(directory)};
  }
  return absl::UnavailableError(
      fmt::format("{}: other writers keep removing the staging directory", parent));
}

// A blob in a staged file.
class LayoutWriter::Blob : public chunkstore::BlobOutput {
 public:
  Blob(LayoutWriter& writer, StagedFile file) : writer_(writer), file_(std::move(file)) {}

  absl::Status Append(std::span<const std::byte> bytes) override {
    RETURN_IF_ERROR(WriteFull(file_.fd.get(), size_, bytes), "blob");
    size_ += bytes.size();
    // The disk works while more is made, so that little is left to wait for in Finish. Only a hint.
    if (size_ - written_back_ >= kWriteBack) {
      ::sync_file_range(file_.fd.get(), static_cast<off_t>(written_back_),
                        static_cast<off_t>(size_ - written_back_), SYNC_FILE_RANGE_WRITE);
      written_back_ = size_;
    }
    return absl::OkStatus();
  }
  absl::Status Finish(const Digest& digest) override {
    if (::fsync(file_.fd.get()) != 0) return ErrnoStatus(errno, "sync blob");
    return writer_.AddBlob(file_.path, digest);
  }

 private:
  static constexpr uint64_t kWriteBack = 8 << 20;

  LayoutWriter& writer_;
  const StagedFile file_;
  uint64_t size_ = 0;
  uint64_t written_back_ = 0;  // up to here write-back has begun
};

absl::StatusOr<std::unique_ptr<chunkstore::BlobOutput>> LayoutWriter::NewBlob() {
  ASSIGN_OR_RETURN(StagedFile file, CreateFile());
  return std::make_unique<Blob>(*this, std::move(file));
}

absl::StatusOr<Transfer> LayoutWriter::AddFrom(const ImageStore& store,
                                               const oci::Descriptor& blob) {
  struct stat info {};
  const std::string there = fmt::format("{}/{}/{}", directory_, kBlobsDirectory, blob.digest.Hex());
  const auto is_whole = [&](const std::string& path) {
    return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
           static_cast<uint64_t>(info.st_size) == blob.size;
  };
  if (blobs_.contains(blob.digest)) return Transfer::kThere;
  if (is_whole(there)) {
    found_.emplace(blob.digest, blob.size);
    return Transfer::kThere;
  }
  const std::string file = store.FileOf(blob.digest);
  if (!file.empty() && is_whole(file)) {
    const std::string path = fmt::format("{}/{}", staging_.directory.path(), files_++);
    // Not possible for another file system, or one without links, or with too many of them.
    if (::linkat(AT_FDCWD, file.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      RETURN_IF_ERROR(AddBlob(path, blob.digest));
      return Transfer::kLinked;
    }
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<chunkstore::BlobOutput> output, NewBlob());
  RETURN_IF_ERROR(CopyBlob(store, blob, *output));
  return Transfer::kCopied;
}

absl::Status LayoutWriter::CommitImage(const oci::Descriptor& descriptor,
                                       std::string_view content) {
  RETURN_IF_ERROR(AddDocument(content));
  oci::Descriptor entry = descriptor;
  if (!tag_.empty()) entry.annotations[std::string(oci::kRefNameKey)] = tag_;
  return Commit(entry);
}

absl::StatusOr<LayoutWriter::StagedFile> LayoutWriter::CreateFile() {
  std::string path = fmt::format("{}/{}", staging_.directory.path(), files_++);
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDWR | O_CREAT | O_EXCL));
  return StagedFile{std::move(fd), std::move(path)};
}

absl::Status LayoutWriter::AddBlob(const std::string& path, const Digest& digest) {
  RETURN_IF_ERROR(Rename(path, fmt::format("{}/{}/{}", layout_, kBlobsDirectory, digest.Hex())));
  blobs_.insert(digest);
  return absl::OkStatus();
}

absl::Status LayoutWriter::AddDocument(std::string_view content) {
  const std::string path = fmt::format("{}/{}", staging_.directory.path(), files_++);
  RETURN_IF_ERROR(WriteNewFile(path, content));
  return AddBlob(path, Digest::Of(AsBytes(content)));
}

absl::Status LayoutWriter::Attach(const oci::Descriptor& descriptor, const Digest& subject,
                                  std::string_view content) {
  if (descriptor.artifact_type == oci::kLaminaImageType) {
    return absl::UnimplementedError("images in a layout cannot be attached to others");
  }
  std::set<Digest> superseded;
  if (exists_) {
    ASSIGN_OR_RETURN(const Layout layout, Layout::OpenDirectory(directory_));
    ASSIGN_OR_RETURN(const std::vector<oci::Descriptor> old,
                     layout.FindReferrers(subject, descriptor.artifact_type));
    for (const oci::Descriptor& entry : old) superseded.insert(entry.digest);
  }
  RETURN_IF_ERROR(AddDocument(content));
  return Commit(descriptor, superseded);
}

absl::Status LayoutWriter::Commit(const oci::Descriptor& manifest,
                                  const std::set<Digest>& superseded) {
  const absl::Status status =
      exists_ ? CommitInto(manifest, superseded) : CommitNew(manifest, superseded);
  return Annotate(status, "write OCI layout " + directory_);
}

absl::Status LayoutWriter::CommitNew(const oci::Descriptor& manifest,
                                     const std::set<Digest>& superseded) {
  ASSIGN_OR_RETURN(const std::string index, oci::ReplaceInIndex(oci::Index().ToJson(), manifest));
  const std::string marker_path = fmt::format("{}/{}", layout_, kLayoutFile);
  const std::string index_path = fmt::format("{}/{}", layout_, kIndexFile);
  RETURN_IF_ERROR(WriteNewFile(marker_path, kLayoutFileContent));
  RETURN_IF_ERROR(WriteNewFile(index_path, index));
  RETURN_IF_ERROR(SyncDirectory(fmt::format("{}/{}", layout_, kBlobsDirectory)));
  RETURN_IF_ERROR(SyncDirectory(layout_));
  // rename(2) replaces an empty directory but nothing else: no other writer's work is lost.
  if (::rename(layout_.c_str(), directory_.c_str()) == 0)
    return SyncDirectory(ParentOf(directory_));
  if (errno != ENOTEMPTY && errno != EEXIST) return ErrnoStatus(errno, "rename into place");
  RETURN_IF_ERROR(CheckDestination(directory_));
  ::unlink(index_path.c_str());
  return CommitInto(manifest, superseded);
}

absl::Status LayoutWriter::CommitInto(const oci::Descriptor& manifest,
                                      const std::set<Digest>& superseded) {
  UniqueFd lock;
  Undo undo;  // runs with the lock still held
  ASSIGN_OR_RETURN(lock, LockLayout(directory_, undo));
  // Whoever put it there may have failed, and taken it away.
  for (const auto& [digest, size] : found_) {
    const std::string path = fmt::format("{}/{}/{}", directory_, kBlobsDirectory, digest.Hex());
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0 || static_cast<uint64_t>(info.st_size) != size) {
      return absl::AbortedError(
          fmt::format("blob {} was removed meanwhile: try again", digest.ToString()));
    }
  }
  const std::string index_path = fmt::format("{}/{}", directory_, kIndexFile);
  const std::string new_index_path = fmt::format("{}/{}", layout_, kIndexFile);
  ASSIGN_OR_RETURN(const std::string old_index, ReadIndexOrEmpty(index_path));
  ASSIGN_OR_RETURN(const std::string index, oci::ReplaceInIndex(old_index, manifest, superseded),
                   "{}", index_path);
  RETURN_IF_ERROR(WriteNewFile(new_index_path, index));

  const std::string blobs = fmt::format("{}/{}", directory_, kBlobsDirectory);
  RETURN_IF_ERROR(MakeDirectoryIfMissing(directory_ + "/blobs", undo));
  RETURN_IF_ERROR(MakeDirectoryIfMissing(blobs, undo));
  for (const Digest& digest : blobs_) {
    const std::string path = fmt::format("{}/{}", blobs, digest.Hex());
    // A blob that is there already is replaced by the same bytes; a damaged one is thereby mended.
    const bool is_new = !Exists(path);
    RETURN_IF_ERROR(Rename(fmt::format("{}/{}/{}", layout_, kBlobsDirectory, digest.Hex()), path));
    if (is_new) undo.Made(path);
  }
  RETURN_IF_ERROR(SyncDirectory(blobs));
  RETURN_IF_ERROR(Rename(new_index_path, index_path));
  undo.Keep();
  return SyncDirectory(directory_);
}

}  // namespace lamina::fs
