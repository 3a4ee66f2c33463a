// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/origin_blob.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

namespace lamina::chunkstore {
namespace {

// Sections are held in memory whole while they are checked, so this bounds what a hostile image can
// ask for. The frame table of a blob of 4 TiB is as large.
constexpr uint64_t kMaxSectionLength = 1 << 30;

// More are given only where images of many registries share a layer. The last one makes room.
constexpr size_t kMaxSources = 8;

absl::Status CheckLength(const Section& section, std::string_view name) {
  if (section.length <= kMaxSectionLength) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format("{} has {} bytes, more than the {} allowed", name,
                                                  section.length, kMaxSectionLength));
}

std::span<std::byte> Writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

}  // namespace

// An origin, with the object once it is open.
class OriginBlob::Source {
 public:
  explicit Source(std::shared_ptr<Origin> origin)
      : origin_(std::move(origin)), name_("origin " + origin_->name()) {}

  Origin& origin() { return *origin_; }
  const std::string& name() const { return name_; }

  absl::StatusOr<std::shared_ptr<OriginObject>> Object(const LayerDescriptor& descriptor) {
    // Held while the object is opened: all who wait need it.
    std::lock_guard lock(mutex_);
    if (object_ == nullptr) {
      ASSIGN_OR_RETURN(object_, origin_->Open(descriptor.digest, descriptor.size));
    }
    return object_;
  }
  // After a read of it failed. It may be another file, or another server, by the time it is opened
  // again.
  void Drop(const std::shared_ptr<OriginObject>& object) {
    std::lock_guard lock(mutex_);
    if (object_ == object) object_ = nullptr;
  }

 private:
  const std::shared_ptr<Origin> origin_;
  const std::string name_;
  std::mutex mutex_;
  std::shared_ptr<OriginObject> object_;  // null: to be opened
};

OriginBlob::OriginBlob(const LayerDescriptor& descriptor, std::shared_ptr<Origin> origin)
    : descriptor_(descriptor) {
  AddOrigin(std::move(origin));
}

void OriginBlob::AddOrigin(std::shared_ptr<Origin> origin) {
  if (origin == nullptr) return;
  const auto source = std::make_shared<Source>(std::move(origin));
  std::lock_guard lock(mutex_);
  const auto same = std::ranges::find(sources_, source->name(), &Source::name);
  if (same != sources_.end()) {
    *same = source;
  } else if (sources_.size() < kMaxSources) {
    sources_.push_back(source);
  } else {
    sources_.back() = source;
  }
}

std::vector<std::shared_ptr<OriginBlob::Source>> OriginBlob::Sources() const {
  std::lock_guard lock(mutex_);
  return sources_;
}

std::string OriginBlob::name() const {
  std::lock_guard lock(mutex_);
  return sources_.empty() ? "no origin" : sources_.front()->name();
}

uint64_t OriginBlob::preferred_request_size() const {
  std::lock_guard lock(mutex_);
  return sources_.empty() ? 0 : sources_.front()->origin().preferred_request_size();
}

absl::Status OriginBlob::UseAny(const Use& use, const bool& final) {
  absl::Status failure;
  for (const std::shared_ptr<Source>& source : Sources()) {
    absl::StatusOr<std::shared_ptr<OriginObject>> object = source->Object(descriptor_);
    absl::Status status = object.status();
    if (status.ok()) status = use(**object);
    if (final) return status;
    if (status.ok()) {
      if (failure.ok()) return status;
      std::lock_guard lock(mutex_);
      const auto found = std::ranges::find(sources_, source);
      if (found != sources_.end() && found != sources_.begin()) {
        std::rotate(sources_.begin(), found, found + 1);
        ++order_;
      }
      return status;
    }
    if (object.ok()) source->Drop(*object);
    status = Annotate(std::move(status), source->name());
    failure = failure.ok() ? std::move(status)
                           : absl::Status(failure.code(),
                                          absl::StrCat(failure.message(), "; ", status.message()));
  }
  if (!failure.ok()) return failure;
  return absl::UnavailableError("there is no origin to read from");
}

absl::Status OriginBlob::Read(std::span<const RangeRead> ranges) {
  return UseAny([&](OriginObject& object) { return object.Read(ranges); }, false);
}

absl::Status OriginBlob::Stream(uint64_t offset, uint64_t length, std::span<std::byte> buffer,
                                const OriginObject::Sink& sink) {
  bool refused = false;
  const auto take = [&](std::span<const std::byte> piece) {
    absl::Status taken = sink(piece);
    refused = !taken.ok();
    offset += piece.size();
    length -= piece.size();
    return taken;
  };
  return UseAny([&](OriginObject& object) { return object.Stream(offset, length, buffer, take); },
                refused);
}

uint64_t OriginBlob::order() const {
  std::lock_guard lock(mutex_);
  return order_;
}

bool OriginBlob::Distrust(uint64_t order, size_t attempt) {
  std::lock_guard lock(mutex_);
  // Once more than there are sources: one may have its mirrors passed over first.
  if (sources_.empty() || attempt > sources_.size()) return false;
  if (order != order_) return true;
  if (attempt == 0 && sources_.front()->origin().Distrust()) return true;
  if (sources_.size() < 2) return false;
  std::rotate(sources_.begin(), sources_.begin() + 1, sources_.end());
  ++order_;
  return true;
}

absl::StatusOr<BlobTables> OriginBlob::ReadTables() {
  return UntilRight([this] { return TryToReadTables(); });
}

absl::StatusOr<std::string> OriginBlob::ReadChunkTable(const SectionTable& sections) {
  return UntilRight([&] { return TryToReadChunkTable(sections); });
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

absl::StatusOr<std::string> OriginBlob::TryToReadChunkTable(const SectionTable& sections) {
  RETURN_IF_ERROR(CheckLength(sections.chunk_table, "chunk table"));
  std::string stored(sections.chunk_table.length, '\0');
  const RangeRead range{sections.chunk_table.offset, Writable(stored)};
  RETURN_IF_ERROR(Read(std::span(&range, 1)), "chunk table");
  return DecodeSection(sections.chunk_table, "chunk table", AsBytes(stored));
}

}  // namespace lamina::chunkstore
