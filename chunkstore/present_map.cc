// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/present_map.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <vector>

namespace lamina::chunkstore {

absl::StatusOr<std::unique_ptr<PresentMap>> PresentMap::Open(const std::string& path,
                                                             uint32_t frames) {
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDWR | O_CREAT));
  std::unique_ptr<PresentMap> map(new PresentMap(std::move(fd), frames));
  RETURN_IF_ERROR(map->Load(frames), "{}", path);
  return map;
}

absl::Status PresentMap::Load(uint32_t frames) {
  std::vector<uint64_t> words(bits_.words().size());
  const uint64_t size = words.size() * sizeof(uint64_t);
  ASSIGN_OR_RETURN(const uint64_t file_size, FileSize(fd_.get()));
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(words));
  if (file_size != size) {
    if (::ftruncate(fd_.get(), 0) != 0) return ErrnoStatus(errno, "truncate");
    return WriteFull(fd_.get(), 0, bytes);
  }
  RETURN_IF_ERROR(ReadFull(fd_.get(), 0, bytes));
  const uint32_t in_last_word = frames % FrameBits::kBitsPerWord;
  if (in_last_word != 0) words.back() &= (uint64_t{1} << in_last_word) - 1;
  for (size_t i = 0; i < words.size(); ++i) {
    bits_.words()[i].store(words[i]);
    count_ += static_cast<uint64_t>(std::popcount(words[i]));
  }
  return absl::OkStatus();
}

bool PresentMap::Set(uint32_t frame) {
  if (!bits_.Set(frame)) return false;
  count_.fetch_add(1, std::memory_order_relaxed);
  WriteWord(frame);
  return true;
}

bool PresentMap::Clear(uint32_t frame) {
  if (!bits_.Clear(frame)) return false;
  count_.fetch_sub(1, std::memory_order_relaxed);
  WriteWord(frame);
  return true;
}

void PresentMap::WriteWord(uint32_t frame) {
  if (!fd_.valid()) return;
  const size_t index = frame / FrameBits::kBitsPerWord;
  std::lock_guard lock(write_mutex_);
  const uint64_t word = bits_.words()[index].load();
  // Failing does no harm: the next process fetches the frame again, or finds it wrong.
  WriteFull(fd_.get(), index * sizeof(word), std::as_bytes(std::span(&word, 1))).IgnoreError();
}

}  // namespace lamina::chunkstore
