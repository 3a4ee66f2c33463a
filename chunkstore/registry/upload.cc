// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/upload.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "chunkstore/base/file.h"
#include "chunkstore/http/url.h"
#include "chunkstore/registry/errors.h"

namespace lamina::registry {
namespace {

constexpr uint64_t kChunk = 8 << 20;
// What a server may ask for with OCI-Chunk-Min-Length.
constexpr uint64_t kMaxChunk = 256 << 20;
// Times a chunk is taken up again before the upload is given up.
constexpr int kAttempts = 5;
constexpr auto kFirstPause = std::chrono::milliseconds(200);
// Servers may read and move all of a blob before they say that they have it.
constexpr auto kFinishTimeout = std::chrono::seconds(600);
constexpr std::string_view kOctets = "application/octet-stream";

std::optional<uint64_t> ParseNumber(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// "0-99": what the server has. An empty upload is "0-0" to some servers, which is taken for nothing.
std::optional<uint64_t> BytesThere(const http::Response& response) {
  std::string_view range = response.headers.contains("range")
                               ? std::string_view(response.headers.find("range")->second)
                               : std::string_view();
  if (range.starts_with("bytes=")) range.remove_prefix(6);
  if (!range.starts_with("0-")) return std::nullopt;
  const std::optional<uint64_t> last = ParseNumber(range.substr(2));
  if (!last) return std::nullopt;
  return *last == 0 ? 0 : *last + 1;
}

class Upload : public chunkstore::BlobOutput {
 public:
  explicit Upload(RegistryClient& client) : client_(client) {}

  ~Upload() override {
    if (sending_.valid()) sending_.wait();
    // Registries remove abandoned uploads themselves, sooner or later.
    if (!location_.empty()) {
      client_.Send(location_, {.method = "DELETE", .attempts = 1}).status().IgnoreError();
    }
  }

  absl::Status Append(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const size_t length = std::min<uint64_t>(bytes.size(), chunk_size_ - filling_.size());
      filling_.append(AsText(bytes.first(length)));
      bytes = bytes.subspan(length);
      if (filling_.size() < chunk_size_) continue;
      RETURN_IF_ERROR(AwaitSent());
      if (location_.empty()) RETURN_IF_ERROR(Begin());
      if (filling_.size() < chunk_size_) continue;  // the server wants larger ones
      auto chunk = std::make_shared<const std::string>(std::move(filling_));
      filling_.clear();
      sending_ = std::async(std::launch::async, [this, chunk] { return SendChunk(*chunk); });
    }
    return absl::OkStatus();
  }

  absl::Status Finish(const Digest& digest) override {
    RETURN_IF_ERROR(AwaitSent());
    if (location_.empty()) RETURN_IF_ERROR(Begin());
    // Not every server takes a last chunk with the request that ends an upload of several.
    if (sent_ > 0 && !filling_.empty()) {
      RETURN_IF_ERROR(SendChunk(std::exchange(filling_, {})));
    }
    absl::Status last;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      if (attempt > 0) std::this_thread::sleep_for(kFirstPause * (1 << attempt));
      if (location_.empty()) RETURN_IF_ERROR(Begin());
      last = TryToFinish(digest);
      // The answer to a request that was done may have been lost.
      if (last.ok() || client_.BlobSize(digest).ok()) {
        location_.clear();
        return absl::OkStatus();
      }
      if (!absl::IsUnavailable(last)) return last;
      // All of it is in the last request, so it can as well begin anew.
      if (sent_ == 0) location_.clear();
    }
    return last;
  }

 private:
  absl::Status Failed(const http::Response& response, std::string_view what) const {
    return Annotate(ErrorOf(response),
                    fmt::format("{}: {} upload after {} bytes", client_.name(), what, sent_));
  }

  absl::Status TryToFinish(const Digest& digest) {
    const char* separator = location_.find('?') == std::string::npos ? "?" : "&";
    const std::string url =
        fmt::format("{}{}digest={}", location_, separator, http::Escape(digest.ToString()));
    ASSIGN_OR_RETURN(const http::Response response,
                     client_.Send(url, {.method = "PUT",
                                        .headers = {{"Content-Type", std::string(kOctets)}},
                                        .body = std::make_shared<const std::string>(filling_),
                                        .attempts = 1,
                                        .stall_timeout = kFinishTimeout}));
    if (response.status == 201 || response.status == 204) return absl::OkStatus();
    return Failed(response, "finish");
  }

  absl::Status AwaitSent() { return sending_.valid() ? sending_.get() : absl::OkStatus(); }

  absl::Status Begin() {
    ASSIGN_OR_RETURN(const http::Response response,
                     client_.Send("blobs/uploads/", {.method = "POST"}));
    if (response.status != 202) return Failed(response, "begin");
    RETURN_IF_ERROR(FollowLocation(response));
    const std::string minimum = response.Header("oci-chunk-min-length");
    if (!minimum.empty()) {
      chunk_size_ = std::clamp(ParseNumber(minimum).value_or(kMaxChunk + 1), kChunk, kMaxChunk + 1);
      if (chunk_size_ > kMaxChunk) {
        return absl::UnimplementedError(
            fmt::format("{}: wants upload chunks of {} bytes", client_.name(), minimum));
      }
    }
    return absl::OkStatus();
  }

  absl::Status FollowLocation(const http::Response& response) {
    const std::string location = response.Header("location");
    if (location.empty()) return Failed(response, "server names no place to go on with the");
    ASSIGN_OR_RETURN(const http::Url from, http::Url::Parse(response.url));
    ASSIGN_OR_RETURN(const http::Url url, from.Resolve(location), "{}: upload", client_.name());
    if (from.is_https() && !url.is_https()) {
      return absl::FailedPreconditionError(
          fmt::format("{}: upload: the server, asked by https, names an http address ({}) to go on "
                      "with, which is refused; a proxy in front of it may lack X-Forwarded-Proto",
                      client_.name(), url.host));
    }
    location_ = url.text;
    return absl::OkStatus();
  }

  // All of it, whatever number of requests that takes.
  absl::Status SendChunk(std::string_view chunk) {
    const uint64_t begin = sent_;
    const uint64_t end = begin + chunk.size();
    absl::Status last;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      if (attempt > 0) {
        std::this_thread::sleep_for(kFirstPause * (1 << attempt));
        RETURN_IF_ERROR(AskHowMuchIsThere(begin, end), "after {}", std::string(last.message()));
        if (sent_ == end) return absl::OkStatus();
      }
      const absl::StatusOr<http::Response> response =
          client_.Send(location_, Patch(chunk.substr(sent_ - begin)));
      if (!response.ok()) {
        last = response.status();
        continue;
      }
      if (response->status == 202) {
        RETURN_IF_ERROR(FollowLocation(*response));
        const uint64_t there = BytesThere(*response).value_or(end);
        if (there == end) {
          sent_ = end;
          return absl::OkStatus();
        }
        last = Failed(*response, fmt::format("the server took {} bytes of the", there));
        continue;
      }
      last = Failed(*response, "continue");
      const bool may_pass =
          response->status == 416 || response->status == 429 || response->status >= 500;
      if (!may_pass) return last;
    }
    return last;
  }

  http::Request Patch(std::string_view bytes) const {
    return {.method = "PATCH",
            .headers = {{"Content-Type", std::string(kOctets)},
                        {"Content-Range", fmt::format("{}-{}", sent_, sent_ + bytes.size() - 1)}},
            .body = std::make_shared<const std::string>(bytes),
            .attempts = 1};
  }

  // Sets sent_, which must lie in the chunk that is being sent: no other is kept.
  absl::Status AskHowMuchIsThere(uint64_t begin, uint64_t end) {
    ASSIGN_OR_RETURN(const http::Response response, client_.Send(location_, {}));
    if (response.status != 204 && response.status != 202) {
      const absl::Status status = Failed(response, "take up");
      return absl::IsUnavailable(status) ? status
                                         : absl::AbortedError(std::string(status.message()));
    }
    if (!response.Header("location").empty()) RETURN_IF_ERROR(FollowLocation(response));
    const std::optional<uint64_t> there = BytesThere(response);
    if (!there || *there < begin || *there > end) {
      return absl::DataLossError(
          fmt::format("{}: the server lost a part of the upload: it says '{}' after {} bytes",
                      client_.name(), response.Header("range"), begin));
    }
    sent_ = *there;
    return absl::OkStatus();
  }

  RegistryClient& client_;
  uint64_t chunk_size_ = kChunk;
  std::string filling_;
  std::string location_;  // where the upload goes on; empty before it began and after it ended
  uint64_t sent_ = 0;
  std::future<absl::Status> sending_;  // owns the three above while it is there
};

}  // namespace

std::unique_ptr<chunkstore::BlobOutput> StartUpload(RegistryClient& client) {
  return std::make_unique<Upload>(client);
}

absl::Status PutBlob(RegistryClient& client, std::string_view content,
                     const std::string& from_repository) {
  const Digest digest = Digest::Of(AsBytes(content));
  const absl::StatusOr<uint64_t> size = client.BlobSize(digest);
  if (size.ok()) return absl::OkStatus();
  if (!absl::IsNotFound(size.status())) return size.status();
  if (!from_repository.empty()) {
    ASSIGN_OR_RETURN(const bool mounted, client.MountBlob(digest, from_repository));
    if (mounted) return absl::OkStatus();
  }
  Upload upload(client);
  RETURN_IF_ERROR(upload.Append(AsBytes(content)));
  return upload.Finish(digest);
}

}  // namespace lamina::registry
