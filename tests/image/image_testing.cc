// SPDX-License-Identifier: Apache-2.0
#include "tests/image/image_testing.h"

#include <gtest/gtest.h>
#include <isa-l/crc.h>
#include <isa-l/igzip_lib.h>
#include <sys/stat.h>
#include <zstd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "chunkstore/origin_blob.h"
#include "erofs/reader.h"
#include "fs/image/layer_reader.h"
#include "fs/image/layout.h"

namespace lamina::fs {
namespace {

constexpr size_t kTarBlock = 512;
constexpr size_t kGzipHeader = 10;

std::string TarHeader(const TarEntry& entry) {
  std::string header(kTarBlock, '\0');
  const auto put = [&](size_t offset, std::string_view text) {
    std::memcpy(header.data() + offset, text.data(), text.size());
  };
  put(0, entry.name);
  put(100, entry.type == '5' ? "0000755" : "0000644");
  put(108, "0000000");
  put(116, "0000000");
  put(124, fmt::format("{:011o}", entry.content.size()));
  put(136, "00000000000");
  put(148, "        ");
  header[156] = entry.type;
  put(157, entry.link);
  put(257, std::string_view("ustar\00000", 8));
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<uint8_t>(c);
  put(148, fmt::format("{:06o}", sum));
  header[154] = '\0';
  return header;
}

std::string ReadContent(const erofs::Reader& reader, const erofs::InodeInfo& inode,
                        const std::string& address_space) {
  std::string content(inode.size, '\0');
  const auto extents = reader.ReadExtents(inode);
  EXPECT_TRUE(extents.ok()) << extents.status();
  for (const erofs::Extent& extent : *extents) {
    EXPECT_EQ(extent.device, 1);
    content.replace(
        extent.offset, extent.length,
        address_space.substr(uint64_t{extent.block} * chunkstore::kBlockSize, extent.length));
  }
  return content;
}

std::string ReadAddressSpace(chunkstore::OriginBlob& blob, const LayerTables& tables) {
  std::string space(uint64_t{tables.sections.blocks} * chunkstore::kBlockSize, '\0');
  for (uint32_t i = 0; i < tables.frames.size(); ++i) {
    const chunkstore::FrameRecord& frame = tables.frames[i];
    std::vector<std::byte> compressed(frame.length);
    const chunkstore::RangeRead range{frame.offset, compressed};
    EXPECT_TRUE(blob.Read(std::span(&range, 1)).ok());
    const auto into = std::as_writable_bytes(std::span(space))
                          .subspan(uint64_t{frame.first_block} * chunkstore::kBlockSize,
                                   uint64_t{frame.blocks} * chunkstore::kBlockSize);
    const absl::Status status = chunkstore::DecodeFrame(frame, compressed, into);
    EXPECT_TRUE(status.ok()) << status;
  }
  return space;
}

}  // namespace

TemporaryDirectory MakeTestDirectory() {
  const char* const parent = std::getenv("TMPDIR");
  auto directory = TemporaryDirectory::Create(parent != nullptr ? parent : "/tmp", "lamina-test-");
  EXPECT_TRUE(directory.ok()) << directory.status();
  return *std::move(directory);
}

std::string MakeTar(const std::vector<TarEntry>& entries) {
  std::string tar;
  for (const TarEntry& entry : entries) {
    tar += TarHeader(entry) + entry.content;
    tar.resize((tar.size() + kTarBlock - 1) / kTarBlock * kTarBlock);
  }
  tar.resize(tar.size() + 2 * kTarBlock);
  return tar;
}

std::string Gzip(std::string_view data) {
  std::string compressed(data.size() + data.size() / 8 + 1024, '\0');
  isal_zstream stream;
  isal_deflate_stateless_init(&stream);
  stream.end_of_stream = 1;
  stream.flush = NO_FLUSH;
  stream.gzip_flag = IGZIP_GZIP;
  stream.next_in = reinterpret_cast<uint8_t*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uint32_t>(data.size());
  stream.next_out = reinterpret_cast<uint8_t*>(compressed.data());
  stream.avail_out = static_cast<uint32_t>(compressed.size());
  EXPECT_EQ(isal_deflate_stateless(&stream), COMP_OK);
  compressed.resize(stream.total_out);
  return compressed;
}

std::string GzipWithOptionalFields(std::string_view data) {
  using namespace std::string_view_literals;
  // FTEXT, FHCRC, FEXTRA, FNAME, FCOMMENT; time, flags and system as gzip(1) has them.
  std::string header = std::string("\x1f\x8b\x08\x1f\x01\x02\x03\x04\x00\x03"sv);
  header += "\x08\x00XX\x04\x00"sv;
  header += "abcd"sv;
  header += "layer.tar\0a comment\0"sv;
  const uint32_t crc =
      crc32_gzip_refl(0, reinterpret_cast<const uint8_t*>(header.data()), header.size());
  header += static_cast<char>(crc & 0xff);
  header += static_cast<char>(crc >> 8 & 0xff);
  return header + Gzip(data).substr(kGzipHeader);
}

std::string Zstd(std::string_view data) {
  std::string compressed(ZSTD_compressBound(data.size()), '\0');
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  const size_t size =
      ZSTD_compress2(context, compressed.data(), compressed.size(), data.data(), data.size());
  ZSTD_freeCCtx(context);
  EXPECT_FALSE(ZSTD_isError(size));
  compressed.resize(size);
  return compressed;
}

std::string Noise(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string noise(size, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  return noise;
}

TestLayer PlainLayer(const std::vector<TarEntry>& entries) {
  const std::string tar = MakeTar(entries);
  return {tar, tar};
}

oci::Descriptor WriteBlob(const std::string& layout, std::string_view content,
                          std::string_view media_type) {
  const Digest digest = Digest::Of(AsBytes(content));
  WriteFile(fmt::format("{}/blobs/sha256/{}", layout, digest.Hex()), content);
  return {.media_type = std::string(media_type), .digest = digest, .size = content.size()};
}

std::string MakeConfigJson(const std::vector<Digest>& diff_ids, const oci::Platform& platform) {
  std::vector<std::string> ids;
  for (const Digest& id : diff_ids) ids.push_back(fmt::format("\"{}\"", id.ToString()));
  return fmt::format(
      "{{\"os\": \"{}\", \"architecture\": \"{}\", \"variant\": \"{}\",\n \"config\": {{\"Cmd\": "
      "[\"sh\"]}}, "
      "\"rootfs\": {{\"type\": \"layers\", \"diff_ids\": [{}]}}}}\n",
      platform.os, platform.architecture, platform.variant, fmt::join(ids, ", "));
}

oci::Descriptor WriteManifest(const std::string& layout, std::string_view config,
                              const std::vector<oci::Descriptor>& layers) {
  const oci::Manifest manifest{.media_type = std::string(oci::kManifestType),
                               .config = WriteBlob(layout, config, oci::kConfigType),
                               .layers = layers,
                               .annotations = {{"org.example.key", "value"}}};
  return WriteBlob(layout, manifest.ToJson(), oci::kManifestType);
}

void WriteIndex(const std::string& layout, const std::vector<oci::Descriptor>& manifests) {
  WriteFile(layout + "/oci-layout", kLayoutFileContent);
  WriteFile(layout + "/index.json", oci::Index{.manifests = manifests}.ToJson());
}

void WriteLayout(const std::string& layout, const std::string& tag,
                 const std::vector<TestLayer>& layers) {
  std::vector<Digest> diff_ids;
  std::vector<oci::Descriptor> descriptors;
  for (const TestLayer& layer : layers) {
    diff_ids.push_back(Digest::Of(AsBytes(layer.tar)));
    descriptors.push_back(WriteBlob(layout, layer.blob, layer.media_type));
  }
  oci::Descriptor manifest = WriteManifest(layout, MakeConfigJson(diff_ids), descriptors);
  manifest.annotations[std::string(oci::kRefNameKey)] = tag;
  WriteIndex(layout, {manifest});
}

void WriteFile(const std::string& path, std::string_view content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << content;
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  EXPECT_TRUE(file.good()) << path;
  return content.str();
}

std::map<std::string, std::string> Snapshot(const std::string& directory) {
  std::map<std::string, std::string> files;
  if (!std::filesystem::exists(directory)) return files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    files[entry.path().string()] = entry.is_regular_file() ? ReadFile(entry.path().string()) : "";
  }
  return files;
}

std::map<std::string, std::string> ReadLayer(const Image& image, size_t layer) {
  chunkstore::OriginBlob blob(image.layers.at(layer), image.origin);
  const auto tables = ReadLayerTables(blob, image.layers[layer]);
  EXPECT_TRUE(tables.ok()) << tables.status();
  const std::string space = ReadAddressSpace(blob, **tables);
  const erofs::Reader& reader = *(*tables)->metadata;

  std::map<std::string, std::string> files;
  const std::function<void(erofs::Nid, const std::string&)> visit = [&](erofs::Nid nid,
                                                                        const std::string& path) {
    const auto inode = reader.ReadInode(nid);
    ASSERT_TRUE(inode.ok()) << inode.status();
    if (inode->is_regular()) files[path] = ReadContent(reader, *inode, space);
    if (inode->is_symlink()) files[path] = reader.ReadLink(*inode).value();
    if (!inode->is_directory()) return;
    if (!path.empty()) files[path + "/"] = "";
    const absl::Status status = reader.ReadDirectory(*inode, 0, [&](const auto& entry) {
      if (entry.name == "." || entry.name == "..") return true;
      visit(entry.nid,
            path.empty() ? std::string(entry.name) : fmt::format("{}/{}", path, entry.name));
      return true;
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  visit(reader.root(), "");
  return files;
}

Image MustOpen(const std::string& reference) {
  absl::StatusOr<Image> image = OpenImage(reference, {"linux", "amd64", ""});
  EXPECT_TRUE(image.ok()) << image.status();
  return image.ok() ? *std::move(image) : Image();
}

ConvertResult MustConvert(const std::string& source, const std::string& destination, int jobs) {
  absl::StatusOr<ConvertResult> result = Convert({.source = source,
                                                  .destination = destination,
                                                  .platform = oci::Platform{"linux", "amd64", ""},
                                                  .jobs = jobs});
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *std::move(result) : ConvertResult();
}

std::string RunCommand(const std::string& command) {
  std::string output;
  FILE* const pipe = ::popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr) << command;
  if (pipe == nullptr) return output;
  char buffer[4096];
  for (size_t size; (size = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    output.append(buffer, size);
  }
  EXPECT_EQ(::pclose(pipe), 0) << command << "\n" << output;
  return output;
}

}  // namespace lamina::fs
