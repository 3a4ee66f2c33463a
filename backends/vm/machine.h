// SPDX-License-Identifier: Apache-2.0
//
// A virtual machine as its monitor (monitor.h) has it, whatever runs it.
#ifndef LAMINA_BACKENDS_VM_MACHINE_H_
#define LAMINA_BACKENDS_VM_MACHINE_H_

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina::backends {

// What a snapshot of a machine consists of, in a directory of its own; the disk is there if the machine
// has one.
inline constexpr const char* kSnapshotMemory = "memory";
inline constexpr const char* kMachineDisk = "disk.img";

// The machine ends with this object, and with this process however that ends. Thread-safe.
class Machine {
 public:
  virtual ~Machine() = default;

  // Waits until the agent is there. An error if the machine ends before.
  virtual absl::Status AwaitAgent(std::chrono::milliseconds patience) = 0;
  // Readable when the machine has ended.
  virtual int ended() const = 0;
  // Gives the agent a connection, whose other end this is.
  virtual void Connect(UniqueFd connection) = 0;

  virtual absl::Status Pause() = 0;
  virtual absl::Status Resume() = 0;
  // Writes the memory of a paused machine, and what belongs to it, into a directory.
  virtual absl::Status SaveMemory(const std::string& directory) = 0;
};

// A child process that ends with this one; killed, and waited for, when the object goes.
class ChildProcess {
 public:
  // Starts a program found on PATH. `descriptors` become 3, 4, ...; `output` its standard output and
  // error; it has no input, and no other descriptors.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& arguments,
                                            const std::vector<int>& descriptors, int output);
  ChildProcess() = default;
  ChildProcess(ChildProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)), pidfd_(std::move(other.pidfd_)) {}
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  int ended() const { return pidfd_.get(); }

 private:
  pid_t pid_ = 0;
  UniqueFd pidfd_;
};

// Copies a file with its holes, sharing its blocks where the file system can. `to` must not be there.
absl::Status CopySparseFile(const std::string& from, const std::string& to);

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_MACHINE_H_
