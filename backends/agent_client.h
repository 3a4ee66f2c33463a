// SPDX-License-Identifier: Apache-2.0
//
// The launcher's side of the agent's protocol. What an agent answers is not trusted.
//
// kUnavailable means that nothing listens: the sandbox has ended. No error that an agent gives, and no
// connection that breaks, is told so. A request that the agent does not go on with for a minute is
// given up with kDeadlineExceeded.
#ifndef LAMINA_BACKENDS_AGENT_CLIENT_H_
#define LAMINA_BACKENDS_AGENT_CLIENT_H_

#include <chrono>
#include <string>

#include "backends/agent/messages.h"
#include "backends/sandbox.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {

inline constexpr const char* kAgentSocket = "agent.sock";

// Whether an agent listens in the sandbox's directory, as far as is known: false says that none does.
// One that takes no connections, since it is frozen or busy, listens.
bool AgentListens(const std::string& directory);

// Runs `message` with the streams of `request`. An agent that goes meanwhile gives kSandboxDied. One
// that does not keep to the limits of time and output, which are its to watch, is left alone with the
// program, and the result is as if it had; what it then does is its sandbox' affair.
struct ExecPatience {
  std::chrono::milliseconds grace = std::chrono::seconds(30);  // beyond the request's timeout
  // The timeout counts from when the agent says that the program has started, for agents that are
  // trusted to say so, and have programs wait for their turn.
  bool from_start = false;
};
absl::StatusOr<ExecResult> AgentExec(const std::string& directory,
                                     const agent::ExecMessage& message, const ExecRequest& request,
                                     const ExecPatience& patience = {});

absl::StatusOr<agent::InfoMessage> AgentInfo(const std::string& directory);
absl::Status AgentCloseSession(const std::string& directory, const std::string& name);

// `tree.path` is the place inside.
absl::StatusOr<CopyCount> AgentPut(const std::string& directory, const agent::TreeMessage& tree,
                                   const std::string& from);
absl::Status AgentPutFile(const std::string& directory, const agent::TreeMessage& tree,
                          std::string_view content, uint32_t mode);
absl::StatusOr<CopyCount> AgentGet(const std::string& directory, const std::string& path,
                                   const std::string& to, uint64_t max_bytes);
absl::StatusOr<std::string> AgentGetFile(const std::string& directory, const std::string& path,
                                         uint64_t max_bytes);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_AGENT_CLIENT_H_
