// SPDX-License-Identifier: Apache-2.0
#include "fs/image/profile.h"

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "erofs/reader.h"
#include "fs/image/oci.h"

namespace lamina::fs {
namespace {

using chunkstore::Touch;
using nlohmann::json;
using oci::Field;

constexpr uint64_t kVersion = 1;
// Three years: what comes is a number that programs in any language can hold.
constexpr uint64_t kMaxMicroseconds = 100'000'000'000'000;

absl::StatusOr<std::optional<Digest>> OptionalDigest(const Field& object, std::string_view key) {
  ASSIGN_OR_RETURN(const std::optional<Field> field, object.Find(key));
  if (!field) return std::nullopt;
  ASSIGN_OR_RETURN(const Digest digest, field->AsDigest());
  return digest;
}

absl::StatusOr<std::vector<Profile::Blob>> ParseBlobs(const Field& list) {
  ASSIGN_OR_RETURN(const std::vector<Field> elements, list.Elements());
  if (elements.size() > oci::kMaxLayers) {
    return list.Error(fmt::format("{} blobs, more than the {} layers of an image", elements.size(),
                                  oci::kMaxLayers));
  }
  std::vector<Profile::Blob> blobs;
  std::set<Digest> digests;
  for (const Field& element : elements) {
    Profile::Blob blob;
    ASSIGN_OR_RETURN(const Field digest, element.Get("digest"));
    ASSIGN_OR_RETURN(blob.digest, digest.AsDigest());
    ASSIGN_OR_RETURN(blob.content, OptionalDigest(element, "content"));
    if (!digests.insert(blob.digest).second) return digest.Error("is there twice");
    blobs.push_back(blob);
  }
  return blobs;
}

// Not through Field, which is too slow for hundreds of thousands of numbers.
absl::StatusOr<std::vector<Touch>> ParseTouches(const json& value, size_t blobs) {
  const auto error = [](size_t index, std::string_view problem) {
    return absl::InvalidArgumentError(fmt::format("profile: touches[{}]: {}", index, problem));
  };
  if (!value.is_array()) return absl::InvalidArgumentError("profile: touches: not an array");
  if (value.size() > chunkstore::kMaxTouches) {
    return absl::InvalidArgumentError(fmt::format("profile: touches: {} of them, more than {}",
                                                  value.size(), chunkstore::kMaxTouches));
  }
  std::vector<Touch> touches;
  touches.reserve(value.size());
  absl::flat_hash_set<std::pair<uint32_t, uint32_t>> seen;
  for (size_t i = 0; i < value.size(); ++i) {
    const json& item = value[i];
    const bool numbers = item.is_array() && item.size() == 3 && item[0].is_number_unsigned() &&
                         item[1].is_number_unsigned() && item[2].is_number_unsigned();
    if (!numbers) return error(i, "not an array of three numbers: blob, frame, microseconds");
    const auto blob = item[0].get<uint64_t>();
    const auto frame = item[1].get<uint64_t>();
    const auto microseconds = item[2].get<uint64_t>();
    if (blob >= blobs) return error(i, fmt::format("blob {} of {}", blob, blobs));
    if (frame >= chunkstore::kMaxFrames) return error(i, fmt::format("frame {}", frame));
    if (microseconds > kMaxMicroseconds) return error(i, fmt::format("time {}", microseconds));
    if (!touches.empty() && microseconds < touches.back().microseconds) {
      return error(i, "is earlier than the one before it");
    }
    touches.push_back({static_cast<uint32_t>(blob), static_cast<uint32_t>(frame), microseconds});
    if (!seen.emplace(touches.back().blob, touches.back().frame).second) {
      return error(i, fmt::format("frame {} of blob {} is there twice", frame, blob));
    }
  }
  return touches;
}

// What a layer's metadata call the blob's content, if that is a digest.
std::optional<Digest> ContentOf(const chunkstore::Blob& blob) {
  const absl::StatusOr<erofs::Reader> reader = erofs::Reader::Open(blob.metadata());
  if (!reader.ok() || reader->devices().size() != 1) return std::nullopt;
  const absl::StatusOr<Digest> digest = Digest::Parse("sha256:" + reader->devices()[0].tag);
  if (!digest.ok()) return std::nullopt;
  return *digest;
}

}  // namespace

absl::StatusOr<Profile> Profile::Parse(std::string_view text) {
  ASSIGN_OR_RETURN(const json value, oci::ParseJson(text, "profile"));
  const Field document(value, "profile");
  ASSIGN_OR_RETURN(const Field version, document.Get("version"));
  ASSIGN_OR_RETURN(const uint64_t number, version.Size());
  if (number != kVersion) {
    return absl::UnimplementedError(
        fmt::format("profile: version {} is not supported, only {} is", number, kVersion));
  }
  Profile profile;
  ASSIGN_OR_RETURN(profile.image, OptionalDigest(document, "image"));
  ASSIGN_OR_RETURN(const Field blobs, document.Get("blobs"));
  ASSIGN_OR_RETURN(profile.blobs, ParseBlobs(blobs));
  RETURN_IF_ERROR(document.Get("touches").status());
  ASSIGN_OR_RETURN(profile.touches, ParseTouches(value["touches"], profile.blobs.size()));
  return profile;
}

std::string Profile::ToJson() const {
  json value = {{"version", kVersion}, {"blobs", json::array()}, {"touches", json::array()}};
  if (image) value["image"] = image->ToString();
  for (const Blob& blob : blobs) {
    json entry = {{"digest", blob.digest.ToString()}};
    if (blob.content) entry["content"] = blob.content->ToString();
    value["blobs"].push_back(std::move(entry));
  }
  for (const Touch& touch : touches) {
    value["touches"].push_back({touch.blob, touch.frame, touch.microseconds});
  }
  return oci::ToCanonicalJson(value);
}

Profile MakeProfile(const Digest& image,
                    const std::vector<std::shared_ptr<chunkstore::Blob>>& blobs,
                    const std::vector<Touch>& touches) {
  Profile profile{.image = image};
  // An image may have a layer twice; its readers then touch either.
  std::map<Digest, uint32_t> indices;
  std::vector<uint32_t> index_of;
  for (const auto& blob : blobs) {
    const Digest& digest = blob->descriptor().digest;
    const auto [index, is_new] =
        indices.emplace(digest, static_cast<uint32_t>(profile.blobs.size()));
    if (is_new) profile.blobs.push_back({digest, ContentOf(*blob)});
    index_of.push_back(index->second);
  }
  absl::flat_hash_set<std::pair<uint32_t, uint32_t>> seen;
  for (Touch touch : touches) {
    touch.blob = index_of[touch.blob];
    touch.microseconds = std::min(touch.microseconds, kMaxMicroseconds);
    if (seen.emplace(touch.blob, touch.frame).second) profile.touches.push_back(touch);
  }
  return profile;
}

}  // namespace lamina::fs
