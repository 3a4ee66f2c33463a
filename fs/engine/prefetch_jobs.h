// SPDX-License-Identifier: Apache-2.0
//
// Images that are fetched onto the node without a mount.
#ifndef LAMINA_FS_ENGINE_PREFETCH_JOBS_H_
#define LAMINA_FS_ENGINE_PREFETCH_JOBS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "chunkstore/blob_store.h"
#include "fs/engine/image_cache.h"
#include "fs/image/image_store.h"
#include "fs/prefetch/prefetcher.h"

namespace lamina::fs {

struct PrefetchRequest {
  std::string image;              // "oci:DIR[:TAG]", DIR absolute
  bool profile_only = false;      // what its profile names; kNotFound if it has none
  uint64_t bytes_per_second = 0;  // 0: no limit
  registry::Settings registry;    // secrets in it stay in memory
};

struct PrefetchReport {
  std::string image;
  std::string manifest_digest;  // empty until it is known
  bool finished = false;
  absl::Status status;         // of a finished one
  uint64_t bytes_missing = 0;  // compressed, when it began
  uint64_t bytes = 0;          // fetched, compressed
  uint64_t requests = 0;
  uint64_t frames = 0;  // fetched or copied
  double seconds = 0;
};

// Thread-safe. A job that nobody has asked about for a while is stopped and forgotten: whoever
// started it is gone.
class PrefetchJobs {
 public:
  // How the registry of an image is reached.
  using Access = std::function<absl::StatusOr<RegistryAccess>(const std::string& image,
                                                              const registry::Settings& settings)>;
  // Merged metadata goes to the directory `metadata`. The others must outlive it.
  PrefetchJobs(std::string metadata, chunkstore::BlobStore& store, ImageCache& images,
               Prefetcher& prefetcher, Access access);
  // Stops them all.
  ~PrefetchJobs();

  // Returns at once; the job's number, which no other job has, nor one of another process: a client may
  // still ask for the job of an engine that was killed.
  uint64_t Start(const PrefetchRequest& request);
  // kNotFound if there is no such job. A finished one is forgotten with its report.
  absl::StatusOr<PrefetchReport> Report(uint64_t id);
  void Cancel(uint64_t id);
  // True if there are none.
  bool Idle();

 private:
  struct Job;

  void Run(Job& job, const std::stop_token& stop);
  absl::Status Fetch(Job& job, const std::stop_token& stop);
  absl::Status FetchOnce(const Job& job, Prefetcher::Work work, const std::stop_token& stop);
  bool Abandoned(const Job& job) const;
  // With mutex_ held: takes out what is finished and was not asked about.
  std::map<uint64_t, std::unique_ptr<Job>> TakeAbandoned();

  const std::string metadata_;
  chunkstore::BlobStore& store_;
  ImageCache& images_;
  Prefetcher& prefetcher_;
  const Access access_;
  std::mutex mutex_;  // guards what follows, and the jobs
  std::condition_variable_any changed_;
  uint64_t next_id_;
  std::map<uint64_t, std::unique_ptr<Job>> jobs_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_PREFETCH_JOBS_H_
