// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/server.h"

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <thread>

#include "backends/agent/frame.h"
#include "chunkstore/base/file.h"
#include "fs/engine/socket.h"

namespace lamina::agent {
namespace {

using std::chrono::milliseconds;

constexpr size_t kOutput = 60'000;

// A program that has written and ended already.
class EndedRun : public Run {
 public:
  int64_t pid() const override { return 1; }
  int ended() const override { return ended_.get(); }
  void Signal(int) override {}
  void Kill() override {}
  absl::StatusOr<EndedMessage> Result() override { return EndedMessage(); }

 private:
  const UniqueFd ended_{::eventfd(1, EFD_CLOEXEC)};
};

class EndedRunner : public Runner {
 public:
  absl::StatusOr<std::unique_ptr<Run>> Start(const ExecMessage&, Streams streams) override {
    EXPECT_EQ(::write(streams.out.get(), std::string(kOutput, 'x').data(), kOutput), kOutput);
    return std::make_unique<EndedRun>();
  }
};

class AgentServerTest : public testing::Test {
 protected:
  ~AgentServerTest() override { serving_.join(); }

  // On this one the server writes little before somebody reads.
  UniqueFd Ask(FrameType request, std::string_view content) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    UniqueFd ours(ends[0]);
    UniqueFd theirs(ends[1]);
    constexpr int kLeast = 1;
    ::setsockopt(theirs.get(), SOL_SOCKET, SO_SNDBUF, &kLeast, sizeof(kLeast));
    EXPECT_TRUE(WriteFrame(ours.get(), request, content).ok());
    server_.Take(std::move(theirs));
    return ours;
  }
  // Bytes in frames of this type, until the server closes.
  static size_t ReadAll(int connection, FrameType type) {
    size_t bytes = 0;
    while (true) {
      const absl::StatusOr<Frame> frame = ReadFrame(connection);
      if (!frame.ok()) return bytes;
      if (frame->type == type) bytes += frame->content.size();
    }
  }
  bool EndsSoon() {
    for (int turn = 0; turn < 1000 && !ended_; ++turn) ::poll(nullptr, 0, 10);
    return ended_;
  }

  static constexpr milliseconds kIdle{200};

  TemporaryDirectory directory_ =
      TemporaryDirectory::Create(testing::TempDir(), "agent-server-").value();
  EndedRunner runner_;
  Server server_{fs::ListenUnix(directory_.path(), "socket").value(), runner_, {.idle_ttl = kIdle}};
  std::atomic<bool> ended_ = false;
  std::thread serving_{[this] {
    EXPECT_EQ(server_.Serve(), absl::OkStatus());
    ended_ = true;
  }};
};

TEST_F(AgentServerTest, IsNotIdleWhileOutputIsOnItsWay) {
  const UniqueFd connection = Ask(FrameType::kExec, Encode(ExecMessage{.arguments = {"program"}}));
  std::this_thread::sleep_for(3 * kIdle);
  EXPECT_FALSE(ended_);
  EXPECT_EQ(ReadAll(connection.get(), FrameType::kStdout), kOutput);
  EXPECT_TRUE(EndsSoon());
}

TEST_F(AgentServerTest, IsNotIdleWhileItCopies) {
  const std::string file = directory_.path() + "/file";
  ASSERT_TRUE(WriteFileAtomically(file, std::string(kOutput, 'x')).ok());
  const UniqueFd connection = Ask(FrameType::kGetTree, Encode(TreeMessage{.path = file}));
  std::this_thread::sleep_for(3 * kIdle);
  EXPECT_FALSE(ended_);
  EXPECT_GE(ReadAll(connection.get(), FrameType::kData), kOutput);
  EXPECT_TRUE(EndsSoon());
}

TEST_F(AgentServerTest, IsIdleWhenNobodyAsksForMoreThanHowItIs) {
  const UniqueFd connection = Ask(FrameType::kInfo, "");
  EXPECT_TRUE(EndsSoon());
}

}  // namespace
}  // namespace lamina::agent
