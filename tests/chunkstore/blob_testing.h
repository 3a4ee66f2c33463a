// SPDX-License-Identifier: Apache-2.0
//
// Small layer blobs for tests: built in memory from a list of files, opened and read back with all
// checks, or taken apart and put together again with digests that match, to lie about the rest.
#ifndef LAMINA_TESTS_CHUNKSTORE_BLOB_TESTING_H_
#define LAMINA_TESTS_CHUNKSTORE_BLOB_TESTING_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/blob_tables.h"
#include "chunkstore/blob_writer.h"

namespace lamina::chunkstore {

// `size` bytes that do not compress, the same ones for the same `seed`.
std::string RandomBytes(size_t size, uint64_t seed);
// `size` bytes of numbered lines, which compress about as well as source code.
std::string TextBytes(size_t size, uint64_t seed);

// A run of a file: bytes, or a hole if there are none.
struct FilePart {
  std::string data;
  uint64_t hole = 0;
};
using FileParts = std::vector<FilePart>;

struct TestBlob {
  std::string object;
  BlobInfo info;
  std::vector<std::vector<Placement>> placements;  // of each file

  LayerDescriptor descriptor() const;
};

// Each Append gives the writer at most `step` bytes.
absl::StatusOr<TestBlob> TryBuildBlob(const std::vector<FileParts>& files,
                                      std::string_view metadata, const BlobWriterOptions& options,
                                      size_t step = SIZE_MAX);
// As above; a failure is a failure of the test.
TestBlob BuildBlob(const std::vector<FileParts>& files, std::string_view metadata = "metadata",
                   const BlobWriterOptions& options = {});
// For files without holes.
TestBlob BuildBlob(const std::vector<std::string>& files);

// A blob with all its parts decoded. Not to be moved: the tables point into the strings.
struct OpenBlob {
  SectionTable sections;
  std::string frame_bytes;
  std::string chunk_bytes;
  std::string metadata;
  FrameTable frames;
  ChunkTable chunks;
  std::string address_space;

  OpenBlob() = default;
  OpenBlob(const OpenBlob&) = delete;
  OpenBlob& operator=(const OpenBlob&) = delete;

  // Checks and decodes everything: section table, sections, frames, and each chunk's digest.
  absl::Status Open(std::string_view object, const LayerDescriptor& descriptor);
  // A file of `size` bytes at these placements, with zeros between them.
  std::string ReadFile(const std::vector<Placement>& placements, uint64_t size) const;
};

// The parts of a blob, to be changed at will.
struct BlobParts {
  std::string frame_data;
  std::vector<ChunkRecord> chunks;
  std::string metadata;  // as stored
  uint64_t metadata_size = 0;
  uint32_t metadata_flags = 0;
  std::vector<FrameRecord> frames;
  uint32_t blocks = 0;

  static BlobParts Of(const TestBlob& blob);
  // Section table that describes the parts as they are, digests included.
  SectionTableRecord MakeTable() const;
  // The object with this section table, and a descriptor that matches it.
  std::string Assemble(const SectionTableRecord& table, LayerDescriptor* descriptor) const;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_TESTS_CHUNKSTORE_BLOB_TESTING_H_
