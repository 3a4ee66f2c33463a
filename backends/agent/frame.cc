// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/frame.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace lamina::agent {
namespace {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;

absl::Status TooLate(std::string_view what) {
  return absl::DeadlineExceededError(fmt::format("{}: the other end does not answer", what));
}

absl::Status SocketError(int error, std::string_view what) {
  if (error == EPIPE || error == ECONNRESET) {
    return absl::UnavailableError(fmt::format("{}: the other end is gone", what));
  }
  if (error == EAGAIN) return TooLate(what);
  return ErrnoStatus(error, what);
}

absl::Status ReadAll(int socket, char* into, size_t size, Deadline deadline) {
  while (size > 0) {
    const ssize_t got = ::recv(socket, into, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SocketError(errno, "receive");
    if (got == 0) return absl::UnavailableError("receive: the other end is gone");
    into += got;
    size -= static_cast<size_t>(got);
    if (size > 0 && deadline.has_value() && std::chrono::steady_clock::now() > *deadline) {
      return TooLate("receive");
    }
  }
  return absl::OkStatus();
}

using FrameHeader = std::array<char, kFrameHeader>;

FrameHeader Header(FrameType type, size_t size) {
  FrameHeader header{};
  for (size_t byte = 0; byte < 4; ++byte) header[byte] = static_cast<char>(size >> (8 * byte));
  header[4] = static_cast<char>(type);
  return header;
}

FrameType Type(const FrameHeader& header) {
  return static_cast<FrameType>(static_cast<unsigned char>(header[4]));
}

absl::StatusOr<uint32_t> ContentSize(const FrameHeader& header) {
  uint32_t size = 0;
  for (size_t byte = 0; byte < 4; ++byte) {
    size |= static_cast<uint32_t>(static_cast<unsigned char>(header[byte])) << (8 * byte);
  }
  if (size > kMaxFrame) {
    return absl::DataLossError(fmt::format("a frame says it has {} bytes", size));
  }
  return size;
}

}  // namespace

absl::Status WriteFrame(int socket, FrameType type, std::string_view content) {
  if (content.size() > kMaxFrame) {
    return absl::ResourceExhaustedError(
        fmt::format("a message of {} bytes: at most {} are allowed", content.size(), kMaxFrame));
  }
  FrameHeader header = Header(type, content.size());
  std::array<iovec, 2> parts{iovec{header.data(), header.size()},
                             iovec{const_cast<char*>(content.data()), content.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  while (message.msg_iovlen > 0) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return SocketError(errno, "send");
    auto left = static_cast<size_t>(sent);
    while (message.msg_iovlen > 0 && left >= message.msg_iov->iov_len) {
      left -= message.msg_iov->iov_len;
      ++message.msg_iov;
      --message.msg_iovlen;
    }
    if (message.msg_iovlen > 0) {
      message.msg_iov->iov_base = static_cast<char*>(message.msg_iov->iov_base) + left;
      message.msg_iov->iov_len -= left;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Frame> ReadFrame(int socket, Deadline deadline) {
  FrameHeader header{};
  RETURN_IF_ERROR(ReadAll(socket, header.data(), header.size(), deadline));
  ASSIGN_OR_RETURN(const uint32_t size, ContentSize(header));
  Frame frame{.type = Type(header), .content = std::string(size, '\0')};
  RETURN_IF_ERROR(ReadAll(socket, frame.content.data(), size, deadline));
  return frame;
}

void FrameStream::Append(FrameType type, std::string_view content) {
  const FrameHeader header = Header(type, content.size());
  out_.append(header.data(), header.size());
  out_.append(content);
}

absl::Status FrameStream::Send() {
  size_t done = 0;
  absl::Status result;
  while (done < out_.size()) {
    const ssize_t sent =
        ::send(socket_, out_.data() + done, out_.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      result = SocketError(errno, "send");
      done = out_.size();
      break;
    }
    done += static_cast<size_t>(sent);
  }
  out_.erase(0, done);
  return result;
}

absl::Status FrameStream::Receive() {
  in_.erase(0, std::exchange(read_, 0));
  std::array<char, kFrameHeader + kPiece> piece;
  ssize_t got = 0;
  do {
    got = ::recv(socket_, piece.data(), piece.size(), MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return absl::OkStatus();
  if (got < 0) return SocketError(errno, "receive");
  if (got == 0) return absl::UnavailableError("receive: the other end is gone");
  in_.append(piece.data(), static_cast<size_t>(got));
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Frame>> FrameStream::Next() {
  const std::string_view rest = std::string_view(in_).substr(read_);
  FrameHeader header{};
  if (rest.size() < header.size()) return std::nullopt;
  std::memcpy(header.data(), rest.data(), header.size());
  ASSIGN_OR_RETURN(const uint32_t size, ContentSize(header));
  if (rest.size() - header.size() < size) return std::nullopt;
  read_ += header.size() + size;
  return Frame{.type = Type(header), .content = std::string(rest.substr(header.size(), size))};
}

FieldWriter& FieldWriter::Number(uint64_t value) {
  for (int byte = 0; byte < 8; ++byte) bytes_.push_back(static_cast<char>(value >> (8 * byte)));
  return *this;
}

FieldWriter& FieldWriter::Text(std::string_view value) {
  Number(value.size());
  bytes_.append(value);
  return *this;
}

FieldWriter& FieldWriter::Texts(const std::vector<std::string>& values) {
  Number(values.size());
  for (const std::string& value : values) Text(value);
  return *this;
}

std::string_view FieldReader::Take(uint64_t size) {
  if (!good_ || size > rest_.size()) {
    good_ = false;
    return {};
  }
  const std::string_view taken = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return taken;
}

uint64_t FieldReader::Number() {
  uint64_t value = 0;
  int shift = 0;
  for (const char byte : Take(8)) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(byte)) << shift;
    shift += 8;
  }
  return value;
}

std::string_view FieldReader::Text() { return Take(Number()); }

std::vector<std::string> FieldReader::Texts() {
  const uint64_t count = Number();
  // Each has at least its length: more than that is a lie, and must not be reserved.
  if (count > rest_.size() / 8) good_ = false;
  std::vector<std::string> values;
  for (uint64_t index = 0; good_ && index < count; ++index) values.emplace_back(Text());
  return values;
}

absl::Status FieldReader::Finish(std::string_view what) const {
  if (good_ && rest_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format(
      "{}: {}", what, good_ ? fmt::format("{} bytes too many", rest_.size()) : "cut short"));
}

}  // namespace lamina::agent
