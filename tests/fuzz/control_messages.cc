// SPDX-License-Identifier: Apache-2.0
//
// Lines on the control socket, of clients and of engines, and the records of mounts that are made of
// the same parts. What is accepted must be the same after it is written.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fs/engine/messages.h"
#include "fs/engine/mount_record.h"
#include "fs/engine/prefetch_messages.h"

namespace {

using namespace lamina::fs;
using nlohmann::json;

void Require(bool condition) {
  if (!condition) std::abort();
}

template <typename Value>
void CheckRoundTrip(const json& object, absl::StatusOr<Value> (*parse)(const json&)) {
  const absl::StatusOr<Value> value = parse(object);
  if (!value.ok()) return;
  const std::string written = ToJson(*value).dump();
  const absl::StatusOr<Value> again =
      parse(json::parse(written));  // numbers have other types in text
  Require(again.ok() && ToJson(*again).dump() == written);
}

void CheckRecord(std::string_view text) {
  const absl::StatusOr<MountRecord> record = ParseMountRecord(text);
  if (!record.ok()) {
    Require(absl::IsDataLoss(record.status()));
    return;
  }
  const std::string written = SerializeMountRecord(*record);
  const absl::StatusOr<MountRecord> again = ParseMountRecord(written);
  Require(again.ok() && SerializeMountRecord(*again) == written);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  ParseReply(text).status().IgnoreError();
  CheckRecord(text);
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  StringField(object, "op").status().IgnoreError();
  CheckRoundTrip<MountRequest>(object, &ParseMountRequest);
  CheckRoundTrip<MountDescription>(object, &ParseMountDescription);
  CheckRoundTrip<PrefetchRequest>(object, &ParsePrefetchRequest);
  CheckRoundTrip<PrefetchReport>(object, &ParsePrefetchReport);
  CheckRoundTrip<PrefetchOptions>(object, &ParsePrefetchOptions);
  return 0;
}
