// SPDX-License-Identifier: Apache-2.0
#include "fs/image/tar_index.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "fs/image/decompress.h"

namespace lamina::fs {
namespace {

constexpr uint64_t kTarBlock = 512;
// Limits: an image archive has a few members a layer, and names are paths.
constexpr size_t kMaxMembers = 1 << 16;
constexpr uint64_t kMaxExtendedHeader = 1 << 20;
constexpr int kMaxLinks = 16;
// What comes out of a compressed archive, at most: this much, or this many times its size. Layers
// compress to a third or less; many are compressed already.
constexpr uint64_t kFreeSize = 256 << 20;
constexpr uint64_t kMaxRatio = 64;
// Offsets in a file.
constexpr uint64_t kMaxOffset = std::numeric_limits<int64_t>::max();

struct TarHeader {  // POSIX.1-2017, pax, "ustar Interchange Format"
  char name[100];
  char mode[8];
  char uid[8];
  char gid[8];
  char size[12];
  char mtime[12];
  char checksum[8];
  char type;
  char link_name[100];
  char magic[6];
  char version[2];
  char user[32];
  char group[32];
  char device_major[8];
  char device_minor[8];
  char prefix[155];
  char padding[12];
};
static_assert(sizeof(TarHeader) == kTarBlock);

// What the next member's header says less well: from pax records ('x', 'g') and GNU's 'L' and 'K'.
struct Overrides {
  std::optional<std::string> name;
  std::optional<std::string> link_name;
  std::optional<uint64_t> size;
};

template <size_t N>
std::string_view Text(const char (&field)[N]) {
  return {field, ::strnlen(field, N)};
}

// Octal digits between spaces, or GNU's base 256 if the first bit is set.
absl::StatusOr<uint64_t> Number(std::string_view field) {
  uint64_t value = 0;
  if ((field[0] & 0x80) != 0) {
    for (size_t i = 0; i < field.size(); ++i) {
      const uint8_t byte = static_cast<uint8_t>(field[i]) & (i == 0 ? 0x7f : 0xff);
      if (value >> 55 != 0) return absl::InvalidArgumentError("number too large");
      value = value << 8 | byte;
    }
    return value;
  }
  field = field.substr(0, field.find('\0'));
  while (field.starts_with(' ')) field.remove_prefix(1);
  while (field.ends_with(' ')) field.remove_suffix(1);
  if (field.empty()) return value;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value, 8);
  if (error != std::errc() || end != field.data() + field.size()) {
    return absl::InvalidArgumentError("number that is not octal");
  }
  return value;
}

bool IsZero(const TarHeader& header) {
  const auto bytes = std::as_bytes(std::span(&header, 1));
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

absl::Status CheckHeader(const TarHeader& header) {
  TarHeader blank = header;
  std::fill(std::begin(blank.checksum), std::end(blank.checksum), ' ');
  uint64_t sum = 0;
  for (const std::byte b : std::as_bytes(std::span(&blank, 1))) sum += static_cast<uint8_t>(b);
  const absl::StatusOr<uint64_t> stored = Number({header.checksum, sizeof(header.checksum)});
  if (!stored.ok() || *stored != sum) {
    return absl::InvalidArgumentError("not a tar archive, or damaged (wrong header checksum)");
  }
  return absl::OkStatus();
}

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

// Records of the form "LENGTH KEY=VALUE\n".
absl::Status ApplyPaxRecords(std::string_view records, Overrides& overrides) {
  absl::Status malformed = absl::InvalidArgumentError("malformed pax record");
  while (!records.empty()) {
    size_t length = 0;
    const char* const begin = records.data();
    const auto [end, error] = std::from_chars(begin, begin + records.size(), length);
    const size_t digits = static_cast<size_t>(end - begin);
    if (error != std::errc() || length > records.size() || length < digits + 2 ||
        records[digits] != ' ' || records[length - 1] != '\n') {
      return malformed;
    }
    const std::string_view record = records.substr(digits + 1, length - digits - 2);
    const size_t equals = record.find('=');
    if (equals == std::string_view::npos) return malformed;
    const std::string_view key = record.substr(0, equals);
    const std::string_view value = record.substr(equals + 1);
    if (key == "path") overrides.name = std::string(value);
    if (key == "linkpath") overrides.link_name = std::string(value);
    if (key == "size") {
      uint64_t size = 0;
      const auto parsed = std::from_chars(value.data(), value.data() + value.size(), size);
      if (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size()) return malformed;
      overrides.size = size;
    }
    records.remove_prefix(length);
  }
  return absl::OkStatus();
}

// Applies a header that describes the next member ('x', 'g', 'L', 'K') and says if it was one.
absl::StatusOr<bool> ApplyExtendedHeader(char type, const ByteRange& content,
                                         Overrides& overrides) {
  if (std::string_view("xgLK").find(type) == std::string_view::npos) return false;
  ASSIGN_OR_RETURN(std::string text, content.ReadAll(kMaxExtendedHeader), "extended header");
  // A global header would hold for all members, but says nothing that names or places one.
  if (type == 'x') RETURN_IF_ERROR(ApplyPaxRecords(text, overrides));
  if (type == 'L') overrides.name = text.substr(0, text.find('\0'));
  if (type == 'K') overrides.link_name = text.substr(0, text.find('\0'));
  return true;
}

std::string MemberName(const TarHeader& header, const Overrides& overrides) {
  if (overrides.name) return *overrides.name;
  const bool has_prefix = Text(header.magic) == "ustar" && header.prefix[0] != '\0';
  if (!has_prefix) return std::string(Text(header.name));
  return fmt::format("{}/{}", Text(header.prefix), Text(header.name));
}

// A file that has no name and goes when it is closed.
absl::StatusOr<UniqueFd> NamelessFile(const std::string& directory) {
  return OpenFile(directory, O_TMPFILE | O_RDWR, 0600);
}

// A compressed archive in a temporary file, decompressed as far as it is asked for.
class DecompressedFile {
 public:
  static absl::StatusOr<std::unique_ptr<DecompressedFile>> Open(const ByteRange& archive,
                                                                Compression compression) {
    const char* const configured = std::getenv("TMPDIR");
    const bool chosen = configured != nullptr && *configured != '\0';
    const std::string directory = chosen ? configured : "/var/tmp";
    const std::string context = fmt::format("temporary file in {} ({})", directory,
                                            chosen ? "from TMPDIR" : "TMPDIR names another place");
    ASSIGN_OR_RETURN(UniqueFd fd, NamelessFile(directory), "{}", context);
    // Not make_unique: the constructor is private.
    return std::unique_ptr<DecompressedFile>(
        new DecompressedFile(archive, compression, std::move(fd), context));
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
  DecompressedFile(const ByteRange& archive, Compression compression, UniqueFd fd,
                   std::string context)
      : archive_(archive),
        decompressor_(Decompressor::Create(compression)),
        content_(ByteRange::OfFile(UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)), kMaxOffset)),
        file_(std::move(fd)),
        context_(std::move(context)) {}

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
                    context_);
    size_ += produced;
    return absl::OkStatus();
  }

  const ByteRange archive_;
  const std::unique_ptr<Decompressor> decompressor_;
  const ByteRange content_;
  const UniqueFd file_;
  const std::string context_;
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
  Overrides overrides;
  uint64_t position = 0;
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, reach(position + kTarBlock));
    if (!more) break;
    TarHeader header;
    RETURN_IF_ERROR(archive_.Read(position, std::as_writable_bytes(std::span(&header, 1))));
    if (IsZero(header)) return absl::OkStatus();
    RETURN_IF_ERROR(CheckHeader(header), "at {}", position);
    ASSIGN_OR_RETURN(uint64_t size, Number({header.size, sizeof(header.size)}), "at {}: size",
                     position);
    size = overrides.size.value_or(size);
    position += kTarBlock;
    bool whole = size < kMaxOffset - position - kTarBlock;
    if (whole) {
      ASSIGN_OR_RETURN(whole, reach(position + size));
    }
    if (!whole) {
      return absl::DataLossError(fmt::format("at {}: archive ends inside a member", position));
    }
    const ByteRange content = archive_.Part(position, size);
    ASSIGN_OR_RETURN(const bool extended, ApplyExtendedHeader(header.type, content, overrides),
                     "at {}", position);
    if (!extended) {
      const bool is_link = header.type == '1' || header.type == '2';
      const bool is_file = header.type == '0' || header.type == '\0' || header.type == '7';
      const std::optional<std::string> name = NormalName(MemberName(header, overrides));
      if (name && (is_link || is_file)) {
        Member member{.offset = position, .size = size, .is_link = is_link};
        std::string target = overrides.link_name.value_or(std::string(Text(header.link_name)));
        // A symbolic link starts from its own directory, a hard link from the top.
        if (header.type == '2') target = fmt::format("{}/{}", DirectoryOf(*name), target);
        if (is_link) member.target = NormalName(target).value_or("");
        members_.insert_or_assign(*name, std::move(member));
      }
      if (members_.size() > kMaxMembers) {
        return absl::ResourceExhaustedError(
            fmt::format("more than {} members: not the archive of an image", kMaxMembers));
      }
      overrides = Overrides();
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
