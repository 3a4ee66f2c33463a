// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/mount.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>

#include "erofs/builder.h"
#include "fs/mount/loop.h"
#include "tests/mount/mount_testing.h"

namespace lamina::fs {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// An image without content, in a file.
class MountCallsTest : public MountTest {
 protected:
  std::string MetadataFile(const std::string& path) const {
    const auto image = erofs::BuildImage(erofs::Tree(), {});
    EXPECT_TRUE(image.ok()) << image.status();
    EXPECT_TRUE(WriteFileAtomically(path, *image).ok());
    return path;
  }
};

TEST_F(MountCallsTest, MountedImagesAreFoundByTheirTarget) {
  const std::string metadata = MetadataFile(root() + "/metadata");
  ASSERT_TRUE(MountErofs(metadata, {}, target(), /*loop=*/false).ok());
  const MountGuard guard(target());
  const auto mount = FindMount(target());
  ASSERT_TRUE(mount.ok() && mount->has_value());
  EXPECT_EQ((*mount)->target, target());
  EXPECT_EQ((*mount)->type, "erofs");
  EXPECT_EQ((*mount)->source, metadata);
  EXPECT_THAT((*mount)->super_options, HasSubstr("ro"));
}

TEST_F(MountCallsTest, AMountIsFoundByEveryNameOfItsTarget) {
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/metadata"), {}, target(), false).ok());
  const MountGuard guard(target());
  std::filesystem::create_symlink("mnt", root() + "/link");
  for (const char* name : {"/mnt/", "/./mnt", "/link", "/mnt/../mnt"}) {
    EXPECT_TRUE(FindMount(root() + name).value().has_value()) << name;
  }
  EXPECT_FALSE(FindMount(root()).value().has_value());
  EXPECT_FALSE(FindMount(root() + "/absent").value().has_value());
}

TEST_F(MountCallsTest, TargetsWithOddNamesAreShownAsTheyAre) {
  const std::string odd = MakeDirectory("tab\tspace newline\nback\\slash#,:\xff");
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/meta,data"), {}, odd, false).ok());
  const MountGuard guard(odd);
  const auto mount = FindMount(odd);
  ASSERT_TRUE(mount.ok() && mount->has_value());
  EXPECT_EQ((*mount)->target, odd);
  EXPECT_EQ((*mount)->source, root() + "/meta,data");
}

TEST_F(MountCallsTest, TheUppermostOfSeveralMountsIsFound) {
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/first"), {}, target(), false).ok());
  const MountGuard first(target());
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/second"), {}, target(), false).ok());
  const MountGuard second(target());
  EXPECT_EQ((*FindMount(target()))->source, root() + "/second");
}

TEST_F(MountCallsTest, PathsMayBeLongerThanTheKernelTakesInAnOption) {
  const std::string directory = MakeDirectory(std::string(200, 'a') + "/" + std::string(200, 'b'));
  for (const bool loop : {false, true}) {
    const absl::Status status =
        MountErofs(MetadataFile(directory + "/metadata"), {}, target(), loop);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(Unmount(target()).ok());
  }
}

TEST_F(MountCallsTest, SetUserIdAndDeviceNodesWorkAsContainersNeedThem) {
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/metadata"), {}, target(), false).ok());
  const MountGuard guard(target());
  const std::string options = Shell("findmnt -no VFS-OPTIONS '" + target() + "'");
  EXPECT_THAT(options, AllOf(HasSubstr("ro"), testing::Not(HasSubstr("nosuid")),
                             testing::Not(HasSubstr("nodev"))));
}

TEST_F(MountCallsTest, WhatIsNotErofsIsRefusedByName) {
  const std::string path = root() + "/text";
  std::ofstream(path) << std::string(8192, 'x');
  std::ofstream(root() + "/empty");
  for (const std::string& file : {path, root() + "/empty"}) {
    for (const bool loop : {false, true}) {
      const absl::Status status = MountErofs(file, {}, target(), loop);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(Message(status),
                  AllOf(HasSubstr(file), HasSubstr(target()), HasSubstr("not an EROFS image")));
    }
  }
}

TEST_F(MountCallsTest, MissingFilesAreNamed) {
  const absl::Status no_metadata = MountErofs(root() + "/absent", {}, target(), false);
  EXPECT_TRUE(absl::IsNotFound(no_metadata)) << no_metadata;
  EXPECT_THAT(Message(no_metadata), HasSubstr(root() + "/absent"));

  const std::string metadata = MetadataFile(root() + "/metadata");
  const absl::Status no_target = MountErofs(metadata, {}, root() + "/nowhere", false);
  EXPECT_TRUE(absl::IsNotFound(no_target)) << no_target;
  EXPECT_THAT(Message(no_target), HasSubstr(root() + "/nowhere"));
}

TEST_F(MountCallsTest, AMissingDeviceIsAnErrorAndLeavesNothing) {
  const TestImage image = ImageOfFiles({"one", "two"});
  const std::string metadata = root() + "/metadata";
  ASSERT_TRUE(WriteFileAtomically(metadata, image.metadata).ok());
  for (const bool loop : {false, true}) {
    const SystemState before = State();
    EXPECT_FALSE(MountErofs(metadata, {metadata, root() + "/absent"}, target(), loop).ok());
    EXPECT_FALSE(MountErofs(metadata, {metadata}, target(), loop).ok()) << "one device too few";
    EXPECT_FALSE(FindMount(target()).value().has_value());
    EXPECT_EQ(State(), before);
  }
}

TEST_F(MountCallsTest, LoopDevicesGoWithTheMountThatUsesThem) {
  const size_t before = State().loop_devices;
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/metadata"), {}, target(), /*loop=*/true).ok());
  EXPECT_EQ(State().loop_devices, before + 1);
  EXPECT_THAT((*FindMount(target()))->source, HasSubstr("/dev/loop"));
  ASSERT_TRUE(Unmount(target()).ok());
  EXPECT_EQ(State().loop_devices, before);
}

TEST_F(MountCallsTest, ManyMayTakeLoopDevicesAtOnce) {
  const std::string file = MetadataFile(root() + "/metadata");
  std::vector<std::future<absl::StatusOr<std::string>>> takers;
  for (int i = 0; i < 16; ++i) {
    takers.push_back(std::async(std::launch::async, [&]() -> absl::StatusOr<std::string> {
      std::string paths;
      for (int round = 0; round < 5; ++round) {
        ASSIGN_OR_RETURN(const LoopDevice device, LoopDevice::Attach(file));
        ASSIGN_OR_RETURN(const UniqueFd fd, OpenFile(device.path(), O_RDONLY));
        paths += device.path();
      }
      return paths;
    }));
  }
  for (auto& taker : takers) {
    const auto paths = taker.get();
    EXPECT_TRUE(paths.ok()) << paths.status();
  }
}

TEST_F(MountCallsTest, UnmountingNothingIsNotFound) {
  for (const std::string& path : {target(), root() + "/absent"}) {
    const absl::Status status = Unmount(path);
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr(path));
  }
}

TEST_F(MountCallsTest, ABusyMountSaysWhatToDo) {
  ASSERT_TRUE(MountErofs(MetadataFile(root() + "/metadata"), {}, target(), false).ok());
  const MountGuard guard(target());
  const UniqueFd user(::open(target().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const absl::Status status = Unmount(target());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(Message(status), AllOf(HasSubstr("in use"), HasSubstr("fuser -vm " + target())));
}

TEST_F(MountCallsTest, CapabilitiesAreThoseOfThisMachine) {
  const size_t mounts = State().mounts;
  EXPECT_TRUE(CanMountErofs().available) << CanMountErofs().reason;
  EXPECT_TRUE(CanMountErofsFromFile("/var/tmp").available)
      << CanMountErofsFromFile("/var/tmp").reason;
  EXPECT_TRUE(CanUseFuse().available) << CanUseFuse().reason;
  EXPECT_EQ(State().mounts, mounts) << "the trial mount was attached somewhere";
}

TEST_F(MountCallsTest, OrdinaryUsersAreToldThatTheyCannotMountErofs) {
  AsNobody([] {
    const Capability erofs = CanMountErofs();
    if (erofs.available || erofs.reason.find("root") == std::string::npos) return 1;
    if (CanMountErofsFromFile("/var/tmp").available) return 2;
    return 0;
  });
}

TEST_F(MountCallsTest, WithoutFusermountOrdinaryUsersHaveNoFuse) {
  AsNobody([] {
    ::setenv("PATH", "/nonexistent", 1);
    const Capability fuse = CanUseFuse();
    return !fuse.available && !fuse.reason.empty() ? 0 : 1;
  });
}

}  // namespace
}  // namespace lamina::fs
