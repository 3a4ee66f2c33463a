// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/sessions.h"

#include "backends/agent/runner.h"

namespace lamina::agent {
namespace {

// $1: what the shell before exported, as it printed it; $2: what to run; the rest: its arguments.
// The state is text that only this shell's followers in the same sandbox evaluate, of the same user, so a
// command that writes nonsense to it harms itself alone. It travels in PWD where the session is.
constexpr const char* kWrapper = R"sh(eval "$1"
if [ -n "$1" ]; then cd -- "$PWD" || exit 125; fi
__lamina_script=$2
shift 2
trap '__lamina_code=$?
trap - EXIT
export PWD
export -p >&9
exit "$__lamina_code"' EXIT
eval "$__lamina_script"
)sh";
static_assert(kStateDescriptor == 9);

}  // namespace

absl::StatusOr<ExecMessage> Sessions::Begin(ExecMessage message) {
  const std::lock_guard lock(mutex_);
  if (!sessions_.contains(message.session) && sessions_.size() >= kMaxSessions) {
    return absl::ResourceExhaustedError(
        fmt::format("there are {} sessions: close one", kMaxSessions));
  }
  const auto [found, is_new] = sessions_.try_emplace(message.session, Session{.uid = message.uid});
  Session& session = found->second;
  // What one user wrote, another one's shell would evaluate.
  if (session.uid != message.uid) {
    return absl::PermissionDeniedError(
        fmt::format("session '{}' is of user {}: user {} needs another one", message.session,
                    session.uid, message.uid));
  }
  if (session.busy) {
    return absl::FailedPreconditionError(
        fmt::format("session '{}' is busy: it runs one command at a time", message.session));
  }
  session.busy = true;
  // What the caller runs is argv; a script comes as sh -c SCRIPT and would lose what it changes.
  std::vector<std::string> arguments = {"/bin/sh", "-c", kWrapper, "sh", session.state};
  const bool is_script = message.arguments.size() == 3 && message.arguments[0] == "/bin/sh" &&
                         message.arguments[1] == "-c";
  if (is_script) {
    arguments.push_back(message.arguments[2]);
  } else {
    arguments.emplace_back("\"$@\"");
    arguments.insert(arguments.end(), message.arguments.begin(), message.arguments.end());
  }
  message.arguments = std::move(arguments);
  // The state has all variables, also those that are not there any more.
  if (!session.state.empty()) message.environment.clear();
  return message;
}

absl::Status Sessions::End(const std::string& name, std::string state) {
  const std::lock_guard lock(mutex_);
  const auto session = sessions_.find(name);
  if (session == sessions_.end()) return absl::OkStatus();
  session->second.busy = false;
  if (state.size() > kMaxState) {
    return absl::ResourceExhaustedError(fmt::format(
        "session '{}' stays as it was: what was exported has more than {} bytes", name, kMaxState));
  }
  if (!state.empty()) session->second.state = std::move(state);
  return absl::OkStatus();
}

absl::Status Sessions::Close(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto session = sessions_.find(name);
  if (session == sessions_.end()) {
    return absl::NotFoundError(fmt::format("there is no session '{}'", name));
  }
  if (session->second.busy) {
    return absl::FailedPreconditionError(fmt::format("session '{}' is busy", name));
  }
  sessions_.erase(session);
  return absl::OkStatus();
}

std::vector<std::string> Sessions::Names() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, session] : sessions_) names.push_back(name);
  return names;
}

}  // namespace lamina::agent
