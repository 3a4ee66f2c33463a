// SPDX-License-Identifier: Apache-2.0
//
// What makes one kind of sandbox. The launcher has mounted the image and listens on the agent's socket;
// a backend starts what answers there.
#ifndef LAMINA_BACKENDS_BACKEND_H_
#define LAMINA_BACKENDS_BACKEND_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/record.h"
#include "backends/sandbox.h"

namespace lamina::backends {

struct StartRequest {
  std::string state;      // the state directory
  std::string directory;  // of the sandbox, see record.h
  std::string rootfs;     // the mounted image
  // Backends with a kernel of their own: the image as files for its devices (fs/engine/engine.h,
  // MountDescription), and the snapshot whose memory it starts with, or an empty path.
  std::vector<std::string> devices;
  std::string snapshot;
  std::string helpers;  // directory with the programs lamina-agent and lamina-fncall
  int listener = -1;    // listening socket
  int lock = -1;        // on the directory: what starts the sandbox has it until it has done so
  uint32_t warm = 0;    // SandboxOptions::warm
};

// Stateless; thread-safe.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;
  // One line for people: how strong it is and what it is for.
  virtual std::string_view description() const = 0;
  virtual Capabilities capabilities() const = 0;
  // OK if it can run on this machine; else says what is missing.
  virtual absl::Status Available() const = 0;
  // What people should know of how it runs here, in a few words, or nothing.
  virtual std::string Note() const { return ""; }
  // Starts the sandbox of the record, in the control group `record.cgroup` with `record.limits`, and
  // sets record.first_process. After an error the caller removes the control group.
  virtual absl::Status Start(const StartRequest& request, Record& record) const = 0;

  // What is asked of a sandbox itself, and not of the agent in it. Without a kernel of its own it is
  // done with the control group and the directories that the launcher made.
  virtual absl::Status Pause(const std::string& directory, const Record& record) const;
  virtual absl::Status Resume(const std::string& directory, const Record& record) const;
  // Waits for the end of a commit or snapshot that has stopped it.
  virtual bool Paused(const std::string& directory, const Record& record) const;
  // Backends with snapshots of memory: puts memory and disk, as they are at one moment, into the
  // directory `into`.
  virtual absl::Status Save(const std::string& directory, const std::string& into) const;
  // What was written, as far as it takes space.
  virtual absl::StatusOr<uint64_t> DiskBytes(const std::string& directory) const;
};

// All of them, and one by its name; kInvalidArgument, naming those there are, for others.
const std::vector<const Backend*>& Backends();
absl::StatusOr<const Backend*> FindBackend(std::string_view name);

std::unique_ptr<Backend> MakeContainerBackend();
std::unique_ptr<Backend> MakeFnCallBackend();
std::unique_ptr<Backend> MakeFirecrackerBackend();
std::unique_ptr<Backend> MakeQemuBackend();

// What a task needs of its sandbox.
struct TaskNeeds {
  bool stateless = false;   // one program, with files in and out
  bool own_kernel = false;  // isolation by a kernel of its own
  bool root = false;        // programs are root
  bool state = false;       // sessions, pause, snapshots or files that stay
};
struct Choice {
  const Backend* backend = nullptr;
  std::string reason;
};
// The weakest backend that is enough and can run here; kFailedPrecondition if none is.
absl::StatusOr<Choice> ChooseBackend(const TaskNeeds& needs);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_BACKEND_H_
