// SPDX-License-Identifier: Apache-2.0
#include "erofs/tar_reader.h"

#include <sys/sysmacros.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "erofs/import_xattrs.h"

namespace lamina::erofs {
namespace {

// Large enough that a call of the read function costs nothing, small enough for the L2 cache.
constexpr size_t kBufferSize = 256 << 10;
// Long names and extended headers are held in memory.
constexpr uint64_t kMaxSpecialBody = 1 << 20;
// Device numbers of the kernel have 12 and 20 bits.
constexpr int64_t kMaxMajor = (1 << 12) - 1;
constexpr int64_t kMaxMinor = (1 << 20) - 1;
// The kernel takes an owner of all ones for "no owner".
constexpr uint64_t kMaxOwner = 0xfffffffe;

constexpr char kOldRegular = '\0';
constexpr char kRegular = '0';
constexpr char kHardLink = '1';
constexpr char kSymlink = '2';
constexpr char kCharacter = '3';
constexpr char kBlock = '4';
constexpr char kDirectory = '5';
constexpr char kFifo = '6';
constexpr char kContiguous = '7';
constexpr char kGnuDumpDirectory = 'D';
constexpr char kGnuLongLink = 'K';
constexpr char kGnuLongName = 'L';
constexpr char kGnuSparse = 'S';
constexpr char kGnuVolumeLabel = 'V';
constexpr char kGlobalHeader = 'g';
constexpr char kExtendedHeader = 'x';
constexpr char kSolarisExtendedHeader = 'X';

uint64_t PaddingAfter(uint64_t length) {
  return (kTarBlockSize - length % kTarBlockSize) % kTarBlockSize;
}

std::string HeaderName(const TarHeader& header) {
  std::string name(header.Text(kTarName));
  if (header.is_ustar() && !header.Text(kTarPrefix).empty()) {
    name = fmt::format("{}/{}", header.Text(kTarPrefix), name);
  }
  return name;
}

// A field that cannot be negative, from the extended header if it is there.
absl::StatusOr<uint64_t> Unsigned(const std::optional<uint64_t>& extended, const TarHeader& header,
                                  TarField field, std::string_view what) {
  if (extended) return *extended;
  ASSIGN_OR_RETURN(const int64_t value, header.Number(field), "{}", what);
  if (value < 0) return absl::InvalidArgumentError(fmt::format("{}: {} is negative", what, value));
  return static_cast<uint64_t>(value);
}

absl::StatusOr<dev_t> DeviceNumber(const TarHeader& header) {
  ASSIGN_OR_RETURN(const int64_t major, header.Number(kTarMajor), "device major number");
  ASSIGN_OR_RETURN(const int64_t minor, header.Number(kTarMinor), "device minor number");
  if (major < 0 || major > kMaxMajor || minor < 0 || minor > kMaxMinor) {
    return absl::InvalidArgumentError(
        fmt::format("device number {}:{} is out of range", major, minor));
  }
  return makedev(static_cast<unsigned>(major), static_cast<unsigned>(minor));
}

// Adds the pairs of an old GNU sparse map in `pairs`, up to the first unused one.
absl::Status AppendOldRuns(std::string_view pairs, std::vector<SparseRun>& runs) {
  for (size_t at = 0; at < pairs.size(); at += 24) {
    const std::string_view pair = pairs.substr(at, 24);
    if (pair[0] == '\0') break;
    ASSIGN_OR_RETURN(const int64_t offset, ParseTarNumber(pair.substr(0, 12)));
    ASSIGN_OR_RETURN(const int64_t length, ParseTarNumber(pair.substr(12)));
    if (offset < 0 || length < 0) return absl::InvalidArgumentError("negative sparse run");
    runs.push_back({static_cast<uint64_t>(offset), static_cast<uint64_t>(length)});
  }
  if (runs.size() > kMaxSparseRuns) return absl::ResourceExhaustedError("too many sparse runs");
  return absl::OkStatus();
}

absl::Status CheckRuns(const std::vector<SparseRun>& runs, uint64_t size, uint64_t stored) {
  uint64_t end = 0;
  uint64_t total = 0;
  for (const SparseRun& run : runs) {
    if (run.offset < end || run.offset > size || run.length > size - run.offset) {
      return absl::InvalidArgumentError(
          fmt::format("sparse run of {} bytes at {} overlaps another or lies outside of the file",
                      run.length, run.offset));
    }
    end = run.offset + run.length;
    total += run.length;
  }
  if (total != stored) {
    return absl::InvalidArgumentError(
        fmt::format("sparse map is of {} bytes, but the archive holds {}", total, stored));
  }
  return absl::OkStatus();
}

}  // namespace

TarReader::TarReader(const TarReadFunction& read) : read_(read), buffer_(kBufferSize) {}

absl::StatusOr<std::optional<TarEntry>> TarReader::Next() {
  RETURN_IF_ERROR(SkipContent());
  Prelude prelude;
  for (;;) {
    const uint64_t header_position = position_;
    ASSIGN_OR_RETURN(const std::optional<TarHeader> header, ReadHeader());
    if (!header) {
      if (prelude.empty()) return std::nullopt;
      return absl::DataLossError(
          fmt::format("tar archive ends at byte {}, after an extended header", header_position));
    }
    switch (header->type()) {
      case kGnuLongName:
      case kGnuLongLink:
      case kExtendedHeader:
      case kSolarisExtendedHeader:
        RETURN_IF_ERROR(ReadPrelude(*header, prelude), "tar header at byte {}", header_position);
        break;
      case kGlobalHeader:
        RETURN_IF_ERROR(ReadGlobalHeader(*header), "tar header at byte {}", header_position);
        break;
      case kGnuVolumeLabel:
        break;
      default: {
        const std::string name = prelude.long_name.value_or(HeaderName(*header));
        ASSIGN_OR_RETURN(TarEntry entry, MakeEntry(*header, std::move(prelude)),
                         "tar entry \"{}\" at byte {}", PrintableName(name), header_position);
        return entry;
      }
    }
  }
}

absl::StatusOr<std::span<const std::byte>> TarReader::ReadContent(uint64_t limit) {
  RETURN_IF_ERROR(Fill(1));
  if (available() == 0) {
    return absl::DataLossError(
        fmt::format("archive ends at byte {}, {} bytes too early", position_, content_));
  }
  const auto length = static_cast<size_t>(std::min({uint64_t{available()}, limit, content_}));
  const std::span<const std::byte> content(buffer_.data() + begin_, length);
  Consume(length);
  content_ -= length;
  return content;
}

absl::Status TarReader::Drain() {
  while (!at_end_) {
    Consume(available());
    RETURN_IF_ERROR(Fill(1));
  }
  return absl::OkStatus();
}

absl::Status TarReader::Fill(size_t wanted) {
  if (available() >= wanted || at_end_) return absl::OkStatus();
  std::memmove(buffer_.data(), buffer_.data() + begin_, available());
  end_ = available();
  begin_ = 0;
  while (end_ < wanted) {
    const std::span<std::byte> space = std::span(buffer_).subspan(end_);
    ASSIGN_OR_RETURN(const size_t length, read_(space), "read tar archive at byte {}",
                     position_ + end_);
    if (length > space.size()) return absl::InternalError("tar archive: read more than asked for");
    if (length == 0) {
      at_end_ = true;
      break;
    }
    end_ += length;
  }
  return absl::OkStatus();
}

TarHeader TarReader::PeekBlock() const {
  TarHeader block;
  std::memcpy(block.bytes.data(), buffer_.data() + begin_, kTarBlockSize);
  return block;
}

void TarReader::Consume(size_t length) {
  begin_ += length;
  position_ += length;
}

absl::Status TarReader::Skip(uint64_t length) {
  while (length > 0) {
    RETURN_IF_ERROR(Fill(1));
    if (available() == 0) {
      return absl::DataLossError(
          fmt::format("archive ends at byte {}, {} bytes too early", position_, length));
    }
    const auto part = static_cast<size_t>(std::min<uint64_t>(length, available()));
    Consume(part);
    length -= part;
  }
  return absl::OkStatus();
}

absl::Status TarReader::SkipContent() {
  RETURN_IF_ERROR(Skip(std::exchange(content_, 0)));
  // The last file of an archive that was cut after its content is whole all the same.
  RETURN_IF_ERROR(Fill(padding_));
  Consume(static_cast<size_t>(std::min<uint64_t>(std::exchange(padding_, 0), available())));
  return absl::OkStatus();
}

absl::StatusOr<std::optional<TarHeader>> TarReader::ReadHeader() {
  RETURN_IF_ERROR(Fill(kTarBlockSize));
  if (available() == 0) return std::nullopt;
  if (available() < kTarBlockSize) {
    return absl::DataLossError(
        fmt::format("tar header at byte {}: archive ends within it", position_));
  }
  const TarHeader header = PeekBlock();
  Consume(kTarBlockSize);
  if (header.IsZero()) {
    RETURN_IF_ERROR(CheckEnd());
    return std::nullopt;
  }
  if (!header.ChecksumMatches()) {
    return absl::DataLossError(
        fmt::format("tar header at byte {}: checksum does not match", position_ - kTarBlockSize));
  }
  return header;
}

absl::Status TarReader::CheckEnd() {
  RETURN_IF_ERROR(Fill(kTarBlockSize));
  if (available() < kTarBlockSize || PeekBlock().IsZero()) return absl::OkStatus();
  return absl::DataLossError(
      fmt::format("tar archive: lone block of zeros before byte {}", position_));
}

absl::Status TarReader::ReadPrelude(const TarHeader& header, Prelude& prelude) {
  ASSIGN_OR_RETURN(std::string body, ReadSpecialBody(header));
  if (header.type() == kExtendedHeader || header.type() == kSolarisExtendedHeader) {
    prelude.records = std::move(body);
    return absl::OkStatus();
  }
  body.resize(std::min(body.find('\0'), body.size()));
  if (body.empty()) return absl::InvalidArgumentError("empty long name");
  (header.type() == kGnuLongName ? prelude.long_name : prelude.long_link) = std::move(body);
  return absl::OkStatus();
}

absl::Status TarReader::ReadGlobalHeader(const TarHeader& header) {
  ASSIGN_OR_RETURN(const std::string body, ReadSpecialBody(header));
  RETURN_IF_ERROR(globals_.Parse(body), "global");
  if (globals_.describes_one_file()) {
    return absl::InvalidArgumentError("global extended header with a path, link or size");
  }
  // Several of them add up.
  if (globals_.xattr_bytes() > kMaxSpecialBody) {
    return absl::ResourceExhaustedError(
        fmt::format("global xattrs of more than {} bytes", kMaxSpecialBody));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TarReader::ReadSpecialBody(const TarHeader& header) {
  ASSIGN_OR_RETURN(const uint64_t size, Unsigned(std::nullopt, header, kTarSize, "size"));
  if (size > kMaxSpecialBody) {
    return absl::ResourceExhaustedError(
        fmt::format("long name or extended header of {} bytes, at most {}", size, kMaxSpecialBody));
  }
  content_ = size;
  padding_ = PaddingAfter(size);
  std::string body;
  while (content_ > 0) {
    ASSIGN_OR_RETURN(const std::span<const std::byte> part, ReadContent(content_));
    body.append(reinterpret_cast<const char*>(part.data()), part.size());
  }
  RETURN_IF_ERROR(SkipContent());
  return body;
}

absl::StatusOr<TarEntry> TarReader::MakeEntry(const TarHeader& header, Prelude prelude) {
  PaxFields pax = globals_.WithoutXattrs();
  if (prelude.records) RETURN_IF_ERROR(pax.Parse(*prelude.records));

  TarEntry entry;
  entry.path = prelude.long_name ? std::move(*prelude.long_name) : HeaderName(header);
  if (pax.path) entry.path = std::move(*pax.path);
  if (pax.sparse_path) entry.path = std::move(*pax.sparse_path);
  if (entry.path.empty()) return absl::InvalidArgumentError("entry without a name");
  std::string link =
      prelude.long_link ? std::move(*prelude.long_link) : std::string(header.Text(kTarLinkName));
  if (pax.link_path) link = std::move(*pax.link_path);

  RETURN_IF_ERROR(SetType(header, entry, std::move(link)));
  RETURN_IF_ERROR(SetOwnerAndTimes(header, pax, entry.inode));
  if (entry.hard_link) {
    RETURN_IF_ERROR(SetHardLinkContent(header, pax));
    return entry;
  }
  ASSIGN_OR_RETURN(entry.inode.xattrs, pax.TakeXattrs(globals_));
  if (entry.inode.is_regular()) {
    RETURN_IF_ERROR(SetContent(header, pax, entry));
  } else if (entry.inode.is_directory() && header.type() != kDirectory) {
    RETURN_IF_ERROR(SetOddDirectoryContent(header, pax));
  }
  return entry;
}

absl::Status TarReader::SetType(const TarHeader& header, TarEntry& entry, std::string link) {
  ASSIGN_OR_RETURN(const int64_t mode, header.Number(kTarMode), "mode");
  Inode& inode = entry.inode;
  inode.mode = static_cast<uint16_t>(mode & 07777);
  switch (header.type()) {
    case kOldRegular:
    case kRegular:
    case kContiguous:
    case kGnuSparse:
      // v7 archives have no type for directories; GNU tar goes by the slash in all formats.
      inode.mode |= entry.path.ends_with('/') ? S_IFDIR : S_IFREG;
      return absl::OkStatus();
    case kHardLink:
      inode.mode |= S_IFREG;
      entry.hard_link = std::move(link);
      return absl::OkStatus();
    case kSymlink:
      inode.mode = S_IFLNK | 0777;
      inode.target = std::move(link);
      return absl::OkStatus();
    case kCharacter:
    case kBlock: {
      inode.mode |= header.type() == kBlock ? S_IFBLK : S_IFCHR;
      ASSIGN_OR_RETURN(inode.rdev, DeviceNumber(header));
      return absl::OkStatus();
    }
    case kDirectory:
    case kGnuDumpDirectory:
      inode.mode |= S_IFDIR;
      return absl::OkStatus();
    case kFifo:
      inode.mode |= S_IFIFO;
      return absl::OkStatus();
    default:
      return absl::UnimplementedError(
          fmt::format("unknown entry type 0x{:02x}", static_cast<uint8_t>(header.type())));
  }
}

absl::Status TarReader::SetOwnerAndTimes(const TarHeader& header, const PaxFields& pax,
                                         Inode& inode) {
  ASSIGN_OR_RETURN(const uint64_t uid, Unsigned(pax.uid, header, kTarUid, "uid"));
  ASSIGN_OR_RETURN(const uint64_t gid, Unsigned(pax.gid, header, kTarGid, "gid"));
  if (uid > kMaxOwner || gid > kMaxOwner) {
    return absl::InvalidArgumentError(fmt::format("owner {}:{} is out of range", uid, gid));
  }
  inode.uid = static_cast<uint32_t>(uid);
  inode.gid = static_cast<uint32_t>(gid);
  if (pax.mtime) {
    inode.mtime = *pax.mtime;
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(inode.mtime.seconds, header.Number(kTarMtime), "modification time");
  return absl::OkStatus();
}

absl::Status TarReader::SetContent(const TarHeader& header, PaxFields& pax, TarEntry& entry) {
  ASSIGN_OR_RETURN(content_, Unsigned(pax.size, header, kTarSize, "size"));
  padding_ = PaddingAfter(content_);
  entry.inode.size = content_;
  if (header.type() == kGnuSparse) {
    RETURN_IF_ERROR(ReadOldSparseMap(header, entry));
  } else if (pax.sparse_major.value_or(0) == 1 && pax.sparse_minor.value_or(0) == 0) {
    RETURN_IF_ERROR(ReadSparseMapFromContent(entry));
  } else if (pax.sparse_major.value_or(0) != 0 || pax.sparse_minor.value_or(0) > 1) {
    return absl::UnimplementedError("unknown version of the sparse format");
  } else if (pax.sparse_map) {
    entry.runs = std::move(*pax.sparse_map);
  } else {
    entry.runs = {{0, content_}};
  }
  if (pax.sparse_size) entry.inode.size = *pax.sparse_size;
  return CheckRuns(entry.runs, entry.inode.size, content_);
}

absl::Status TarReader::ReadOldSparseMap(const TarHeader& header, TarEntry& entry) {
  if (!header.is_gnu())
    return absl::InvalidArgumentError("sparse file in an archive not of GNU tar");
  ASSIGN_OR_RETURN(entry.inode.size,
                   Unsigned(std::nullopt, header, kGnuRealSize, "size of the sparse file"));
  RETURN_IF_ERROR(AppendOldRuns(header.Raw(kGnuSparsePairs), entry.runs), "sparse map");
  bool extended = header.Raw(kGnuIsExtended)[0] != '\0';
  while (extended) {
    RETURN_IF_ERROR(Fill(kTarBlockSize));
    if (available() < kTarBlockSize) return absl::DataLossError("archive ends in the sparse map");
    const TarHeader extension = PeekBlock();
    Consume(kTarBlockSize);
    RETURN_IF_ERROR(AppendOldRuns(extension.Raw(kGnuExtensionPairs), entry.runs), "sparse map");
    extended = extension.Raw(kGnuExtensionIsExtended)[0] != '\0';
  }
  return absl::OkStatus();
}

absl::Status TarReader::ReadSparseMapFromContent(TarEntry& entry) {
  // Lines of decimal numbers: how many runs, then offset and length of each; padded to whole
  // blocks.
  uint64_t consumed = 0;
  auto read_number = [&]() -> absl::StatusOr<uint64_t> {
    std::string digits;
    for (;;) {
      if (content_ == 0) return absl::DataLossError("content ends in the sparse map");
      ASSIGN_OR_RETURN(const std::span<const std::byte> byte, ReadContent(1));
      ++consumed;
      if (byte[0] == std::byte{'\n'}) return ParsePaxNumber(digits);
      digits += static_cast<char>(byte[0]);
      if (digits.size() > 20) return absl::InvalidArgumentError("number too long in a sparse map");
    }
  };
  ASSIGN_OR_RETURN(const uint64_t count, read_number(), "sparse map");
  if (count > kMaxSparseRuns) return absl::ResourceExhaustedError("too many sparse runs");
  for (uint64_t i = 0; i < count; ++i) {
    SparseRun run;
    ASSIGN_OR_RETURN(run.offset, read_number(), "sparse map");
    ASSIGN_OR_RETURN(run.length, read_number(), "sparse map");
    entry.runs.push_back(run);
  }
  const uint64_t padding = PaddingAfter(consumed);
  if (padding > content_) return absl::DataLossError("content ends in the sparse map");
  RETURN_IF_ERROR(Skip(padding));
  content_ -= padding;
  return absl::OkStatus();
}

absl::Status TarReader::SetOddDirectoryContent(const TarHeader& header, const PaxFields& pax) {
  ASSIGN_OR_RETURN(content_, Unsigned(pax.size, header, kTarSize, "size"));
  padding_ = PaddingAfter(content_);
  if (content_ > 0 && header.type() != kGnuDumpDirectory) {
    return absl::InvalidArgumentError("regular file with content has the name of a directory");
  }
  return absl::OkStatus();
}

absl::Status TarReader::SetHardLinkContent(const TarHeader& header, const PaxFields& pax) {
  ASSIGN_OR_RETURN(const uint64_t size, Unsigned(pax.size, header, kTarSize, "size"));
  if (size == 0) return absl::OkStatus();
  RETURN_IF_ERROR(Fill(kTarBlockSize));
  if (available() < kTarBlockSize) return absl::OkStatus();
  const TarHeader next = PeekBlock();
  if (next.IsZero() || next.ChecksumMatches()) return absl::OkStatus();
  content_ = size;
  padding_ = PaddingAfter(size);
  return absl::OkStatus();
}

}  // namespace lamina::erofs
