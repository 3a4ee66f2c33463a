// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lamina::fs {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

TEST(Messages, MountRequestSurvivesTheWire) {
  const MountRequest request{.image = "oci:/srv/images:tag",
                             .layer_images = {"oci:/srv/images:a", "oci:/srv/images:b"},
                             .target = "/mnt",
                             .transport = Transport::kErofs,
                             .loop = true,
                             .writable = true,
                             .writable_dir = "/srv/upper"};
  const absl::StatusOr<MountRequest> parsed =
      ParseMountRequest(json::parse(ToJson(request).dump()));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->image, request.image);
  EXPECT_EQ(parsed->layer_images, request.layer_images);
  EXPECT_EQ(parsed->target, request.target);
  EXPECT_EQ(parsed->transport, request.transport);
  EXPECT_TRUE(parsed->loop);
  EXPECT_TRUE(parsed->writable);
  EXPECT_EQ(parsed->writable_dir, request.writable_dir);
}

TEST(Messages, EachMissingOrMistypedFieldIsNamed) {
  for (const char* field : {"image", "target", "transport", "loop", "writable", "writable_dir"}) {
    json request = ToJson(MountRequest{.image = "oci:/a", .target = "/mnt"});
    request[field] = 7;
    const absl::Status mistyped = ParseMountRequest(request).status();
    EXPECT_THAT(
        std::string(mistyped.message()),
        HasSubstr(field == std::string_view("transport") ? "'transport' is not a string" : field));
    request.erase(field);
    EXPECT_THAT(std::string(ParseMountRequest(request).status().message()), HasSubstr(field));
  }
}

TEST(Messages, RequestThatIsNotAnObjectIsAnError) {
  EXPECT_FALSE(ParseMountRequest(json::array()).ok());
  EXPECT_FALSE(ParseMountRequest(json::parse("{", nullptr, false)).ok());
}

TEST(Messages, ErrorKeepsItsCodeAndText) {
  const absl::Status error = absl::NotFoundError("mount oci:/a: no such image");
  EXPECT_EQ(ParseReply(ErrorToJson(error).dump()).status(), error);
}

TEST(Messages, ReplyThatIsNotUnderstoodIsShown) {
  const absl::Status status = ParseReply("{\"surprise\": 1}").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("surprise"));
}

TEST(Messages, UnknownTransportIsNamed) {
  EXPECT_THAT(std::string(ParseTransport("nfs").status().message()), HasSubstr("nfs"));
}

}  // namespace
}  // namespace lamina::fs
