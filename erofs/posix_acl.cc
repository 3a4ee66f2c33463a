// SPDX-License-Identifier: Apache-2.0
#include "erofs/posix_acl.h"

#include <absl/strings/escaping.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace lamina::erofs {
namespace {

using Tag = AclEntry::Tag;

constexpr uint32_t kXattrVersion = 2;
constexpr size_t kXattrHeaderSize = 4;
constexpr size_t kXattrEntrySize = 8;
constexpr uint32_t kNoId = 0xffffffff;
constexpr std::string_view kBlanks = " \t\r";

bool IsNamed(Tag tag) { return tag == Tag::kUser || tag == Tag::kGroup; }

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

absl::Status Malformed(std::string_view entry, std::string_view why) {
  return absl::InvalidArgumentError(
      fmt::format("ACL entry \"{}\": {}", absl::CHexEscape({entry.data(), entry.size()}), why));
}

absl::StatusOr<PosixAcl> Validated(PosixAcl acl) {
  std::sort(acl.begin(), acl.end());
  size_t base_entries = 0;
  size_t masks = 0;
  size_t named = 0;
  for (size_t i = 0; i < acl.size(); ++i) {
    if (i > 0 && acl[i].tag == acl[i - 1].tag && acl[i].id == acl[i - 1].id) {
      return absl::InvalidArgumentError("ACL with two entries for the same user or group");
    }
    if (IsNamed(acl[i].tag)) {
      ++named;
    } else if (acl[i].tag == Tag::kMask) {
      ++masks;
    } else {
      ++base_entries;
    }
  }
  if (base_entries != 3) {
    return absl::InvalidArgumentError("ACL without entries for owner, group and others");
  }
  if (named > 0 && masks == 0) return absl::InvalidArgumentError("ACL without a mask");
  return acl;
}

std::optional<uint32_t> ParseId(std::string_view text) {
  uint32_t id = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, id);
  if (error != std::errc() || stop != end || id == kNoId) return std::nullopt;
  return id;
}

std::optional<uint16_t> ParsePermissions(std::string_view text) {
  uint16_t permissions = 0;
  if (text.empty()) return std::nullopt;
  for (char c : text) {
    if (c == 'r') {
      permissions |= 4;
    } else if (c == 'w') {
      permissions |= 2;
    } else if (c == 'x') {
      permissions |= 1;
    } else if (c != '-') {
      return std::nullopt;
    }
  }
  return permissions;
}

// Tag for the first field of an entry; `qualified` says whether the second names someone.
std::optional<Tag> ParseTag(std::string_view text, bool qualified) {
  if (text == "user" || text == "u") return qualified ? Tag::kUser : Tag::kOwner;
  if (text == "group" || text == "g") return qualified ? Tag::kGroup : Tag::kOwningGroup;
  if (qualified) return std::nullopt;
  if (text == "mask" || text == "m") return Tag::kMask;
  if (text == "other" || text == "o") return Tag::kOther;
  return std::nullopt;
}

absl::StatusOr<AclEntry> ParseTextEntry(std::string_view text) {
  std::vector<std::string_view> fields;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(':', begin), text.size());
    fields.push_back(Trim(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  if (fields.front() == "default") fields.erase(fields.begin());
  // "mask:r-x" is short for "mask::r-x", and "other" likewise.
  if (fields.size() == 2) fields.insert(fields.begin() + 1, std::string_view());
  if (fields.size() < 3 || fields.size() > 4) return Malformed(text, "wrong number of fields");

  const std::optional<Tag> tag = ParseTag(fields[0], !fields[1].empty());
  if (!tag) return Malformed(text, "unknown kind");
  const std::optional<uint16_t> permissions = ParsePermissions(fields[2]);
  if (!permissions) return Malformed(text, "unknown permissions");
  AclEntry entry{*tag, kNoId, *permissions};
  if (IsNamed(*tag)) {
    std::optional<uint32_t> id = ParseId(fields.size() == 4 ? fields[3] : fields[1]);
    if (!id && fields[1] == "root") id = 0;
    if (!id) return Malformed(text, "has no numeric id, and names differ between machines");
    entry.id = *id;
  }
  return entry;
}

void AppendLittleEndian(std::string& out, uint32_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

uint32_t LittleEndian(std::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i - 1]);
  return value;
}

}  // namespace

absl::StatusOr<PosixAcl> ParseAclText(std::string_view text) {
  PosixAcl acl;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(",\n"), text.size());
    std::string_view entry = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    entry = Trim(entry.substr(0, entry.find('#')));
    if (entry.empty()) continue;
    ASSIGN_OR_RETURN(const AclEntry parsed, ParseTextEntry(entry));
    acl.push_back(parsed);
  }
  return Validated(std::move(acl));
}

absl::StatusOr<PosixAcl> ParseAclXattr(std::string_view value) {
  if (value.size() < kXattrHeaderSize || (value.size() - kXattrHeaderSize) % kXattrEntrySize != 0) {
    return absl::InvalidArgumentError(fmt::format("ACL of {} bytes", value.size()));
  }
  if (LittleEndian(value.substr(0, 4)) != kXattrVersion) {
    return absl::InvalidArgumentError("ACL of an unknown version");
  }
  PosixAcl acl;
  for (size_t at = kXattrHeaderSize; at < value.size(); at += kXattrEntrySize) {
    const uint32_t tag = LittleEndian(value.substr(at, 2));
    const uint32_t permissions = LittleEndian(value.substr(at + 2, 2));
    const uint32_t id = LittleEndian(value.substr(at + 4, 4));
    if (tag == 0 || tag > 0x20 || (tag & (tag - 1)) != 0 || permissions > 7) {
      return absl::InvalidArgumentError(
          fmt::format("ACL entry with tag 0x{:x} and permissions 0x{:x}", tag, permissions));
    }
    AclEntry entry{static_cast<Tag>(tag), kNoId, static_cast<uint16_t>(permissions)};
    if (IsNamed(entry.tag)) {
      if (id == kNoId) return absl::InvalidArgumentError("ACL entry without an id");
      entry.id = id;
    }
    acl.push_back(entry);
  }
  return Validated(std::move(acl));
}

std::string FormatAclXattr(const PosixAcl& acl) {
  std::string value;
  AppendLittleEndian(value, kXattrVersion, 4);
  for (const AclEntry& entry : acl) {
    AppendLittleEndian(value, static_cast<uint16_t>(entry.tag), 2);
    AppendLittleEndian(value, entry.permissions, 2);
    AppendLittleEndian(value, entry.id, 4);
  }
  return value;
}

uint16_t AclMode(const PosixAcl& acl) {
  uint16_t mode = 0;
  for (const AclEntry& entry : acl) {
    switch (entry.tag) {
      case Tag::kOwner:
        mode |= entry.permissions << 6;
        break;
      case Tag::kOwningGroup:
        mode |= entry.permissions << 3;
        break;
      case Tag::kMask:
        mode = static_cast<uint16_t>((mode & ~0070) | entry.permissions << 3);
        break;
      case Tag::kOther:
        mode |= entry.permissions;
        break;
      case Tag::kUser:
      case Tag::kGroup:
        break;
    }
  }
  return mode;
}

bool IsMinimal(const PosixAcl& acl) { return acl.size() == 3; }

}  // namespace lamina::erofs
