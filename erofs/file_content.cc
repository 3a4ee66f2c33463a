// SPDX-License-Identifier: Apache-2.0
#include "erofs/file_content.h"

#include <algorithm>
#include <array>
#include <bit>

namespace lamina::erofs {
namespace {

constexpr uint64_t kMaxHoleUnit = uint64_t{1} << 20;
// Index entries that a sparse file may need: 512 KiB of metadata.
constexpr uint64_t kMaxUnits = uint64_t{1} << 16;

}  // namespace

uint64_t HoleUnit(uint64_t size) {
  const uint64_t wanted = std::bit_ceil(size / kMaxUnits + (size % kMaxUnits != 0));
  return std::clamp<uint64_t>(wanted, kBlockSize, kMaxHoleUnit);
}

FileContent::FileContent(ContentSink& sink, uint64_t size)
    : sink_(&sink), size_(size), unit_(HoleUnit(size)) {}

absl::StatusOr<FileContent> FileContent::Begin(ContentSink& sink, uint64_t size) {
  if (size > kMaxFileSize) {
    return absl::InvalidArgumentError(
        fmt::format("file of {} bytes, at most {} are possible", size, kMaxFileSize));
  }
  RETURN_IF_ERROR(sink.BeginFile(size));
  return FileContent(sink, size);
}

absl::Status FileContent::Append(std::span<const std::byte> data) {
  if (data.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckSpace(data.size()));
  RETURN_IF_ERROR(FlushHole());
  RETURN_IF_ERROR(sink_->Append(data));
  given_ += data.size();
  return absl::OkStatus();
}

absl::Status FileContent::AppendHole(uint64_t length) {
  RETURN_IF_ERROR(CheckSpace(length));
  hole_ += length;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Extent>> FileContent::Finish() {
  hole_ = size_ - given_;
  RETURN_IF_ERROR(FlushHole());
  return sink_->EndFile();
}

absl::Status FileContent::CheckSpace(uint64_t length) const {
  if (length > size_ - given_ - hole_) {
    return absl::InvalidArgumentError(
        fmt::format("content of more than the {} bytes that were said", size_));
  }
  return absl::OkStatus();
}

absl::Status FileContent::FlushHole() {
  const uint64_t end = given_ + hole_;
  hole_ = 0;
  const uint64_t unit_begin = (given_ + unit_ - 1) / unit_ * unit_;
  const uint64_t unit_end = end == size_ ? end : end / unit_ * unit_;
  if (unit_begin < unit_end) {
    RETURN_IF_ERROR(AppendZeros(unit_begin - given_));
    RETURN_IF_ERROR(sink_->AppendHole(unit_end - unit_begin));
    given_ = unit_end;
  }
  return AppendZeros(end - given_);
}

absl::Status FileContent::AppendZeros(uint64_t length) {
  static constexpr std::array<std::byte, 65536> kZeros{};
  while (length > 0) {
    const uint64_t part = std::min<uint64_t>(length, kZeros.size());
    RETURN_IF_ERROR(sink_->Append(std::span(kZeros).first(part)));
    given_ += part;
    length -= part;
  }
  return absl::OkStatus();
}

}  // namespace lamina::erofs
