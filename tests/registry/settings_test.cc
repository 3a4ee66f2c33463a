// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/settings.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "chunkstore/base/file.h"
#include "chunkstore/registry/ca_file.h"

namespace lamina::registry {
namespace {

TEST(SettingsTest, MirrorsAreForOneRegistryOrAny) {
  const auto any = Mirror::Parse("https://mirror.example/");
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_EQ(any->registry, "");
  EXPECT_EQ(any->url, "https://mirror.example");
  const auto one = Mirror::Parse("docker.io=http://127.0.0.1:5000/v2/hub");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->registry, "docker.io");
  EXPECT_EQ(one->url, "http://127.0.0.1:5000/v2/hub");
  for (const char* text : {"", "mirror.example", "ftp://h", "=https://h", "a b=https://h",
                           "https://u:p@h", "https://h/?a=b"}) {
    EXPECT_FALSE(Mirror::Parse(text).ok()) << text;
  }
}

TEST(SettingsTest, AuthoritiesOfARegistryAreFound) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-certs-");
  ASSERT_TRUE(directory.ok());
  const std::string path = directory->path() + "/h.x:5000";
  std::filesystem::create_directory(path);
  ASSERT_TRUE(WriteFileAtomically(path + "/ca.crt", "").ok());
  EXPECT_EQ(FindCaFile("h.x:5000", {"/nonexistent", directory->path()}), path + "/ca.crt");
  EXPECT_EQ(FindCaFile("h.x", {directory->path()}), "");
}

}  // namespace
}  // namespace lamina::registry
