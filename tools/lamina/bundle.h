// SPDX-License-Identifier: Apache-2.0
//
// The directory that `lamina run` makes for a container: config.json, and the mounted image in
// rootfs/. Whoever runs the container holds a lock on it, so that what a killed `run` leaves can be
// told from what is in use.
#ifndef LAMINA_TOOLS_LAMINA_BUNDLE_H_
#define LAMINA_TOOLS_LAMINA_BUNDLE_H_

#include <string>

#include "chunkstore/base/file.h"

namespace lamina::cli {

class Bundle {
 public:
  static absl::StatusOr<Bundle> Create();
  Bundle(Bundle&& other) noexcept
      : path_(std::exchange(other.path_, std::string())), lock_(std::move(other.lock_)) {}
  // Removes the directory, unless something is still mounted in it: then it stays for
  // RemoveStaleBundles.
  ~Bundle();

  const std::string& path() const { return path_; }
  std::string rootfs() const { return path_ + "/rootfs"; }
  // Of the container.
  std::string id() const { return path_.substr(path_.rfind('/') + 1); }
  // Descriptor with the lock.
  int lock() const { return lock_.get(); }

 private:
  Bundle(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  UniqueFd lock_;
};

// Ends the containers, mounts and bundles that nobody holds the lock of. What cannot be removed stays
// for the next time.
void RemoveStaleBundles();

}  // namespace lamina::cli

#endif  // LAMINA_TOOLS_LAMINA_BUNDLE_H_
