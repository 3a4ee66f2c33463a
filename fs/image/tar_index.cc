// SPDX-License-Identifier: Apache-2.0
#include "fs/image/tar_index.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fs/image/decompress.h"

namespace lamina::fs {
namespace {

constexpr uint64_t kTarBlock = 512;
// Limits: an image archive has a few members a layer, and names are paths.
constexpr size_t kMaxMembers = 1 << 16;
constexpr uint64_t kMaxExtendedHeader = 1 << 20;
constexpr int kMaxLinks = 16;

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
  const absl::Status malformed = absl::InvalidArgumentError("malformed pax record");
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
absl::StatusOr<UniqueFd> NamelessFile() {
  const char* const configured = std::getenv("TMPDIR");
  const std::string directory = configured != nullptr ? configured : "/var/tmp";
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(directory, O_TMPFILE | O_RDWR, 0600));
  return fd;
}

absl::StatusOr<ByteRange> DecompressToFile(const ByteRange& archive, Compression compression) {
  ASSIGN_OR_RETURN(UniqueFd fd, NamelessFile());
  const std::unique_ptr<Decompressor> decompressor = Decompressor::Create(compression);
  std::vector<std::byte> input(kIoSize);
  std::vector<std::byte> output(kIoSize);
  uint64_t written = 0;
  for (uint64_t position = 0; position < archive.size;) {
    const size_t length = std::min<uint64_t>(input.size(), archive.size - position);
    std::span<const std::byte> rest(input.data(), length);
    RETURN_IF_ERROR(archive.Read(position, std::span(input).first(length)));
    position += length;
    for (size_t produced = output.size(); !rest.empty() || produced == output.size();) {
      ASSIGN_OR_RETURN(produced, decompressor->Decompress(rest, output));
      RETURN_IF_ERROR(WriteFull(fd.get(), written, std::span(output).first(produced)));
      written += produced;
    }
  }
  RETURN_IF_ERROR(decompressor->Finish());
  return ByteRange::OfFile(std::move(fd), written);
}

}  // namespace

absl::StatusOr<TarIndex> TarIndex::Open(const std::string& path) {
  ASSIGN_OR_RETURN(ByteRange archive, ByteRange::Open(path));
  ASSIGN_OR_RETURN(const Compression compression, DetectCompression(archive), "{}", path);
  if (compression != Compression::kNone) {
    ASSIGN_OR_RETURN(archive, DecompressToFile(archive, compression), "decompress {}", path);
  }
  ASSIGN_OR_RETURN(TarIndex index, Build(std::move(archive)), "{}", path);
  return index;
}

absl::StatusOr<TarIndex> TarIndex::Build(ByteRange archive) {
  TarIndex index;
  index.archive_ = std::move(archive);
  const ByteRange& file = index.archive_;
  Overrides overrides;
  uint64_t position = 0;
  while (file.size - position >= kTarBlock) {
    TarHeader header;
    RETURN_IF_ERROR(file.Read(position, std::as_writable_bytes(std::span(&header, 1))));
    if (IsZero(header)) return index;
    RETURN_IF_ERROR(CheckHeader(header), "at {}", position);
    ASSIGN_OR_RETURN(uint64_t size, Number({header.size, sizeof(header.size)}), "at {}: size",
                     position);
    size = overrides.size.value_or(size);
    position += kTarBlock;
    if (size > file.size - position) {
      return absl::DataLossError(fmt::format("at {}: archive ends inside a member", position));
    }
    const ByteRange content = file.Part(position, size);
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
        index.members_.insert_or_assign(*name, std::move(member));
      }
      if (index.members_.size() > kMaxMembers) {
        return absl::ResourceExhaustedError(
            fmt::format("more than {} members: not the archive of an image", kMaxMembers));
      }
      overrides = Overrides();
    }
    position += std::min((size + kTarBlock - 1) / kTarBlock * kTarBlock, file.size - position);
  }
  if (position != file.size || index.members_.empty()) {
    return absl::DataLossError(fmt::format("not a tar archive, or it ends early at {}", position));
  }
  return index;
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
