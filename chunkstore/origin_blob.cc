// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/origin_blob.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/metadata_file.h"

namespace lamina::chunkstore {
namespace {

// What is read of an object's end to have its tables with one request: they have a hundredth of usual
// images' bytes and less.
constexpr uint64_t kTailPart = 128;
constexpr uint64_t kMinTail = 64 << 10;
constexpr uint64_t kMaxTail = 4 << 20;
constexpr size_t kStreamBuffer = 256 << 10;

// More are given only where images of many registries share a layer. The last one makes room.
constexpr size_t kMaxSources = 8;

absl::Status CheckLength(const Section& section, std::string_view name) {
  if (section.length <= kMaxSectionLength) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{} has {} bytes, more than the {} allowed", name,
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
  size_t id() const { return std::hash<std::string>()(name_); }

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
  // After bytes of it were wrong.
  void Drop() {
    std::lock_guard lock(mutex_);
    object_ = nullptr;
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

size_t OriginBlob::id() const {
  std::lock_guard lock(mutex_);
  return sources_.empty() ? 0 : sources_.front()->id();
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
  std::shared_ptr<Source> distrusted;
  {
    std::lock_guard lock(mutex_);
    // Once more than there are sources: one may have its mirrors passed over, or be opened again.
    if (sources_.empty() || attempt > sources_.size()) return false;
    if (order != order_) return true;
    distrusted = sources_.front();
    if (attempt == 0 && distrusted->origin().Distrust()) return true;
    // With a single one, what it has by now is all that is left to try.
    if (sources_.size() < 2 && attempt > 0) return false;
    std::rotate(sources_.begin(), sources_.begin() + 1, sources_.end());
    ++order_;
  }
  distrusted->Drop();
  return true;
}

absl::StatusOr<BlobTables> OriginBlob::ReadTables(int metadata) {
  return UntilRight([&] { return TryToReadTables(metadata); });
}

absl::StatusOr<std::string> OriginBlob::ReadChunkTable(const SectionTable& sections) {
  return UntilRight([&] { return TryToReadChunkTable(sections); });
}

uint64_t OriginBlob::TailLength() const {
  const uint64_t least = sizeof(SectionTableRecord);
  if (preferred_request_size() == 0) return least;
  return std::min(descriptor_.size, std::clamp(descriptor_.size / kTailPart, kMinTail, kMaxTail));
}

absl::StatusOr<BlobTables> OriginBlob::TryToReadTables(int metadata) {
  // Checked here, before it is used as a length; Parse checks the rest.
  if (descriptor_.section_table_offset > descriptor_.size ||
      descriptor_.size - descriptor_.section_table_offset != sizeof(SectionTableRecord)) {
    return absl::InvalidArgumentError(
        fmt::format("a section table at {} does not fit an object of {} bytes",
                    descriptor_.section_table_offset, descriptor_.size));
  }
  std::string tail(TailLength(), '\0');
  const uint64_t tail_offset = descriptor_.size - tail.size();
  const RangeRead end{tail_offset, Writable(tail)};
  RETURN_IF_ERROR(Read(std::span(&end, 1)), "section table");
  BlobTables tables{.section_table = tail.substr(tail.size() - sizeof(SectionTableRecord))};
  ASSIGN_OR_RETURN(const SectionTable sections,
                   SectionTable::Parse(AsBytes(tables.section_table), descriptor_));
  RETURN_IF_ERROR(CheckLength(sections.chunk_table, "chunk table"));
  RETURN_IF_ERROR(CheckLength(sections.metadata, "metadata"));
  RETURN_IF_ERROR(CheckLength(sections.frame_table, "frame table"));

  // The three are neighbours (FORMAT.md), and their bytes come in order.
  MetadataFile file(metadata, sections.metadata);
  std::string chunks;
  std::string frames;
  uint64_t position = sections.chunk_table.offset;
  const auto take = [&](std::span<const std::byte> bytes) -> absl::Status {
    const auto part_of = [&](const Section& section) {
      const uint64_t left = section.offset + section.length - position;
      const auto part = bytes.first(std::min<uint64_t>(left, bytes.size()));
      bytes = bytes.subspan(part.size());
      position += part.size();
      return part;
    };
    if (position < sections.metadata.offset) chunks.append(AsText(part_of(sections.chunk_table)));
    if (position >= sections.metadata.offset && position < sections.frame_table.offset &&
        !bytes.empty()) {
      RETURN_IF_ERROR(file.Append(part_of(sections.metadata)));
    }
    if (!bytes.empty()) frames.append(AsText(part_of(sections.frame_table)));
    return absl::OkStatus();
  };
  if (position < tail_offset) {
    std::vector<std::byte> buffer(kStreamBuffer);
    const uint64_t before = std::min(tail_offset, descriptor_.section_table_offset);
    RETURN_IF_ERROR(Stream(position, before - position, buffer, take), "tables");
  }
  const uint64_t rest = descriptor_.section_table_offset - position;
  RETURN_IF_ERROR(take(AsBytes(tail).subspan(position - tail_offset, rest)));
  RETURN_IF_ERROR(file.Finish());
  ASSIGN_OR_RETURN(tables.chunks,
                   DecodeSection(sections.chunk_table, "chunk table", AsBytes(chunks)));
  ASSIGN_OR_RETURN(tables.frames,
                   DecodeSection(sections.frame_table, "frame table", AsBytes(frames)));
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
