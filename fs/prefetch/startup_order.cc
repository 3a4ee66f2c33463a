// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/startup_order.h"

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "chunkstore/base/file.h"
#include "fs/prefetch/image_paths.h"
#include "fs/prefetch/program_file.h"

namespace lamina::fs {
namespace {

using chunkstore::Blob;
using chunkstore::Touch;

constexpr uint64_t kMaxContent = 64 << 20;
constexpr size_t kMaxFiles = 256;
// Files that are arguments of the program (scripts, configuration), each up to this size.
constexpr uint64_t kMaxArgumentFile = 1 << 20;
constexpr uint64_t kMaxNeighbours = 4 << 20;
// An image may name as many directories and libraries as it likes.
constexpr size_t kMaxSearchPath = 64;
constexpr int kMaxLookups = 10'000;
constexpr std::string_view kDefaultPath =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// The first `limit` parts that are not empty.
std::vector<std::string> Split(std::string_view text, char separator, size_t limit) {
  std::vector<std::string> parts;
  while (!text.empty() && parts.size() < limit) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

class Walker {
 public:
  Walker(const erofs::Reader& image, const std::vector<std::shared_ptr<Blob>>& blobs,
         const oci::ImageConfig& config, std::shared_ptr<chunkstore::ReadStats> stats,
         std::stop_token stop)
      : image_(image),
        blobs_(blobs),
        config_(config),
        stats_(std::move(stats)),
        stop_(std::move(stop)) {
    search_path_ = Split(kDefaultPath, ':', kMaxSearchPath);
    for (const std::string& variable : config.environment) {
      if (!variable.starts_with("PATH=")) continue;
      search_path_ = Split(std::string_view(variable).substr(5), ':', kMaxSearchPath);
    }
  }

  StartupFrames Walk() {
    std::vector<std::string> arguments = config_.entrypoint;
    arguments.insert(arguments.end(), config_.command.begin(), config_.command.end());
    if (arguments.empty()) return {};
    std::vector<std::string> directories;  // of arguments
    AddProgram(arguments[0]);
    Follow();
    for (size_t i = 1; i < arguments.size(); ++i) {
      if (!arguments[i].starts_with('/')) continue;
      const absl::StatusOr<FoundFile> file = Find(arguments[i]);
      if (!file.ok() || file->inode.size > kMaxArgumentFile) continue;
      Add(*file);
      if (file->inode.is_regular())
        directories.push_back(file->path.substr(0, file->path.rfind('/')));
    }
    Follow();
    StartupFrames frames{.opened = std::exchange(touches_, {})};
    limit_ = content_ + std::min(content_, kMaxNeighbours);
    for (const std::string& directory : directories) AddFilesOf(directory);
    AddBeside(frames.opened);
    frames.neighbours = std::move(touches_);
    return frames;
  }

 private:
  absl::StatusOr<FoundFile> Find(const std::string& path) {
    if (stop_.stop_requested()) return absl::CancelledError("stopped");
    if (++lookups_ > kMaxLookups) return absl::ResourceExhaustedError("too many files looked for");
    return FindFile(image_, path);
  }

  // A program by its name, as execvp(3) finds it.
  void AddProgram(const std::string& name) {
    if (name.find('/') != std::string::npos) {
      const bool absolute = name.starts_with('/');
      AddPath(absolute ? name : config_.working_directory + "/" + name);
      return;
    }
    for (const std::string& directory : search_path_) {
      if (AddPath(directory + "/" + name)) return;
    }
  }

  bool AddPath(const std::string& path) {
    const absl::StatusOr<FoundFile> file = Find(path);
    if (!file.ok() || !file->inode.is_regular()) return false;
    Add(*file);
    return true;
  }

  void Add(const FoundFile& file) {
    if (!file.inode.is_regular() || files_.size() >= kMaxFiles) return;
    if (!files_.insert(file.inode.nid).second) return;
    AddFrames(file.inode);
    queue_.push_back(file);
  }

  // Small files of a directory, which a program that was given one of them may read as well.
  void AddFilesOf(const std::string& directory) {
    const absl::StatusOr<FoundFile> found = Find(directory);
    if (!found.ok() || !found->inode.is_directory()) return;
    const auto add = [this](const erofs::Reader::Entry& entry) {
      const absl::StatusOr<erofs::InodeInfo> file = image_.ReadInode(entry.nid);
      if (file.ok() && file->is_regular() && file->size <= kMaxArgumentFile) AddFrames(*file);
      return content_ < limit_ && !stop_.stop_requested();
    };
    image_.ReadDirectory(found->inode, 0, add).IgnoreError();
  }

  // Layers have files of one directory one behind the other.
  void AddBeside(const std::vector<Touch>& touches) {
    for (const Touch& touch : touches) {
      for (const uint32_t frame : {touch.frame + 1, touch.frame - 1}) {  // no frame before 0
        if (content_ < limit_ && frame < blobs_[touch.blob]->frames().size()) {
          AddFrame(touch.blob, frame);
        }
      }
    }
  }

  void AddFrame(uint32_t index, uint32_t frame) {
    if (!seen_.emplace(index, frame).second) return;
    touches_.push_back({.blob = index, .frame = frame});
    content_ += uint64_t{blobs_[index]->frames()[frame].blocks} * chunkstore::kBlockSize;
  }

  void AddFrames(const erofs::InodeInfo& file) {
    for (uint64_t offset = 0; offset < file.size && content_ < limit_ && !stop_.stop_requested();) {
      const absl::StatusOr<erofs::Mapped> mapped = image_.Map(file, offset);
      if (!mapped.ok()) return;
      if (mapped->kind == erofs::Mapped::Kind::kDevice) AddRange(*mapped);
      offset += mapped->length;
    }
  }

  void AddRange(const erofs::Mapped& mapped) {
    if (mapped.device == 0 || mapped.device > blobs_.size()) return;
    const uint32_t index = mapped.device - 1U;
    const Blob& blob = *blobs_[index];
    if (mapped.offset >= blob.size()) return;
    const uint64_t end = mapped.offset + std::min(mapped.length, blob.size() - mapped.offset);
    const chunkstore::FrameTable& frames = blob.frames();
    const uint32_t last = frames.Find(static_cast<uint32_t>((end - 1) / chunkstore::kBlockSize));
    uint32_t frame = frames.Find(static_cast<uint32_t>(mapped.offset / chunkstore::kBlockSize));
    for (; frame <= last && content_ < limit_; ++frame) AddFrame(index, frame);
  }

  // What the files in the queue need, and what that needs in turn.
  void Follow() {
    while (!queue_.empty() && !stop_.stop_requested()) {
      const FoundFile file = std::move(queue_.front());
      queue_.pop_front();
      const absl::StatusOr<ProgramNeeds> needs =
          ReadProgramNeeds(file.inode.size, [&](uint64_t offset, std::span<std::byte> into) {
            return Read(file.inode, offset, into);
          });
      if (!needs.ok()) continue;
      if (!needs->interpreter.empty()) AddPath(needs->interpreter);
      // "#!/usr/bin/env NAME"
      if (needs->interpreter.ends_with("/env")) {
        for (const std::string& argument : needs->arguments) AddProgram(argument);
      }
      const std::vector<std::string> directories = LibraryDirectories(*needs, file.path);
      for (const std::string& library : needs->libraries) AddLibrary(library, directories);
    }
  }

  // Where ld.so(8) looks, but for its cache, which says the same of usual images.
  static std::vector<std::string> LibraryDirectories(const ProgramNeeds& needs,
                                                     const std::string& path) {
    std::vector<std::string> directories;
    const std::string origin = path.substr(0, path.rfind('/'));
    for (std::string directory : needs.search_paths) {
      for (const std::string_view name : {"${ORIGIN}", "$ORIGIN"}) {
        if (const size_t found = directory.find(name); found != std::string::npos) {
          directory.replace(found, name.size(), origin);
        }
      }
      directories.push_back(std::move(directory));
    }
    for (const char* parent : {"/lib", "/usr/lib", "/usr/local/lib"}) {
      if (!needs.machine_directory.empty()) {
        directories.push_back(fmt::format("{}/{}", parent, needs.machine_directory));
      }
      directories.push_back(fmt::format("{}64", parent));
      directories.emplace_back(parent);
    }
    return directories;
  }

  // Like the linker, once for each name that is found.
  void AddLibrary(const std::string& name, const std::vector<std::string>& directories) {
    if (libraries_.contains(name)) return;
    if (name.find('/') != std::string::npos) {
      AddPath(name);
      return;
    }
    for (const std::string& directory : directories) {
      if (!AddPath(directory + "/" + name)) continue;
      libraries_.insert(name);
      return;
    }
  }

  // Content of a file; fetched if it is not there.
  absl::Status Read(const erofs::InodeInfo& file, uint64_t offset, std::span<std::byte> into) {
    while (!into.empty()) {
      if (offset >= file.size) return absl::OutOfRangeError("read past the end of a file");
      ASSIGN_OR_RETURN(const erofs::Mapped mapped, image_.Map(file, offset));
      const auto part = into.first(std::min<uint64_t>(into.size(), mapped.length));
      if (mapped.kind == erofs::Mapped::Kind::kHole) {
        std::ranges::fill(part, std::byte{0});
      } else if (mapped.device == 0 || mapped.device > blobs_.size()) {
        return absl::DataLossError("content on a device that is not there");
      } else {
        const std::shared_ptr<Blob>& blob = blobs_[mapped.device - 1U];
        RETURN_IF_ERROR(Fetch(blob, mapped.offset, part.size()));
        RETURN_IF_ERROR(ReadFull(blob->data_fd(), mapped.offset, part));
      }
      offset += part.size();
      into = into.subspan(part.size());
    }
    return absl::OkStatus();
  }

  absl::Status Fetch(const std::shared_ptr<Blob>& blob, uint64_t offset, uint64_t length) {
    struct Result {
      std::mutex mutex;
      std::condition_variable_any changed;
      std::optional<absl::Status> status;
    };
    const auto result = std::make_shared<Result>();  // the call may come after a stop
    blob->Fetch(offset, length, chunkstore::Priority::kPrefetch, stats_,
                [result](absl::Status status) {
                  std::lock_guard lock(result->mutex);
                  result->status = std::move(status);
                  result->changed.notify_all();
                });
    std::unique_lock lock(result->mutex);
    result->changed.wait(lock, stop_, [&] { return result->status.has_value(); });
    return result->status.value_or(absl::CancelledError("stopped"));
  }

  const erofs::Reader& image_;
  const std::vector<std::shared_ptr<Blob>>& blobs_;
  const oci::ImageConfig& config_;
  const std::shared_ptr<chunkstore::ReadStats> stats_;
  const std::stop_token stop_;
  std::vector<std::string> search_path_;
  absl::flat_hash_set<erofs::Nid> files_;
  absl::flat_hash_set<std::string> libraries_;
  int lookups_ = 0;
  absl::flat_hash_set<std::pair<uint32_t, uint32_t>> seen_;
  std::deque<FoundFile> queue_;  // to be looked into
  std::vector<Touch> touches_;
  uint64_t content_ = 0;
  uint64_t limit_ = kMaxContent;  // of that
};

}  // namespace

StartupFrames StartupOrder(const erofs::Reader& image,
                           const std::vector<std::shared_ptr<Blob>>& blobs,
                           const oci::ImageConfig& config,
                           const std::shared_ptr<chunkstore::ReadStats>& stats,
                           const std::stop_token& stop) {
  return Walker(image, blobs, config, stats, stop).Walk();
}

}  // namespace lamina::fs
