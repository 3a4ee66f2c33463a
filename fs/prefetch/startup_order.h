// SPDX-License-Identifier: Apache-2.0
//
// What an image without a profile will probably read when it is started: its entrypoint, what that
// needs, and what lies beside it.
#ifndef LAMINA_FS_PREFETCH_STARTUP_ORDER_H_
#define LAMINA_FS_PREFETCH_STARTUP_ORDER_H_

#include <memory>
#include <stop_token>
#include <vector>

#include "chunkstore/blob_store.h"
#include "chunkstore/touch_recorder.h"
#include "erofs/reader.h"
#include "fs/image/oci.h"

namespace lamina::fs {

// The frames of the program that `config` starts, of its interpreter and of its libraries, in the
// order in which they are opened; 64 MiB of content at the most. `blobs` are the devices of `image`.
// Reads the beginnings of those files, for which it fetches frames and waits; what cannot be found
// or read is left out. Ends early when `stop` is requested.
std::vector<chunkstore::Touch> StartupOrder(
    const erofs::Reader& image, const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs,
    const oci::ImageConfig& config, const std::shared_ptr<chunkstore::ReadStats>& stats,
    const std::stop_token& stop);

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_STARTUP_ORDER_H_
