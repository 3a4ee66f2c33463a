// SPDX-License-Identifier: Apache-2.0
//
// The engine as a process: serves an Engine on <state>/control.sock (messages.h), follows unmounts
// made by others, and ends when it is told to or when nothing needs it.
//
// Descriptors "control" that the holder has are the listening sockets: clients wait in their queues
// from one engine to the next.
#ifndef LAMINA_FS_ENGINE_SERVER_H_
#define LAMINA_FS_ENGINE_SERVER_H_

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "chunkstore/base/status.h"
#include "fs/engine/engine.h"

namespace lamina::fs {

struct ServerOptions {
  EngineOptions engine;
  // End as soon as the engine is idle (once it has served a request): for engines that the CLI
  // starts on demand.
  bool end_when_idle = false;
  // Called once, when the socket answers.
  std::function<void()> ready;
  // What else serves the engine, for example on other sockets: started before `ready` is called, and
  // gone, through its destructor, before the engine ends.
  std::function<absl::StatusOr<std::shared_ptr<void>>(Engine&)> start_services;
  // Answers requests on the socket that are not the engine's, in threads of the server, while the
  // services run; may be null.
  std::function<absl::StatusOr<nlohmann::json>(std::string_view op, const nlohmann::json& request)>
      execute;
};

// Runs until SIGTERM or SIGINT, or until idle if so asked; unmounts everything before it returns.
// With a holder SIGHUP ends it as well, and mounts stay, as they do then after an error. The signals
// must be blocked in the calling process before any thread is started, which must be after the call: it
// forks (Engine::Open). Sets how the process allocates memory.
absl::Status RunServer(const ServerOptions& options);

}  // namespace lamina::fs

#endif  // LAMINA_FS_ENGINE_SERVER_H_
