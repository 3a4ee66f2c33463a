// SPDX-License-Identifier: Apache-2.0
#include "fs/image/decompress.h"

#include <isa-l/igzip_lib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "fs/image/gzip_header.h"

namespace lamina::fs {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kGzipMagic = "\x1f\x8b"sv;
constexpr size_t kTarMagicOffset = 257;
// Input for one call of ISA-L, whose counters have 32 bits.
constexpr size_t kMaxCall = 1 << 30;

class PlainCopy : public Decompressor {
 public:
  absl::StatusOr<size_t> Run(std::span<const std::byte>& input,
                             std::span<std::byte> output) override {
    const size_t length = std::min(input.size(), output.size());
    if (length != 0) std::memcpy(output.data(), input.data(), length);
    input = input.subspan(length);
    return length;
  }
  absl::Status Finish() override { return absl::OkStatus(); }
};

// RFC 1952: any number of members, one after the other. What follows the last member and does not
// start like another is ignored, as gzip(1) does (tapes padded it with zeros).
class GzipDecompressor : public Decompressor {
 public:
  absl::Status Finish() override {
    const bool between_members = members_ > 0 && place_ == Place::kHeader && !header_.has_magic();
    if (between_members || place_ == Place::kEnded) return absl::OkStatus();
    return absl::DataLossError("gzip: the stream ends early");
  }

 private:
  enum class Place { kHeader, kContent, kEnded };
  struct Step {
    size_t used = 0;
    size_t made = 0;
  };

  absl::StatusOr<size_t> Run(std::span<const std::byte>& input,
                             std::span<std::byte> output) override {
    size_t produced = 0;
    for (;;) {
      if (place_ == Place::kHeader) RETURN_IF_ERROR(ReadHeader(input));
      if (place_ != Place::kContent) break;
      ASSIGN_OR_RETURN(const Step step, Inflate(input, output.subspan(produced)));
      input = input.subspan(step.used);
      produced += step.made;
      if (place_ == Place::kContent && step.used == 0 && step.made == 0) break;
    }
    if (place_ == Place::kEnded) input = {};
    return produced;
  }

  absl::Status ReadHeader(std::span<const std::byte>& input) {
    const absl::StatusOr<bool> complete = header_.Parse(input);
    if (absl::IsNotFound(complete.status())) {
      if (members_ == 0) return absl::DataLossError("gzip: invalid header");
      place_ = Place::kEnded;
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(complete.status());
    if (!*complete) return absl::OkStatus();
    isal_inflate_init(&state_);
    state_.crc_flag = ISAL_GZIP_NO_HDR_VER;  // checks the member's checksum and length at its end
    place_ = Place::kContent;
    return absl::OkStatus();
  }

  absl::StatusOr<Step> Inflate(std::span<const std::byte> input, std::span<std::byte> output) {
    const size_t offered = std::min(input.size(), kMaxCall);
    const size_t room = std::min(output.size(), kMaxCall);
    state_.next_in = AsBuffer(input.data());
    state_.avail_in = static_cast<uint32_t>(offered);
    state_.next_out = AsBuffer(output.data());
    state_.avail_out = static_cast<uint32_t>(room);
    const int result = isal_inflate(&state_);
    if (result == ISAL_INCORRECT_CHECKSUM) return absl::DataLossError("gzip: checksum mismatch");
    if (result < 0 || result == ISAL_NEED_DICT) {
      return absl::DataLossError(fmt::format("gzip: invalid compressed data ({})", result));
    }
    if (state_.block_state == ISAL_BLOCK_FINISH) {
      ++members_;
      header_ = GzipHeader();
      place_ = Place::kHeader;
    }
    return Step{offered - state_.avail_in, room - state_.avail_out};
  }

  // ISA-L's interface has no const.
  static uint8_t* AsBuffer(const std::byte* data) {
    return reinterpret_cast<uint8_t*>(const_cast<std::byte*>(data));
  }

  Place place_ = Place::kHeader;
  uint64_t members_ = 0;  // that are complete
  GzipHeader header_;
  inflate_state state_;
};

// RFC 8878: any number of frames, skippable ones included. Windows up to 128 MiB, the limit of
// zstd(1), bound the memory.
class ZstdDecompressor : public Decompressor {
 public:
  absl::StatusOr<size_t> Run(std::span<const std::byte>& input,
                             std::span<std::byte> output) override {
    if (input.empty() && at_frame_end_) return 0;
    ZSTD_inBuffer in{input.data(), input.size(), 0};
    ZSTD_outBuffer out{output.data(), output.size(), 0};
    do {
      const size_t before = in.pos + out.pos;
      const size_t result = ZSTD_decompressStream(context_.get(), &out, &in);
      if (ZSTD_isError(result)) {
        return absl::DataLossError(fmt::format("zstd: {}", ZSTD_getErrorName(result)));
      }
      at_frame_end_ = result == 0;
      if (in.pos + out.pos == before) break;
    } while (in.pos < in.size && out.pos < out.size);
    input = input.subspan(in.pos);
    return out.pos;
  }

  absl::Status Finish() override {
    if (at_frame_end_) return absl::OkStatus();
    return absl::DataLossError("zstd: the stream ends early");
  }

 private:
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  std::unique_ptr<ZSTD_DCtx, Free> context_{ZSTD_createDCtx()};
  bool at_frame_end_ = true;
};

bool IsZstdFrame(std::string_view head) {
  if (head.starts_with("\x28\xb5\x2f\xfd"sv)) return true;
  // Skippable frames have 16 magic numbers, 0x184D2A50 to 0x184D2A5F.
  return head.size() >= 4 && (head[0] & 0xf0) == 0x50 && head.substr(1, 3) == "\x2a\x4d\x18"sv;
}

}  // namespace

absl::StatusOr<Compression> DetectCompression(const ByteRange& file) {
  std::array<char, kTarMagicOffset + 5> buffer{};
  const size_t length = std::min<uint64_t>(buffer.size(), file.size);
  const std::string_view head(buffer.data(), length);
  RETURN_IF_ERROR(file.Read(0, std::as_writable_bytes(std::span(buffer).first(length))));
  if (length == buffer.size() && head.ends_with("ustar")) return Compression::kNone;
  if (head.starts_with(kGzipMagic)) return Compression::kGzip;
  if (IsZstdFrame(head)) return Compression::kZstd;
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kUnsupported = {{
      {"\xfd"
       "7zXZ\0"sv,
       "xz"},
      {"BZh"sv, "bzip2"},
      {"\x04\x22\x4d\x18"sv, "lz4"},
  }};
  for (const auto& [magic, name] : kUnsupported) {
    if (!head.starts_with(magic)) continue;
    return absl::UnimplementedError(
        fmt::format("compressed with {}; only gzip, zstd and no compression are supported", name));
  }
  return Compression::kNone;
}

std::unique_ptr<Decompressor> Decompressor::Create(Compression compression) {
  switch (compression) {
    case Compression::kGzip:
      return std::make_unique<GzipDecompressor>();
    case Compression::kZstd:
      return std::make_unique<ZstdDecompressor>();
    case Compression::kNone:
      break;
  }
  return std::make_unique<PlainCopy>();
}

absl::StatusOr<size_t> Decompressor::Decompress(std::span<const std::byte>& input,
                                                std::span<std::byte> output) {
  const size_t offered = input.size();
  ASSIGN_OR_RETURN(const size_t made, Run(input, output));
  // Keeps a decoder that finds nothing to do in bad input from spinning its caller.
  if (made == 0 && offered != 0 && input.size() == offered) {
    return absl::DataLossError("compressed data that leads nowhere");
  }
  return made;
}

}  // namespace lamina::fs
