// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/mux.h"

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>

namespace lamina::agent {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

std::pair<UniqueFd, UniqueFd> Pair() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// Reads to the end.
std::string ReadAll(int fd) {
  std::string all;
  std::array<char, 65536> piece;
  ssize_t got = 0;
  while ((got = ::read(fd, piece.data(), piece.size())) > 0) {
    all.append(piece.data(), static_cast<size_t>(got));
  }
  return all;
}

bool WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (put <= 0) return false;
    text.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

// One end that runs.
class Running {
 public:
  Running(Mux::Side side, UniqueFd stream, Mux::Events events)
      : mux_(*Mux::Create(side, std::move(stream), std::move(events))),
        thread_([this] { result_ = mux_->Run(); }) {}
  ~Running() { End().IgnoreError(); }
  Mux* operator->() { return mux_.get(); }
  // How it ended; it is stopped if it has not.
  absl::Status End() {
    mux_->Stop();
    return Await();
  }
  absl::Status Await() {
    if (thread_.joinable()) thread_.join();
    return result_;
  }

 private:
  std::unique_ptr<Mux> mux_;
  absl::Status result_;
  std::thread thread_;
};

class MuxTest : public testing::Test {
 protected:
  void SetUp() override {
    auto [host_end, guest_end] = Pair();
    stream_.Reset(::dup(host_end.get()));
    guest_ = std::make_unique<Running>(
        Mux::Side::kGuest, std::move(guest_end),
        Mux::Events{.opened = [this](UniqueFd socket) { Serve(std::move(socket)); },
                    .clock = [this](auto) { ++greetings_; }});
    host_ = std::make_unique<Running>(Mux::Side::kHost, std::move(host_end), Mux::Events{});
  }
  void TearDown() override {
    host_.reset();
    guest_.reset();
    for (std::thread& thread : agents_) thread.join();
  }
  // What the guest does with a connection.
  void Serve(UniqueFd socket) {
    if (refuses_) {
      WriteAll(socket.get(), "no");
      return;
    }
    agents_.emplace_back([this, fd = std::make_shared<UniqueFd>(std::move(socket))] {
      std::array<char, 65536> piece;
      ssize_t got = 0;
      while ((got = ::read(fd->get(), piece.data(), piece.size())) > 0) {
        if (!WriteAll(fd->get(), {piece.data(), static_cast<size_t>(got)})) break;
      }
      ++ended_;
    });
  }
  UniqueFd Connect() {
    auto [ours, theirs] = Pair();
    (*host_)->Open(std::move(theirs));
    return std::move(ours);
  }
  bool EndedSoon(int count) const {
    for (int turn = 0; turn < 500 && ended_ < count; ++turn) ::usleep(10'000);
    return ended_ == count;
  }

  UniqueFd stream_;  // the host's end once more
  std::unique_ptr<Running> guest_;
  std::unique_ptr<Running> host_;
  std::vector<std::thread> agents_;
  std::atomic<int> ended_ = 0;
  std::atomic<int> greetings_ = 0;
  std::atomic<bool> refuses_ = false;
};

std::string Echo(const UniqueFd& connection, std::string_view text) {
  EXPECT_TRUE(WriteAll(connection.get(), text));
  ::shutdown(connection.get(), SHUT_WR);
  return ReadAll(connection.get());
}

TEST_F(MuxTest, ConnectionsDoNotMix) {
  std::vector<std::thread> threads;
  for (int number = 0; number < 8; ++number) {
    threads.emplace_back([this, number] {
      for (int turn = 0; turn < 20; ++turn) {
        const UniqueFd connection = Connect();
        const std::string text = fmt::format("{} {}", number, turn);
        EXPECT_EQ(Echo(connection, text), text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(EndedSoon(160));
}

TEST_F(MuxTest, MuchGoesThroughWhileItIsRead) {
  const UniqueFd connection = Connect();
  std::string text(20'000'000, 'x');
  for (size_t at = 0; at < text.size(); at += 1000)
    text[at] = static_cast<char>('a' + at / 1000 % 26);
  std::thread writer([&] {
    EXPECT_TRUE(WriteAll(connection.get(), text));
    ::shutdown(connection.get(), SHUT_WR);
  });
  EXPECT_TRUE(ReadAll(connection.get()) == text);
  writer.join();
}

TEST_F(MuxTest, AReaderWhoWaitsHoldsUpNobodyElse) {
  const UniqueFd slow = Connect();
  // As much as there is room for on the way, there and back.
  std::thread writer([&] { WriteAll(slow.get(), std::string(5'000'000, 's')); });
  const UniqueFd quick = Connect();
  EXPECT_EQ(Echo(quick, "quick"), "quick");
  ::shutdown(slow.get(), SHUT_RDWR);
  writer.join();
}

TEST_F(MuxTest, AnAgentHearsThatItsCallerHasGoneEvenIfItReadsNothing) {
  UniqueFd caller = Connect();
  std::thread writer([fd = caller.get()] { WriteAll(fd, std::string(5'000'000, 's')); });
  ::usleep(50'000);
  ::shutdown(caller.get(), SHUT_RDWR);  // as if it were killed
  writer.join();
  caller.Reset();
  EXPECT_TRUE(EndedSoon(1));
}

TEST_F(MuxTest, AnAgentThatDoesNotListenIsHeard) {
  refuses_ = true;
  for (int turn = 0; turn < 20; ++turn) {
    const UniqueFd connection = Connect();
    std::thread writer([&] { WriteAll(connection.get(), std::string(1'000'000, 'x')); });
    EXPECT_EQ(ReadAll(connection.get()), "no");
    ::shutdown(connection.get(), SHUT_RDWR);
    writer.join();
  }
  refuses_ = false;
  EXPECT_EQ(Echo(Connect(), "yes"), "yes");
}

TEST_F(MuxTest, ConnectionsGoOnAfterAPause) {
  const UniqueFd connection = Connect();
  ASSERT_TRUE(WriteAll(connection.get(), "before"));
  std::array<char, 16> text{};
  EXPECT_EQ(::read(connection.get(), text.data(), text.size()), 6);
  ASSERT_EQ((*host_)->Quiesce(seconds(10)), absl::OkStatus());
  const UniqueFd later = Connect();
  ASSERT_TRUE(WriteAll(connection.get(), "meanwhile"));
  pollfd wait{connection.get(), POLLIN};
  EXPECT_EQ(::poll(&wait, 1, 100), 0);
  (*host_)->Continue();
  EXPECT_EQ(::read(connection.get(), text.data(), text.size()), 9);
  EXPECT_EQ(Echo(later, "later"), "later");
  EXPECT_EQ(greetings_, 2) << "the clock is told";
}

TEST_F(MuxTest, ACallerWhoGoesDuringAPauseKeepsNobodyBusy) {
  UniqueFd caller = Connect();
  // More comes back than it takes.
  std::thread writer([fd = caller.get()] { WriteAll(fd, std::string(5'000'000, 's')); });
  ::usleep(100'000);
  ASSERT_EQ((*host_)->Quiesce(seconds(10)), absl::OkStatus());
  ::shutdown(caller.get(), SHUT_RDWR);
  writer.join();
  caller.Reset();
  const auto used_ms = [] {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
  };
  const int64_t before = used_ms();
  ::usleep(1'000'000);
  EXPECT_LT(used_ms() - before, 50);
  (*host_)->Continue();
  EXPECT_TRUE(EndedSoon(1));
}

TEST_F(MuxTest, AnotherHostBeginsAnewWhereTheStreamIsQuiet) {
  const UniqueFd left = Connect();
  ASSERT_TRUE(WriteAll(left.get(), std::string(1'000'000, 'x')) || true);
  ASSERT_EQ((*host_)->Quiesce(seconds(10)), absl::OkStatus());
  EXPECT_EQ(host_->End(), absl::OkStatus());
  host_ =
      std::make_unique<Running>(Mux::Side::kHost, UniqueFd(::dup(stream_.get())), Mux::Events{});
  EXPECT_EQ(Echo(Connect(), "again"), "again");
  EXPECT_TRUE(EndedSoon(2)) << "connections of the host before are closed";
}

TEST_F(MuxTest, ConnectionsCloseWithTheStream) {
  const UniqueFd connection = Connect();
  ASSERT_TRUE(WriteAll(connection.get(), "x"));
  char byte = 0;
  EXPECT_EQ(::read(connection.get(), &byte, 1), 1);
  ::shutdown(stream_.get(), SHUT_RDWR);
  EXPECT_TRUE(absl::IsUnavailable(host_->Await()));
  EXPECT_TRUE(absl::IsUnavailable(guest_->Await()));
  host_.reset();
  EXPECT_EQ(::read(connection.get(), &byte, 1), 0);
  guest_.reset();
}

// What a guest may send that has taken its agent over.
class HostileGuestTest : public testing::Test {
 protected:
  static std::string Frame(uint32_t id, Mux::FrameType type, uint32_t length, std::string content) {
    std::string bytes;
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(id >> shift));
    bytes.push_back(static_cast<char>(type));
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(length >> shift));
    return bytes + content;
  }
  // What the host says to it, with one connection open.
  static std::string Send(const std::string& bytes) {
    auto [host_end, guest_end] = Pair();
    Running host(Mux::Side::kHost, std::move(host_end), {});
    auto [ours, theirs] = Pair();
    host->Open(std::move(theirs));
    std::array<char, 64> greeting;
    EXPECT_GT(::read(guest_end.get(), greeting.data(), greeting.size()), 0);
    ::usleep(20'000);
    std::thread writer([&, fd = guest_end.get()] {
      WriteAll(fd, bytes);
      ::shutdown(fd, SHUT_WR);
    });
    const absl::Status ended = host.Await();
    ::shutdown(guest_end.get(), SHUT_RDWR);  // the host may have read no more
    writer.join();
    EXPECT_FALSE(ended.ok());
    return std::string(ended.message());
  }
};

TEST_F(HostileGuestTest, IsCutOff) {
  using Type = Mux::FrameType;
  const std::string piece(Mux::kPiece, 'x');
  EXPECT_THAT(Send(Frame(1, Type::kData, 0xffffffff, "x")), HasSubstr("a frame of 4294967295"));
  EXPECT_THAT(Send(Frame(7, Type::kOpen, 0, "")), HasSubstr("opens a connection"));
  EXPECT_THAT(Send(Frame(9, Type::kData, 1, "x")), HasSubstr("no connection 9"));
  EXPECT_THAT(Send(Frame(0, Type::kQuiesce, 0, "")), HasSubstr("not allowed"));
  EXPECT_THAT(Send(Frame(0, static_cast<Type>(200), 0, "")), HasSubstr("not allowed"));
  EXPECT_THAT(Send(Frame(1, static_cast<Type>(200), 0, "")), HasSubstr("unknown"));
  EXPECT_THAT(Send(Frame(1, Type::kCredit, 1, "x")), HasSubstr("without a size"));
  EXPECT_THAT(Send(Frame(1, Type::kCredit, 4, std::string("\1\0\0\0", 4))),
              HasSubstr("too much credit"));
  EXPECT_THAT(Send(Frame(1, Type::kEnd, 0, "") + Frame(1, Type::kData, 1, "x")),
              HasSubstr("more than is allowed"));
  std::string flood;
  for (size_t sent = 0; sent <= 4 * Mux::kWindow; sent += piece.size()) {
    flood += Frame(1, Type::kData, Mux::kPiece, piece);
  }
  EXPECT_THAT(Send(flood), HasSubstr("more than is allowed"));
}

}  // namespace
}  // namespace lamina::agent
