// SPDX-License-Identifier: Apache-2.0
//
// The launcher's side of the agent's protocol. What an agent answers is not trusted.
#ifndef LAMINA_BACKENDS_AGENT_CLIENT_H_
#define LAMINA_BACKENDS_AGENT_CLIENT_H_

#include <string>

#include "backends/agent/messages.h"
#include "backends/sandbox.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {

inline constexpr const char* kAgentSocket = "agent.sock";

// Whether an agent listens in the sandbox's directory, as far as is known: false says that none does.
// Not for frozen ones, which do not take connections: one too many would wait.
bool AgentListens(const std::string& directory);

// Runs `message` with the streams of `request`. kUnavailable if there is no agent; an agent that goes
// meanwhile gives kSandboxDied.
absl::StatusOr<ExecResult> AgentExec(const std::string& directory,
                                     const agent::ExecMessage& message, const ExecRequest& request);

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
