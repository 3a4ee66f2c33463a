// SPDX-License-Identifier: Apache-2.0
//
// One process on one connection: its streams and signals go over it until it has ended.
#ifndef LAMINA_BACKENDS_AGENT_EXEC_CONNECTION_H_
#define LAMINA_BACKENDS_AGENT_EXEC_CONNECTION_H_

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "backends/agent/frame.h"
#include "backends/agent/runner.h"
#include "chunkstore/base/file.h"

namespace lamina::agent {

class ExecConnection {
 public:
  // `null`: the open /dev/null, the input of processes without one; borrowed, as is `socket`.
  ExecConnection(int socket, Runner& runner, int null)
      : socket_(socket), runner_(runner), null_(null), stream_(socket) {}

  // Starts the process and serves it to its end, or until the other side has gone: then it is
  // killed. `state` gets what came from kStateDescriptor if `with_state`. How it ended is for Finish.
  absl::StatusOr<EndedMessage> Serve(const ExecMessage& message, bool with_state,
                                     std::string& state);
  // Sends what is left of the output, and how the process ended.
  absl::Status Finish(const EndedMessage& ended);

 private:
  using Clock = std::chrono::steady_clock;

  absl::StatusOr<Streams> MakePipes(const ExecMessage& message, bool with_state);
  absl::Status Loop();
  absl::Status TakeFrames();
  absl::Status TakeFrame(const Frame& frame);
  void TakeOutput(UniqueFd& pipe, std::optional<FrameType> stream);
  void FeedStdin();
  void KillFor(Ending reason);
  int PollTimeout() const;

  const int socket_;
  Runner& runner_;
  const int null_;
  FrameStream stream_;
  std::unique_ptr<Run> run_;
  UniqueFd stdin_;
  UniqueFd stdout_;
  UniqueFd stderr_;
  UniqueFd state_;
  std::string stdin_bytes_;  // not yet taken by the process
  bool stdin_ends_ = false;
  std::string* state_bytes_ = nullptr;
  uint64_t output_bytes_ = 0;
  uint64_t output_limit_ = 0;
  std::optional<Clock::time_point> deadline_;
  std::optional<Ending> killed_for_;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_EXEC_CONNECTION_H_
