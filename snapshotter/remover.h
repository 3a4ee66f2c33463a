// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_SNAPSHOTTER_REMOVER_H_
#define LAMINA_SNAPSHOTTER_REMOVER_H_

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lamina::snapshotter {

// Removes directory trees in the background. Thread-safe.
class Remover {
 public:
  Remover() : thread_([this](const std::stop_token& stop) { Run(stop); }) {}
  // Leaves what is not removed yet.
  ~Remover() = default;

  void Remove(std::string path);
  // Until all that was given before is removed; what cannot be is in the log.
  void Wait();

 private:
  void Run(const std::stop_token& stop);

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::string> paths_;
  bool busy_ = false;
  std::jthread thread_;  // last: it uses the rest
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_REMOVER_H_
