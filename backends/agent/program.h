// SPDX-License-Identifier: Apache-2.0
//
// Becoming a program. What the new process needs is computed before it is forked: between fork and
// exec of a process with threads nothing may be allocated (fork(2), signal-safety(7)).
#ifndef LAMINA_BACKENDS_AGENT_PROGRAM_H_
#define LAMINA_BACKENDS_AGENT_PROGRAM_H_

#include <string>
#include <vector>

#include "backends/agent/messages.h"

namespace lamina::agent {

class Program {
 public:
  // Borrows `message`, which must stay as it is.
  explicit Program(const ExecMessage& message);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Executes it in this process, which returns only on failure: the errno, of the candidate in PATH
  // that was nearest to running. Allocates nothing.
  int Execute() const;

 private:
  std::vector<std::string> candidates_;
  std::vector<char*> arguments_;
  std::vector<char*> environment_;
};

// For a forked process: makes these its standard streams and closes all other descriptors, but for
// `kept`, at exec. Returns 0 or an errno. Allocates nothing. Negative ones are left as they are.
int TakeStreams(int in, int out, int err, int kept, int kept_as);

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_PROGRAM_H_
