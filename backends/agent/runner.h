// SPDX-License-Identifier: Apache-2.0
//
// What an agent's server starts processes with: in the agent's own sandbox (DirectRunner), or each in
// a jail of its own (backends/fncall).
#ifndef LAMINA_BACKENDS_AGENT_RUNNER_H_
#define LAMINA_BACKENDS_AGENT_RUNNER_H_

#include <memory>

#include "backends/agent/messages.h"
#include "chunkstore/base/file.h"

namespace lamina::agent {

// The process' ends of its pipes.
struct Streams {
  UniqueFd in;
  UniqueFd out;
  UniqueFd err;
  UniqueFd state;  // becomes descriptor kStateDescriptor; may be invalid
};
inline constexpr int kStateDescriptor = 9;

// A process that was started. Used by one thread. Killed when it goes.
class Run {
 public:
  virtual ~Run() = default;

  virtual int64_t pid() const = 0;  // as the sandbox sees it; 0: not known
  // Readable once Result() does not have to wait.
  virtual int ended() const = 0;
  virtual void Signal(int signal) = 0;
  // Kills the process and what it started.
  virtual void Kill() = 0;
  // An error means that it is not known how it went, or that it did not run at all.
  virtual absl::StatusOr<EndedMessage> Result() = 0;
};

// Thread-safe.
class Runner {
 public:
  virtual ~Runner() = default;

  // Starts what the message says; `message.timeout_ms` and `output_limit` are the caller's to watch.
  // A program that cannot be executed is a Run that ends with kCannotStart. May wait for its turn, but
  // not for what the program, or others before it, can hold up.
  virtual absl::StatusOr<std::unique_ptr<Run>> Start(const ExecMessage& message,
                                                     Streams streams) = 0;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_RUNNER_H_
