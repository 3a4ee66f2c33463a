// SPDX-License-Identifier: Apache-2.0
//
// Opens an arbitrary object as a layer blob. Its digests are set right first, as the author of a
// hostile image would, so that everything behind them is reached.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/blob_tables.h"

namespace lamina::chunkstore {
namespace {

// A part of the object, or nothing if it is not inside.
std::span<std::byte> Part(std::span<std::byte> object, uint64_t offset, uint64_t length) {
  if (offset > object.size() || length > object.size() - offset) return {};
  return object.subspan(offset, length);
}

void SetDigest(std::span<const std::byte> bytes, uint8_t (&digest)[32]) {
  std::ranges::copy(Digest::Of(bytes).bytes, digest);
}

void SetFrameDigests(std::span<std::byte> object, std::span<std::byte> table) {
  for (; table.size() >= sizeof(FrameRecord); table = table.subspan(sizeof(FrameRecord))) {
    FrameRecord record;
    std::memcpy(&record, table.data(), sizeof(record));
    if (record.length > kMaxFrameLength) continue;
    SetDigest(Part(object, record.offset, record.length), record.digest);
    std::memcpy(table.data(), &record, sizeof(record));
  }
}

LayerDescriptor SetDigests(std::span<std::byte> object) {
  SectionTableRecord table;
  const auto table_bytes = object.last(sizeof(table));
  std::memcpy(&table, table_bytes.data(), sizeof(table));
  SetFrameDigests(object, Part(object, table.frame_table.offset, table.frame_table.length));
  for (SectionRecord* section : {&table.chunk_table, &table.metadata, &table.frame_table}) {
    SetDigest(Part(object, section->offset, section->length), section->digest);
  }
  std::memcpy(table_bytes.data(), &table, sizeof(table));
  return {.size = object.size(),
          .section_table_offset = object.size() - sizeof(table),
          .section_table_digest = Digest::Of(table_bytes)};
}

void Require(bool condition) {
  if (!condition) std::abort();
}

// What parsed must be safe to use and consistent.
void UseTables(std::span<std::byte> object, const SectionTable& sections,
               const FrameTable& frames) {
  for (uint32_t i = 0; i < frames.size(); ++i) {
    const FrameRecord& frame = frames[i];
    Require(frames.Find(frame.first_block) == i);
    Require(frames.Find(frame.first_block + frame.blocks - 1) == i);
    std::vector<std::byte> content(uint64_t{frame.blocks} * kBlockSize);
    if (DecodeFrame(frame, Part(object, frame.offset, frame.length), content).ok()) {
      FrameIsIntact(frame, content);
    }
  }
}

void OpenBlob(std::span<std::byte> object) {
  const LayerDescriptor descriptor = SetDigests(object);
  const auto sections =
      SectionTable::Parse(object.subspan(descriptor.section_table_offset), descriptor);
  if (!sections.ok()) return;
  const auto decode = [&](const Section& section) {
    return DecodeSection(section, "section", Part(object, section.offset, section.length));
  };
  decode(sections->metadata).IgnoreError();
  const absl::StatusOr<std::string> frame_bytes = decode(sections->frame_table);
  const absl::StatusOr<std::string> chunk_bytes = decode(sections->chunk_table);
  Require(frame_bytes.ok() && chunk_bytes.ok());
  const auto frames = FrameTable::Parse(AsBytes(*frame_bytes), *sections);
  if (!frames.ok()) return;
  UseTables(object, *sections, *frames);
  const auto chunks = ChunkTable::Parse(AsBytes(*chunk_bytes), *sections, *frames);
  if (!chunks.ok()) return;
  for (uint32_t i = 0; i < chunks->size(); ++i) {
    Require(chunks->Find((*chunks)[i].first_block) == i);
  }
}

}  // namespace
}  // namespace lamina::chunkstore

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < sizeof(lamina::chunkstore::SectionTableRecord)) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  std::vector<std::byte> object(bytes.begin(), bytes.end());
  lamina::chunkstore::OpenBlob(object);
  return 0;
}
