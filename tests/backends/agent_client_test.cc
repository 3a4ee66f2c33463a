// SPDX-License-Identifier: Apache-2.0
//
// Agents that do not do what they should: who asks them gets an answer all the same.
#include "backends/agent_client.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/socket.h>

#include <functional>
#include <thread>

#include "backends/agent/frame.h"
#include "chunkstore/base/file.h"
#include "fs/engine/socket.h"

namespace lamina::backends {
namespace {

using agent::Frame;
using agent::FrameType;
using agent::ReadFrame;
using agent::WriteFrame;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;

class AgentClientTest : public testing::Test {
 protected:
  ~AgentClientTest() override { End(); }

  // Answers one request with `behave`, which has the connection until it returns.
  void Serve(std::function<void(int connection)> behave) {
    thread_ = std::thread([this, behave = std::move(behave)] {
      const UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      EXPECT_TRUE(ReadFrame(connection.get()).ok());
      behave(connection.get());
    });
  }
  void End() {
    if (thread_.joinable()) thread_.join();
  }
  absl::StatusOr<ExecResult> Exec(ExecRequest request, bool from_start = false) {
    return AgentExec(directory(), {.arguments = {"program"}}, request,
                     {.grace = milliseconds(300), .from_start = from_start});
  }
  std::string directory() const { return directory_.path(); }

  TemporaryDirectory directory_ =
      TemporaryDirectory::Create(testing::TempDir(), "agent-client-").value();
  UniqueFd listener_ = fs::ListenUnix(directory(), kAgentSocket).value();
  std::thread thread_;
};

// Until the other end goes.
void Wait(int connection) {
  while (ReadFrame(connection).ok()) {
  }
}

TEST_F(AgentClientTest, AnAgentThatStandsStillDoesNotHoldUpWhoGaveItATimeout) {
  Serve(Wait);
  const auto start = steady_clock::now();
  const absl::StatusOr<ExecResult> result = Exec({.timeout = milliseconds(200)});
  ASSERT_EQ(result.status(), absl::OkStatus());
  EXPECT_EQ(result->ending, ExecEnding::kTimeLimit);
  EXPECT_EQ(result->signal, SIGKILL);
  EXPECT_GE(result->wall_time, milliseconds(500));
  EXPECT_LT(steady_clock::now() - start, seconds(10));
}

TEST_F(AgentClientTest, TimeInAPoolsQueueIsNotTheCalls) {
  Serve([](int connection) {
    std::this_thread::sleep_for(milliseconds(1000));
    EXPECT_EQ(WriteFrame(connection, FrameType::kStarted, agent::FieldWriter().Number(1).Take()),
              absl::OkStatus());
    EXPECT_EQ(WriteFrame(connection, FrameType::kEnded, agent::Encode(agent::EndedMessage())),
              absl::OkStatus());
  });
  EXPECT_EQ(Exec({.timeout = milliseconds(200)}, /*from_start=*/true).value().ending,
            ExecEnding::kExited);
}

TEST_F(AgentClientTest, AnAgentThatFloodsIsCutOffAtTheLimit) {
  Serve([](int connection) {
    const std::string piece(agent::kPiece, 'x');
    while (WriteFrame(connection, FrameType::kStdout, piece).ok()) {
    }
  });
  const absl::StatusOr<ExecResult> result = Exec({.output_limit = 1'000'000});
  ASSERT_EQ(result.status(), absl::OkStatus());
  EXPECT_EQ(result->ending, ExecEnding::kOutputLimit);
  EXPECT_LT(result->output_bytes, 2'000'000);
}

TEST_F(AgentClientTest, AnErrorThatAnAgentGivesDoesNotSayThatItIsGone) {
  const auto refuse = [](int connection) {
    EXPECT_EQ(WriteFrame(connection, FrameType::kError,
                         agent::Encode(absl::UnavailableError("no more processes"))),
              absl::OkStatus());
  };
  Serve(refuse);
  const absl::Status refused = Exec({}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no more processes"));
  End();
  Serve(refuse);
  EXPECT_EQ(AgentInfo(directory()).status().code(), absl::StatusCode::kAborted);
  End();
  Serve([](int) {});
  EXPECT_EQ(AgentInfo(directory()).status().code(), absl::StatusCode::kAborted)
      << "a connection that breaks says nothing about others";
  End();
  listener_.Reset();
  EXPECT_EQ(Exec({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(AgentListens(directory()));
}

TEST_F(AgentClientTest, ErrorsCanBePrinted) {
  Serve([](int connection) {
    EXPECT_EQ(WriteFrame(connection, FrameType::kError,
                         agent::Encode(absl::InternalError("\x1b[31mred\n\xc2\x9b caf\xc3\xa9"))),
              absl::OkStatus());
  });
  EXPECT_EQ(Exec({}).status().message(), "\\x1b[31mred\\x0a\\xc2\\x9b caf\xc3\xa9");
}

TEST_F(AgentClientTest, OneThatTakesNoConnectionsIsThere) {
  std::vector<UniqueFd> waiting;
  absl::Status connected;
  while (connected.ok()) {
    ASSERT_LT(waiting.size(), 1000);
    absl::StatusOr<UniqueFd> one = fs::ConnectUnix(directory(), kAgentSocket, milliseconds(50));
    connected = one.status();
    if (one.ok()) waiting.push_back(*std::move(one));
  }
  EXPECT_EQ(connected.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(AgentListens(directory()));
}

}  // namespace
}  // namespace lamina::backends
