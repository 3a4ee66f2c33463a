// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/test_image.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "fs/image/convert.h"

namespace lamina::fs {
namespace {

TemporaryDirectory MakeDirectory() {
  absl::StatusOr<TemporaryDirectory> directory =
      TemporaryDirectory::Create(testing::TempDir(), "lamina-engine-test-");
  if (!directory.ok()) throw std::runtime_error(std::string(directory.status().message()));
  return *std::move(directory);
}

void Write(const std::string& path, std::string_view content) {
  const absl::Status status = WriteFileAtomically(path, content);
  ASSERT_TRUE(status.ok()) << status;
}

}  // namespace

TestImage::TestImage() : directory_(MakeDirectory()) {
  std::mt19937 random(1);
  data_.resize(1'000'000);
  for (char& c : data_) c = static_cast<char>(random());
  const std::string root = directory_.path() + "/root";
  for (const std::string& path : {root, mountpoint()}) ::mkdir(path.c_str(), 0755);
  Write(root + "/hello.txt", hello_);
  Write(root + "/data.bin", data_);
  // With the names of directories of an engine's, and leading out of the image.
  for (const char* name : {"/lower", "/root"}) {
    EXPECT_EQ(::symlink((mountpoint() + "-outside").c_str(), (root + name).c_str()), 0);
  }
  ::chmod(root.c_str(), 0751);
  EXPECT_EQ(::chown(root.c_str(), 7, 8), ::geteuid() == 0 ? 0 : -1);
  const absl::StatusOr<ConvertResult> result =
      Convert({.source = "dir:" + root, .destination = reference()});
  if (!result.ok()) ADD_FAILURE() << result.status();
}

std::string Slurp(const std::string& path) {
  absl::StatusOr<std::string> content = ReadFileToString(path, 1 << 30);
  EXPECT_TRUE(content.ok()) << content.status();
  return content.ok() ? *std::move(content) : "";
}

}  // namespace lamina::fs
