// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/origin_blob.h"

#include <utility>

namespace lamina::chunkstore {
namespace {

// Sections are held in memory whole while they are checked, so this bounds what a hostile image can
// ask for. The frame table of a blob of 4 TiB is as large.
constexpr uint64_t kMaxSectionLength = 1 << 30;

absl::Status CheckLength(const Section& section, std::string_view name) {
  if (section.length <= kMaxSectionLength) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format("{} has {} bytes, more than the {} allowed", name,
                                                  section.length, kMaxSectionLength));
}

std::span<std::byte> Writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

}  // namespace

OriginBlob::OriginBlob(const LayerDescriptor& descriptor, std::shared_ptr<Origin> origin)
    : descriptor_(descriptor) {
  SetOrigin(std::move(origin));
}

void OriginBlob::SetOrigin(std::shared_ptr<Origin> origin) {
  std::string name = origin == nullptr ? "no origin" : "origin " + origin->name();
  std::lock_guard lock(mutex_);
  origin_ = std::move(origin);
  name_ = std::move(name);
  object_ = nullptr;
}

std::string OriginBlob::name() const {
  std::lock_guard lock(mutex_);
  return name_;
}

uint64_t OriginBlob::preferred_request_size() const {
  std::lock_guard lock(mutex_);
  return origin_ == nullptr ? 0 : origin_->preferred_request_size();
}

absl::StatusOr<std::shared_ptr<OriginObject>> OriginBlob::Object() {
  // Held while the object is opened: all who wait need it.
  std::lock_guard lock(mutex_);
  if (object_ != nullptr) return object_;
  if (origin_ == nullptr) return absl::UnavailableError("there is no origin to read from");
  ASSIGN_OR_RETURN(object_, origin_->Open(descriptor_.digest, descriptor_.size), "{}", name_);
  return object_;
}

absl::Status OriginBlob::Read(std::span<const RangeRead> ranges) {
  ASSIGN_OR_RETURN(const std::shared_ptr<OriginObject> object, Object());
  absl::Status status = object->Read(ranges);
  if (status.ok()) return status;
  Drop(object);
  return Annotate(std::move(status), name());
}

absl::Status OriginBlob::Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                                const OriginObject::Sink& sink) {
  ASSIGN_OR_RETURN(const std::shared_ptr<OriginObject> object, Object());
  bool refused = false;
  absl::Status status =
      object->Stream(offset, length, buffer, [&](std::span<const std::byte> piece) {
        absl::Status taken = sink(piece);
        refused = !taken.ok();
        return taken;
      });
  if (status.ok() || refused) return status;
  Drop(object);
  return Annotate(std::move(status), name());
}

void OriginBlob::Drop(const std::shared_ptr<OriginObject>& object) {
  // It may be another file, or another server, by the time it is opened again.
  std::lock_guard lock(mutex_);
  if (object_ == object) object_ = nullptr;
}

bool OriginBlob::Distrust() {
  std::lock_guard lock(mutex_);
  return origin_ != nullptr && origin_->Distrust();
}

absl::StatusOr<BlobTables> OriginBlob::ReadTables() {
  absl::StatusOr<BlobTables> tables = TryToReadTables();
  if (!absl::IsDataLoss(tables.status()) || !Distrust()) return tables;
  return TryToReadTables();
}

absl::StatusOr<BlobTables> OriginBlob::TryToReadTables() {
  // Checked here, before it is used as a length; Parse checks the rest.
  if (descriptor_.section_table_offset > descriptor_.size ||
      descriptor_.size - descriptor_.section_table_offset != sizeof(SectionTableRecord)) {
    return absl::InvalidArgumentError(
        fmt::format("a section table at {} does not fit an object of {} bytes",
                    descriptor_.section_table_offset, descriptor_.size));
  }
  BlobTables tables;
  tables.section_table.resize(sizeof(SectionTableRecord));
  const RangeRead table{descriptor_.section_table_offset, Writable(tables.section_table)};
  RETURN_IF_ERROR(Read(std::span(&table, 1)), "section table");
  ASSIGN_OR_RETURN(const SectionTable sections,
                   SectionTable::Parse(AsBytes(tables.section_table), descriptor_));

  // The two sections are neighbours (FORMAT.md), so one range holds both.
  const Section& metadata = sections.metadata;
  const Section& frames = sections.frame_table;
  RETURN_IF_ERROR(CheckLength(metadata, "metadata"));
  RETURN_IF_ERROR(CheckLength(frames, "frame table"));
  std::string stored(metadata.length + frames.length, '\0');
  const RangeRead both{metadata.offset, Writable(stored)};
  RETURN_IF_ERROR(Read(std::span(&both, 1)), "metadata and frame table");
  const std::span<const std::byte> bytes = AsBytes(stored);
  ASSIGN_OR_RETURN(tables.metadata,
                   DecodeSection(metadata, "metadata", bytes.first(metadata.length)));
  ASSIGN_OR_RETURN(tables.frames,
                   DecodeSection(frames, "frame table", bytes.subspan(metadata.length)));
  return tables;
}

absl::StatusOr<std::string> OriginBlob::ReadChunkTable(const SectionTable& sections) {
  RETURN_IF_ERROR(CheckLength(sections.chunk_table, "chunk table"));
  std::string stored(sections.chunk_table.length, '\0');
  const RangeRead range{sections.chunk_table.offset, Writable(stored)};
  RETURN_IF_ERROR(Read(std::span(&range, 1)), "chunk table");
  return DecodeSection(sections.chunk_table, "chunk table", AsBytes(stored));
}

}  // namespace lamina::chunkstore
