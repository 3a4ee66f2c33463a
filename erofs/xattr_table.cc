// SPDX-License-Identifier: Apache-2.0
#include "erofs/xattr_table.h"

#include <cstring>
#include <limits>

namespace lamina::erofs {
namespace {

constexpr size_t kMaxNameSize = 255;
constexpr size_t kMaxValueSize = 0xFFFF;
constexpr uint32_t kMaxShared = 255;  // XattrHeader::shared_count

}  // namespace

absl::StatusOr<XattrTable::Set> XattrTable::Add(const std::vector<Xattr>& xattrs) {
  Set set = {.first = static_cast<uint32_t>(references_.size())};
  uint64_t area_size = sizeof(XattrHeader);
  for (const Xattr& xattr : xattrs) {
    const std::optional<XattrName> name = SplitXattrName(xattr.name);
    if (!name.has_value() || name->suffix.find('\0') != std::string_view::npos) {
      return absl::InvalidArgumentError(
          fmt::format("xattr \"{}\": EROFS has no place for this name", xattr.name));
    }
    if (xattr.name.size() > kMaxNameSize || xattr.value.size() > kMaxValueSize) {
      return absl::InvalidArgumentError(fmt::format(
          "xattr \"{}\": name of {} and value of {} bytes (at most {} and {})", xattr.name,
          xattr.name.size(), xattr.value.size(), kMaxNameSize, kMaxValueSize));
    }
    const auto [found, added] = index_.try_emplace({xattr.name, xattr.value}, entries_.size());
    if (added) entries_.push_back({.name = *name, .value = xattr.value});
    ++entries_[found->second].uses;
    references_.push_back(found->second);
    ++set.count;
    area_size += EntrySize(entries_[found->second]);
  }
  if (area_size > kMaxXattrAreaSize) {
    return absl::InvalidArgumentError(
        fmt::format("xattrs of {} bytes (at most {})", area_size, kMaxXattrAreaSize));
  }
  if (references_.size() > std::numeric_limits<uint32_t>::max()) {
    return absl::ResourceExhaustedError("more than 2^32 xattrs");
  }
  return set;
}

void XattrTable::Share() {
  for (Entry& entry : entries_) {
    if (entry.uses < 2) continue;
    const uint64_t id = shared_size_ / sizeof(uint32_t);
    if (id >= kNotShared) return;
    entry.shared_id = static_cast<uint32_t>(id);
    shared_size_ += EntrySize(entry);
  }
}

void XattrTable::WriteShared(std::byte* to) const {
  for (const Entry& entry : entries_) {
    if (entry.shared_id != kNotShared) to = WriteEntry(entry, to);
  }
}

uint32_t XattrTable::AreaSize(Set set) const {
  if (set.count == 0) return 0;
  uint32_t size = sizeof(XattrHeader);
  uint32_t shared = 0;
  for (uint32_t i = set.first; i < set.first + set.count; ++i) {
    const Entry& entry = entries_[references_[i]];
    const bool is_shared = entry.shared_id != kNotShared && shared < kMaxShared;
    shared += is_shared;
    size += is_shared ? sizeof(uint32_t) : EntrySize(entry);
  }
  return size;
}

void XattrTable::WriteArea(Set set, std::byte* to) const {
  if (set.count == 0) return;
  const uint32_t shared_count = SharedCount(set);
  XattrHeader header = {.name_filter = 0xFFFFFFFF,
                        .shared_count = static_cast<uint8_t>(shared_count)};
  std::byte* shared = to + sizeof(header);
  std::byte* inlined = shared + shared_count * sizeof(uint32_t);
  uint32_t shared_left = shared_count;
  for (uint32_t i = set.first; i < set.first + set.count; ++i) {
    const Entry& entry = entries_[references_[i]];
    header.name_filter &= ~XattrFilterBit(entry.name);
    if (entry.shared_id != kNotShared && shared_left > 0) {
      std::memcpy(shared, &entry.shared_id, sizeof(uint32_t));
      shared += sizeof(uint32_t);
      --shared_left;
    } else {
      inlined = WriteEntry(entry, inlined);
    }
  }
  std::memcpy(to, &header, sizeof(header));
}

uint32_t XattrTable::SharedCount(Set set) const {
  uint32_t shared = 0;
  for (uint32_t i = set.first; i < set.first + set.count && shared < kMaxShared; ++i) {
    shared += entries_[references_[i]].shared_id != kNotShared;
  }
  return shared;
}

uint32_t XattrTable::EntrySize(const Entry& entry) {
  return static_cast<uint32_t>(
      AlignUp(sizeof(XattrEntry) + entry.name.suffix.size() + entry.value.size(), 4));
}

std::byte* XattrTable::WriteEntry(const Entry& entry, std::byte* to) {
  const XattrEntry head = {.name_length = static_cast<uint8_t>(entry.name.suffix.size()),
                           .prefix = entry.name.prefix,
                           .value_size = static_cast<uint16_t>(entry.value.size())};
  std::memcpy(to, &head, sizeof(head));
  std::memcpy(to + sizeof(head), entry.name.suffix.data(), entry.name.suffix.size());
  std::memcpy(to + sizeof(head) + entry.name.suffix.size(), entry.value.data(), entry.value.size());
  return to + EntrySize(entry);
}

}  // namespace lamina::erofs
