// SPDX-License-Identifier: Apache-2.0
//
// What the tests of erofs/ share: trees made from a seed, data files with known content, mounts in
// the kernel, and one textual form of a file tree, whether it is in memory, in an image or mounted,
// so that a difference shows as a difference of lines.
#ifndef LAMINA_TESTS_EROFS_EROFS_TESTING_H_
#define LAMINA_TESTS_EROFS_EROFS_TESTING_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "erofs/builder.h"
#include "erofs/reader.h"
#include "erofs/tree.h"

namespace lamina::erofs {

// Everything but file content: a line for each name, sorted.
std::string Describe(const Tree& tree);
std::string DescribeDirectory(const std::string& path);
// The extents of all files, joined where they touch.
std::string DescribeExtents(const Tree& tree);

// The same through Reader's calls for one inode at a time, without ReadTree.
std::string DescribeImage(const Reader& reader);

// A tree of `inodes` inodes with every kind of thing in it, always the same for a seed. Its content
// is on `devices`.
Tree RandomTree(uint64_t seed, size_t inodes, std::span<const Device> devices);

// The 4 KiB in a block of a data device that WriteDeviceFile makes.
std::string BlockContent(uint16_t device, uint64_t block);
absl::Status WriteDeviceFile(const std::string& path, uint16_t device, uint32_t blocks);

// Writes a file, without the fsync that makes WriteFileAtomically slow.
absl::Status WriteFile(const std::string& path, std::string_view content);

// True if this process may mount EROFS images from files; otherwise tests that need it skip.
bool CanMount();

// A mount in the kernel, undone when the object goes.
class KernelMount {
 public:
  static absl::StatusOr<KernelMount> Create(const std::string& image,
                                            std::span<const std::string> devices,
                                            const std::string& mount_point);
  // A read-only overlay of directories that are separated by colons, the uppermost first.
  static absl::StatusOr<KernelMount> Overlay(const std::string& layers,
                                             const std::string& mount_point);
  KernelMount(KernelMount&& other) noexcept : path_(std::exchange(other.path_, std::string())) {}
  ~KernelMount();
  const std::string& path() const { return path_; }

 private:
  explicit KernelMount(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Runs a program; its output and whether it exited with 0.
struct CommandResult {
  bool ok = false;
  std::string output;
};
CommandResult RunCommand(const std::string& command);

// A directory for the test's files, removed with the object.
TemporaryDirectory MakeScratch();

}  // namespace lamina::erofs

#endif  // LAMINA_TESTS_EROFS_EROFS_TESTING_H_
