// SPDX-License-Identifier: Apache-2.0
#include "tests/mount/mount_testing.h"

#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "chunkstore/blob_writer.h"
#include "erofs/builder.h"
#include "erofs/import.h"
#include "fs/mount/mount.h"

namespace lamina::fs {
namespace {

using chunkstore::BlobWriter;
using chunkstore::LayerDescriptor;

// File content goes into a layer blob.
class BlobSink final : public erofs::ContentSink {
 public:
  explicit BlobSink(BlobWriter& writer) : writer_(writer) {}
  absl::Status BeginFile(uint64_t size) override { return writer_.BeginFile(size); }
  absl::Status Append(std::span<const std::byte> data) override { return writer_.Append(data); }
  absl::Status AppendHole(uint64_t length) override { return writer_.AppendHole(length); }
  absl::StatusOr<std::vector<erofs::Extent>> EndFile() override {
    ASSIGN_OR_RETURN(const auto placements, writer_.EndFile());
    std::vector<erofs::Extent> extents;
    for (const chunkstore::Placement& placement : placements) {
      extents.push_back({placement.offset, placement.length, 1, placement.block});
    }
    return extents;
  }

 private:
  BlobWriter& writer_;
};

absl::StatusOr<TestImage> BuildImageOf(const std::string& directory, const std::string& layout) {
  const std::string object = layout + "/blobs/sha256/new";
  ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(object, O_RDWR | O_CREAT | O_EXCL));
  ASSIGN_OR_RETURN(const auto writer, BlobWriter::Create(std::move(fd), {}));
  BlobSink sink(*writer);
  ASSIGN_OR_RETURN(const erofs::Tree tree, erofs::ImportDirectory(directory, sink));
  TestImage image;
  const erofs::Device device{writer->content_digest().Hex(), writer->blocks()};
  ASSIGN_OR_RETURN(image.metadata, erofs::BuildImage(tree, {.devices = {device}}));
  ASSIGN_OR_RETURN(const auto info, writer->Finish(AsBytes(image.metadata)));
  std::filesystem::rename(object, layout + "/blobs/sha256/" + info.digest.Hex());
  image.layers.push_back(
      {info.digest, info.size, info.section_table_offset, info.section_table_digest});
  return image;
}

size_t EntriesOf(const std::string& directory) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(directory), {}));
}

}  // namespace

std::string NameOf(Transport transport) {
  switch (transport) {
    case Transport::kErofsOnFiles:
      return "ErofsOnFiles";
    case Transport::kErofsOnLoop:
      return "ErofsOnLoop";
    case Transport::kFuseTree:
      return "FuseTree";
  }
  return "";
}

MountGuard::~MountGuard() { Unmount(target_, /*detach=*/true).IgnoreError(); }

MountedImage::~MountedImage() {
  erofs.reset();
  tree_fs.reset();
  blob_fs.reset();
  blobs.clear();
  store.reset();
}

SystemState SystemState::Of(const std::string& directory) {
  SystemState state;
  state.descriptors = EntriesOf("/proc/self/fd");
  state.threads = EntriesOf("/proc/self/task");
  const auto mounts = ReadMountInfo();
  EXPECT_TRUE(mounts.ok()) << mounts.status();
  for (const MountInfo& mount : *mounts) {
    if (mount.target.starts_with(directory + "/")) ++state.mounts;
  }
  for (const auto& device : std::filesystem::directory_iterator("/sys/block")) {
    std::ifstream backing_file(device.path() / "loop/backing_file");
    std::string path;
    if (std::getline(backing_file, path) && path.starts_with(directory + "/")) {
      ++state.loop_devices;
    }
  }
  return state;
}

std::ostream& operator<<(std::ostream& out, const SystemState& state) {
  return out << state.descriptors << " descriptors, " << state.threads << " threads, "
             << state.mounts << " mounts, " << state.loop_devices << " loop devices";
}

// EROFS mounts from files of a disk file system only, and /tmp may be a tmpfs.
MountTest::MountTest() { parent_ = "/var/tmp"; }

void MountTest::SetUp() {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting needs root";
  StoreTest::SetUp();
  // The image below is reached by ordinary users too.
  std::filesystem::permissions(root(), std::filesystem::perms(0755));
  MakeDirectory("mnt");
  std::thread([] {}).join();  // ThreadSanitizer has a thread of its own from the first one on
  before_ = State();
}

void MountTest::TearDown() {
  if (!before_) return;
  // What was detached goes when the kernel is through with it.
  SystemState now = State();
  for (int i = 0; i < 200 && now != *before_; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    now = State();
  }
  EXPECT_EQ(now, *before_) << "left behind by the test";
  const auto mounts = ReadMountInfo();
  ASSERT_TRUE(mounts.ok()) << mounts.status();
  for (auto mount = mounts->rbegin(); mount != mounts->rend(); ++mount) {
    if (mount->target.starts_with(root() + "/")) Unmount(mount->target, true).IgnoreError();
  }
}

std::string MountTest::MakeDirectory(const std::string& name) const {
  const std::string path = root() + "/" + name;
  std::filesystem::create_directories(path);
  return path;
}

TestImage MountTest::ImageOf(const std::string& directory) const {
  auto image = BuildImageOf(directory, layout());
  EXPECT_TRUE(image.ok()) << image.status();
  return image.ok() ? *std::move(image) : TestImage();
}

TestImage MountTest::ImageOfFiles(const std::vector<std::string>& contents) {
  TestImage image;
  erofs::Tree tree;
  erofs::BuildOptions options;
  for (size_t i = 0; i < contents.size(); ++i) {
    const chunkstore::TestBlob blob = AddBlob({contents[i]});
    image.layers.push_back(blob.descriptor());
    options.devices.push_back({blob.info.digest.Hex(), blob.info.blocks});
    erofs::Inode inode{.mode = S_IFREG | 0644, .size = contents[i].size()};
    for (const chunkstore::Placement& placement : blob.placements[0]) {
      inode.extents.push_back(
          {placement.offset, placement.length, static_cast<uint16_t>(i + 1), placement.block});
    }
    EXPECT_TRUE(tree.Create(erofs::Tree::kRoot, fmt::format("f{}", i + 1), inode).ok());
  }
  auto metadata = erofs::BuildImage(tree, options);
  EXPECT_TRUE(metadata.ok()) << metadata.status();
  if (metadata.ok()) image.metadata = *std::move(metadata);
  return image;
}

std::unique_ptr<MountedImage> MountTest::Mount(const TestImage& image, Transport transport) const {
  auto mounted = std::make_unique<MountedImage>();
  mounted->origin = NewOrigin();
  mounted->store = OpenStore();
  for (const LayerDescriptor& layer : image.layers) {
    auto blob = mounted->store->Attach(layer, mounted->origin);
    EXPECT_TRUE(blob.ok()) << blob.status();
    if (!blob.ok()) return nullptr;
    mounted->blobs.push_back(*std::move(blob));
  }
  if (transport == Transport::kFuseTree) {
    auto tree = TreeFs::Start({.mountpoint = target(),
                               .source = "image",
                               .metadata = AsBytes(image.metadata),
                               .blobs = mounted->blobs,
                               .stats = mounted->stats});
    EXPECT_TRUE(tree.ok()) << tree.status();
    if (!tree.ok()) return nullptr;
    mounted->tree_fs = *std::move(tree);
    return mounted;
  }
  auto blob_fs = BlobFs::Start(MakeDirectory("blobs"));
  EXPECT_TRUE(blob_fs.ok()) << blob_fs.status();
  if (!blob_fs.ok()) return nullptr;
  mounted->blob_fs = *std::move(blob_fs);
  EXPECT_TRUE(mounted->blob_fs->Add({1, mounted->blobs, mounted->stats}).ok());
  const std::string metadata = root() + "/metadata";
  EXPECT_TRUE(WriteFileAtomically(metadata, image.metadata).ok());
  std::vector<std::string> devices;
  for (size_t slot = 1; slot <= image.layers.size(); ++slot) {
    devices.push_back(fmt::format("{}/1/{}", mounted->blob_fs->mountpoint(), slot));
  }
  const absl::Status status =
      MountErofs(metadata, devices, target(), transport == Transport::kErofsOnLoop);
  EXPECT_TRUE(status.ok()) << status;
  if (!status.ok()) return nullptr;
  mounted->erofs = std::make_unique<MountGuard>(target());
  return mounted;
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

absl::StatusOr<std::string> ReadAt(const std::string& path, uint64_t offset, size_t length,
                                   int flags) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(path, O_RDONLY | flags));
  // Aligned for O_DIRECT.
  ASSIGN_OR_RETURN(Mapping buffer, Mapping::Anonymous(length));
  size_t filled = 0;
  while (filled < length) {
    const ssize_t got = ::pread(fd.get(), buffer.bytes().data() + filled, length - filled,
                                static_cast<off_t>(offset + filled));
    if (got < 0) return ErrnoStatus(errno, fmt::format("read {}", path));
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  return std::string(AsText(buffer.bytes().first(filled)));
}

void DropPages(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(fd.valid()) << path;
  EXPECT_EQ(::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED), 0);
}

std::string Shell(const std::string& command) {
  std::FILE* pipe = ::popen(("{ " + command + "\n} 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen";
    return "";
  }
  std::string output;
  std::array<char, 4096> buffer;
  while (const size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), got);
  }
  EXPECT_EQ(::pclose(pipe), 0) << command << "\n" << output;
  return output;
}

void AsNobody(const std::function<int()>& check) {
  // A node of our own in place of /dev/fuse, which not every system opens to all, seen by the child
  // alone.
  auto directory = TemporaryDirectory::Create("/var/tmp", "lamina-dev-");
  ASSERT_TRUE(directory.ok()) << directory.status();
  const std::string node = directory->path() + "/fuse";
  ASSERT_EQ(::mknod(node.c_str(), S_IFCHR | 0666, makedev(10, 229)), 0);
  ASSERT_EQ(::chmod(node.c_str(), 0666), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool prepared = ::unshare(CLONE_NEWNS) == 0 &&
                          ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                          ::mount(node.c_str(), "/dev/fuse", nullptr, MS_BIND, nullptr) == 0 &&
                          ::setgroups(0, nullptr) == 0 && ::setgid(65534) == 0 &&
                          ::setuid(65534) == 0;
    ::_exit(prepared ? check() : 99);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace lamina::fs
