// SPDX-License-Identifier: Apache-2.0
#include "fs/mount/overlay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "fs/mount/mount.h"
#include "tests/mount/mount_testing.h"
#include "tests/mount/tree_differences.h"

namespace lamina::fs {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

// An image mounted as the lower layer of a writable overlay.
class OverlayTest : public MountTest {
 protected:
  OverlayDirectories Directories() const {
    return {{target()}, MakeDirectory("upper"), MakeDirectory("work")};
  }
  std::string merged() const { return MakeDirectory("merged"); }
};

TEST_F(OverlayTest, ChangesGoToTheUpperAsAPlainLayer) {
  const std::string source = MakeDirectory("source");
  Shell("cd " + source +
        " && mkdir dir old-dir && echo one > dir/one && echo two > two && echo gone > gone && "
        "echo below > old-dir/below && echo name > name");
  const TestImage image = ImageOf(source);
  const auto mounted = Mount(image, Transport::kErofsOnFiles);
  ASSERT_NE(mounted, nullptr);
  const OverlayDirectories at = Directories();
  // The root of an overlay has the attributes of the upper directory.
  Shell(fmt::format("chmod --reference={0} {1} && touch -r {0} {1}", source, at.upper));
  const absl::Status status = MountOverlay(at, merged());
  ASSERT_TRUE(status.ok()) << status;
  const MountGuard guard(merged());
  EXPECT_THAT(TreeDifferences(source, merged()), IsEmpty());

  Shell("cd " + merged() +
        " && echo new > new && echo more >> two && rm gone && mv name renamed && rm -r old-dir && "
        "mkdir old-dir && echo fresh > old-dir/fresh && chmod 600 dir/one");
  // A directory of the lower layer is not renamed by reference: rename(2) says so, mv(1) copies.
  EXPECT_EQ(::rename((merged() + "/dir").c_str(), (merged() + "/moved").c_str()), -1);
  EXPECT_EQ(errno, EXDEV);

  EXPECT_EQ(ReadAll(merged() + "/two"), "two\nmore\n");
  EXPECT_EQ(ReadAll(merged() + "/renamed"), "name\n");
  EXPECT_EQ(ReadAll(merged() + "/dir/one"), "one\n");
  EXPECT_FALSE(std::filesystem::exists(merged() + "/gone"));
  EXPECT_FALSE(std::filesystem::exists(merged() + "/old-dir/below"));

  struct stat whiteout {};
  ASSERT_EQ(::lstat((at.upper + "/gone").c_str(), &whiteout), 0);
  EXPECT_TRUE(S_ISCHR(whiteout.st_mode) && whiteout.st_rdev == 0);
  char opaque = 0;
  EXPECT_EQ(::getxattr((at.upper + "/old-dir").c_str(), "trusted.overlay.opaque", &opaque, 1), 1);
  EXPECT_EQ(opaque, 'y');
  EXPECT_THAT(Shell("getfattr -R -h -d -m 'trusted.overlay.(redirect|metacopy)' " + at.upper),
              IsEmpty());
  // The image is as it was.
  EXPECT_THAT(TreeDifferences(source, target()), IsEmpty());
}

TEST_F(OverlayTest, UpperLayersOfAnImageHideLowerOnes) {
  const std::string top = MakeDirectory("top"), middle = MakeDirectory("middle");
  const std::string bottom = MakeDirectory("bottom");
  std::ofstream(top + "/file") << "top";
  std::ofstream(middle + "/file") << "middle";
  std::ofstream(middle + "/other") << "middle";
  std::ofstream(bottom + "/other") << "bottom";
  std::ofstream(bottom + "/third") << "bottom";
  const auto check = [&](const absl::Status& status) {
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(ReadAll(merged() + "/file"), "top");
    EXPECT_EQ(ReadAll(merged() + "/other"), "middle");
    EXPECT_EQ(ReadAll(merged() + "/third"), "bottom");
    EXPECT_TRUE(Unmount(merged()).ok());
  };
  const OverlayDirectories at{{top, middle, bottom}, MakeDirectory("upper"), MakeDirectory("work")};
  check(MountOverlayByLayer(at, merged()));
  check(MountOverlayByString(at, merged()));
}

TEST_F(OverlayTest, PathsMayHoldWhatSeparatesOptions) {
  const std::string lower = MakeDirectory("a,b:c\\d" + std::string(200, 'x') + "/lower");
  std::ofstream(lower + "/file") << "content";
  const OverlayDirectories at{{lower}, MakeDirectory("up,per:\\"), MakeDirectory("wo,rk:\\")};
  for (const auto mount : {&MountOverlayByLayer, &MountOverlayByString}) {
    const absl::Status status = mount(at, merged());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(ReadAll(merged() + "/file"), "content");
    EXPECT_TRUE(Unmount(merged()).ok());
  }
}

TEST_F(OverlayTest, ManyLayersFitInEitherWay) {
  OverlayDirectories at{{}, MakeDirectory("upper"), MakeDirectory("work")};
  for (int i = 0; i < 127; ++i) {
    at.lowers.push_back(MakeDirectory(fmt::format("{}-{}", std::string(100, 'l'), i)));
    std::ofstream(fmt::format("{}/{}", at.lowers.back(), i)) << i;
  }
  for (const auto mount : {&MountOverlayByLayer, &MountOverlayByString}) {
    const absl::Status status = mount(at, merged());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(ReadAll(merged() + "/126"), "126");
    EXPECT_TRUE(Unmount(merged()).ok());
  }
}

TEST_F(OverlayTest, OneThatNeedNotSurviveSaysSo) {
  OverlayDirectories at{{MakeDirectory("lower")}, MakeDirectory("upper"), MakeDirectory("work")};
  at.is_volatile = true;
  for (const auto mount : {&MountOverlayByLayer, &MountOverlayByString}) {
    const absl::Status status = mount(at, merged());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(FindMount(merged()).value()->super_options, HasSubstr("volatile"));
    EXPECT_TRUE(Unmount(merged()).ok());
    at.work = MakeDirectory("work2");
  }
}

TEST_F(OverlayTest, ErrorsNameTheTargetAndWhatIsMissing) {
  const absl::Status none =
      MountOverlay({{}, MakeDirectory("upper"), MakeDirectory("work")}, merged());
  EXPECT_TRUE(absl::IsInvalidArgument(none)) << none;
  const absl::Status missing =
      MountOverlay({{root() + "/absent"}, MakeDirectory("upper"), MakeDirectory("work")}, merged());
  EXPECT_FALSE(missing.ok());
  EXPECT_THAT(std::string(missing.message()), HasSubstr(merged()));
  EXPECT_THAT(std::string(missing.message()), HasSubstr(root() + "/absent"));
  EXPECT_FALSE(FindMount(merged()).value().has_value());
}

}  // namespace
}  // namespace lamina::fs
