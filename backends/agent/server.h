// SPDX-License-Identifier: Apache-2.0
//
// The agent's side of the protocol: takes connections and does what they ask, each in a thread.
#ifndef LAMINA_BACKENDS_AGENT_SERVER_H_
#define LAMINA_BACKENDS_AGENT_SERVER_H_

#include <atomic>
#include <chrono>
#include <mutex>

#include "backends/agent/exec_connection.h"
#include "backends/agent/frame.h"
#include "backends/agent/runner.h"
#include "backends/agent/sessions.h"
#include "chunkstore/base/file.h"

namespace lamina::agent {

struct ServerOptions {
  std::chrono::milliseconds ttl{0};       // the server ends after that; 0: never
  std::chrono::milliseconds idle_ttl{0};  // without a process or a copy under way; 0: never
  // Only peers outside of this PID namespace: whoever got at the socket from inside is refused.
  bool only_outside_peers = false;
  bool sessions = true;
  bool files = true;  // trees of this file system
};

class Server {
 public:
  Server(UniqueFd listener, Runner& runner, ServerOptions options);

  // Until a time to live is over, or the listener fails. Without a listener, connections come by Take.
  absl::Status Serve();
  // Serves a connection in a thread of its own. Thread-safe.
  void Take(UniqueFd connection);

 private:
  using Clock = std::chrono::steady_clock;

  void Handle(int connection);
  absl::Status Answer(int connection);
  absl::Status Work(int connection, const Frame& request);
  absl::StatusOr<EndedMessage> Execute(ExecConnection& exec, ExecMessage message);
  absl::StatusOr<EndedMessage> ExecuteInSession(ExecConnection& exec, ExecMessage message);
  absl::Status PutTree(int connection, std::string_view content);
  absl::Status GetTree(int connection, std::string_view content);
  absl::Status Info(int connection);
  bool AllowPeer(int connection) const;
  std::chrono::milliseconds IdleFor();
  void CountUse(int change);

  const UniqueFd listener_;
  Runner& runner_;
  const ServerOptions options_;
  // Opened once: programs may put something else in its place, which could wait for ever.
  const absl::StatusOr<UniqueFd> null_;
  const Clock::time_point start_ = Clock::now();
  Sessions sessions_;
  std::atomic<int> connections_ = 0;

  std::mutex mutex_;
  int running_ = 0;  // processes
  int in_use_ = 0;   // connections that keep the server from being idle
  Clock::time_point last_used_ = Clock::now();
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_SERVER_H_
