// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_FS_CONTROL_ACCEPTOR_H_
#define LAMINA_FS_CONTROL_ACCEPTOR_H_

#include <functional>
#include <string>
#include <thread>

#include "chunkstore/base/file.h"
#include "chunkstore/base/status.h"

namespace lamina::fs {

// Accepts connections on a listening socket, in a thread of its own, for as long as it lives.
class Acceptor {
 public:
  // Called in that thread with one connection after the other.
  using Handler = std::function<void(UniqueFd)>;
  Acceptor(UniqueFd listener, Handler handler)
      : listener_(std::move(listener)), handler_(std::move(handler)) {}
  // Waits for the handler to return.
  ~Acceptor() { Stop(); }

  // `name` is the socket's in the log.
  absl::Status Start(const std::string& name);
  void Stop();

 private:
  void Run(const std::string& name);

  const UniqueFd listener_;
  const Handler handler_;
  UniqueFd stop_;  // readable (eventfd) once the thread shall end
  std::thread thread_;
};

}  // namespace lamina::fs

#endif  // LAMINA_FS_CONTROL_ACCEPTOR_H_
