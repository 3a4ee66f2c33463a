// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>

namespace lamina {
namespace {

absl::StatusOr<std::unique_ptr<int>> MakeInt(int value) {
  if (value < 0) return absl::OutOfRangeError("negative");
  return std::make_unique<int>(value);
}

absl::Status CheckEven(int value) {
  ASSIGN_OR_RETURN(const std::unique_ptr<int> number, MakeInt(value), "make {}", value);
  RETURN_IF_ERROR(*number % 2 == 0 ? absl::OkStatus() : absl::InvalidArgumentError("odd"),
                  "number {}", *number);
  return absl::OkStatus();
}

TEST(Status, ErrorsGatherContextOnTheWayUp) {
  EXPECT_EQ(CheckEven(2), absl::OkStatus());
  EXPECT_EQ(CheckEven(3), absl::InvalidArgumentError("number 3: odd"));
  EXPECT_EQ(CheckEven(-1), absl::OutOfRangeError("make -1: negative"));
  EXPECT_EQ(Annotate(CheckEven(3), "check"), absl::InvalidArgumentError("check: number 3: odd"));
}

TEST(Status, SuccessStaysSuccess) {
  EXPECT_EQ(Annotate(absl::OkStatus(), "context"), absl::OkStatus());
}

TEST(Status, ContextIsEvaluatedOnFailureOnly) {
  int evaluations = 0;
  const auto run = [&](absl::Status status) -> absl::Status {
    RETURN_IF_ERROR(status, "{}", ++evaluations);
    return absl::OkStatus();
  };
  EXPECT_EQ(run(absl::OkStatus()), absl::OkStatus());
  EXPECT_EQ(evaluations, 0);
  EXPECT_EQ(run(absl::AbortedError("no")), absl::AbortedError("1: no"));
}

TEST(ErrnoStatus, HasCodeContextAndText) {
  const absl::Status status = ErrnoStatus(ENOENT, "open /nowhere");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(status.message()), "open /nowhere: No such file or directory");
  EXPECT_EQ(ErrnoStatus(ENOSPC, "write").code(), absl::StatusCode::kResourceExhausted);
}

TEST(StatusToErrno, GivesTheReaderOfAnImageWhatFits) {
  EXPECT_EQ(StatusToErrno(absl::OkStatus()), 0);
  EXPECT_EQ(StatusToErrno(absl::NotFoundError("")), ENOENT);
  EXPECT_EQ(StatusToErrno(absl::PermissionDeniedError("")), EACCES);
  EXPECT_EQ(StatusToErrno(absl::InvalidArgumentError("")), EINVAL);
  EXPECT_EQ(StatusToErrno(absl::UnimplementedError("")), EOPNOTSUPP);
  EXPECT_EQ(StatusToErrno(absl::DataLossError("")), EIO);
  EXPECT_EQ(StatusToErrno(ErrnoStatus(ENOSPC, "cache")), EIO) << "the reader did not write";
}

}  // namespace
}  // namespace lamina
