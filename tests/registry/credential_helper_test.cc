// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/credential_helper.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>

#include "chunkstore/base/file.h"

namespace lamina::registry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr const char* kAnswer = R"(echo '{"ServerURL":"x","Username":"ann","Secret":"s3cret"}')";

// A zombie, which whoever inherited it has yet to reap, does not.
bool Runs(int pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  return name_end != std::string::npos && line[name_end + 2] != 'Z';
}

class CredentialHelperTest : public testing::Test {
 protected:
  CredentialHelperTest() {
    absl::StatusOr<TemporaryDirectory> directory =
        TemporaryDirectory::Create(testing::TempDir(), "lamina-helper-");
    EXPECT_TRUE(directory.ok()) << directory.status();
    directory_ = std::make_unique<TemporaryDirectory>(*std::move(directory));
    ::setenv("PATH", fmt::format("{}:{}", directory_->path(), path_).c_str(), 1);
  }
  ~CredentialHelperTest() override { ::setenv("PATH", path_.c_str(), 1); }

  std::string Path(const char* name) const { return directory_->path() + "/" + name; }

  // What a shell script as a helper answers: "user:secret", "nothing", or an error.
  std::string Ask(std::string_view script, milliseconds patience = seconds(20)) const {
    EXPECT_TRUE(WriteFileAtomically(Path("docker-credential-test"),
                                    fmt::format("#!/bin/sh\n{}\n", script), 0755)
                    .ok());
    const auto credential = AskHelper("test", "h.x:5000", patience);
    if (!credential.ok()) return credential.status().ToString();
    if (!*credential) return "nothing";
    return (*credential)->username + ":" + (*credential)->password;
  }

 private:
  const std::string path_ = std::getenv("PATH");
  std::unique_ptr<TemporaryDirectory> directory_;
};

TEST_F(CredentialHelperTest, GetsTheRegistryAndNeedNotReadIt) {
  EXPECT_EQ(Ask(fmt::format(R"sh([ "$1 $(cat)" = "get h.x:5000" ] && {})sh", kAnswer)),
            "ann:s3cret");
  EXPECT_EQ(Ask(kAnswer), "ann:s3cret");
  EXPECT_EQ(Ask(fmt::format("exec 0<&-; {}", kAnswer)), "ann:s3cret");
}

TEST_F(CredentialHelperTest, NothingFoundIsNoError) {
  EXPECT_EQ(Ask("echo 'credentials not found in native keychain'; exit 1"), "nothing");
}

TEST_F(CredentialHelperTest, WhatItPrintedIsNotRepeated) {
  for (const char* end : {"exit 3", "kill -9 $$", "echo more"}) {
    const std::string error = Ask(fmt::format("{}; {}", kAnswer, end));
    EXPECT_NE(error.find("docker-credential-test"), std::string::npos) << error;
    EXPECT_EQ(error.find("s3cret"), std::string::npos) << error;
  }
  EXPECT_NE(Ask("echo token=s3cret; exit 3").find("exit status 3"), std::string::npos);
  EXPECT_NE(Ask("kill -9 $$").find("signal 9"), std::string::npos);
}

TEST_F(CredentialHelperTest, WhatItLeavesBehindIsNotWaitedFor) {
  const auto begin = steady_clock::now();
  EXPECT_EQ(Ask(fmt::format("sleep 15 & {}", kAnswer)), "ann:s3cret");
  EXPECT_LT(steady_clock::now() - begin, seconds(10));
}

TEST_F(CredentialHelperTest, IsEndedWithAllThatItHasStarted) {
  const std::string file = Path("pid");
  for (const char* output : {"", "exec 1>&-;"}) {
    const std::string error =
        Ask(fmt::format("{} sleep 100 & echo $! > {}; wait", output, file), milliseconds(1000));
    EXPECT_NE(error.find("in time"), std::string::npos) << error;
    const absl::StatusOr<std::string> text = ReadFileToString(file, 100);
    ASSERT_TRUE(text.ok()) << text.status();
    const int pid = std::atoi(text->c_str());
    ASSERT_GT(pid, 1);
    for (int i = 0; i < 100 && Runs(pid); ++i) std::this_thread::sleep_for(milliseconds(20));
    EXPECT_FALSE(Runs(pid));
  }
}

}  // namespace
}  // namespace lamina::registry
