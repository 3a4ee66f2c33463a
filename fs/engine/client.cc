// SPDX-License-Identifier: Apache-2.0
#include "fs/engine/client.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "chunkstore/base/program.h"
#include "fs/engine/messages.h"
#include "fs/engine/socket.h"
#include "fs/mount/mount.h"

extern char** environ;

namespace lamina::fs {
namespace {

using nlohmann::json;

// An engine that ends just as it is called does not answer; another is started then.
constexpr int kConnectAttempts = 20;
// How long Unmount waits for an engine without mounts to end. Readers of a mount that was detached
// can keep it alive for as long as they like.
constexpr int kEndMilliseconds = 5'000;
// What mounts name by a descriptor instead of its path.
constexpr std::string_view kDescriptors = "/proc/self/fd/";

void WaitForClose(int socket) {
  pollfd event = {.fd = socket, .events = POLLRDHUP};
  ::poll(&event, 1, kEndMilliseconds);
}

absl::StatusOr<std::string> NewToken() {
  std::array<uint64_t, 2> random;
  if (::getrandom(random.data(), sizeof(random), 0) != sizeof(random)) {
    return ErrnoStatus(errno, "getrandom");
  }
  return fmt::format("{:016x}{:016x}", random[0], random[1]);
}

}  // namespace

absl::StatusOr<json> Client::Mount(const MountRequest& request) {
  json message = ToJson(request);
  message["op"] = "mount";
  message["mount_namespace"] = MountNamespace();
  if (request.token.empty()) {
    ASSIGN_OR_RETURN(message["token"], NewToken());
  }
  return Call(message, /*start_engine=*/true);
}

absl::StatusOr<json> Client::Fork(ForkRequest request) {
  request.mount_namespace = MountNamespace();
  if (request.token.empty()) {
    ASSIGN_OR_RETURN(request.token, NewToken());
  }
  json message = ToJson(request);
  message["op"] = "fork";
  absl::StatusOr<json> reply = Call(message, /*start_engine=*/false);
  if (!absl::IsUnavailable(reply.status())) return reply;
  return absl::NotFoundError(fmt::format("no image is mounted at {}: {}", request.target,
                                         std::string(reply.status().message())));
}

absl::Status Client::Unmount(const std::string& target) {
  const auto is_mounted = [&target] {
    const absl::StatusOr<std::optional<MountInfo>> info = FindMount(target);
    return info.ok() && info->has_value();
  };
  const bool was_mounted = is_mounted();
  // An engine that starts removes what others have left; where there never was one is nothing to remove.
  const bool was_used = ::access((state_ + "/lock").c_str(), F_OK) == 0;
  const absl::Status status = Call({{"op", "unmount"}, {"target", target}}, was_used).status();
  if (!was_used && absl::IsUnavailable(status)) {
    return absl::NotFoundError(fmt::format("unmount {}: no image is mounted there", target));
  }
  // An engine that is killed just after it has unmounted leaves its successor with nothing to do.
  if (absl::IsNotFound(status) && was_mounted && !is_mounted()) return absl::OkStatus();
  return status;
}

absl::StatusOr<json> Client::Report(const std::optional<std::string>& target) {
  json message = {{"op", "report"}};
  if (target.has_value()) message["target"] = *target;
  absl::StatusOr<json> reply = Call(message, /*start_engine=*/false);
  if (!absl::IsUnavailable(reply.status())) return reply;
  if (target.has_value()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", *target));
  }
  return json::array();
}

absl::StatusOr<json> Client::ListCache() {
  return Call({{"op", "cache-list"}}, /*start_engine=*/true);
}

absl::StatusOr<json> Client::CleanCache(std::optional<uint64_t> bytes) {
  json message = {{"op", "cache-clean"}};
  if (bytes.has_value()) message["bytes"] = *bytes;
  return Call(message, /*start_engine=*/true);
}

absl::Status Client::PinImage(const std::string& image, bool pinned,
                              const registry::Settings& registry) {
  return Call({{"op", "cache-pin"},
               {"image", image},
               {"pinned", pinned},
               {"registry", ToJson(registry, Secrets::kIncluded)}},
              /*start_engine=*/true)
      .status();
}

absl::StatusOr<json> Client::RemoveImage(const std::string& image) {
  return Call({{"op", "cache-remove"}, {"image", image}}, /*start_engine=*/true);
}

absl::StatusOr<json> Client::Call(const json& request, bool start_engine) {
  std::string text;
  try {
    text = request.dump();
  } catch (const json::type_error&) {
    return absl::InvalidArgumentError(
        "a path or name has bytes that are not UTF-8, which requests to the engine cannot carry");
  }
  absl::Status last =
      absl::UnavailableError(fmt::format("it ends when it has started: see {}/engine.log", state_));
  for (int attempt = 0; attempt < kConnectAttempts; ++attempt) {
    const absl::StatusOr<UniqueFd> socket = ConnectUnix(state_, kControlSocket);
    if (!socket.ok()) {
      const bool absent = absl::IsUnavailable(socket.status()) || absl::IsNotFound(socket.status());
      if (!absent) return socket.status();
      if (!start_engine) return absl::UnavailableError(std::string(socket.status().message()));
      absl::Status started = StartEngine();
      if (started.ok()) continue;
      // Another client may have started one at the same time: then it is that one we talk to.
      if (!absl::IsUnavailable(started)) return started;
      last = std::move(started);
      ::usleep(20'000);
      continue;
    }
    absl::Status sent = WriteLine(socket->get(), text);
    absl::StatusOr<std::string> line =
        sent.ok() ? ReadLine(socket->get()) : absl::StatusOr<std::string>(sent);
    if (!line.ok()) {
      // Closed without an answer: the request was not begun, or the engine was killed, and then a
      // mount's token lets it be made again.
      last = line.status();
      continue;
    }
    absl::StatusOr<json> reply = ParseReply(*line);
    // After an unmount, or a mount that failed, the engine may have nothing left to do.
    const bool may_end =
        !reply.ok() || (request["op"] == "unmount" && reply->value("stays", json()) != true);
    if (may_end) WaitForClose(socket->get());
    return reply;
  }
  return Annotate(std::move(last), fmt::format("engine of {}", state_));
}

absl::Status Client::StartEngine() {
  int pipe_fds[2];
  if (::pipe2(pipe_fds, 0) != 0) return ErrnoStatus(errno, "create a pipe");
  UniqueFd read_end(pipe_fds[0]);
  UniqueFd write_end(pipe_fds[1]);
  ::fcntl(read_end.get(), F_SETFD, FD_CLOEXEC);
  const std::string state_option = "--state=" + state_;
  const std::string ready_option = fmt::format("--ready-fd={}", write_end.get());
  std::vector<const char*> arguments = {"lamina", "serve", state_option.c_str(), "--end-when-idle",
                                        ready_option.c_str()};
  for (const std::string& option : engine_options_) arguments.push_back(option.c_str());
  arguments.push_back(nullptr);
  pid_t child = -1;
  const int error = ::posix_spawn(&child, program_.c_str(), nullptr, nullptr,
                                  const_cast<char**>(arguments.data()), environ);
  if (error != 0) return ErrnoStatus(error, "start the engine " + program_);
  write_end.Reset();
  // The child detaches itself: it forks, and the parent half ends at once.
  int ignored = 0;
  while (::waitpid(child, &ignored, 0) < 0 && errno == EINTR) {
  }
  // "ok", or {"error": ..., "code": ...}; nothing if it died.
  ASSIGN_OR_RETURN(const std::string answer, ReadToEnd(read_end.get(), kMaxLine),
                   "the engine's ready pipe");
  if (answer == "ok") return absl::OkStatus();
  if (answer.empty()) {
    return absl::InternalError(
        fmt::format("the engine ended before it was ready: see {}/engine.log", state_));
  }
  const absl::StatusOr<json> reply = ParseReply(answer);
  return reply.ok() ? absl::OkStatus() : reply.status();
}

std::string DefaultStateDirectory() {
  if (::geteuid() == 0) return "/var/lib/lamina";
  if (const char* data = std::getenv("XDG_DATA_HOME"); data != nullptr && data[0] == '/') {
    return std::string(data) + "/lamina";
  }
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : "/tmp") + "/.local/share/lamina";
}

absl::StatusOr<std::string> StateOfMount(const std::string& target) {
  const absl::StatusOr<std::optional<MountInfo>> info = FindMount(target);
  if (!info.ok() || !info->has_value()) {
    return absl::NotFoundError(fmt::format("no image is mounted at {}", target));
  }
  // EROFS has <state>/images/... as its source, FUSE <state>/mounts/..., an overlay has the latter
  // in its options.
  const std::string source = LoopBackingFile((*info)->source).value_or((*info)->source);
  for (std::string text : {source, (*info)->super_options}) {
    if (const size_t option = text.find("lowerdir"); option != std::string::npos) {
      const size_t start = text.find('/', option);
      text = start == std::string::npos ? "" : text.substr(start);
    }
    for (const char* part : {"/images/", "/mounts/"}) {
      if (!text.starts_with('/')) continue;
      // The state directory may itself be below one with such a name.
      for (size_t end = text.find(part); end != std::string::npos; end = text.find(part, end + 1)) {
        const std::string state = text.substr(0, end);
        std::error_code ignored;
        if (std::filesystem::exists(state + "/lock", ignored)) return state;
      }
    }
  }
  const bool by_descriptor =
      ((*info)->type == "erofs" && source.starts_with(kDescriptors)) ||
      ((*info)->type == "overlay" &&
       (*info)->super_options.find(fmt::format("upperdir={}", kDescriptors)) != std::string::npos);
  if (by_descriptor) {
    return absl::FailedPreconditionError(fmt::format(
        "the mount at {} does not tell its state directory, whose path is long or has a backslash: "
        "say it with --state",
        target));
  }
  return absl::NotFoundError(fmt::format("no image is mounted at {}", target));
}

}  // namespace lamina::fs
