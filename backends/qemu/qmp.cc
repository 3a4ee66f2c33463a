// SPDX-License-Identifier: Apache-2.0
#include "backends/qemu/qmp.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <span>

#include "chunkstore/base/descriptor_message.h"

namespace lamina::backends {
namespace {

using nlohmann::json;

// An answer is not longer.
constexpr size_t kMaxLine = 1 << 20;

}  // namespace

Qmp::Qmp(UniqueFd socket) : socket_(std::move(socket)), reader_([this] { Read(); }) {}

Qmp::~Qmp() {
  ::shutdown(socket_.get(), SHUT_RDWR);
  reader_.join();
}

void Qmp::Read() {
  std::string line;
  std::array<char, 4096> piece;
  while (true) {
    const ssize_t got = ::recv(socket_.get(), piece.data(), piece.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    for (const char byte : std::string_view(piece.data(), static_cast<size_t>(got))) {
      if (byte != '\n') {
        line.push_back(byte);
        continue;
      }
      json message = json::parse(line, nullptr, /*allow_exceptions=*/false);
      line.clear();
      if (!message.is_object() || message.contains("event")) continue;
      const std::lock_guard lock(mutex_);
      if (message.contains("QMP")) greeted_ = true;
      const auto id = message.find("id");
      if (id != message.end() && id->is_number_unsigned() && *id == awaited_) {
        answer_ = std::move(message);
      }
      changed_.notify_all();
    }
    if (line.size() > kMaxLine) break;
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

absl::Status Qmp::Negotiate(std::chrono::milliseconds patience) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience, [this] { return greeted_ || ended_; });
    if (ended_) return absl::UnavailableError("QEMU has ended");
    if (!greeted_) return absl::DeadlineExceededError("QEMU does not answer");
  }
  return Execute("qmp_capabilities").status();
}

absl::StatusOr<json> Qmp::Execute(std::string_view command, json arguments, int descriptor,
                                  std::chrono::milliseconds patience) {
  const std::lock_guard one_at_a_time(commands_);
  json message = {{"execute", command}, {"arguments", std::move(arguments)}};
  {
    const std::lock_guard lock(mutex_);
    awaited_ = next_id_++;
    answer_.reset();
    message["id"] = awaited_;
  }
  const std::span<const int> passed(&descriptor, descriptor >= 0 ? 1 : 0);
  RETURN_IF_ERROR(SendDescriptorMessage(socket_.get(), message.dump() + "\n", passed), "QEMU: {}",
                  command);
  ASSIGN_OR_RETURN(json answer, Await(patience), "QEMU: {}", command);
  if (const auto value = answer.find("return"); value != answer.end()) return *value;
  const json error = answer.value("error", json::object());
  const std::string text = error.is_object() ? error.value("desc", "") : "";
  return absl::InternalError(fmt::format("QEMU: {}: {}", command, text));
}

absl::StatusOr<json> Qmp::Await(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [this] { return answer_.has_value() || ended_; });
  if (answer_.has_value()) return *std::exchange(answer_, std::nullopt);
  if (ended_) return absl::UnavailableError("it has ended");
  return absl::DeadlineExceededError("no answer");
}

}  // namespace lamina::backends
