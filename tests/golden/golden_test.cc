// SPDX-License-Identifier: Apache-2.0
//
// Digests of whole EROFS images. Nodes and registries keep images that were built long ago, and a
// layer's digest is its name in every cache: a change of one of these digests makes all of them
// different from what is built now. Change them only together with FORMAT.md, and say why.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/file.h"
#include "erofs/builder.h"
#include "erofs/merge.h"
#include "erofs/reader.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

// One of everything a layer can hold, and a directory of several blocks.
std::string LowerArchive() {
  TarWriter tar;
  tar.Directory("./", 0755).Directory("bin").File("bin/tool", "#!/bin/sh\necho tool\n");
  tar.Add({.name = "bin/su", .mode = 04755, .content = std::string(70'000, 's')});
  tar.HardLink("bin/login", "bin/su").Symlink("sh", "bin/tool");
  tar.Symlink("long", std::string(200, 'l'));
  tar.Add({.name = "owned", .mode = 0640, .uid = 70'000, .gid = 80'000, .mtime = 1'700'000'000});
  tar.Pax({{"mtime", "1700000000.123456789"}, {"SCHILY.xattr.user.note", "early"}}).File("noted");
  tar.Pax({{"SCHILY.acl.access", "user::rw-,user:7:r--,group::r--,mask::r--,other::r--"}});
  tar.File("acl", "acl");
  tar.Directory("dev");
  tar.Add({.name = "dev/null", .type = '3', .mode = 0666, .major = 1, .minor = 3});
  tar.Add({.name = "dev/disk", .type = '4', .mode = 0660, .major = 259, .minor = 70'000});
  tar.Add({.name = "dev/fifo", .type = '6', .mode = 0600});
  tar.Directory("many");
  for (int i = 0; i < 500; ++i) tar.File(fmt::format("many/file-{:04}", i), std::to_string(i));
  tar.Directory("gone").File("gone/file", "below").Directory("opaque").File("opaque/old", "old");
  return tar.Finish();
}

std::string UpperArchive() {
  TarWriter tar;
  tar.File(".wh.gone").File("opaque/.wh..wh..opq").File("opaque/new", "new");
  tar.File("bin/tool", "replaced").File("implied/below", "x").File("many/file-0499", "again");
  return tar.Finish();
}

class Golden : public TarImportFixture {
 protected:
  std::string Layer(std::string_view archive, uint32_t blocks) {
    const absl::StatusOr<std::string> image =
        BuildImage(Import(archive), {.devices = {{.tag = "sha256:layer", .blocks = blocks}}});
    EXPECT_TRUE(image.ok()) << image.status();
    return image.value_or("");
  }
};

TEST_F(Golden, ImagesAreBuiltByteForByteAsBefore) {
  const std::vector<std::string> layers = {Layer(LowerArchive(), 4096),
                                           Layer(UpperArchive(), 4096)};
  EXPECT_EQ(Digest::Of(AsBytes(layers[0])).Hex(),
            "23290e7fa7b58a5c523439a4db75a825efcc1f6f9b48e3e38071c135be0ff6ca");
  EXPECT_EQ(Digest::Of(AsBytes(layers[1])).Hex(),
            "0bdc39d9714b92a6b5e9a469778627cdb71a16e39822efc88125c2f2e81266ed");

  std::vector<Reader> readers;
  for (const std::string& layer : layers) {
    absl::StatusOr<Reader> reader = Reader::Open(AsBytes(layer));
    ASSERT_TRUE(reader.ok()) << reader.status();
    readers.push_back(*std::move(reader));
  }
  const absl::StatusOr<Tree> merged =
      MergeLayers(std::vector<const Reader*>{&readers[0], &readers[1]});
  ASSERT_TRUE(merged.ok()) << merged.status();
  const absl::StatusOr<std::string> image = BuildImage(
      *merged, {.devices = {{.tag = "sha256:lower", .blocks = 4096}, {"sha256:upper", 4096}}});
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(Digest::Of(AsBytes(*image)).Hex(),
            "8293de94ca2196e32e7342f1a060c404feba14b21348533be0ead8a1d2c0174e");
}

}  // namespace
}  // namespace lamina::erofs
