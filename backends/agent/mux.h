// SPDX-License-Identifier: Apache-2.0
//
// Many connections over one stream, for agents that are reached by one: through a virtual machine's
// serial port. PROTOCOL.md describes the bytes. The host opens connections; either end bounds what it
// keeps of one, so that a reader who waits holds up nobody else. The ends do not trust each other.
#ifndef LAMINA_BACKENDS_AGENT_MUX_H_
#define LAMINA_BACKENDS_AGENT_MUX_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina::agent {

class Mux {
 public:
  enum class Side { kHost, kGuest };
  enum class FrameType : uint8_t {
    kGreeting = 1,  // forget all there was; the guest answers with the same
    kOpen = 2,
    kData = 3,
    kCredit = 4,  // the receiver has room for so many bytes more
    kEnd = 5,     // no more data this way
    kClose = 6,   // the connection is gone
    kQuiesce = 7,
    kQuiet = 8,
    kContinue = 9,
  };
  static constexpr size_t kHeader = 9;
  static constexpr size_t kPiece = 32 << 10;    // of data in a frame, at most
  static constexpr size_t kWindow = 256 << 10;  // of data that the receiver keeps, at most
  // More than an agent serves, so that it is the one who says so.
  static constexpr size_t kMaxConnections = 1024;

  // Called by the thread in Run.
  struct Events {
    // The guest's: a connection that the host has opened, and the host's clock when it greets and when
    // it goes on after a pause.
    std::function<void(UniqueFd connection)> opened;
    std::function<void(std::chrono::microseconds since_1970)> clock;
    // The host's: the guest is there.
    std::function<void()> greeted;
  };

  // `stream` is a socket or a serial port.
  static absl::StatusOr<std::unique_ptr<Mux>> Create(Side side, UniqueFd stream, Events events);

  // Serves until the stream ends (kUnavailable), Stop is called (OK), or the other end sends what is
  // not allowed (kDataLoss). Connections close with it.
  absl::Status Run();

  // What follows is thread-safe.
  void Stop();
  // The host's: the guest gets this connection's other end. Closed at once if there are too many.
  void Open(UniqueFd connection);
  // The host's: has both ends stop with the stream empty, as it must be while the guest's memory is
  // copied, whose next host then knows where it is. kDeadlineExceeded if the guest does not answer;
  // then, and after a copy, Continue.
  absl::Status Quiesce(std::chrono::milliseconds patience);
  void Continue();

 private:
  struct Connection {
    UniqueFd socket;
    std::string incoming;       // for the socket
    size_t credit = kWindow;    // bytes that may be sent
    size_t consumed = 0;        // bytes that the socket took and the sender was not told of
    bool socket_ended = false;  // its end was sent
    bool deaf = false;          // the socket takes no more, but may have something to say
    bool other_ended = false;   // nothing more comes for it
  };
  using Connections = std::map<uint32_t, Connection>;

  Mux(Side side, UniqueFd stream, UniqueFd wake, Events events)
      : side_(side),
        stream_(std::move(stream)),
        wake_(std::move(wake)),
        events_(std::move(events)) {}

  void Wake();
  void Append(uint32_t connection, FrameType type, std::string_view content = "");
  void AppendClock(FrameType type);
  void TakeOrders();
  absl::Status ReadStream();
  absl::Status WriteStream();
  absl::Status TakeFrame(uint32_t id, FrameType type, std::string_view content);
  absl::Status TakeConnectionFrame(uint32_t id, FrameType type, std::string_view content);
  void ReadSocket(uint32_t id, Connection& connection);
  // False if the connection is to be closed.
  bool WriteSocket(Connection& connection);
  void GiveCredit(uint32_t id, Connection& connection);
  void ServeConnections(const std::map<uint32_t, short>& ready);

  const Side side_;
  const UniqueFd stream_;
  const UniqueFd wake_;  // eventfd
  const Events events_;
  std::string in_;   // of the stream: less than a frame
  std::string out_;  // for the stream
  Connections connections_;
  uint32_t next_id_ = 1;    // the host's
  uint32_t last_read_ = 0;  // turns go round
  bool stopped_ = false;    // between kQuiesce and what ends it

  std::mutex mutex_;  // guards what follows
  std::condition_variable quiet_;
  std::vector<UniqueFd> to_open_;
  bool end_ = false;
  enum class Quiet { kNo, kAsked, kSent, kYes, kOver } quiescing_ = Quiet::kNo;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_MUX_H_
