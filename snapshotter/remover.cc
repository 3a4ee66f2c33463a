// SPDX-License-Identifier: Apache-2.0
#include "snapshotter/remover.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "chunkstore/base/remove_tree.h"

namespace lamina::snapshotter {

void Remover::Remove(std::string path) {
  {
    std::lock_guard lock(mutex_);
    paths_.push_back(std::move(path));
  }
  changed_.notify_all();
}

void Remover::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return paths_.empty() && !busy_; });
}

void Remover::Run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !paths_.empty(); }) && !stop.stop_requested()) {
    const std::string path = std::move(paths_.back());
    paths_.pop_back();
    busy_ = true;
    lock.unlock();
    // Of a container's files, which may be as deep as it likes.
    const absl::Status status = RemoveTree(path);
    if (!status.ok()) spdlog::warn("remove {}: {}", path, std::string(status.message()));
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace lamina::snapshotter
