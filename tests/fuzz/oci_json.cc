// SPDX-License-Identifier: Apache-2.0
//
// The JSON documents of images: index, manifest, configuration, and the manifest.json of Docker's
// archives. What is accepted must come back the same after it is written.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "fs/image/docker_archive.h"
#include "fs/image/layout.h"
#include "fs/image/oci.h"

namespace {

using lamina::oci::Descriptor;
using lamina::oci::Index;
using lamina::oci::Manifest;

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckManifest(std::string_view json) {
  const auto manifest = Manifest::Parse(json);
  if (!manifest.ok()) return;
  const std::string written = manifest->ToJson();
  const auto again = Manifest::Parse(written);
  Require(again.ok() && again->ToJson() == written);
  for (const Descriptor& layer : manifest->layers) {
    const auto descriptor = layer.ToLayerDescriptor();
    if (descriptor.ok()) Require(descriptor->section_table_offset < descriptor->size);
  }
}

void CheckIndex(std::string_view json) {
  const auto index = Index::Parse(json);
  if (!index.ok()) return;
  const std::string written = index->ToJson();
  const auto again = Index::Parse(written);
  Require(again.ok() && again->ToJson() == written);
  const auto replaced = lamina::oci::ReplaceInIndex(json, Descriptor{.media_type = "a/b"});
  Require(replaced.ok() && Index::Parse(*replaced).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  CheckManifest(json);
  CheckIndex(json);
  (void)lamina::oci::ImageConfig::Parse(json);
  (void)lamina::fs::ParseDockerManifest(json);
  (void)lamina::fs::CheckLayoutFile(json);
  return 0;
}
