// SPDX-License-Identifier: Apache-2.0
//
// QEMU's machine protocol (docs/interop/qmp-spec.txt): JSON on a stream.
#ifndef LAMINA_BACKENDS_QEMU_QMP_H_
#define LAMINA_BACKENDS_QEMU_QMP_H_

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "chunkstore/base/file.h"

namespace lamina::backends {

// Thread-safe: commands are done one after the other. What happens in QEMU meanwhile (events) is read
// and dropped. QEMU's answers are not trusted: a guest may have taken it over.
class Qmp {
 public:
  // `socket` is connected to QEMU's, which greets first.
  explicit Qmp(UniqueFd socket);
  // Ends its thread.
  ~Qmp();

  // Waits for the greeting, and answers it.
  absl::Status Negotiate(std::chrono::milliseconds patience);
  // The command's "return". Errors have QEMU's description. A descriptor that is not -1 goes along.
  absl::StatusOr<nlohmann::json> Execute(
      std::string_view command, nlohmann::json arguments = nlohmann::json::object(),
      int descriptor = -1, std::chrono::milliseconds patience = std::chrono::seconds(30));

 private:
  void Read();
  absl::StatusOr<nlohmann::json> Await(std::chrono::milliseconds patience);

  const UniqueFd socket_;
  std::mutex commands_;  // one at a time

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool greeted_ = false;
  bool ended_ = false;
  std::optional<nlohmann::json> answer_;
  uint64_t next_id_ = 1;
  uint64_t awaited_ = 0;

  std::thread reader_;
};

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_QEMU_QMP_H_
