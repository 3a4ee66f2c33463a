// SPDX-License-Identifier: Apache-2.0
//
// What the tests of fs/mount/ share: images with their blobs in a real store, mounted in each of
// the ways there are, and a check that nothing of it is left behind.
#ifndef LAMINA_TESTS_MOUNT_MOUNT_TESTING_H_
#define LAMINA_TESTS_MOUNT_MOUNT_TESTING_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/blob_store.h"
#include "erofs/tree.h"
#include "fs/mount/blob_fs.h"
#include "fs/mount/tree_fs.h"
#include "tests/chunkstore/store_testing.h"

namespace lamina::fs {

// An image whose blobs are in the image layout of the test.
struct TestImage {
  std::string metadata;
  std::vector<chunkstore::LayerDescriptor> layers;  // device slots 1, 2, ...
};

enum class Transport { kErofsOnFiles, kErofsOnLoop, kFuseTree };
std::string NameOf(Transport transport);

// Unmounts (detached) when it goes.
class MountGuard {
 public:
  explicit MountGuard(std::string target) : target_(std::move(target)) {}
  ~MountGuard();
  MountGuard(const MountGuard&) = delete;
  MountGuard& operator=(const MountGuard&) = delete;

 private:
  const std::string target_;
};

// An image mounted by one of the transports.
struct MountedImage {
  std::shared_ptr<chunkstore::ObservedOrigin> origin;
  std::shared_ptr<chunkstore::ReadStats> stats = std::make_shared<chunkstore::ReadStats>();
  // In the order in which they are made: they go in the reverse of it.
  std::unique_ptr<chunkstore::BlobStore> store;
  std::vector<std::shared_ptr<chunkstore::Blob>> blobs;
  std::unique_ptr<BlobFs> blob_fs;
  std::unique_ptr<TreeFs> tree_fs;
  std::unique_ptr<MountGuard> erofs;
  ~MountedImage();
};

// What a mount could leave behind: what this process holds, and what the system has below a
// directory.
struct SystemState {
  size_t descriptors = 0;
  size_t threads = 0;
  size_t mounts = 0;        // on something below the directory
  size_t loop_devices = 0;  // of files there
  static SystemState Of(const std::string& directory);
  bool operator==(const SystemState&) const = default;
};
std::ostream& operator<<(std::ostream& out, const SystemState& state);

// Gives each test a directory with an image layout and a mountpoint "mnt". Needs root.
class MountTest : public chunkstore::StoreTest {
 protected:
  MountTest();
  void SetUp() override;
  void TearDown() override;

  std::string target() const { return root() + "/mnt"; }
  std::string MakeDirectory(const std::string& name) const;
  SystemState State() const { return SystemState::Of(root()); }

  // An image of a directory of the local file system, as one layer.
  TestImage ImageOf(const std::string& directory) const;
  // An image with the files f1, f2, ... of these contents, each in a layer of its own.
  TestImage ImageOfFiles(const std::vector<std::string>& contents);

  // Mounts at target() with a store of its own; a failure is a failure of the test. The metadata of
  // `image` must outlive it.
  std::unique_ptr<MountedImage> Mount(const TestImage& image, Transport transport) const;

 private:
  std::optional<SystemState> before_;
};

std::string ReadAll(const std::string& path);
// `length` bytes at `offset`; the bytes that there are if the file ends before.
absl::StatusOr<std::string> ReadAt(const std::string& path, uint64_t offset, size_t length,
                                   int flags = 0);
// Makes the kernel forget the pages of a file, so that the next read asks for them again.
void DropPages(const std::string& path);
// Runs a shell command and fails the test with its output unless it succeeds.
std::string Shell(const std::string& command);

// Runs `check` in a process of user 65534, which has no privileges but those that ordinary users
// have on ordinary systems: /dev/fuse is open to it. `check` returns 0 if all is well; another
// number is what failed.
void AsNobody(const std::function<int()>& check);

// Fills `directory` with one of everything that a file system can have, and files of all sizes
// around the boundaries of blocks, frames and chunks.
void MakeSampleTree(const std::string& directory);

}  // namespace lamina::fs

#endif  // LAMINA_TESTS_MOUNT_MOUNT_TESTING_H_
