// SPDX-License-Identifier: Apache-2.0
//
// An object far away, read from the front to the end: the next stretch is on its way while the last
// one is used.
#ifndef LAMINA_FS_IMAGE_SEQUENTIAL_SOURCE_H_
#define LAMINA_FS_IMAGE_SEQUENTIAL_SOURCE_H_

#include <memory>

#include "chunkstore/origin.h"
#include "fs/image/byte_range.h"

namespace lamina::fs {

// Holds up to 16 MiB. Reads in any order are right, those in order are fast.
std::shared_ptr<const ByteSource> MakeSequentialSource(
    std::unique_ptr<chunkstore::OriginObject> object, uint64_t size);

}  // namespace lamina::fs

#endif  // LAMINA_FS_IMAGE_SEQUENTIAL_SOURCE_H_
