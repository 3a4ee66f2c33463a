// SPDX-License-Identifier: Apache-2.0
#include "bench/read_operations.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "bench/page_cache.h"
#include "bench/tree_walk.h"
#include "chunkstore/base/file.h"

namespace lamina::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
constexpr size_t kReadSize = 128 * 1024;  // what cp(1) and cat(1) read at a time
constexpr uint64_t kLargeFile = 1 << 20;  // those from here on are read sequentially
constexpr uint64_t kSeed = 1;             // both sides get the same random offsets

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// One pass over the work; returns how much was done, in the operation's unit.
using Pass = std::function<absl::StatusOr<double>()>;

// Runs whole passes until `seconds` have gone.
absl::StatusOr<Sample> Repeat(const Pass& pass, double seconds) {
  const Clock::time_point start = Clock::now();
  double done = 0;
  do {
    ASSIGN_OR_RETURN(const double amount, pass());
    done += amount;
  } while (SecondsSince(start) < seconds);
  return Sample{{"rate", done / SecondsSince(start)}};
}

// Returns a measurement of `pass` after one pass that is not measured.
absl::StatusOr<Measurement> Warm(Pass pass, const ReadOptions& options) {
  RETURN_IF_ERROR(pass().status());
  return Measurement(
      [pass = std::move(pass), seconds = options.seconds] { return Repeat(pass, seconds); });
}

// Bytes read.
absl::StatusOr<uint64_t> ReadToEnd(const std::string& path, std::vector<char>& buffer) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY));
  uint64_t total = 0;
  for (;;) {
    const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
    if (got < 0) return ErrnoStatus(errno, "read " + path);
    if (got == 0) return total;
    total += static_cast<uint64_t>(got);
  }
}

absl::StatusOr<std::vector<std::string>> LargeFiles(const std::string& root) {
  ASSIGN_OR_RETURN(const TreeList tree, WalkTree(root));
  std::vector<std::string> paths;
  for (const TreeFile& file : tree.files) {
    if (file.size >= kLargeFile) paths.push_back(file.path);
  }
  if (paths.empty()) return absl::NotFoundError(root + ": no file of 1 MiB or more");
  return paths;
}

// Megabytes of all large files, each from its first byte to its last.
absl::StatusOr<Pass> SequentialPass(const std::string& root) {
  ASSIGN_OR_RETURN(auto paths, LargeFiles(root));
  return Pass([paths = std::move(paths)]() -> absl::StatusOr<double> {
    std::vector<char> buffer(kReadSize);
    uint64_t total = 0;
    for (const std::string& path : paths) {
      ASSIGN_OR_RETURN(const uint64_t size, ReadToEnd(path, buffer));
      total += size;
    }
    return static_cast<double>(total) / 1e6;
  });
}

absl::StatusOr<Measurement> PrepareSequential(const std::string& root, const ReadOptions& options) {
  ASSIGN_OR_RETURN(Pass pass, SequentialPass(root));
  return Warm(std::move(pass), options);
}

absl::StatusOr<Measurement> PrepareColdSequential(const std::string& root, const ReadOptions&) {
  ASSIGN_OR_RETURN(Pass pass, SequentialPass(root));
  return Measurement([pass = std::move(pass)] { return Repeat(pass, /*seconds=*/0); });
}

// The largest file, for random reads in it.
struct LargestFile {
  std::string path;
  UniqueFd fd;
  uint64_t pages = 0;
};

absl::StatusOr<std::shared_ptr<LargestFile>> OpenLargestFile(const std::string& root) {
  ASSIGN_OR_RETURN(const TreeList tree, WalkTree(root));
  const auto largest =
      std::max_element(tree.files.begin(), tree.files.end(),
                       [](const TreeFile& a, const TreeFile& b) { return a.size < b.size; });
  if (largest == tree.files.end()) return absl::NotFoundError(root + ": no file");
  auto file = std::make_shared<LargestFile>();
  file->path = largest->path;
  file->pages = largest->size / kPage;
  ASSIGN_OR_RETURN(file->fd, OpenFile(file->path, O_RDONLY));
  std::vector<char> buffer(kReadSize);
  RETURN_IF_ERROR(ReadToEnd(file->path, buffer).status());
  return file;
}

// The first `count` of all pages in random order, each once.
std::vector<uint64_t> RandomPages(uint64_t pages, uint64_t count) {
  std::vector<uint64_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(kSeed));
  order.resize(std::min(pages, count));
  return order;
}

// Reads the pages one by one, putting the microseconds that each took in `latencies`.
absl::Status ReadPages(const LargestFile& file, std::span<const uint64_t> pages,
                       std::span<double> latencies) {
  std::vector<std::byte> buffer(kPage);
  for (size_t i = 0; i < pages.size(); ++i) {
    const Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(ReadFull(file.fd.get(), pages[i] * kPage, buffer), "{}", file.path);
    latencies[i] = SecondsSince(start) * 1e6;
  }
  return absl::OkStatus();
}

// As ReadPages, the pages divided between `readers` threads.
absl::StatusOr<Sample> TimeReads(const LargestFile& file, const std::vector<uint64_t>& pages,
                                 int readers) {
  std::vector<double> latencies(pages.size());
  std::vector<absl::Status> results(static_cast<size_t>(readers));
  const size_t share = pages.size() / results.size();
  const Clock::time_point start = Clock::now();
  {
    std::vector<std::jthread> threads;
    for (size_t reader = 0; reader < results.size(); ++reader) {
      threads.emplace_back([&, reader] {
        results[reader] = ReadPages(file, std::span(pages).subspan(reader * share, share),
                                    std::span(latencies).subspan(reader * share, share));
      });
    }
  }
  const double seconds = SecondsSince(start);
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  latencies.resize(share * results.size());
  std::sort(latencies.begin(), latencies.end());
  const auto quantile = [&latencies](double fraction) {
    return latencies[static_cast<size_t>(fraction * static_cast<double>(latencies.size() - 1))];
  };
  return Sample{{"rate", static_cast<double>(latencies.size()) / seconds},
                {"p50_us", quantile(0.5)},
                {"p99_us", quantile(0.99)}};
}

absl::StatusOr<Measurement> PrepareRandom(const std::string& root, const ReadOptions& options) {
  ASSIGN_OR_RETURN(const auto file, OpenLargestFile(root));
  const std::vector<uint64_t> pages = RandomPages(file->pages, options.reads);
  return Measurement([file, pages] { return TimeReads(*file, pages, /*readers=*/1); });
}

// Empties the page cache of the file but not of what lies below: the next read of a page goes down
// to whatever serves the file system, and finds it in memory there.
absl::Status DropPages(const LargestFile& file) {
  if (const int error = ::posix_fadvise(file.fd.get(), 0, 0, POSIX_FADV_DONTNEED); error != 0) {
    return ErrnoStatus(error, "fadvise DONTNEED " + file.path);
  }
  ASSIGN_OR_RETURN(const uint64_t left, PagesInCache(file.fd.get(), file.pages * kPage), "{}",
                   file.path);
  if (left > file.pages / 100) {
    return absl::FailedPreconditionError(
        fmt::format("{}: {} of {} pages stay in the page cache", file.path, left, file.pages));
  }
  // Else the kernel would read ahead, and one read would pay for many.
  if (const int error = ::posix_fadvise(file.fd.get(), 0, 0, POSIX_FADV_RANDOM); error != 0) {
    return ErrnoStatus(error, "fadvise RANDOM " + file.path);
  }
  return absl::OkStatus();
}

absl::StatusOr<Measurement> PrepareColdPage(const std::string& root, const ReadOptions& options) {
  ASSIGN_OR_RETURN(const auto file, OpenLargestFile(root));
  const std::vector<uint64_t> pages = RandomPages(file->pages, options.reads);
  return Measurement([file, pages, readers = options.readers]() -> absl::StatusOr<Sample> {
    RETURN_IF_ERROR(DropPages(*file));
    return TimeReads(*file, pages, readers);
  });
}

absl::StatusOr<Measurement> PrepareStat(const std::string& root, const ReadOptions& options) {
  ASSIGN_OR_RETURN(TreeList tree, WalkTree(root));
  return Warm(
      [paths = std::move(tree.paths)]() -> absl::StatusOr<double> {
        struct stat info {};
        for (const std::string& path : paths) {
          if (::lstat(path.c_str(), &info) != 0) return ErrnoStatus(errno, "lstat " + path);
        }
        return static_cast<double>(paths.size());
      },
      options);
}

// Names in the directory.
absl::StatusOr<uint64_t> ListDirectory(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), &::closedir);
  if (directory == nullptr) return ErrnoStatus(errno, "opendir " + path);
  uint64_t names = 0;
  errno = 0;
  while (::readdir(directory.get()) != nullptr) ++names;
  if (errno != 0) return ErrnoStatus(errno, "readdir " + path);
  return names;
}

absl::StatusOr<Measurement> PrepareReadDirectory(const std::string& root,
                                                 const ReadOptions& options) {
  ASSIGN_OR_RETURN(TreeList tree, WalkTree(root));
  return Warm(
      [paths = std::move(tree.directories)]() -> absl::StatusOr<double> {
        uint64_t names = 0;
        for (const std::string& path : paths) {
          ASSIGN_OR_RETURN(const uint64_t here, ListDirectory(path));
          names += here;
        }
        return static_cast<double>(names);
      },
      options);
}

absl::StatusOr<Measurement> PrepareGetAttribute(const std::string& root,
                                                const ReadOptions& options) {
  const std::string& name = options.extended_attribute;
  ASSIGN_OR_RETURN(const TreeList tree, WalkTree(root));
  std::vector<std::string> paths;
  for (const TreeFile& file : tree.files) {
    if (::lgetxattr(file.path.c_str(), name.c_str(), nullptr, 0) >= 0) paths.push_back(file.path);
  }
  if (paths.empty()) return absl::NotFoundError(fmt::format("{}: no file has {}", root, name));
  return Warm(
      [paths = std::move(paths), name]() -> absl::StatusOr<double> {
        char value[256];
        for (const std::string& path : paths) {
          if (::lgetxattr(path.c_str(), name.c_str(), value, sizeof(value)) < 0) {
            return ErrnoStatus(errno, "getxattr " + path);
          }
        }
        return static_cast<double>(paths.size());
      },
      options);
}

absl::StatusOr<Measurement> PrepareOpenRead(const std::string& root, const ReadOptions& options) {
  ASSIGN_OR_RETURN(TreeList tree, WalkTree(root));
  std::erase_if(tree.files, [](const TreeFile& file) { return file.size >= kLargeFile; });
  return Warm(
      [files = std::move(tree.files)]() -> absl::StatusOr<double> {
        std::vector<char> buffer(kReadSize);
        for (const TreeFile& file : files) {
          RETURN_IF_ERROR(ReadToEnd(file.path, buffer).status());
        }
        return static_cast<double>(files.size());
      },
      options);
}

constexpr ReadOperation kOperations[] = {
    {"sequential", "MB/s", "files of 1 MiB or more from end to end, in memory", &PrepareSequential},
    {"cold-sequential", "MB/s", "the same without reading them before", &PrepareColdSequential},
    {"random", "reads/s", "4 KiB at random places of the largest file, in memory", &PrepareRandom},
    {"cold-page", "reads/s", "the same, each page not in the file's page cache", &PrepareColdPage},
    {"stat", "files/s", "lstat of every path", &PrepareStat},
    {"readdir", "names/s", "list every directory", &PrepareReadDirectory},
    {"getxattr", "files/s", "one attribute of each file that has it", &PrepareGetAttribute},
    {"open-read", "files/s", "open, read and close every file below 1 MiB", &PrepareOpenRead},
};

}  // namespace

const ReadOperation* FindReadOperation(const std::string& name) {
  for (const ReadOperation& operation : kOperations) {
    if (name == operation.name) return &operation;
  }
  return nullptr;
}

std::string DescribeReadOperations() {
  std::string text;
  for (const ReadOperation& operation : kOperations) {
    text +=
        fmt::format("  {:<16} {} ({})\n", operation.name, operation.description, operation.unit);
  }
  return text;
}

}  // namespace lamina::bench
