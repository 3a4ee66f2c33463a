// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <memory>
#include <vector>

#include "backends/agent/frame.h"
#include "backends/agent/messages.h"
#include "chunkstore/base/file.h"

namespace lamina::agent {
namespace {

constexpr int kMaxDepth = 512;
constexpr uint32_t kModeBits = 01777;

enum class EntryType : uint8_t { kFile = 1, kDirectory = 2, kLink = 3 };

struct Entry {
  std::string path;  // below the root; empty: the root
  EntryType type = EntryType::kFile;
  uint32_t mode = 0;
  int64_t seconds = 0;  // modification time
  uint32_t nanoseconds = 0;
  std::string target;  // of a link
};

std::string Encode(const Entry& entry) {
  FieldWriter writer;
  writer.Text(entry.path).Number(static_cast<uint64_t>(entry.type)).Number(entry.mode);
  writer.Number(static_cast<uint64_t>(entry.seconds)).Number(entry.nanoseconds).Text(entry.target);
  return writer.Take();
}

absl::StatusOr<Entry> DecodeEntry(std::string_view bytes) {
  FieldReader reader(bytes);
  Entry entry;
  entry.path = reader.Text();
  const uint64_t type = reader.Number();
  const uint64_t mode = reader.Number();
  entry.seconds = static_cast<int64_t>(reader.Number());
  const uint64_t nanoseconds = reader.Number();
  entry.target = reader.Text();
  RETURN_IF_ERROR(reader.Finish("entry of a tree"));
  RETURN_IF_ERROR(CheckRelativePath(entry.path));
  if (type < 1 || type > 3 || nanoseconds > 999'999'999) {
    return absl::InvalidArgumentError(fmt::format("entry '{}' cannot be read", entry.path));
  }
  entry.type = static_cast<EntryType>(type);
  entry.mode = static_cast<uint32_t>(mode & kModeBits);
  entry.nanoseconds = static_cast<uint32_t>(nanoseconds);
  const bool is_link = entry.type == EntryType::kLink;
  if (is_link == entry.target.empty() || entry.target.size() >= PATH_MAX ||
      entry.target.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(fmt::format("entry '{}' has a bad target", entry.path));
  }
  return entry;
}

// Sending.

struct Sender {
  int socket = -1;
  TreeCount count;

  absl::Status Send(int parent, const char* name, const std::string& path, int depth);
  absl::Status SendContent(int fd);
  absl::Status SendChildren(UniqueFd directory, const std::string& path, int depth);
};

absl::Status Sender::SendContent(int fd) {
  std::string piece(kPiece, '\0');
  while (true) {
    const ssize_t got = ::read(fd, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "read");
    if (got == 0) return absl::OkStatus();
    count.bytes += static_cast<uint64_t>(got);
    RETURN_IF_ERROR(WriteFrame(socket, FrameType::kData,
                               std::string_view(piece).substr(0, static_cast<size_t>(got))));
  }
}

absl::Status Sender::SendChildren(UniqueFd directory, const std::string& path, int depth) {
  if (depth >= kMaxDepth) {
    return absl::ResourceExhaustedError(fmt::format("'{}' is deeper than {}", path, kMaxDepth));
  }
  const int fd = directory.get();
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::fdopendir(fd), ::closedir);
  if (entries == nullptr) return ErrnoStatus(errno, "read directory");
  directory.Release();
  while (true) {
    errno = 0;
    const dirent* child = ::readdir(entries.get());
    if (child == nullptr) return errno == 0 ? absl::OkStatus() : ErrnoStatus(errno, "readdir");
    const std::string_view name = child->d_name;
    if (name == "." || name == "..") continue;
    RETURN_IF_ERROR(Send(fd, child->d_name,
                         path.empty() ? std::string(name) : fmt::format("{}/{}", path, name),
                         depth + 1));
  }
}

absl::Status Sender::Send(int parent, const char* name, const std::string& path, int depth) {
  // Looked at before it is opened: opening a device or FIFO may do something.
  struct stat info {};
  if (::fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT && depth > 0) return absl::OkStatus();
    return ErrnoStatus(errno, fmt::format("stat '{}'", path.empty() ? name : path));
  }
  Entry entry{.path = path,
              .mode = info.st_mode & kModeBits,
              .seconds = info.st_mtim.tv_sec,
              .nanoseconds = static_cast<uint32_t>(info.st_mtim.tv_nsec)};
  if (S_ISLNK(info.st_mode)) {
    std::array<char, PATH_MAX> target{};
    const ssize_t size = ::readlinkat(parent, name, target.data(), target.size());
    if (size < 0) return ErrnoStatus(errno, fmt::format("read link '{}'", path));
    entry.type = EntryType::kLink;
    entry.target.assign(target.data(), static_cast<size_t>(size));
    ++count.entries;
    return WriteFrame(socket, FrameType::kEntry, Encode(entry));
  }
  if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) {
    if (depth == 0) {
      return absl::FailedPreconditionError("neither a file, nor a directory or symbolic link");
    }
    ++count.skipped;
    return absl::OkStatus();
  }
  const bool is_directory = S_ISDIR(info.st_mode);
  UniqueFd fd(::openat(parent, name,
                       O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY |
                           (is_directory ? O_DIRECTORY : 0)));
  if (!fd.valid()) {
    if (errno == ENOENT && depth > 0) return absl::OkStatus();
    return ErrnoStatus(errno, fmt::format("open '{}'", path.empty() ? name : path));
  }
  // It may be another one by now.
  if (::fstat(fd.get(), &info) != 0 || S_ISDIR(info.st_mode) != is_directory ||
      (!is_directory && !S_ISREG(info.st_mode))) {
    ++count.skipped;
    return absl::OkStatus();
  }
  entry.type = is_directory ? EntryType::kDirectory : EntryType::kFile;
  ++count.entries;
  RETURN_IF_ERROR(WriteFrame(socket, FrameType::kEntry, Encode(entry)));
  if (is_directory) return SendChildren(std::move(fd), path, depth);
  RETURN_IF_ERROR(SendContent(fd.get()), "'{}'", path.empty() ? name : path);
  return absl::OkStatus();
}

// Receiving.

// Directory and last name of a path.
std::pair<std::string, std::string> Split(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return {"", path};
  return {path.substr(0, slash), path.substr(slash + 1)};
}

class Receiver {
 public:
  Receiver(const std::string& path, const ReceiveOptions& options)
      : root_path_(path), options_(options) {}

  absl::Status Start();
  absl::Status Begin(const Entry& entry);
  absl::Status Append(std::string_view content);
  absl::Status Finish();
  const TreeCount& count() const { return count_; }

 private:
  absl::StatusOr<int> Parent(const std::string& directory);
  absl::Status MakeDirectory(int parent, const std::string& name, const Entry& entry);
  absl::Status MakeFile(int parent, const std::string& name, const Entry& entry);
  absl::Status MakeLink(int parent, const std::string& name, const Entry& entry);
  absl::Status EndFile();
  absl::Status LeaveDirectories(std::string_view path);
  absl::Status EndDirectory(const Entry& entry);
  absl::Status Give(int fd, const Entry& entry) const;

  const std::string root_path_;
  const ReceiveOptions& options_;
  UniqueFd base_;  // the directory that the root is made in
  std::string root_name_;
  UniqueFd root_;  // the root, if it is a directory
  bool started_ = false;
  std::string parent_path_;  // what parent_ is
  UniqueFd parent_;
  UniqueFd file_;
  Entry file_entry_;
  // Those that the last entry is in, outermost first. A directory gets its attributes when an entry
  // comes that is not in it: senders go through one after the other, and what is kept does not grow
  // with what they send.
  std::vector<Entry> directories_;
  TreeCount count_;
};

absl::Status Receiver::Start() {
  std::string path = root_path_;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const auto [directory, name] = Split(path);
  if (name.empty() || name == "." || name == "..") {
    return absl::InvalidArgumentError(fmt::format("'{}' has no last name", root_path_));
  }
  root_name_ = name;
  const std::string base = directory.empty() ? (path.starts_with('/') ? "/" : ".") : directory;
  ASSIGN_OR_RETURN(base_, OpenFile(base, O_PATH | O_DIRECTORY));
  return absl::OkStatus();
}

absl::StatusOr<int> Receiver::Parent(const std::string& directory) {
  if (!root_.valid()) return absl::InvalidArgumentError("an entry below what is no directory");
  if (directory.empty()) return root_.get();
  if (parent_.valid() && parent_path_ == directory) return parent_.get();
  open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
                  .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS};
  UniqueFd opened(
      static_cast<int>(::syscall(SYS_openat2, root_.get(), directory.c_str(), &how, sizeof(how))));
  if (!opened.valid()) return ErrnoStatus(errno, fmt::format("open '{}'", directory));
  parent_ = std::move(opened);
  parent_path_ = directory;
  return parent_.get();
}

absl::Status Receiver::Begin(const Entry& entry) {
  RETURN_IF_ERROR(EndFile());
  RETURN_IF_ERROR(LeaveDirectories(entry.path));
  if (++count_.entries > options_.max_entries) {
    return absl::ResourceExhaustedError(fmt::format("more than {} files", options_.max_entries));
  }
  if (entry.path.empty() == started_) {
    return absl::InvalidArgumentError(started_ ? "a second root" : "an entry before the root");
  }
  started_ = true;
  int parent = base_.get();
  std::string name = root_name_;
  if (!entry.path.empty()) {
    const auto [directory, last] = Split(entry.path);
    ASSIGN_OR_RETURN(parent, Parent(directory));
    name = last;
  }
  switch (entry.type) {
    case EntryType::kDirectory:
      return MakeDirectory(parent, name, entry);
    case EntryType::kFile:
      return MakeFile(parent, name, entry);
    case EntryType::kLink:
      return MakeLink(parent, name, entry);
  }
  return absl::InternalError("no such type");
}

absl::Status Receiver::MakeDirectory(int parent, const std::string& name, const Entry& entry) {
  if (::mkdirat(parent, name.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, fmt::format("make directory '{}'", name));
  }
  UniqueFd fd(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, fmt::format("open directory '{}'", name));
  if (entry.path.empty()) root_ = std::move(fd);
  directories_.push_back(entry);
  return absl::OkStatus();
}

absl::Status Receiver::MakeFile(int parent, const std::string& name, const Entry& entry) {
  if (::unlinkat(parent, name.c_str(), 0) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, fmt::format("replace '{}'", name));
  }
  file_.Reset(
      ::openat(parent, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file_.valid()) return ErrnoStatus(errno, fmt::format("make '{}'", name));
  file_entry_ = entry;
  return absl::OkStatus();
}

absl::Status Receiver::MakeLink(int parent, const std::string& name, const Entry& entry) {
  if (::unlinkat(parent, name.c_str(), 0) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, fmt::format("replace '{}'", name));
  }
  if (::symlinkat(entry.target.c_str(), parent, name.c_str()) != 0) {
    return ErrnoStatus(errno, fmt::format("make link '{}'", name));
  }
  if (options_.owner.has_value() && ::fchownat(parent, name.c_str(), options_.owner->uid,
                                               options_.owner->gid, AT_SYMLINK_NOFOLLOW) != 0) {
    return ErrnoStatus(errno, fmt::format("give '{}' away", name));
  }
  return absl::OkStatus();
}

absl::Status Receiver::Append(std::string_view content) {
  if (!file_.valid()) return absl::InvalidArgumentError("content of no file");
  count_.bytes += content.size();
  if (count_.bytes > options_.max_bytes) {
    return absl::ResourceExhaustedError(fmt::format("more than {} bytes", options_.max_bytes));
  }
  while (!content.empty()) {
    const ssize_t written = ::write(file_.get(), content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus(errno, fmt::format("write '{}'", file_entry_.path));
    content.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status Receiver::Give(int fd, const Entry& entry) const {
  if (options_.owner.has_value() && ::fchown(fd, options_.owner->uid, options_.owner->gid) != 0) {
    return ErrnoStatus(errno, fmt::format("give '{}' away", entry.path));
  }
  if (::fchmod(fd, entry.mode) != 0) {
    return ErrnoStatus(errno, fmt::format("set permissions of '{}'", entry.path));
  }
  const std::array<timespec, 2> times{timespec{.tv_nsec = UTIME_OMIT},
                                      timespec{entry.seconds, entry.nanoseconds}};
  if (::futimens(fd, times.data()) != 0) {
    return ErrnoStatus(errno, fmt::format("set times of '{}'", entry.path));
  }
  return absl::OkStatus();
}

absl::Status Receiver::EndFile() {
  if (!file_.valid()) return absl::OkStatus();
  const UniqueFd file = std::move(file_);
  return Give(file.get(), file_entry_);
}

absl::Status Receiver::EndDirectory(const Entry& entry) {
  if (entry.path.empty()) return Give(root_.get(), entry);
  const auto [directory, name] = Split(entry.path);
  ASSIGN_OR_RETURN(const int parent, Parent(directory));
  const UniqueFd fd(
      ::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, fmt::format("open directory '{}'", entry.path));
  return Give(fd.get(), entry);
}

// All that `path` is not in.
absl::Status Receiver::LeaveDirectories(std::string_view path) {
  const auto is_in = [path](const std::string& directory) {
    return directory.empty() || (path.starts_with(directory) && path.size() > directory.size() &&
                                 path[directory.size()] == '/');
  };
  while (!directories_.empty() && !is_in(directories_.back().path)) {
    RETURN_IF_ERROR(EndDirectory(directories_.back()));
    directories_.pop_back();
  }
  return absl::OkStatus();
}

absl::Status Receiver::Finish() {
  RETURN_IF_ERROR(EndFile());
  if (!started_) return absl::InvalidArgumentError("nothing came");
  for (auto entry = directories_.rbegin(); entry != directories_.rend(); ++entry) {
    RETURN_IF_ERROR(EndDirectory(*entry));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRelativePath(std::string_view path) {
  if (path.empty()) return absl::OkStatus();
  const auto refuse = [path] {
    return absl::InvalidArgumentError(fmt::format("path '{}' is not allowed", path));
  };
  if (path.size() >= PATH_MAX || path.find('\0') != std::string_view::npos) return refuse();
  while (true) {
    const size_t slash = path.find('/');
    const std::string_view part = path.substr(0, slash);
    if (part.empty() || part == "." || part == ".." || part.size() > NAME_MAX) return refuse();
    if (slash == std::string_view::npos) return absl::OkStatus();
    path.remove_prefix(slash + 1);
  }
}

absl::StatusOr<TreeCount> SendTree(int socket, const std::string& path) {
  Sender sender{.socket = socket};
  RETURN_IF_ERROR(sender.Send(AT_FDCWD, path.c_str(), "", 0));
  RETURN_IF_ERROR(WriteFrame(socket, FrameType::kTreeEnd, ""));
  return sender.count;
}

absl::Status SendFile(int socket, std::string_view content, uint32_t mode) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  RETURN_IF_ERROR(WriteFrame(socket, FrameType::kEntry,
                             Encode(Entry{.mode = mode,
                                          .seconds = now.tv_sec,
                                          .nanoseconds = static_cast<uint32_t>(now.tv_nsec)})));
  while (!content.empty()) {
    const std::string_view piece = content.substr(0, kPiece);
    RETURN_IF_ERROR(WriteFrame(socket, FrameType::kData, piece));
    content.remove_prefix(piece.size());
  }
  return WriteFrame(socket, FrameType::kTreeEnd, "");
}

absl::StatusOr<TreeCount> ReceiveTree(int socket, const std::string& path,
                                      const ReceiveOptions& options) {
  Receiver receiver(path, options);
  RETURN_IF_ERROR(receiver.Start());
  while (true) {
    ASSIGN_OR_RETURN(const Frame frame, ReadFrame(socket));
    switch (frame.type) {
      case FrameType::kEntry: {
        ASSIGN_OR_RETURN(const Entry entry, DecodeEntry(frame.content));
        RETURN_IF_ERROR(receiver.Begin(entry));
        break;
      }
      case FrameType::kData:
        RETURN_IF_ERROR(receiver.Append(frame.content));
        break;
      case FrameType::kTreeEnd:
        RETURN_IF_ERROR(receiver.Finish());
        return receiver.count();
      case FrameType::kError:
        return DecodeError(frame.content);
      default:
        return absl::InvalidArgumentError(
            fmt::format("frame {} in a tree", static_cast<int>(frame.type)));
    }
  }
}

absl::StatusOr<std::string> ReceiveFile(int socket, uint64_t max_bytes) {
  std::string content;
  bool started = false;
  while (true) {
    ASSIGN_OR_RETURN(const Frame frame, ReadFrame(socket));
    switch (frame.type) {
      case FrameType::kEntry: {
        ASSIGN_OR_RETURN(const Entry entry, DecodeEntry(frame.content));
        if (started || !entry.path.empty() || entry.type != EntryType::kFile) {
          return absl::FailedPreconditionError("not a regular file");
        }
        started = true;
        break;
      }
      case FrameType::kData:
        if (!started || frame.content.size() > max_bytes - content.size()) {
          return absl::ResourceExhaustedError(fmt::format("more than {} bytes", max_bytes));
        }
        content += frame.content;
        break;
      case FrameType::kTreeEnd:
        if (!started) return absl::InvalidArgumentError("nothing came");
        return content;
      case FrameType::kError:
        return DecodeError(frame.content);
      default:
        return absl::InvalidArgumentError(
            fmt::format("frame {} in a tree", static_cast<int>(frame.type)));
    }
  }
}

}  // namespace lamina::agent
