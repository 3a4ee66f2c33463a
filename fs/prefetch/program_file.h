// SPDX-License-Identifier: Apache-2.0
//
// What the kernel and the dynamic linker open to start a program: the interpreter of a script, or an
// ELF file's interpreter and libraries. The files come from images: nothing in them is trusted.
#ifndef LAMINA_FS_PREFETCH_PROGRAM_FILE_H_
#define LAMINA_FS_PREFETCH_PROGRAM_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::fs {

struct ProgramNeeds {
  std::string interpreter;                // path, or empty
  std::vector<std::string> arguments;     // of a script's interpreter
  std::vector<std::string> libraries;     // DT_NEEDED: names, or paths
  std::vector<std::string> search_paths;  // DT_RUNPATH or DT_RPATH, $ORIGIN not expanded
  std::string machine_directory;          // "x86_64-linux-gnu", or empty if it is not known
};

// Fills `into` with the file's bytes at `offset`.
using ReadAt = std::function<absl::Status(uint64_t offset, std::span<std::byte> into)>;

// Nothing is needed by a file that is neither a script nor a 64-bit little-endian ELF file. Reads a
// few pieces of at most 1 MiB, and takes 256 libraries and 64 search paths at the most.
// kInvalidArgument for an ELF file whose parts lie outside of it; otherwise only errors of `read`.
absl::StatusOr<ProgramNeeds> ReadProgramNeeds(uint64_t size, const ReadAt& read);

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_PROGRAM_FILE_H_
