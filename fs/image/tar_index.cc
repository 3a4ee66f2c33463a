// SPDX-License-Identifier: Apache-2.0
#include "fs/image/tar_index.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "erofs/tar_header.h"
#include "erofs/tar_pax.h"
#include "fs/image/decompress.h"
#include "fs/image/scratch_file.h"

namespace lamina::fs {
namespace {

using erofs::PaxFields;
using erofs::TarHeader;

constexpr uint64_t kTarBlock = erofs::kTarBlockSize;
// Limits: an image archive has a few members a layer, and names are paths.
constexpr size_t kMaxMembers = 1 << 16;
constexpr size_t kMaxNameLength = 4095;
constexpr uint64_t kMaxExtendedHeader = 1 << 20;
constexpr int kMaxLinks = 16;
// What comes out of a compressed archive, at most: this much, or this many times its size. Layers
// compress to a third or less; many are compressed already.
constexpr uint64_t kFreeSize = 256 << 20;
constexpr uint64_t kMaxRatio = 64;
// Offsets in a file.
constexpr uint64_t kMaxOffset = std::numeric_limits<int64_t>::max();

// A path without ".", "..", and doubled or leading slashes; nothing if it leads out of the archive.
std::optional<std::string> NormalName(std::string_view path) {
  std::vector<std::string_view> parts;
  while (!path.empty()) {
    const std::string_view part = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(part.size() + 1, path.size()));
    if (part == "..") {
      if (parts.empty()) return std::nullopt;
      parts.pop_back();
    } else if (!part.empty() && part != ".") {
      parts.push_back(part);
    }
  }
  return fmt::format("{}", fmt::join(parts, "/"));
}

std::string_view DirectoryOf(std::string_view name) {
  const size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(0, slash);
}

// Applies a header that describes the next member ('x', 'g', or GNU's 'L' and 'K') and says if it was
// one.
absl::StatusOr<bool> ApplyExtendedHeader(char type, const ByteRange& content, PaxFields& member) {
  if (std::string_view("xgLK").find(type) == std::string_view::npos) return false;
  ASSIGN_OR_RETURN(const std::string text, content.ReadAll(kMaxExtendedHeader), "extended header");
  // A global header would hold for all members, but says nothing that names or places one.
  if (type == 'x') RETURN_IF_ERROR(member.Parse(text));
  if (type == 'L') member.path = text.substr(0, text.find('\0'));
  if (type == 'K') member.link_path = text.substr(0, text.find('\0'));
  return true;
}

std::string MemberName(const TarHeader& header, const PaxFields& member) {
  if (member.path) return *member.path;
  const std::string_view prefix = header.is_ustar() ? header.Text(erofs::kTarPrefix) : "";
  const std::string_view name = header.Text(erofs::kTarName);
  return prefix.empty() ? std::string(name) : fmt::format("{}/{}", prefix, name);
}

absl::StatusOr<uint64_t> MemberSize(const TarHeader& header, const PaxFields& member) {
  if (member.size) return *member.size;
  ASSIGN_OR_RETURN(const int64_t size, header.Number(erofs::kTarSize), "size");
  if (size < 0) return absl::InvalidArgumentError(fmt::format("size {}", size));
  return static_cast<uint64_t>(size);
}

// A compressed archive in a temporary file, decompressed as far as it is asked for.
class DecompressedFile {
 public:
  static absl::StatusOr<std::unique_ptr<DecompressedFile>> Open(const ByteRange& archive,
                                                                Compression compression) {
    ASSIGN_OR_RETURN(UniqueFd fd, OpenScratch());
    // Not make_unique: the constructor is private.
    return std::unique_ptr<DecompressedFile>(
        new DecompressedFile(archive, compression, std::move(fd)));
  }

  // Whether the archive has at least `end` bytes; then they are in the file.
  absl::StatusOr<bool> Reach(uint64_t end) {
    while (size_ < end && !ended_) RETURN_IF_ERROR(Continue());
    return size_ >= end;
  }
  // Bytes in the file so far.
  uint64_t size() const { return size_; }
  // All that it will have; only what was reached can be read.
  const ByteRange& content() const { return content_; }

 private:
  DecompressedFile(const ByteRange& archive, Compression compression, UniqueFd fd)
      : archive_(archive),
        decompressor_(Decompressor::Create(compression)),
        content_(ByteRange::OfFile(UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)), kMaxOffset)),
        file_(std::move(fd)) {}

  absl::Status Continue() {
    if (rest_.empty() && !more_) {
      const size_t length = std::min<uint64_t>(input_.size(), archive_.size - position_);
      if (length == 0) {
        ended_ = true;
        return decompressor_->Finish();
      }
      RETURN_IF_ERROR(archive_.Read(position_, std::span(input_).first(length)));
      position_ += length;
      rest_ = std::span(input_).first(length);
    }
    ASSIGN_OR_RETURN(const size_t produced, decompressor_->Decompress(rest_, output_));
    more_ = produced == output_.size();
    if (size_ + produced > kFreeSize && (size_ + produced) / kMaxRatio > archive_.size) {
      return absl::ResourceExhaustedError(
          fmt::format("more than {} bytes come out of {}: decompress it first if it is no bomb",
                      std::max(kFreeSize, kMaxRatio * archive_.size), archive_.size));
    }
    RETURN_IF_ERROR(WriteFull(file_.get(), size_, std::span(output_).first(produced)), "{}",
                    ScratchName());
    size_ += produced;
    return absl::OkStatus();
  }

  const ByteRange archive_;
  const std::unique_ptr<Decompressor> decompressor_;
  const ByteRange content_;
  const UniqueFd file_;
  std::vector<std::byte> input_ = std::vector<std::byte>(kIoSize);
  std::vector<std::byte> output_ = std::vector<std::byte>(kIoSize);
  std::span<const std::byte> rest_;  // of the input, not yet decompressed
  bool more_ = false;                // the decompressor may have more without further input
  uint64_t position_ = 0;            // in the archive, of the next input
  uint64_t size_ = 0;
  bool ended_ = false;
};

}  // namespace

absl::StatusOr<TarIndex> TarIndex::Open(const std::string& path) {
  ASSIGN_OR_RETURN(ByteRange archive, ByteRange::Open(path));
  ASSIGN_OR_RETURN(const Compression compression, DetectCompression(archive), "{}", path);
  if (compression == Compression::kNone) {
    ASSIGN_OR_RETURN(TarIndex index, Build(std::move(archive)), "{}", path);
    return index;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<DecompressedFile> file,
                   DecompressedFile::Open(archive, compression), "decompress {}", path);
  TarIndex index;
  index.archive_ = file->content();
  const auto reach = [&](uint64_t end) -> absl::StatusOr<bool> {
    ASSIGN_OR_RETURN(const bool reached, file->Reach(end), "decompress");
    return reached;
  };
  RETURN_IF_ERROR(index.AddMembers(reach), "{}", path);
  index.archive_.size = file->size();
  return index;
}

absl::StatusOr<TarIndex> TarIndex::Build(ByteRange archive) {
  TarIndex index;
  index.archive_ = std::move(archive);
  const uint64_t size = index.archive_.size;
  RETURN_IF_ERROR(index.AddMembers([size](uint64_t end) { return end <= size; }));
  return index;
}

absl::Status TarIndex::AddMembers(const Reach& reach) {
  PaxFields described;  // of the next member, by extended headers
  uint64_t position = 0;
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, reach(position + kTarBlock));
    if (!more) break;
    TarHeader header;
    RETURN_IF_ERROR(archive_.Read(position, std::as_writable_bytes(std::span(&header, 1))));
    if (header.IsZero()) return absl::OkStatus();
    if (!header.ChecksumMatches()) {
      return absl::InvalidArgumentError(
          fmt::format("at {}: not a tar archive, or damaged (wrong header checksum)", position));
    }
    ASSIGN_OR_RETURN(const uint64_t size, MemberSize(header, described), "at {}", position);
    position += kTarBlock;
    bool whole = size < kMaxOffset - position - kTarBlock;
    if (whole) {
      ASSIGN_OR_RETURN(whole, reach(position + size));
    }
    if (!whole) {
      return absl::DataLossError(fmt::format("at {}: archive ends inside a member", position));
    }
    const ByteRange content = archive_.Part(position, size);
    ASSIGN_OR_RETURN(const bool extended, ApplyExtendedHeader(header.type(), content, described),
                     "at {}", position);
    if (!extended) {
      RETURN_IF_ERROR(AddMember(header, std::exchange(described, {}), position, size), "at {}",
                      position);
    }
    // The last one may lack its padding.
    const uint64_t padded = (size + kTarBlock - 1) / kTarBlock * kTarBlock;
    ASSIGN_OR_RETURN(const bool has_padding, reach(position + padded));
    if (!has_padding) return absl::OkStatus();
    position += padded;
  }
  ASSIGN_OR_RETURN(const bool ends_early, reach(position + 1));
  if (ends_early || members_.empty()) {
    return absl::DataLossError(fmt::format("not a tar archive, or it ends early at {}", position));
  }
  return absl::OkStatus();
}

absl::Status TarIndex::AddMember(const TarHeader& header, const PaxFields& described,
                                 uint64_t position, uint64_t size) {
  const char type = header.type();
  const bool is_link = type == '1' || type == '2';
  const bool is_file = type == '0' || type == '\0' || type == '7';
  const std::optional<std::string> name = NormalName(MemberName(header, described));
  if (!name || (!is_link && !is_file)) return absl::OkStatus();
  Member member{.offset = position, .size = size, .is_link = is_link};
  if (is_link) {
    std::string target =
        described.link_path.value_or(std::string(header.Text(erofs::kTarLinkName)));
    // A symbolic link starts from its own directory, a hard link from the top.
    if (type == '2') target = fmt::format("{}/{}", DirectoryOf(*name), target);
    member.target = NormalName(target).value_or("");
  }
  if (std::max(name->size(), member.target.size()) > kMaxNameLength) {
    return absl::InvalidArgumentError(
        fmt::format("name of {} bytes, or its target of {}: at most {}", name->size(),
                    member.target.size(), kMaxNameLength));
  }
  members_.insert_or_assign(*name, std::move(member));
  if (members_.size() <= kMaxMembers) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      fmt::format("more than {} members: not the archive of an image", kMaxMembers));
}

absl::StatusOr<ByteRange> TarIndex::Find(std::string_view name) const {
  std::string current = NormalName(name).value_or("");
  for (int links = 0; links <= kMaxLinks; ++links) {
    const auto found = members_.find(current);
    if (found == members_.end()) break;
    const Member& member = found->second;
    if (!member.is_link) {
      return archive_.Part(member.offset, member.size);
    }
    current = member.target;
  }
  return absl::NotFoundError(fmt::format("no member '{}' in the archive", name));
}

}  // namespace lamina::fs
