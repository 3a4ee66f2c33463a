// SPDX-License-Identifier: Apache-2.0
#include "erofs/tar_pax.h"

#include <absl/strings/escaping.h>

#include <charconv>
#include <limits>

#include "erofs/posix_acl.h"

namespace lamina::erofs {
namespace {

constexpr std::string_view kSchilyXattr = "SCHILY.xattr.";
constexpr std::string_view kLibarchiveXattr = "LIBARCHIVE.xattr.";
constexpr std::string_view kGnuSparsePrefix = "GNU.sparse.";
constexpr uint32_t kNanosecondsPerSecond = 1'000'000'000;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// GNU tar (1.29 and later) writes '=' and '%' of an xattr's name as "%3D" and "%25" so that the key
// ends where it should, and undoes just these two.
std::string DecodeSchilyName(std::string_view name) {
  std::string result;
  for (size_t i = 0; i < name.size(); ++i) {
    const std::string_view escape = name.substr(i, 3);
    if (escape == "%3D" || escape == "%25") {
      result += escape == "%25" ? '%' : '=';
      i += 2;
    } else {
      result += name[i];
    }
  }
  return result;
}

// libarchive writes all unusual bytes of a name as %XX.
std::string DecodeLibarchiveName(std::string_view name) {
  std::string result;
  for (size_t i = 0; i < name.size(); ++i) {
    uint8_t byte = 0;
    const char* digits = name.data() + i + 1;
    if (name[i] == '%' && i + 2 < name.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      result += static_cast<char>(byte);
      i += 2;
    } else {
      result += name[i];
    }
  }
  return result;
}

absl::StatusOr<std::string> CheckedText(std::string_view value) {
  if (value.find('\0') != value.npos) return absl::InvalidArgumentError("value holds a NUL byte");
  return std::string(value);
}

}  // namespace

absl::StatusOr<uint64_t> ParsePaxNumber(std::string_view text) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) {
    return absl::InvalidArgumentError("not a decimal number of up to 64 bits");
  }
  return value;
}

absl::StatusOr<Timestamp> ParsePaxTime(std::string_view text) {
  const absl::Status malformed = absl::InvalidArgumentError("not a time in seconds");
  const char* end = text.data() + text.size();
  const bool negative = text.starts_with('-');
  Timestamp time;
  // The sign is left to from_chars, so that the most negative number can be read.
  auto [stop, error] = std::from_chars(text.data(), end, time.seconds);
  if (error != std::errc()) return malformed;
  if (stop == end) return time;
  if (*stop != '.') return malformed;

  uint32_t scale = kNanosecondsPerSecond / 10;
  bool excess = false;
  for (const char* digit = stop + 1; digit != end; ++digit) {
    if (!IsDigit(*digit)) return malformed;
    const auto value = static_cast<uint32_t>(*digit - '0');
    time.nanoseconds += value * scale;
    excess = excess || (scale == 0 && value != 0);
    scale /= 10;
  }
  if (!negative) return time;

  // -1.5 is half a second after -2.
  if (excess) ++time.nanoseconds;
  if (time.nanoseconds == 0) return time;
  if (time.seconds == std::numeric_limits<int64_t>::min()) return malformed;
  --time.seconds;
  time.nanoseconds = kNanosecondsPerSecond - time.nanoseconds;
  return time;
}

absl::Status PaxFields::Parse(std::string_view records) {
  while (!records.empty()) {
    uint64_t length = 0;
    const char* begin = records.data();
    auto [stop, error] = std::from_chars(begin, begin + records.size(), length);
    const auto prefix = static_cast<size_t>(stop - begin) + 1;  // the length and a blank
    if (error != std::errc() || length > records.size() || length <= prefix || *stop != ' ' ||
        records[length - 1] != '\n') {
      return absl::InvalidArgumentError("malformed record in an extended header");
    }
    const std::string_view record = records.substr(prefix, length - prefix - 1);
    records.remove_prefix(length);
    const size_t equals = record.find('=');
    if (equals == record.npos || equals == 0) {
      return absl::InvalidArgumentError("record without a key in an extended header");
    }
    const std::string_view key = record.substr(0, equals);
    RETURN_IF_ERROR(Apply(key, record.substr(equals + 1)), "extended header: {}",
                    absl::CHexEscape({key.data(), key.size()}));
    if (xattrs_.size() + libarchive_xattrs_.size() > 2 * kMaxPaxXattrs) {
      return absl::ResourceExhaustedError(
          fmt::format("extended header with more than {} xattrs", kMaxPaxXattrs));
    }
  }
  if (sparse_offset_)
    return absl::InvalidArgumentError("extended header: sparse run has no length");
  return absl::OkStatus();
}

absl::Status PaxFields::Apply(std::string_view key, std::string_view value) {
  if (key.starts_with(kSchilyXattr)) {
    xattrs_[DecodeSchilyName(key.substr(kSchilyXattr.size()))] = value;
    return absl::OkStatus();
  }
  if (key.starts_with(kLibarchiveXattr)) {
    std::string decoded;
    if (!absl::Base64Unescape({value.data(), value.size()}, &decoded)) {
      return absl::InvalidArgumentError("value is not base64");
    }
    libarchive_xattrs_[DecodeLibarchiveName(key.substr(kLibarchiveXattr.size()))] = decoded;
    return absl::OkStatus();
  }
  if (key == "SCHILY.acl.access") {
    access_acl_ = value;
    return absl::OkStatus();
  }
  if (key == "SCHILY.acl.default") {
    default_acl_ = value;
    return absl::OkStatus();
  }
  if (key.starts_with(kGnuSparsePrefix))
    return ApplySparse(key.substr(kGnuSparsePrefix.size()), value);

  const bool given = !value.empty();
  if (key == "path") {
    path.reset();
    if (given) {
      ASSIGN_OR_RETURN(path, CheckedText(value));
    }
  } else if (key == "linkpath") {
    link_path.reset();
    if (given) {
      ASSIGN_OR_RETURN(link_path, CheckedText(value));
    }
  } else if (key == "size") {
    size.reset();
    if (given) {
      ASSIGN_OR_RETURN(size, ParsePaxNumber(value));
    }
  } else if (key == "uid") {
    uid.reset();
    if (given) {
      ASSIGN_OR_RETURN(uid, ParsePaxNumber(value));
    }
  } else if (key == "gid") {
    gid.reset();
    if (given) {
      ASSIGN_OR_RETURN(gid, ParsePaxNumber(value));
    }
  } else if (key == "mtime") {
    mtime.reset();
    if (given) {
      ASSIGN_OR_RETURN(mtime, ParsePaxTime(value));
    }
  }
  return absl::OkStatus();
}

absl::Status PaxFields::ApplySparse(std::string_view key, std::string_view value) {
  if (key == "name") {
    ASSIGN_OR_RETURN(sparse_path, CheckedText(value));
  } else if (key == "size" || key == "realsize") {
    ASSIGN_OR_RETURN(sparse_size, ParsePaxNumber(value));
  } else if (key == "major") {
    ASSIGN_OR_RETURN(sparse_major, ParsePaxNumber(value));
  } else if (key == "minor") {
    ASSIGN_OR_RETURN(sparse_minor, ParsePaxNumber(value));
  } else if (key == "numblocks") {
    // Says how many runs follow; needed to know that this is a sparse file if there are none.
    if (!sparse_map) sparse_map.emplace();
  } else if (key == "map") {
    return ParseSparseMap(value);
  } else if (key == "offset") {
    if (sparse_offset_) return absl::InvalidArgumentError("run before it has no length");
    ASSIGN_OR_RETURN(sparse_offset_, ParsePaxNumber(value));
  } else if (key == "numbytes") {
    if (!sparse_offset_) return absl::InvalidArgumentError("run has no offset");
    ASSIGN_OR_RETURN(const uint64_t length, ParsePaxNumber(value));
    if (!sparse_map) sparse_map.emplace();
    sparse_map->push_back({*sparse_offset_, length});
    sparse_offset_.reset();
  }
  return absl::OkStatus();
}

absl::Status PaxFields::ParseSparseMap(std::string_view value) {
  sparse_map.emplace();
  std::optional<uint64_t> offset;
  while (!value.empty()) {
    const size_t comma = std::min(value.find(','), value.size());
    ASSIGN_OR_RETURN(const uint64_t number, ParsePaxNumber(value.substr(0, comma)));
    value.remove_prefix(std::min(comma + 1, value.size()));
    if (offset) {
      sparse_map->push_back({*offset, number});
      offset.reset();
    } else {
      offset = number;
    }
  }
  if (offset) return absl::InvalidArgumentError("last run has no length");
  return absl::OkStatus();
}

bool PaxFields::describes_one_file() const {
  return path || link_path || size || sparse_path || sparse_size || sparse_major || sparse_minor ||
         sparse_map;
}

PaxFields PaxFields::WithoutXattrs() const {
  PaxFields copy;
  copy.path = path;
  copy.link_path = link_path;
  copy.size = size;
  copy.uid = uid;
  copy.gid = gid;
  copy.mtime = mtime;
  copy.sparse_path = sparse_path;
  copy.sparse_size = sparse_size;
  copy.sparse_major = sparse_major;
  copy.sparse_minor = sparse_minor;
  copy.sparse_map = sparse_map;
  return copy;
}

uint64_t PaxFields::xattr_bytes() const {
  uint64_t bytes = access_acl_.value_or("").size() + default_acl_.value_or("").size();
  for (const auto* xattrs : {&xattrs_, &libarchive_xattrs_}) {
    for (const auto& [name, value] : *xattrs) bytes += name.size() + value.size();
  }
  return bytes;
}

absl::StatusOr<std::vector<Xattr>> PaxFields::TakeXattrs(const PaxFields& globals) {
  xattrs_.insert(globals.xattrs_.begin(), globals.xattrs_.end());
  libarchive_xattrs_.insert(globals.libarchive_xattrs_.begin(), globals.libarchive_xattrs_.end());
  const std::string access_acl = access_acl_.value_or(globals.access_acl_.value_or(""));
  const std::string default_acl = default_acl_.value_or(globals.default_acl_.value_or(""));
  // The text of an ACL wins over the binary form: GNU tar sets it last.
  if (!access_acl.empty()) {
    ASSIGN_OR_RETURN(const PosixAcl acl, ParseAclText(access_acl), "access ACL");
    xattrs_.insert_or_assign(std::string(kAccessAclXattr), FormatAclXattr(acl));
  }
  if (!default_acl.empty()) {
    ASSIGN_OR_RETURN(const PosixAcl acl, ParseAclText(default_acl), "default ACL");
    xattrs_.insert_or_assign(std::string(kDefaultAclXattr), FormatAclXattr(acl));
  }
  // libarchive writes both forms of every xattr. Its own one is the fallback.
  xattrs_.merge(libarchive_xattrs_);

  std::vector<Xattr> result;
  result.reserve(xattrs_.size());
  for (auto& [name, value] : xattrs_) result.push_back({name, std::move(value)});
  return result;
}

}  // namespace lamina::erofs
