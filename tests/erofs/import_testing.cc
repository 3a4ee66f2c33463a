// SPDX-License-Identifier: Apache-2.0
#include "tests/erofs/import_testing.h"

#include <absl/strings/escaping.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/file.h"

#include "erofs/merge.h"

namespace lamina::erofs {
namespace {

std::string Octal(uint64_t value, size_t width) { return fmt::format("{:0{}o}", value, width - 1); }

std::string Escape(std::string_view text) { return absl::CHexEscape({text.data(), text.size()}); }

std::string TypeName(const Inode& inode) {
  switch (inode.mode & S_IFMT) {
    case S_IFREG:
      return "file";
    case S_IFDIR:
      return "directory";
    case S_IFLNK:
      return "symlink";
    case S_IFCHR:
      return "character";
    case S_IFBLK:
      return "block";
    case S_IFIFO:
      return "fifo";
    case S_IFSOCK:
      return "socket";
    default:
      return "unknown";
  }
}

std::string DescribeInode(const Inode& inode, const RecordingSink& sink,
                          const DescribeOptions& options) {
  std::string line =
      fmt::format("{} {:04o} {}:{}", TypeName(inode), inode.mode & 07777, inode.uid, inode.gid);
  if (options.mtime) {
    line += fmt::format(" {}.{:09}", inode.mtime.seconds, inode.mtime.nanoseconds);
  }
  if (inode.is_symlink()) line += fmt::format(" -> {}", Escape(inode.target));
  if (S_ISCHR(inode.mode) || S_ISBLK(inode.mode)) {
    line += fmt::format(" {}:{}", major(inode.rdev), minor(inode.rdev));
  }
  if (inode.is_regular()) {
    line += fmt::format(" {} bytes", inode.size);
    const std::string content = sink.Read(inode);
    if (content.size() <= 40) {
      line += fmt::format(" \"{}\"", Escape(content));
    } else {
      line += ' ' + Digest::Of(AsBytes(content)).ToString();
    }
  }
  if (options.extents) {
    uint64_t end = 0;
    for (const Extent& extent : inode.extents) {
      if (extent.offset != end) line += fmt::format(" hole {}..{}", end, extent.offset);
      end = extent.offset + extent.length;
    }
    if (end != inode.size) line += fmt::format(" hole {}..{}", end, inode.size);
  }
  for (const Xattr& xattr : inode.xattrs) {
    // No file system has this mark, and trees are compared with what is extracted to one.
    if (xattr.name == kImpliedXattr) continue;
    line += fmt::format(" {}={}", Escape(xattr.name), Escape(xattr.value));
  }
  return line;
}

std::optional<InodeIndex> FindPath(const Tree& tree, std::string_view path) {
  InodeIndex index = Tree::kRoot;
  while (!path.empty()) {
    const std::string_view part = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(part.size() + 1, path.size()));
    const std::optional<InodeIndex> next = tree.Find(index, part);
    if (!next) return std::nullopt;
    index = *next;
  }
  return index;
}

}  // namespace

absl::Status RecordingSink::BeginFile(uint64_t size) {
  EXPECT_FALSE(in_file_) << "BeginFile within a file";
  in_file_ = true;
  size_ = size;
  position_ = 0;
  extents_.clear();
  return absl::OkStatus();
}

absl::Status RecordingSink::Append(std::span<const std::byte> data) {
  EXPECT_TRUE(in_file_);
  EXPECT_FALSE(data.empty());
  EXPECT_LE(data.size(), size_ - position_);
  if (extents_.empty() || extents_.back().offset + extents_.back().length != position_) {
    EXPECT_EQ(position_ % kBlockSize, 0U) << "data after a hole is not aligned";
    device_.resize((device_.size() + kBlockSize - 1) / kBlockSize * kBlockSize);
    extents_.push_back({position_, 0, 1, static_cast<uint32_t>(device_.size() / kBlockSize)});
  }
  device_.append(AsText(data));
  extents_.back().length += data.size();
  position_ += data.size();
  return absl::OkStatus();
}

absl::Status RecordingSink::AppendHole(uint64_t length) {
  EXPECT_TRUE(in_file_);
  EXPECT_GT(length, 0U);
  EXPECT_LE(length, size_ - position_);
  EXPECT_EQ(position_ % HoleUnit(size_), 0U) << "start of a hole";
  position_ += length;
  EXPECT_TRUE(position_ == size_ || position_ % HoleUnit(size_) == 0) << "end of a hole";
  hole_bytes_ += length;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Extent>> RecordingSink::EndFile() {
  EXPECT_TRUE(in_file_);
  EXPECT_EQ(position_, size_) << "file ended early";
  in_file_ = false;
  return std::move(extents_);
}

std::string RecordingSink::Read(const Inode& inode) const {
  std::string content(inode.size, '\0');
  for (const Extent& extent : inode.extents) {
    EXPECT_LE(extent.offset + extent.length, inode.size);
    device_.copy(content.data() + extent.offset, extent.length,
                 uint64_t{extent.block} * kBlockSize);
  }
  return content;
}

absl::Status CountingSink::BeginFile(uint64_t) { return absl::OkStatus(); }

absl::Status CountingSink::Append(std::span<const std::byte> data) {
  bytes += data.size();
  return absl::OkStatus();
}

absl::Status CountingSink::AppendHole(uint64_t length) {
  hole_bytes += length;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Extent>> CountingSink::EndFile() { return std::vector<Extent>(); }

void SetTarChecksum(std::string& block) {
  block.replace(148, 8, "        ");
  uint64_t sum = 0;
  for (size_t i = 0; i < 512; ++i) sum += static_cast<uint8_t>(block[i]);
  block.replace(148, 7, Octal(sum, 7) + '\0');
}

std::string TarHeaderBlock(const TarFields& fields, uint64_t size) {
  std::string block(512, '\0');
  auto put = [&](size_t offset, std::string_view text) {
    block.replace(offset, text.size(), text);
  };
  put(0, std::string_view(fields.name).substr(0, 100));
  put(100, Octal(fields.mode, 8));
  put(108, fields.raw_uid.empty() ? Octal(fields.uid, 8) : fields.raw_uid);
  put(116, Octal(fields.gid, 8));
  put(124, fields.raw_size.empty() ? Octal(size, 12) : fields.raw_size);
  put(136,
      fields.raw_mtime.empty() ? Octal(static_cast<uint64_t>(fields.mtime), 12) : fields.raw_mtime);
  block[156] = fields.type;
  put(157, std::string_view(fields.link).substr(0, 100));
  put(257, fields.gnu ? std::string_view("ustar  \0", 8)
                      : std::string_view("ustar\0"
                                         "00",
                                         8));
  put(329, Octal(fields.major, 8));
  put(337, Octal(fields.minor, 8));
  put(345, fields.prefix);
  SetTarChecksum(block);
  return block;
}

std::string PaxRecord(std::string_view key, std::string_view value) {
  size_t length = key.size() + value.size() + 3;
  while (length != fmt::formatted_size("{} {}={}\n", length, key, value)) {
    length = fmt::formatted_size("{} {}={}\n", length, key, value);
  }
  return fmt::format("{} {}={}\n", length, key, value);
}

TarWriter& TarWriter::Raw(std::string_view bytes) {
  archive_ += bytes;
  archive_.resize((archive_.size() + 511) / 512 * 512);
  return *this;
}

TarWriter& TarWriter::Add(const TarFields& fields) {
  Raw(TarHeaderBlock(fields, fields.content.size()));
  return Raw(fields.content);
}

TarWriter& TarWriter::File(std::string name, std::string content) {
  return Add({.name = std::move(name), .content = std::move(content)});
}

TarWriter& TarWriter::Directory(std::string name, uint64_t mode) {
  return Add({.name = std::move(name), .type = '5', .mode = mode});
}

TarWriter& TarWriter::Symlink(std::string name, std::string target) {
  return Add({.name = std::move(name), .type = '2', .mode = 0777, .link = std::move(target)});
}

TarWriter& TarWriter::HardLink(std::string name, std::string target) {
  return Add({.name = std::move(name), .type = '1', .link = std::move(target)});
}

TarWriter& TarWriter::Pax(const std::vector<std::pair<std::string, std::string>>& records,
                          char type) {
  std::string body;
  for (const auto& [key, value] : records) body += PaxRecord(key, value);
  return Add({.name = "PaxHeaders/0", .type = type, .content = body});
}

std::string TarWriter::Finish() {
  archive_.append(1024, '\0');
  return std::move(archive_);
}

absl::StatusOr<Tree> ImportBytes(std::string_view archive, ContentSink& sink, size_t piece) {
  auto read = [&archive, piece](std::span<std::byte> into) -> absl::StatusOr<size_t> {
    const size_t length = std::min({into.size(), archive.size(), piece});
    std::memcpy(into.data(), archive.data(), length);
    archive.remove_prefix(length);
    return length;
  };
  return ImportTar(read, sink);
}

std::string Describe(const Tree& tree, const RecordingSink& sink, const DescribeOptions& options) {
  std::string text;
  std::map<InodeIndex, std::string> first_names;
  std::vector<std::pair<std::string, InodeIndex>> left = {{"", Tree::kRoot}};
  while (!left.empty()) {
    const auto [path, index] = left.back();
    left.pop_back();
    const Inode& inode = tree.inode(index);
    if (index != Tree::kRoot || options.root) {
      text += fmt::format("{} {}", path.empty() ? "/" : Escape(path),
                          DescribeInode(inode, sink, options));
      const auto [first, is_new] = first_names.emplace(index, path);
      if (!is_new) text += fmt::format(" linked to {}", Escape(first->second));
      text += '\n';
    }
    std::vector<DirectoryEntry> entries = tree.Entries(index);
    std::reverse(entries.begin(), entries.end());
    for (const DirectoryEntry& entry : entries) {
      left.emplace_back(fmt::format("{}/{}", path, entry.name), entry.inode);
    }
  }
  return text;
}

const Inode& At(const Tree& tree, std::string_view path) {
  static const Inode kNothing;
  const std::optional<InodeIndex> index = FindPath(tree, path);
  EXPECT_TRUE(index) << path << " is not there";
  return index ? tree.inode(*index) : kNothing;
}

bool Exists(const Tree& tree, std::string_view path) { return FindPath(tree, path).has_value(); }

std::string XattrOf(const Inode& inode, std::string_view name) {
  for (const Xattr& xattr : inode.xattrs) {
    if (xattr.name == name) return xattr.value;
  }
  return "(none)";
}

std::string Shell(const std::string& command) {
  FILE* pipe = ::popen(fmt::format("{{ {}\n}} 2>&1", command).c_str(), "re");
  if (pipe == nullptr) {
    ADD_FAILURE() << "cannot run: " << command;
    return {};
  }
  std::string output;
  char buffer[4096];
  for (size_t length = 0; (length = ::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    output.append(buffer, length);
  }
  const int status = ::pclose(pipe);
  EXPECT_EQ(status, 0) << command << "\n" << output;
  return output;
}

void WriteTestFile(const std::string& path, std::string_view content) {
  const absl::StatusOr<UniqueFd> fd = OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC);
  ASSERT_TRUE(fd.ok()) << fd.status();
  const absl::Status written = WriteFull(fd->get(), 0, AsBytes(content));
  ASSERT_TRUE(written.ok()) << written;
}

}  // namespace lamina::erofs
