// SPDX-License-Identifier: Apache-2.0
//
// Files without a name, for what is too large for memory and gone with the descriptor.
#ifndef LAMINA_FS_IMAGE_SCRATCH_FILE_H_
#define LAMINA_FS_IMAGE_SCRATCH_FILE_H_

#include <string>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// Open for reading and writing, in $TMPDIR or else /var/tmp.
absl::StatusOr<UniqueFd> OpenScratch();
// What errors call it, with the way to have it elsewhere.
std::string ScratchName();

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_SCRATCH_FILE_H_
