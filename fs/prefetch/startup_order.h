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

struct StartupFrames {
  // Of the program, of its interpreter and of its libraries, in the order in which they are opened;
  // 64 MiB of content at the most.
  std::vector<chunkstore::Touch> opened;
  // What lies beside them: files of the directories that the program's arguments are in, and the
  // frames before and behind. As much as `opened` at the most, and no more than 4 MiB.
  std::vector<chunkstore::Touch> neighbours;
};

// Of the program that `config` starts. `blobs` are the devices of `image`. Reads the beginnings of
// those files, for which it fetches frames and waits; what cannot be found or read is left out. Ends
// early when `stop` is requested, or when an image has more looked for than programs do.
StartupFrames StartupOrder(const erofs::Reader& image,
                           const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs,
                           const oci::ImageConfig& config,
                           const std::shared_ptr<chunkstore::ReadStats>& stats,
                           const std::stop_token& stop);

}  // namespace lamina::fs

#endif  // LAMINA_FS_PREFETCH_STARTUP_ORDER_H_
