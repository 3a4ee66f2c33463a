// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/filter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lamina::snapshotter {
namespace {

using ::testing::HasSubstr;

const Snapshot kSnapshot{
    .name = "default/3/sha256:ab",
    .parent = "default/2/base",
    .kind = Kind::kCommitted,
    .labels = {{"containerd.io/snapshot.ref", "sha256:ab"}, {"a.b", "c d"}, {"empty", ""}}};

bool Matches(const std::vector<std::string>& filters) {
  const absl::StatusOr<Filter> filter = Filter::Parse(filters);
  EXPECT_TRUE(filter.ok()) << filter.status();
  return filter.ok() && filter->Matches(kSnapshot);
}

std::string ErrorOf(const std::string& filter) {
  const absl::Status status = Filter::Parse({filter}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << filter;
  return std::string(status.message());
}

TEST(Filter, NoneMatchesEverything) {
  EXPECT_TRUE(Matches({}));
  EXPECT_TRUE(Matches({""}));
}

TEST(Filter, FieldsAreComparedWithValues) {
  EXPECT_TRUE(Matches({"name==default/3/sha256:ab"}));
  EXPECT_TRUE(Matches({"parent==\"default/2/base\""}));
  EXPECT_TRUE(Matches({"kind==committed"}));
  EXPECT_FALSE(Matches({"kind==active"}));
  EXPECT_TRUE(Matches({"kind!=active"}));
  EXPECT_FALSE(Matches({"parent==\"\""}));
  EXPECT_FALSE(Matches({"size==1"}));
  EXPECT_TRUE(Matches({"size!=1"}));
}

TEST(Filter, LabelsAreNamedWithDotsOrInQuotes) {
  EXPECT_TRUE(Matches({"labels.\"containerd.io/snapshot.ref\"==sha256:ab"}));
  EXPECT_TRUE(Matches({"labels.a.b==\"c d\""}));
  EXPECT_TRUE(Matches({"labels.a.b"}));
  EXPECT_TRUE(Matches({"labels.empty"}));
  EXPECT_FALSE(Matches({"labels.other"}));
  EXPECT_TRUE(Matches({"labels.other!=x"}));
}

TEST(Filter, AllSelectorsOfOneFilterMustMatch) {
  EXPECT_TRUE(Matches({"kind==committed,labels.a.b"}));
  EXPECT_FALSE(Matches({"kind==committed , labels.other"}));
  EXPECT_TRUE(Matches({"kind==active", "labels.a.b"}));
}

TEST(Filter, ExpressionsFindAPart) {
  EXPECT_TRUE(Matches({"name~=sha256"}));
  EXPECT_TRUE(Matches({"name~=/^default/"}));
  EXPECT_TRUE(Matches({"name~=|^default/[0-9]+|"}));
  EXPECT_FALSE(Matches({"name~=\"^sha256\""}));
}

TEST(Filter, EscapesAreThoseOfGo) {
  EXPECT_TRUE(Matches({R"(labels.a.b=="\x63\u0020\144")"}));
  EXPECT_FALSE(Matches({R"(labels.a.b=="\U0001F600")"}));
}

TEST(Filter, WhatIsNotUnderstoodIsRefusedWithItsPlace) {
  EXPECT_THAT(ErrorOf("name="), HasSubstr("character 5: expected an operator"));
  EXPECT_THAT(ErrorOf("name=="), HasSubstr("expected a value"));
  EXPECT_THAT(ErrorOf("==x"), HasSubstr("character 1: expected a field"));
  EXPECT_THAT(ErrorOf("name==x y"), HasSubstr("unexpected input"));
  EXPECT_THAT(ErrorOf("name==\"x"), HasSubstr("does not end"));
  EXPECT_THAT(ErrorOf("name==\"\\q\""), HasSubstr("unknown escape"));
  EXPECT_THAT(ErrorOf("name==\"\\x1\""), HasSubstr("too few digits"));
  EXPECT_THAT(ErrorOf("name~=("), HasSubstr("bad regular expression"));
  EXPECT_THAT(ErrorOf("name,"), HasSubstr("expected a field"));
}

}  // namespace
}  // namespace lamina::snapshotter
