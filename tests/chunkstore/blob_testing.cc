// SPDX-License-Identifier: Apache-2.0
#include "tests/chunkstore/blob_testing.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

namespace lamina::chunkstore {
namespace {

std::span<const std::byte> Part(std::string_view object, uint64_t offset, uint64_t length) {
  return AsBytes(object.substr(offset, length));
}

absl::Status WriteFileParts(BlobWriter& writer, const FileParts& parts, size_t step) {
  uint64_t size = 0;
  for (const FilePart& part : parts) size += part.data.size() + part.hole;
  RETURN_IF_ERROR(writer.BeginFile(size));
  for (const FilePart& part : parts) {
    for (size_t at = 0; at < part.data.size(); at += std::min(step, part.data.size() - at)) {
      RETURN_IF_ERROR(writer.Append(AsBytes(std::string_view(part.data).substr(at, step))));
    }
    if (part.hole != 0) RETURN_IF_ERROR(writer.AppendHole(part.hole));
  }
  return absl::OkStatus();
}

}  // namespace

std::string RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, size - i));
  }
  return bytes;
}

std::string TextBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text;
  while (text.size() < size) {
    text += fmt::format("line {} of file {}: {:x}\n", text.size(), seed, random());
  }
  text.resize(size);
  return text;
}

LayerDescriptor TestBlob::descriptor() const {
  return {.digest = info.digest,
          .size = info.size,
          .section_table_offset = info.section_table_offset,
          .section_table_digest = info.section_table_digest};
}

absl::StatusOr<TestBlob> TryBuildBlob(const std::vector<FileParts>& files,
                                      std::string_view metadata, const BlobWriterOptions& options,
                                      size_t step) {
  const UniqueFd file(::memfd_create("blob", MFD_CLOEXEC));
  if (!file.valid()) return ErrnoStatus(errno, "memfd_create");
  ASSIGN_OR_RETURN(auto writer, BlobWriter::Create(UniqueFd(::dup(file.get())), options));
  TestBlob blob;
  for (const FileParts& parts : files) {
    RETURN_IF_ERROR(WriteFileParts(*writer, parts, step));
    ASSIGN_OR_RETURN(std::vector<Placement> placements, writer->EndFile());
    blob.placements.push_back(std::move(placements));
  }
  ASSIGN_OR_RETURN(blob.info, writer->Finish(AsBytes(metadata)));
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(file.get()));
  blob.object.resize(size);
  RETURN_IF_ERROR(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(blob.object))));
  return blob;
}

TestBlob BuildBlob(const std::vector<FileParts>& files, std::string_view metadata,
                   const BlobWriterOptions& options) {
  absl::StatusOr<TestBlob> blob = TryBuildBlob(files, metadata, options);
  EXPECT_TRUE(blob.ok()) << blob.status();
  return blob.ok() ? *std::move(blob) : TestBlob();
}

TestBlob BuildBlob(const std::vector<std::string>& files) {
  std::vector<FileParts> parts;
  for (const std::string& file : files) parts.push_back({{.data = file}});
  return BuildBlob(parts);
}

absl::Status OpenBlob::Open(std::string_view object, const LayerDescriptor& descriptor) {
  if (object.size() != descriptor.size) return absl::DataLossError("object has another size");
  ASSIGN_OR_RETURN(
      sections,
      SectionTable::Parse(AsBytes(object.substr(descriptor.section_table_offset)), descriptor));
  const auto decode = [&](const Section& section, std::string_view name) {
    return DecodeSection(section, name, Part(object, section.offset, section.length));
  };
  ASSIGN_OR_RETURN(frame_bytes, decode(sections.frame_table, "frame table"));
  ASSIGN_OR_RETURN(chunk_bytes, decode(sections.chunk_table, "chunk table"));
  ASSIGN_OR_RETURN(metadata, decode(sections.metadata, "metadata"));
  ASSIGN_OR_RETURN(frames, FrameTable::Parse(AsBytes(frame_bytes), sections));
  ASSIGN_OR_RETURN(chunks, ChunkTable::Parse(AsBytes(chunk_bytes), sections, frames));

  address_space.resize(uint64_t{sections.blocks} * kBlockSize);
  for (uint32_t i = 0; i < frames.size(); ++i) {
    const auto into = std::as_writable_bytes(std::span(address_space))
                          .subspan(uint64_t{frames[i].first_block} * kBlockSize,
                                   uint64_t{frames[i].blocks} * kBlockSize);
    RETURN_IF_ERROR(DecodeFrame(frames[i], Part(object, frames[i].offset, frames[i].length), into),
                    "frame {}", i);
    if (!FrameIsIntact(frames[i], into)) {
      return absl::DataLossError(fmt::format("frame {}: wrong checksum", i));
    }
  }
  for (uint32_t i = 0; i < chunks.size(); ++i) {
    const Digest digest = Digest::Of(
        Part(address_space, uint64_t{chunks[i].first_block} * kBlockSize, chunks[i].length));
    if (!std::ranges::equal(digest.bytes, chunks[i].digest)) {
      return absl::DataLossError(fmt::format("chunk {}: wrong digest", i));
    }
  }
  return absl::OkStatus();
}

std::string OpenBlob::ReadFile(const std::vector<Placement>& placements, uint64_t size) const {
  std::string content(size, '\0');
  for (const Placement& placement : placements) {
    address_space.copy(content.data() + placement.offset, placement.length,
                       uint64_t{placement.block} * kBlockSize);
  }
  return content;
}

BlobParts BlobParts::Of(const TestBlob& blob) {
  SectionTableRecord table;
  std::memcpy(&table, blob.object.data() + blob.info.section_table_offset, sizeof(table));
  BlobParts parts{.frame_data = blob.object.substr(0, table.frames_length),
                  .metadata = blob.object.substr(table.metadata.offset, table.metadata.length),
                  .metadata_size = table.metadata.uncompressed_length,
                  .metadata_flags = table.metadata.flags,
                  .blocks = table.blocks};
  const auto copy_records = [&]<typename Record>(const SectionRecord& section,
                                                 std::vector<Record>* into) {
    into->resize(section.length / sizeof(Record));
    blob.object.copy(reinterpret_cast<char*>(into->data()), section.length, section.offset);
  };
  copy_records(table.chunk_table, &parts.chunks);
  copy_records(table.frame_table, &parts.frames);
  return parts;
}

SectionTableRecord BlobParts::MakeTable() const {
  uint64_t position = frame_data.size();
  const auto section = [&](std::span<const std::byte> bytes) {
    SectionRecord record{
        .offset = position, .length = bytes.size(), .uncompressed_length = bytes.size()};
    std::ranges::copy(Digest::Of(bytes).bytes, record.digest);
    position += bytes.size();
    return record;
  };
  SectionTableRecord table{
      .magic = kMagic, .version = kVersion, .blocks = blocks, .frames_length = frame_data.size()};
  table.chunk_table = section(std::as_bytes(std::span(chunks)));
  table.metadata = section(AsBytes(metadata));
  table.metadata.uncompressed_length = metadata_size;
  table.metadata.flags = metadata_flags;
  table.frame_table = section(std::as_bytes(std::span(frames)));
  return table;
}

std::string BlobParts::Assemble(const SectionTableRecord& table,
                                LayerDescriptor* descriptor) const {
  std::string object = frame_data;
  object += AsText(std::as_bytes(std::span(chunks)));
  object += metadata;
  object += AsText(std::as_bytes(std::span(frames)));
  const auto table_bytes = std::as_bytes(std::span(&table, 1));
  *descriptor = {.section_table_offset = object.size(),
                 .section_table_digest = Digest::Of(table_bytes)};
  object += AsText(table_bytes);
  descriptor->size = object.size();
  descriptor->digest = Digest::Of(AsBytes(object));
  return object;
}

}  // namespace lamina::chunkstore
