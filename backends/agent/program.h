// SPDX-License-Identifier: Apache-2.0
//
// Becoming a program. What the new process needs is computed before it is forked: between fork and
// exec of a process with threads nothing may be allocated (fork(2), signal-safety(7)).
#ifndef LAMINA_BACKENDS_AGENT_PROGRAM_H_
#define LAMINA_BACKENDS_AGENT_PROGRAM_H_

#include <sys/resource.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "backends/agent/messages.h"
#include "backends/agent/runner.h"

namespace lamina::agent {

// Why a process did not become its program.
struct StartFailure {
  int error = 0;  // an errno; 0: it did
  bool of_directory = false;
};
// How a process with such a failure ended.
void SetCannotStart(const StartFailure& failure, EndedMessage& ended);

// As shells have it, for an errno: 127 if there is no such program, 126 if it cannot be executed.
int ExitCodeFor(int error);

// Between fork and exec: gives pipes that are streams of this process, or its state's descriptor, to the
// user that it becomes, who can then open them by name as well (/dev/stdout). Before privileges are given
// up; what fails fails then.
void GivePipesTo(uid_t user, gid_t group);

// User and system time, in microseconds.
uint64_t ProcessorTime(const rusage& usage);

class Program {
 public:
  // Borrows `message`, which must stay as it is.
  explicit Program(const ExecMessage& message);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Becomes the program in this process, which was forked for it: in a session of its own, with these
  // streams and the limits and working directory of the message. What else there is to do is done by
  // `prepare`, before the directory is entered; it returns 0 or an errno. A failure is written to
  // `failure_pipe`, which closes when the program runs. Allocates nothing.
  template <typename Prepare>
  [[noreturn]] void Become(const Streams& streams, int failure_pipe, const Prepare& prepare) const {
    StartFailure failure{.error = TakeOver(streams)};
    if (failure.error == 0) failure.error = prepare();
    if (failure.error == 0) failure = Execute();
    Fail(failure, failure_pipe);
  }

  // Enters the working directory of the message, unless that is empty, and becomes the program in this
  // process as it is; returns if that fails. Allocates nothing.
  StartFailure Execute() const;

 private:
  int TakeOver(const Streams& streams) const;
  [[noreturn]] static void Fail(const StartFailure& failure, int failure_pipe);

  const ExecMessage& message_;
  std::vector<std::string> candidates_;
  std::vector<char*> arguments_;
  std::vector<char*> environment_;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_PROGRAM_H_
