// SPDX-License-Identifier: Apache-2.0
//
// Small images for tests: tar archives and layouts made in memory, and the content of converted
// images read back.
#ifndef LAMINA_TESTS_IMAGE_IMAGE_TESTING_H_
#define LAMINA_TESTS_IMAGE_IMAGE_TESTING_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"
#include "fs/image/convert.h"
#include "fs/image/image.h"

namespace lamina::fs {

inline constexpr std::string_view kTarLayer = "application/vnd.oci.image.layer.v1.tar";
inline constexpr std::string_view kGzipLayer = "application/vnd.oci.image.layer.v1.tar+gzip";
inline constexpr std::string_view kZstdLayer = "application/vnd.oci.image.layer.v1.tar+zstd";

// A directory below $TMPDIR or /tmp that goes with the object.
TemporaryDirectory MakeTestDirectory();

struct TarEntry {
  std::string name;
  std::string content;
  char type = '0';
  std::string link;
};
std::string MakeTar(const std::vector<TarEntry>& entries);

std::string Gzip(std::string_view data);
// The same content behind a header with all optional fields (RFC 1952, section 2.3).
std::string GzipWithOptionalFields(std::string_view data);
// One frame that does not tell the size of its content.
std::string Zstd(std::string_view data);

// `size` bytes that do not compress, the same ones for the same seed.
std::string Noise(size_t size, uint32_t seed);

struct TestLayer {
  std::string tar;
  std::string blob;  // the archive as it is stored
  std::string media_type = std::string(kTarLayer);
};
TestLayer PlainLayer(const std::vector<TarEntry>& entries);

// Writes a blob into a layout and returns its descriptor.
oci::Descriptor WriteBlob(const std::string& layout, std::string_view content,
                          std::string_view media_type);
// An image configuration, as another tool would format it.
std::string MakeConfigJson(const std::vector<Digest>& diff_ids,
                           const oci::Platform& platform = {"linux", "amd64", ""});
// Writes configuration and manifest of an image whose layers are there, and returns the descriptor.
oci::Descriptor WriteManifest(const std::string& layout, std::string_view config,
                              const std::vector<oci::Descriptor>& layers);
void WriteIndex(const std::string& layout, const std::vector<oci::Descriptor>& manifests);
// A whole layout with one image, "oci:<layout>:<tag>".
void WriteLayout(const std::string& layout, const std::string& tag,
                 const std::vector<TestLayer>& layers);

void WriteFile(const std::string& path, std::string_view content);
std::string ReadFile(const std::string& path);

// Path -> content of every file below a directory, to see that nothing has changed.
std::map<std::string, std::string> Snapshot(const std::string& directory);

// Path -> content of every regular file of a converted layer, read through its tables and frames;
// directories have an empty content and names that end in '/', symbolic links have their target.
std::map<std::string, std::string> ReadLayer(const Image& image, size_t layer);

// Opens "oci:<layout>:<tag>" for linux/amd64; a failure is a failure of the test.
Image MustOpen(const std::string& reference);
ConvertResult MustConvert(const std::string& source, const std::string& destination, int jobs = 2);

// Runs a shell command, expects success, and returns what it wrote to standard output.
std::string RunCommand(const std::string& command);

}  // namespace lamina::fs

#endif  // LAMINA_TESTS_IMAGE_IMAGE_TESTING_H_
