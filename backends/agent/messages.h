// SPDX-License-Identifier: Apache-2.0
//
// What is asked of an agent, and what it answers, as structures and as the content of frames.
#ifndef LAMINA_BACKENDS_AGENT_MESSAGES_H_
#define LAMINA_BACKENDS_AGENT_MESSAGES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::agent {

// Of one call, each way: files, and bytes of all of them together.
inline constexpr size_t kMaxCallFiles = 1024;
inline constexpr uint64_t kMaxCallBytes = 4 << 20;

// A small file that goes with a call, or comes back from it.
struct CallFile {
  std::string path;  // relative to the working directory of the call
  uint32_t mode = 0644;
  std::string content;
  std::string error;  // coming back: why there is no content; empty if there is
};

// A process to start. Limits of 0 are none.
struct ExecMessage {
  std::vector<std::string> arguments;    // not empty; [0] without a slash is looked up in PATH
  std::vector<std::string> environment;  // "NAME=value", all of it
  std::string working_directory = "/";
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;
  // The name of a session, or empty. The first use makes it, with `environment` and
  // `working_directory`; later ones go on with what the one before left.
  std::string session;
  bool has_stdin = false;
  uint64_t timeout_ms = 0;
  uint64_t cpu_ms = 0;
  uint64_t output_limit = 0;  // of both streams together: the process is killed beyond it
  uint64_t file_limit = 0;    // bytes of one file
  std::vector<CallFile> files_in;
  std::vector<std::string> files_out;
};

// How it ended: exactly one of these.
enum class Ending : uint8_t {
  kExited = 0,         // `code` is the exit code
  kSignalled = 1,      // by signal `code`, for none of the reasons below
  kTimeLimit = 2,      // killed at its timeout, or out of processor time
  kMemoryLimit = 3,    // killed by the kernel for want of memory
  kOutputLimit = 4,    // killed for its output, or a file over the limit
  kForbiddenCall = 5,  // killed for a system call
  kCannotStart = 6,    // the program could not be executed; `code` is the errno
};
inline constexpr uint8_t kLastEnding = 6;

struct EndedMessage {
  Ending ending = Ending::kExited;
  int32_t code = 0;
  uint64_t wall_us = 0;
  uint64_t cpu_us = 0;        // user and system, of it and of its descendants that it waited for
  uint64_t peak_bytes = 0;    // resident memory; 0: not known
  uint64_t output_bytes = 0;  // of both streams, dropped ones included
  std::string detail;         // one line more for people, or empty
  std::vector<CallFile> files_out;
};

struct TreeMessage {
  std::string path;  // absolute, inside the sandbox
  uint32_t uid = 0;  // kPutTree: whose the files become
  uint32_t gid = 0;
  uint64_t limit = 0;  // kPutTree: bytes
};

struct InfoMessage {
  uint64_t uptime_ms = 0;
  uint64_t running = 0;  // processes of execs
  uint64_t idle_ms = 0;  // since the last one ended
  std::vector<std::string> sessions;
};

std::string Encode(const ExecMessage& message);
std::string Encode(const EndedMessage& message);
std::string Encode(const TreeMessage& message);
std::string Encode(const InfoMessage& message);
// Of an error, for kError.
std::string Encode(const absl::Status& error);

// kInvalidArgument for what does not fit, values out of range included.
absl::StatusOr<ExecMessage> DecodeExec(std::string_view bytes);
absl::StatusOr<EndedMessage> DecodeEnded(std::string_view bytes);
absl::StatusOr<TreeMessage> DecodeTree(std::string_view bytes);
absl::StatusOr<InfoMessage> DecodeInfo(std::string_view bytes);
// The error that kError carries; never OK. Its text, like EndedMessage::detail, can be printed as it is:
// control characters are escaped.
absl::Status DecodeError(std::string_view bytes);

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_MESSAGES_H_
