// SPDX-License-Identifier: Apache-2.0
//
// Xattrs: an inode's area holds the ids of shared ones and then its own.
#include <algorithm>
#include <cstring>

#include "erofs/format.h"
#include "erofs/reader.h"

namespace lamina::erofs {

absl::Status Reader::ReadLongPrefixes(uint64_t offset, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    // A length, then that many bytes: the number of a short prefix and what follows it.
    ASSIGN_OR_RETURN(const uint16_t length, ReadStruct<uint16_t>(offset), "prefix {}", i);
    ASSIGN_OR_RETURN(const auto bytes, ImageBytes(offset + sizeof(length), length), "prefix {}", i);
    if (length == 0) return absl::DataLossError(fmt::format("prefix {}: empty", i));
    long_prefixes_.push_back(
        {.base = static_cast<uint8_t>(bytes[0]),
         .infix = {reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1}});
    offset = AlignUp(offset + sizeof(length) + length, 4);
  }
  return absl::OkStatus();
}

absl::Status Reader::VisitXattrs(const InodeInfo& inode, const XattrVisitor& visit) const {
  if (inode.xattr_size <= sizeof(XattrHeader)) return absl::OkStatus();
  uint64_t offset = inode.header_offset + inode.inode_size;
  const uint64_t end = offset + inode.xattr_size;
  ASSIGN_OR_RETURN(const auto header, ReadStruct<XattrHeader>(offset), "inode {}: xattrs",
                   inode.nid);
  offset += sizeof(header);
  if (header.shared_count * sizeof(uint32_t) > end - offset) {
    return absl::DataLossError(fmt::format("inode {}: {} shared xattrs in {} bytes", inode.nid,
                                           header.shared_count, inode.xattr_size));
  }
  for (uint32_t i = 0; i < header.shared_count; ++i) {
    ASSIGN_OR_RETURN(const auto id, ReadStruct<uint32_t>(offset), "inode {}: xattrs", inode.nid);
    offset += sizeof(id);
    uint64_t shared = xattr_offset_ + uint64_t{id} * sizeof(uint32_t);
    ASSIGN_OR_RETURN(const bool more, VisitXattr(shared, image_.size(), visit),
                     "inode {}: shared xattr {}", inode.nid, id);
    if (!more) return absl::OkStatus();
  }
  while (offset < end) {
    ASSIGN_OR_RETURN(const bool more, VisitXattr(offset, end, visit), "inode {}", inode.nid);
    if (!more) return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Reader::VisitXattr(uint64_t& offset, uint64_t end,
                                        const XattrVisitor& visit) const {
  ASSIGN_OR_RETURN(const auto head, ReadStruct<XattrEntry>(offset));
  const uint64_t size = sizeof(head) + head.name_length + head.value_size;
  if (size > end - offset) {
    return absl::DataLossError(
        fmt::format("xattr at {}: {} bytes, {} left", offset, size, end - offset));
  }
  ASSIGN_OR_RETURN(const auto bytes, ImageBytes(offset, size));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string_view suffix = text.substr(sizeof(head), head.name_length);
  const std::string_view value = text.substr(sizeof(head) + head.name_length);
  const uint64_t start = std::exchange(offset, AlignUp(offset + size, 4));

  uint8_t prefix = head.prefix;
  std::string_view infix;
  if (prefix & kXattrLongPrefix) {
    const size_t index = prefix & ~kXattrLongPrefix;
    if (index >= long_prefixes_.size()) {
      return absl::DataLossError(
          fmt::format("xattr at {}: prefix {} of {}", start, index, long_prefixes_.size()));
    }
    prefix = long_prefixes_[index].base;
    infix = long_prefixes_[index].infix;
  }
  const std::optional<std::string_view> prefix_text = XattrPrefixText(prefix);
  // Like the kernel, pass over what has no name space here.
  if (!prefix_text.has_value()) return true;
  if (suffix.find('\0') != suffix.npos || infix.find('\0') != infix.npos) {
    return absl::DataLossError(fmt::format("xattr at {}: its name has a NUL", start));
  }
  return visit(*prefix_text, infix, suffix, value);
}

absl::StatusOr<std::vector<Xattr>> Reader::ReadXattrs(const InodeInfo& inode) const {
  std::vector<Xattr> xattrs;
  RETURN_IF_ERROR(VisitXattrs(inode, [&](std::string_view prefix, std::string_view infix,
                                         std::string_view suffix, std::string_view value) {
    Xattr& xattr = xattrs.emplace_back();
    xattr.name.reserve(prefix.size() + infix.size() + suffix.size());
    xattr.name.append(prefix).append(infix).append(suffix);
    xattr.value = value;
    return true;
  }));
  std::sort(xattrs.begin(), xattrs.end());
  const auto twice =
      std::adjacent_find(xattrs.begin(), xattrs.end(),
                         [](const Xattr& a, const Xattr& b) { return a.name == b.name; });
  if (twice != xattrs.end()) {
    return absl::DataLossError(fmt::format("inode {}: xattr {} twice", inode.nid, twice->name));
  }
  return xattrs;
}

absl::StatusOr<std::optional<std::string>> Reader::GetXattr(const InodeInfo& inode,
                                                            std::string_view name) const {
  std::optional<std::string> found;
  RETURN_IF_ERROR(VisitXattrs(inode, [&](std::string_view prefix, std::string_view infix,
                                         std::string_view suffix, std::string_view value) {
    const bool matches = name.size() == prefix.size() + infix.size() + suffix.size() &&
                         name.starts_with(prefix) && name.ends_with(suffix) &&
                         name.substr(prefix.size(), infix.size()) == infix;
    if (matches) found = value;
    return !matches;
  }));
  return found;
}

}  // namespace lamina::erofs
