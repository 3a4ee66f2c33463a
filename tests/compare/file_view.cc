// SPDX-License-Identifier: Apache-2.0
#include "tests/compare/file_view.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lamina::compare {
namespace {

constexpr size_t kMaxPrinted = 200;
constexpr size_t kMaxXattrValue = 65536;  // XATTR_SIZE_MAX of the kernel
constexpr size_t kSeekSamples = 24;
constexpr uint64_t kZeroSample = 128 << 10;  // holes up to twice this size are read whole

// Lists from the descriptor's position on, with a buffer so small that many calls are needed.
absl::StatusOr<std::vector<ListedName>> ListFromHere(int directory, size_t limit) {
  std::vector<ListedName> names;
  alignas(dirent64) char buffer[2048];
  while (names.size() < limit) {
    const ssize_t length = getdents64(directory, buffer, sizeof(buffer));
    if (length < 0) return ErrnoStatus(errno, "getdents64");
    if (length == 0) break;
    for (ssize_t position = 0; position < length;) {
      const auto* entry = reinterpret_cast<const dirent64*>(buffer + position);
      names.push_back({entry->d_name, entry->d_type, entry->d_off});
      position += entry->d_reclen;
    }
  }
  return names;
}

absl::StatusOr<bool> ReadsAsZeros(int file, Range range) {
  std::string bytes(range.end - range.begin, '\1');
  RETURN_IF_ERROR(ReadFull(file, range.begin, std::as_writable_bytes(std::span(bytes))));
  return std::all_of(bytes.begin(), bytes.end(), [](char c) { return c == 0; });
}

// Both ends of a hole, or all of a small one.
absl::StatusOr<bool> HoleReadsAsZeros(int file, Range hole) {
  if (hole.end - hole.begin <= 2 * kZeroSample) return ReadsAsZeros(file, hole);
  ASSIGN_OR_RETURN(const bool start, ReadsAsZeros(file, {hole.begin, hole.begin + kZeroSample}));
  ASSIGN_OR_RETURN(const bool end, ReadsAsZeros(file, {hole.end - kZeroSample, hole.end}));
  return start && end;
}

// The start of the next data or hole at or after `offset`; `size` if there is none.
absl::StatusOr<uint64_t> Seek(int file, uint64_t offset, int whence, uint64_t size) {
  const off_t found = lseek(file, static_cast<off_t>(offset), whence);
  if (found >= 0) return static_cast<uint64_t>(found);
  if (errno == ENXIO && whence == SEEK_DATA) return size;
  return ErrnoStatus(
      errno, fmt::format("{} at {}", whence == SEEK_DATA ? "SEEK_DATA" : "SEEK_HOLE", offset));
}

}  // namespace

std::string Printable(std::string_view bytes) {
  std::string text;
  for (const unsigned char c : bytes.substr(0, kMaxPrinted)) {
    if (c == '\\') {
      text += "\\\\";
    } else if (c < 0x20 || c >= 0x7f) {
      text += fmt::format("\\x{:02x}", c);
    } else {
      text += static_cast<char>(c);
    }
  }
  if (bytes.size() > kMaxPrinted) text += fmt::format("... ({} bytes)", bytes.size());
  return text;
}

absl::StatusOr<UniqueFd> OpenAt(int directory, const std::string& name, int flags) {
  UniqueFd fd(openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | flags));
  if (!fd.valid()) return ErrnoStatus(errno, "open");
  return fd;
}

absl::StatusOr<std::string> ReadLink(int directory, const std::string& name) {
  char target[PATH_MAX];
  const ssize_t length = readlinkat(directory, name.c_str(), target, sizeof(target));
  if (length < 0) return ErrnoStatus(errno, fmt::format("{}: readlink", Printable(name)));
  return std::string(target, static_cast<size_t>(length));
}

absl::StatusOr<std::map<std::string, std::string>> ReadXattrs(int directory,
                                                              const std::string& name) {
  // There is no lgetxattrat(2) before Linux 6.13; the descriptor's entry in /proc stands in for it.
  const std::string path =
      directory == AT_FDCWD ? name : fmt::format("/proc/self/fd/{}/{}", directory, name);
  std::string names(kMaxXattrValue, '\0');
  const ssize_t names_length = llistxattr(path.c_str(), names.data(), names.size());
  if (names_length < 0) {
    if (errno == ENOTSUP) return std::map<std::string, std::string>();
    return ErrnoStatus(errno, "listxattr");
  }
  std::map<std::string, std::string> xattrs;
  std::string value(kMaxXattrValue, '\0');
  for (ssize_t position = 0; position < names_length;) {
    const std::string xattr = names.c_str() + position;
    const ssize_t length = lgetxattr(path.c_str(), xattr.c_str(), value.data(), value.size());
    if (length < 0) return ErrnoStatus(errno, fmt::format("getxattr {}", Printable(xattr)));
    xattrs[xattr] = value.substr(0, static_cast<size_t>(length));
    position += static_cast<ssize_t>(xattr.size()) + 1;
  }
  return xattrs;
}

absl::StatusOr<std::vector<ListedName>> ListDirectory(int directory) {
  if (lseek(directory, 0, SEEK_SET) != 0) return ErrnoStatus(errno, "rewind directory");
  return ListFromHere(directory, SIZE_MAX);
}

absl::StatusOr<std::string> CheckSeeking(int directory, const std::vector<ListedName>& names) {
  ASSIGN_OR_RETURN(const std::vector<ListedName> again, ListDirectory(directory));
  const auto same = [](const ListedName& a, const ListedName& b) { return a.name == b.name; };
  if (!std::equal(names.begin(), names.end(), again.begin(), again.end(), same)) {
    return "lists other names after a rewind";
  }
  const size_t step = std::max<size_t>(1, names.size() / kSeekSamples);
  for (size_t i = 0; i < names.size(); i += step) {
    if (lseek(directory, names[i].next, SEEK_SET) != names[i].next) {
      return ErrnoStatus(errno, fmt::format("seek to {}", names[i].next));
    }
    ASSIGN_OR_RETURN(const std::vector<ListedName> rest, ListFromHere(directory, 1));
    const std::string expected = i + 1 < names.size() ? names[i + 1].name : "(the end)";
    const std::string found = rest.empty() ? "(the end)" : rest[0].name;
    if (found != expected) {
      return fmt::format("lists {} after a seek behind {}, where {} was", Printable(found),
                         Printable(names[i].name), Printable(expected));
    }
  }
  return "";
}

absl::StatusOr<Segments> ReadSegments(int file, uint64_t size) {
  Segments segments;
  uint64_t position = 0;
  while (position < size) {
    ASSIGN_OR_RETURN(const uint64_t data, Seek(file, position, SEEK_DATA, size));
    if (data < position || data > size) {
      segments.problem = fmt::format("SEEK_DATA at {} says {}", position, data);
      return segments;
    }
    if (data > position) {
      ASSIGN_OR_RETURN(const bool zeros, HoleReadsAsZeros(file, {position, data}));
      if (!zeros) segments.problem = fmt::format("hole at {} does not read as zeros", position);
    }
    if (data == size) break;
    ASSIGN_OR_RETURN(const uint64_t hole, Seek(file, data, SEEK_HOLE, size));
    if (hole <= data || hole > size) {
      segments.problem = fmt::format("SEEK_HOLE at {} says {}", data, hole);
      return segments;
    }
    segments.data.push_back({data, hole});
    position = hole;
  }
  return segments;
}

std::vector<Range> Union(const std::vector<Range>& a, const std::vector<Range>& b) {
  std::vector<Range> all = a;
  all.insert(all.end(), b.begin(), b.end());
  std::sort(all.begin(), all.end(),
            [](const Range& x, const Range& y) { return x.begin < y.begin; });
  std::vector<Range> joined;
  for (const Range& range : all) {
    if (!joined.empty() && range.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

}  // namespace lamina::compare
