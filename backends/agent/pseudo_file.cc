// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/pseudo_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace lamina::agent {

std::string ReadPseudoFile(const std::string& path) {
  constexpr size_t kMost = 4 << 20;
  std::string text;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  std::array<char, 16384> piece;
  while (text.size() < kMost) {
    const ssize_t got = ::read(fd, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(piece.data(), static_cast<size_t>(got));
  }
  ::close(fd);
  return text;
}

}  // namespace lamina::agent
