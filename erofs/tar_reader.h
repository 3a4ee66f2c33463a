// SPDX-License-Identifier: Apache-2.0
//
// Reads the entries of an uncompressed tar archive from a stream: v7, ustar, pax and GNU formats,
// with sparse files in all of GNU's ways. It is strict: what is malformed is an error with its
// place in the archive, not skipped.
//
// It stands here in place of libarchive because that reads names through the locale: in the "C"
// locale libarchive 3.6 warns on every pax path outside ASCII with the same code as on real faults,
// drops pax link targets that are not UTF-8 and has no option to do neither. It also leaves the
// sign of a fraction of a second before 1970 to its caller, and cannot bound the size of a sparse
// map.
#ifndef LAMINA_EROFS_TAR_READER_H_
#define LAMINA_EROFS_TAR_READER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "erofs/import.h"
#include "erofs/tar_header.h"
#include "erofs/tar_pax.h"

namespace lamina::erofs {

struct TarEntry {
  std::string path;  // bytes as in the archive, not empty
  // The path that this is a further name of; then only `path` counts besides.
  std::optional<std::string> hard_link;
  // Type, attributes, target, device number, size (holes included) and all xattrs, in no order.
  Inode inode;
  // The runs of a sparse file whose bytes the archive holds, ascending and inside the file. Any
  // other regular file is one run.
  std::vector<SparseRun> runs;
};

// Belongs to one thread. After an error it is not used again.
class TarReader {
 public:
  // `read` must outlive the reader.
  explicit TarReader(const TarReadFunction& read);

  // The next entry, or nothing at the end of the archive, after which only Drain may be called.
  // Content of the last entry that was not read is skipped.
  absl::StatusOr<std::optional<TarEntry>> Next();

  // Some of the current entry's stored bytes: its runs, one after the other. At least one byte and
  // at most `limit` (> 0) of them, which must not exceed what is left of the runs. The bytes stay
  // valid until the next call.
  absl::StatusOr<std::span<const std::byte>> ReadContent(uint64_t limit);

  // Reads the stream to its end, whatever follows the archive.
  absl::Status Drain();

 private:
  // What precedes an entry and belongs to it.
  struct Prelude {
    std::optional<std::string> long_name;
    std::optional<std::string> long_link;
    std::optional<std::string> records;
    bool empty() const { return !long_name && !long_link && !records; }
  };

  // Makes at least `wanted` bytes available unless the stream ends before.
  absl::Status Fill(size_t wanted);
  size_t available() const { return end_ - begin_; }
  // The next block of the stream, which must be available.
  TarHeader PeekBlock() const;
  void Consume(size_t length);
  absl::Status Skip(uint64_t length);

  absl::Status SkipContent();
  // The next header block; nothing at the end of the archive.
  absl::StatusOr<std::optional<TarHeader>> ReadHeader();
  // An archive ends with two blocks of zeros. One before the end of the stream will do; one before
  // something else is refused, because a reader that went on would see other entries.
  absl::Status CheckEnd();
  absl::Status ReadPrelude(const TarHeader& header, Prelude& prelude);
  absl::Status ReadGlobalHeader(const TarHeader& header);
  absl::StatusOr<std::string> ReadSpecialBody(const TarHeader& header);

  absl::StatusOr<TarEntry> MakeEntry(const TarHeader& header, Prelude prelude);
  absl::Status SetType(const TarHeader& header, TarEntry& entry, std::string link);
  absl::Status SetOwnerAndTimes(const TarHeader& header, const PaxFields& pax, Inode& inode);
  // Sets `runs`, the size and how much content follows.
  absl::Status SetContent(const TarHeader& header, PaxFields& pax, TarEntry& entry);
  absl::Status ReadOldSparseMap(const TarHeader& header, TarEntry& entry);
  absl::Status ReadSparseMapFromContent(TarEntry& entry);
  // Directories that are of another type than '5': GNU's incremental backups list their content, to
  // be skipped.
  absl::Status SetOddDirectoryContent(const TarHeader& header, const PaxFields& pax);
  // A hard link has no content, though its header may give the size of the file it links to. POSIX
  // allows content all the same; the one sign of it is that no header comes next.
  absl::Status SetHardLinkContent(const TarHeader& header, const PaxFields& pax);

  const TarReadFunction& read_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;  // of the bytes in the buffer that are not yet consumed
  size_t end_ = 0;
  bool at_end_ = false;    // the stream has no more
  uint64_t position_ = 0;  // in the archive, of begin_
  uint64_t content_ = 0;   // bytes of the current entry's content not yet consumed
  uint64_t padding_ = 0;   // bytes that follow it up to a whole block
  PaxFields globals_;
};

}  // namespace lamina::erofs

#endif  // LAMINA_EROFS_TAR_READER_H_
