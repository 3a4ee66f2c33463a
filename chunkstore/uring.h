// SPDX-License-Identifier: Apache-2.0
//
// Reads from files with io_uring: all ranges of a call are in flight at once, and the calling
// thread waits for its own.
#ifndef LAMINA_CHUNKSTORE_URING_H_
#define LAMINA_CHUNKSTORE_URING_H_

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "chunkstore/base/status.h"
#include "chunkstore/origin.h"

namespace lamina::chunkstore {

class Ring;

// Lends a ring to each call, so that no lock is held while a read is in flight and rings need no
// locks of their own. Thread-safe.
//
// Files and buffers are not registered with the rings. Measured on Linux 6.18 with reads from the
// page cache, registered files made no difference beyond the noise from 4 KiB to 1 MiB. Registered
// buffers saved up to a tenth from 256 KiB on, which is 1% of a fetch (decompression is most of
// it), but the buffers would be pinned for as long as the rings live.
class RingPool {
 public:
  // Fails where the kernel or its configuration does not allow io_uring; the error names the cause.
  static absl::StatusOr<std::unique_ptr<RingPool>> Create();
  ~RingPool();

  // Fills all ranges from `fd`. An end of file inside a range is kDataLoss. kResourceExhausted if
  // no further ring could be made (nothing was read then).
  absl::Status Read(int fd, std::span<const RangeRead> ranges);

 private:
  RingPool();
  absl::StatusOr<std::unique_ptr<Ring>> Borrow();
  void GiveBack(std::unique_ptr<Ring> ring);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> idle_;
};

}  // namespace lamina::chunkstore

#endif  // LAMINA_CHUNKSTORE_URING_H_
