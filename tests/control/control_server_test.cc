// SPDX-License-Identifier: Apache-2.0
#include "fs/control/control_server.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "fs/control/control.grpc.pb.h"
#include "fs/engine/socket.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

using ::testing::HasSubstr;

class ControlServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting without fusermount3 needs root";
    auto engine = Engine::Open({.state = image_.state()});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    auto listener = ListenUnix(image_.state(), "api.sock");
    ASSERT_TRUE(listener.ok()) << listener.status();
    auto server = StartControlServer(*engine_, *std::move(listener));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = control::v1::Mounts::NewStub(grpc::CreateChannel("unix:" + image_.state() + "/api.sock",
                                                             grpc::InsecureChannelCredentials()));
  }

  control::v1::MountRequest Request() const {
    control::v1::MountRequest request;
    request.set_image(image_.reference());
    request.set_target(image_.mountpoint());
    return request;
  }
  grpc::Status Mount(const control::v1::MountRequest& request,
                     control::v1::MountResponse* response = nullptr) {
    control::v1::MountResponse unused;
    grpc::ClientContext context;
    return stub_->Mount(&context, request, response != nullptr ? response : &unused);
  }
  grpc::Status Unmount(const std::string& target) {
    control::v1::UnmountRequest request;
    control::v1::UnmountResponse response;
    request.set_target(target);
    grpc::ClientContext context;
    return stub_->Unmount(&context, request, &response);
  }
  grpc::Status Report(const std::string& target, control::v1::ReportResponse* response) {
    control::v1::ReportRequest request;
    request.set_target(target);
    grpc::ClientContext context;
    return stub_->Report(&context, request, response);
  }

  TestImage image_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<control::v1::Mounts::Stub> stub_;
};

TEST_F(ControlServerTest, MountsReportsAndUnmounts) {
  control::v1::MountResponse mounted;
  const grpc::Status status = Mount(Request(), &mounted);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(mounted.mount().image(), image_.reference());
  EXPECT_EQ(mounted.mount().transport(), control::v1::TRANSPORT_EROFS);
  EXPECT_THAT(mounted.mount().manifest_digest(), HasSubstr("sha256:"));
  EXPECT_EQ(Slurp(image_.mountpoint() + "/data.bin"), image_.data());
  EXPECT_EQ(Slurp(image_.mountpoint() + "/hello.txt"), image_.hello());

  control::v1::ReportResponse report;
  ASSERT_TRUE(Report("", &report).ok());
  ASSERT_EQ(report.mounts_size(), 1);
  EXPECT_EQ(report.mounts(0).mount().target(), image_.mountpoint());
  EXPECT_GE(report.mounts(0).read_bytes(), image_.data().size());
  EXPECT_EQ(report.mounts(0).frames_present(), report.mounts(0).frames());
  EXPECT_GT(report.mounts(0).missed_requests(), 0u);  // latencies come after the answer

  EXPECT_TRUE(Unmount(image_.mountpoint()).ok());
  ASSERT_TRUE(Report("", &report).ok());
  EXPECT_EQ(report.mounts_size(), 0);
}

TEST_F(ControlServerTest, ErrorsHaveTheirCodeAndText) {
  control::v1::MountRequest request = Request();
  request.set_image(request.image() + "-missing");
  const grpc::Status missing = Mount(request);
  EXPECT_EQ(missing.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(missing.error_message(), HasSubstr("test-missing"));

  EXPECT_EQ(Unmount("/nowhere").error_code(), grpc::StatusCode::NOT_FOUND);
  control::v1::ReportResponse report;
  EXPECT_EQ(Report("/nowhere", &report).error_code(), grpc::StatusCode::NOT_FOUND);

  ASSERT_TRUE(Mount(Request()).ok());
  EXPECT_EQ(Mount(Request()).error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(ControlServerTest, RequestsThatMakeNoSenseAreRefused) {
  control::v1::MountRequest request = Request();
  request.set_transport(static_cast<control::v1::Transport>(99));
  EXPECT_EQ(Mount(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request = Request();
  request.set_target("relative");
  EXPECT_EQ(Mount(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.set_target(image_.mountpoint() + std::string(1, '\0') + "x");
  EXPECT_EQ(Mount(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Mount({}).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ControlServerTest, RequestThatComesAgainWithItsTokenSucceeds) {
  control::v1::MountRequest request = Request();
  request.set_token("0123");
  EXPECT_TRUE(Mount(request).ok());
  EXPECT_TRUE(Mount(request).ok());
}

}  // namespace
}  // namespace lamina::fs
