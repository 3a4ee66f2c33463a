// SPDX-License-Identifier: Apache-2.0
//
// Which images a node keeps, and what of them: the records of images, pins, and what `lamina cache`
// does. The bytes are the blob store's business.
//
//   <images>/<hex>.json       a record: the image with that manifest digest. Its time is when the
//                             image was used last
//   <images>/<hex>/metadata   merged metadata (metadata_cache.h)
#ifndef LAMINA_FS_ENGINE_IMAGE_CACHE_H_
#define LAMINA_FS_ENGINE_IMAGE_CACHE_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/blob_store.h"
#include "fs/image/image.h"

namespace lamina::fs {

struct ImageRecord {
  std::string image;  // the reference under which it was used last
  Digest manifest_digest;
  std::vector<chunkstore::LayerDescriptor> layers;
  bool pinned = false;
};

ImageRecord RecordOf(const Image& image);
// Of images on top of each other, lowest first: as one, called "A + B", with a digest made of theirs.
// The same as above for a single one.
ImageRecord RecordOf(std::span<const Image> images);
Digest DigestOfImages(std::span<const Digest> manifests);

struct CachedImage {
  std::string image;
  Digest manifest_digest;
  std::vector<Digest> layers;
  bool pinned = false;
  bool mounted = false;
  uint64_t content_bytes = 0;  // of all layers; what images share counts for each
  uint64_t present_bytes = 0;  // of that on the node
  int64_t last_used = 0;       // seconds since 1970
};

struct CacheReport {
  std::vector<CachedImage> images;  // by reference
  chunkstore::BlobStore::Usage usage;
};

struct CacheCleanup {
  uint64_t freed_bytes = 0;  // of content
  uint64_t removed_images = 0;
  uint64_t removed_blobs = 0;
};

// Thread-safe. Of an image, `name` is the digest of its manifest ("sha256:..." or at least 12 of
// its digits) or a reference.
class ImageCache {
 public:
  // Reads the records and pins what they say. Damaged records are logged and dropped: they cost no
  // more than fetching again. `store` must outlive the object.
  ImageCache(std::string directory, chunkstore::BlobStore& store);

  // The image is in use as long as the returned object lives: nothing of it is removed. It must not
  // outlive the cache.
  std::shared_ptr<void> Use(const ImageRecord& image);
  // The same for layers that are mounted without an image, by themselves or merged. Images that have no
  // other layers than such are in use as well.
  std::shared_ptr<void> UseLayers(std::vector<chunkstore::LayerDescriptor> layers);

  CacheReport Report();
  // Evicts down to `bytes`, or to the limit if there is none. Then removes images of which nothing
  // is left, and what no image needs: blobs, merged metadata, leftovers of killed processes.
  absl::StatusOr<CacheCleanup> Clean(std::optional<uint64_t> bytes);
  // Pins an image, also one that is not on the node yet: what comes of it then stays.
  absl::Status Pin(const ImageRecord& image);
  // For images that have a record; kNotFound if none is called that.
  absl::Status SetPinned(const std::string& name, bool pinned);
  // Removes an image and what only it needed. kFailedPrecondition if it is in use.
  absl::StatusOr<CacheCleanup> Remove(const std::string& name);

 private:
  struct Known {
    ImageRecord record;
    int users = 0;

    bool IsUsed(const std::set<Digest>& used_layers) const;
  };

  void Load();
  // All with mutex_ held.
  std::string PathOf(const Digest& manifest) const;
  absl::Status Save(const ImageRecord& record) const;
  void Drop(const Digest& manifest);
  std::set<Digest> LayersInUse() const;
  void ApplyPins();
  std::vector<Digest> Find(const std::string& name) const;
  void RemoveUnneeded(CacheCleanup* cleanup);

  const std::string directory_;
  chunkstore::BlobStore& store_;
  std::mutex mutex_;
  std::map<Digest, Known> images_;
  std::list<std::vector<chunkstore::LayerDescriptor>> used_layers_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_IMAGE_CACHE_H_
