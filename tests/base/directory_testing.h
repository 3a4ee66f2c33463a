// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_TESTS_BASE_DIRECTORY_TESTING_H_
#define LAMINA_TESTS_BASE_DIRECTORY_TESTING_H_

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina {

// Gives each test a directory of its own, which goes with it.
class DirectoryTest : public testing::Test {
 protected:
  void SetUp() override {
    auto directory = TemporaryDirectory::Create(testing::TempDir(), "directory-test-");
    ASSERT_EQ(directory.status(), absl::OkStatus());
    directory_ = *std::move(directory);
  }

  std::string Path(std::string_view name) const {
    return fmt::format("{}/{}", directory_->path(), name);
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_->path())) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  std::optional<TemporaryDirectory> directory_;
};

}  // namespace lamina

#endif  // LAMINA_TESTS_BASE_DIRECTORY_TESTING_H_
