// SPDX-License-Identifier: Apache-2.0
//
// Sessions: names under which commands that run one after the other, each in a shell of its own,
// hand on working directory and exported variables.
#ifndef LAMINA_BACKENDS_AGENT_SESSIONS_H_
#define LAMINA_BACKENDS_AGENT_SESSIONS_H_

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "backends/agent/messages.h"
#include "chunkstore/base/status.h"

namespace lamina::agent {

// Thread-safe.
class Sessions {
 public:
  // What a shell says of its state is not longer: it goes to the next one as an argument, and Linux
  // takes none of more than 128 KiB (MAX_ARG_STRLEN in execve(2)).
  static constexpr size_t kMaxState = 127 << 10;
  static constexpr size_t kMaxSessions = 1024;

  // Turns a message into one for the shell that runs it in its session, which is busy until End.
  // kFailedPrecondition if it is busy already, kPermissionDenied if another user began it.
  absl::StatusOr<ExecMessage> Begin(ExecMessage message);
  // `state`: what the shell wrote to kStateDescriptor; empty if it did not get to it, and then the
  // session is as before. So it is if that is too long: kResourceExhausted.
  absl::Status End(const std::string& name, std::string state);

  absl::Status Close(const std::string& name);
  std::vector<std::string> Names();

 private:
  struct Session {
    uint32_t uid = 0;  // of its commands
    bool busy = false;
    std::string state;
  };

  std::mutex mutex_;
  std::map<std::string, Session> sessions_;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_SESSIONS_H_
