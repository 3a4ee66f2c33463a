// SPDX-License-Identifier: Apache-2.0
//
// The metadata section of a blob on its way into a file: never whole in memory, however large.
#ifndef LAMINA_CHUNKSTORE_METADATA_FILE_H_
#define LAMINA_CHUNKSTORE_METADATA_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "chunkstore/base/status.h"
#include "chunkstore/blob_tables.h"

namespace lamina::chunkstore {

// Used by one thread. Until Finish() the section lies in the file as it is stored, behind the place
// of its content, because nothing is decompressed before its digest was checked.
class MetadataFile {
 public:
  // `fd` is of a file for reading and writing, of any content. It must stay open.
  MetadataFile(int fd, const Section& section);

  // Takes the next bytes of the section.
  absl::Status Append(std::span<const std::byte> stored);
  // After the last of them: the file then holds the decoded section and nothing else. kDataLoss if it
  // is not what the section table says.
  absl::Status Finish();

 private:
  const int fd_;
  const Section section_;
  const uint64_t begin_;  // of the stored section, in the file
  uint64_t stored_ = 0;   // bytes so far
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_METADATA_FILE_H_
