// SPDX-License-Identifier: Apache-2.0
#include "backends/oci_bundle.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

class OciBundleTest : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(root() + "/etc");
    Write("passwd",
          "root:x:0:0:root:/root:/bin/sh\n"
          "app:x:1000:1001:App:/home/app:/bin/sh\n"
          "1234:x:77:78::/seven:/bin/sh\n"
          "bare:x:99:98\n"
          "huge:x:4294967295:0::/:\n"
          "wide:x:5:2147483648::/:\n");
    Write("group",
          "root:x:0:\napp:x:1001:app\nextra:x:2000:other,app\nshort:x:3000\nhuge:x:2147483648:\n");
  }
  const std::string& root() const { return directory_.path(); }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_EQ(WriteFileAtomically(root() + "/etc/" + name, text), absl::OkStatus());
  }
  // "uid:gid additional... home", or the error.
  std::string Resolve(std::string_view user) {
    const absl::StatusOr<User> resolved = ResolveUser(root(), user);
    if (!resolved.ok()) return std::string(resolved.status().message());
    return fmt::format("{}:{} [{}] {}", resolved->uid, resolved->gid,
                       fmt::join(resolved->additional_gids, ","), resolved->home);
  }
  BundleOptions Options() { return {.rootfs = root(), .command = {"true"}}; }

 private:
  TemporaryDirectory directory_ = *TemporaryDirectory::Create("/tmp", "oci-bundle-test-");
};

TEST_F(OciBundleTest, UsersResolveAsWithDocker) {
  EXPECT_EQ(Resolve(""), "0:0 [] /root");
  EXPECT_EQ(Resolve("app"), "1000:1001 [2000] /home/app");
  EXPECT_EQ(Resolve("app:"), "1000:1001 [2000] /home/app");
  EXPECT_EQ(Resolve("1000"), "1000:1001 [2000] /home/app");
  EXPECT_EQ(Resolve("app:extra"), "1000:2000 [] /home/app");
  EXPECT_EQ(Resolve("app:short"), "1000:3000 [] /home/app");
  EXPECT_EQ(Resolve("app:7"), "1000:7 [] /home/app");
  EXPECT_EQ(Resolve(":extra"), "0:2000 [] /root");
  EXPECT_EQ(Resolve("5000"), "5000:0 [] /");
  EXPECT_EQ(Resolve("5000:6"), "5000:6 [] /");
  EXPECT_EQ(Resolve("1234"), "1234:0 [] /") << "a number is an id even if there is such a name";
  EXPECT_EQ(Resolve("bare"), "99:98 [] /");
  EXPECT_EQ(Resolve("2147483647:2147483647"), "2147483647:2147483647 [] /");
  EXPECT_THAT(Resolve("ghost"), HasSubstr("'ghost' of the image is not in its /etc/passwd"));
  EXPECT_THAT(Resolve("app:ghosts"), HasSubstr("'ghosts' of the image is not in its /etc/group"));
  EXPECT_THAT(Resolve("a:b:c"), HasSubstr("two colons"));
}

TEST_F(OciBundleTest, IdsThatTheKernelWouldTakeForNoChangeAreRefused) {
  for (const char* user : {"4294967295", "2147483648", "99999999999999999999", "0:4294967295",
                           "huge", "wide", "app:huge"}) {
    EXPECT_THAT(Resolve(user), HasSubstr("is not a number from 0 to 2147483647")) << user;
  }
}

TEST_F(OciBundleTest, NothingButARegularFileIsOpenedForAccounts) {
  for (const mode_t type : {S_IFIFO, S_IFCHR, S_IFDIR}) {
    const std::string path = root() + "/etc/passwd";
    std::filesystem::remove(path);
    const int made =
        type == S_IFDIR ? ::mkdir(path.c_str(), 0755) : ::mknod(path.c_str(), type | 0644, 0x0a82);
    if (made != 0 && errno == EPERM) GTEST_SKIP() << "making device nodes needs root";
    ASSERT_EQ(made, 0);
    EXPECT_THAT(Resolve("app"), HasSubstr("etc/passwd of the image is not a regular file"));
  }
}

TEST_F(OciBundleTest, HomeIsAlwaysGiven) {
  BundleOptions options = Options();
  options.config.user = "app";
  const auto environment = [](const absl::StatusOr<std::string>& config) {
    return nlohmann::json::parse(config.value())["process"]["env"].get<std::vector<std::string>>();
  };
  EXPECT_THAT(environment(BundleConfig(options)), Contains("HOME=/home/app"));
  options.config.environment = {"PATH=/bin", "HOME=/mine"};
  EXPECT_THAT(environment(BundleConfig(options)), ElementsAre("PATH=/bin", "HOME=/mine"));
}

TEST_F(OciBundleTest, WhatIsNotUtf8IsRefused) {
  BundleOptions options = Options();
  options.command = {"printf", "caf\xe9"};
  EXPECT_EQ(BundleConfig(options).status(),
            absl::InvalidArgumentError("argument \"caf\\xe9\" is not UTF-8: a container's "
                                       "configuration cannot have it"));
  options = Options();
  options.config.user = "latin";
  Write("passwd", "latin:x:1:1::/caf\xe9:\n");
  EXPECT_THAT(std::string(BundleConfig(options).status().message()),
              HasSubstr("home directory \"/caf\\xe9\" is not UTF-8"));
}

// crun would end the text there: "rm -rf /data\0/tmp" is another command then.
TEST_F(OciBundleTest, WhatHasANulIsRefused) {
  using namespace std::string_literals;
  const auto message = [](const BundleOptions& options) {
    return std::string(BundleConfig(options).status().message());
  };
  BundleOptions options = Options();
  options.command = {"sh", "-c", "rm -rf /data\0/tmp"s};
  EXPECT_THAT(message(options), HasSubstr("argument \"rm -rf /data\\x00/tmp\" has a NUL"));
  options = Options();
  options.config.environment = {"A=b\0c"s};
  EXPECT_THAT(message(options), HasSubstr("variable \"A=b\\x00\\x63\" has a NUL"));
  options = Options();
  options.config.working_directory = "/a\0b"s;
  EXPECT_THAT(message(options), HasSubstr("working directory \"/a\\x00\\x62\" has a NUL"));
}

TEST_F(OciBundleTest, TheImagesTermIsKept) {
  BundleOptions options = Options();
  options.terminal = true;
  options.config.environment = {"PATH=/bin", "HOME=/", "TERM=dumb"};
  const auto config = nlohmann::json::parse(BundleConfig(options).value());
  EXPECT_EQ(config["process"]["env"], nlohmann::json::array({"PATH=/bin", "HOME=/", "TERM=dumb"}));
}

}  // namespace
}  // namespace lamina::backends
