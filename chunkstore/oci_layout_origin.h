// SPDX-License-Identifier: Apache-2.0
//
// Objects in an OCI image layout (blobs/sha256/<hex>) on any file system, read with io_uring where
// the kernel allows it and with pread(2) where not.
#ifndef LAMINA_CHUNKSTORE_OCI_LAYOUT_ORIGIN_H_
#define LAMINA_CHUNKSTORE_OCI_LAYOUT_ORIGIN_H_

#include <memory>
#include <string>

#include "chunkstore/origin.h"

namespace lamina::chunkstore {

enum class ReadMethod {
  kAuto,     // io_uring, or pread if io_uring_setup fails; the log says which and why
  kIoUring,  // fails where io_uring is not to be had
  kPread,
};

absl::StatusOr<std::unique_ptr<Origin>> OpenOciLayoutOrigin(const std::string& directory,
                                                            ReadMethod method = ReadMethod::kAuto);

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_OCI_LAYOUT_ORIGIN_H_
