// SPDX-License-Identifier: Apache-2.0
//
// The bytes of the agent's protocol (PROTOCOL.md): frames on a stream, and fields in a frame. Both
// ends take the other one for hostile: an agent may have been broken by what runs beside it, and so
// every length is checked before it is used.
#ifndef LAMINA_BACKENDS_AGENT_FRAME_H_
#define LAMINA_BACKENDS_AGENT_FRAME_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::agent {

// A frame's content is not longer; whoever gets more ends the connection.
inline constexpr uint32_t kMaxFrame = 8 << 20;
// Output and file content come in pieces of up to this.
inline constexpr size_t kPiece = 64 << 10;
inline constexpr size_t kFrameHeader = 5;
// Input that was sent and not yet taken by the process is not more than this.
inline constexpr size_t kStdinWindow = 4 * kPiece;

enum class FrameType : uint8_t {
  // To the agent. The first frame of a connection says what it is for.
  kExec = 1,
  kStdin = 2,
  kStdinEnd = 3,
  kSignal = 4,
  kPutTree = 5,
  kGetTree = 6,
  kInfo = 7,
  kCloseSession = 8,
  // From the agent.
  kStarted = 32,
  kStdout = 33,
  kStderr = 34,
  kEnded = 35,
  kError = 36,
  kDone = 37,
  kInfoReply = 38,
  kStdinTaken = 39,
  // A tree, either way.
  kEntry = 64,
  kData = 65,
  kTreeEnd = 66,
};

struct Frame {
  FrameType type = FrameType::kError;
  std::string content;
};

// Both block; kDeadlineExceeded if a send or receive takes longer than the socket allows (SO_SNDTIMEO,
// SO_RCVTIMEO in socket(7)), or the whole frame longer than to `deadline`, as far as those bound it.

// Writes one frame, whole. kUnavailable if the other end is gone.
absl::Status WriteFrame(int socket, FrameType type, std::string_view content);
// Reads one frame. kUnavailable at the end of the stream, before or in a frame; kDataLoss if it is
// longer than kMaxFrame.
absl::StatusOr<Frame> ReadFrame(
    int socket, std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

// Frames of a connection whose ends both send when they like. Nothing here waits: an end that waited for
// the other one to take something, and meanwhile took nothing itself, could wait for ever.
class FrameStream {
 public:
  explicit FrameStream(int socket) : socket_(socket) {}  // borrowed

  // Puts a frame behind those that are to be sent; `content` must not be longer than kMaxFrame.
  void Append(FrameType type, std::string_view content);
  // Bytes that are to be sent.
  size_t unsent() const { return out_.size(); }
  // Sends what the socket takes now. kUnavailable if the other end is gone, and then nothing is to be
  // sent any more.
  absl::Status Send();

  // Takes what has arrived, to be read with Next. kUnavailable at the end of the stream.
  absl::Status Receive();
  // The next frame, if all of it has arrived. kDataLoss if it is longer than kMaxFrame.
  absl::StatusOr<std::optional<Frame>> Next();

 private:
  const int socket_;
  std::string out_;
  std::string in_;
  size_t read_ = 0;  // of in_
};

// Appends fields: integers little-endian, text and lists with their length in front.
class FieldWriter {
 public:
  FieldWriter& Number(uint64_t value);
  FieldWriter& Text(std::string_view value);
  FieldWriter& Texts(const std::vector<std::string>& values);
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what FieldWriter wrote. After the first mistake every read gives nothing; Finish says so.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : rest_(bytes) {}

  uint64_t Number();
  std::string_view Text();  // a part of the bytes given
  std::vector<std::string> Texts();
  // kInvalidArgument unless all fields were there and nothing is left.
  absl::Status Finish(std::string_view what) const;

 private:
  std::string_view Take(uint64_t size);

  std::string_view rest_;
  bool good_ = true;
};

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_FRAME_H_
