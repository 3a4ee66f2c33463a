// SPDX-License-Identifier: Apache-2.0
//
// Servers that go on for ever, break off and ask for pauses. What else goes wrong is tested with whole
// registries (tests/system/registry_fault_tests.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "chunkstore/base/file.h"
#include "chunkstore/http/client.h"

namespace lamina::http {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;

// Answers each request on a connection of its own.
class TestServer {
 public:
  // Gets the connection, and the request's headers. The connection is closed behind it.
  using Answer = std::function<void(int connection, const std::string& request)>;

  explicit TestServer(Answer answer)
      : answer_(std::move(answer)), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    EXPECT_EQ(::listen(listener_.get(), 16), 0);
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    url_ = fmt::format("http://127.0.0.1:{}/", ntohs(address.sin_port));
    thread_ = std::thread([this] { Run(); });
  }
  ~TestServer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }

  const std::string& url() const { return url_; }
  int requests() const { return requests_; }

  // False once the client has gone.
  static bool Send(int connection, std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }

 private:
  void Run() {
    std::vector<std::jthread> connections;
    while (true) {
      UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!connection.valid()) return;
      connections.emplace_back([this, accepted = std::move(connection)] {
        std::string request;
        char buffer[4096];
        while (request.find("\r\n\r\n") == std::string::npos) {
          const ssize_t size = ::recv(accepted.get(), buffer, sizeof(buffer), 0);
          if (size <= 0) return;
          request.append(buffer, static_cast<size_t>(size));
        }
        ++requests_;
        answer_(accepted.get(), request);
      });
    }
  }

  const Answer answer_;
  const UniqueFd listener_;
  std::string url_;
  std::atomic<int> requests_ = 0;
  std::thread thread_;
};

std::shared_ptr<Client> NewClient(const ClientOptions& options = {}) {
  auto client = Client::Create(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

TEST(HttpClientTest, AnErrorWithoutEndIsReadNoFurtherThanItIsKept) {
  TestServer server([](int connection, const std::string&) {
    TestServer::Send(connection, "HTTP/1.1 403 Forbidden\r\n\r\n");
    const std::string text(10'000, 'x');
    while (TestServer::Send(connection, text)) {
    }
  });
  const auto response = NewClient()->Perform({.url = server.url()});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->status, 403);
  EXPECT_EQ(response->body.size(), 64u << 10);
}

TEST(HttpClientTest, ARequestWhoseBytesTrickleInEndsAtTheTimeLimit) {
  TestServer server([](int connection, const std::string&) {
    TestServer::Send(connection, "HTTP/1.1 200 OK\r\nContent-Length: 8000000\r\n\r\n");
    const std::string text(100'000, 'x');
    while (TestServer::Send(connection, text)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  const auto client =
      NewClient({.stall_timeout = seconds(1), .patience = seconds(1), .slowest = 8'000'000});
  const auto start = steady_clock::now();
  const auto response = client->Perform(
      {.url = server.url(), .range = Range{0, 8'000'000, 8'000'000}, .attempts = 1});
  EXPECT_TRUE(absl::IsUnavailable(response.status())) << response.status();
  EXPECT_LT(steady_clock::now() - start, seconds(30));
  EXPECT_THAT(std::string(response.status().message()), HasSubstr("timed out"));
}

TEST(HttpClientTest, ARangeThatComesInManyPartsIsPutTogether) {
  constexpr uint64_t kSize = 2'000'000;
  constexpr uint64_t kPart = 100'000;
  std::string object(kSize, '\0');
  for (size_t i = 0; i < kSize; ++i) object[i] = static_cast<char>(i * 7 + i / 251);
  TestServer server([&](int connection, const std::string& request) {
    constexpr std::string_view kName = "bytes=";
    const uint64_t first = std::stoull(request.substr(request.find(kName) + kName.size()));
    TestServer::Send(connection, fmt::format("HTTP/1.1 206 Partial Content\r\n"
                                             "Content-Length: {}\r\n"
                                             "Content-Range: bytes {}-{}/{}\r\n\r\n",
                                             kSize - first, first, kSize - 1, kSize));
    TestServer::Send(connection, std::string_view(object).substr(first, kPart));
  });
  const auto client = NewClient({.first_backoff = std::chrono::milliseconds(1)});
  const auto response =
      client->Perform({.url = server.url(), .range = Range{0, kSize, kSize}, .attempts = 3});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_TRUE(response->body == object);
  EXPECT_EQ(server.requests(), 20);
}

TEST(HttpClientTest, PausesAreToldOfAndKeptTo) {
  TestServer server([](int connection, const std::string&) {
    TestServer::Send(connection,
                     "HTTP/1.1 503 Busy\r\nRetry-After: 900\r\nContent-Length: 0\r\n\r\n");
  });
  const auto client = NewClient();
  std::atomic<int64_t> told = 0;
  const auto start = steady_clock::now();
  const auto response = client->Perform({.url = server.url(),
                                         .not_before = start + std::chrono::milliseconds(300),
                                         .busy = [&](seconds pause) { told = pause.count(); }});
  EXPECT_GE(steady_clock::now() - start, std::chrono::milliseconds(300));
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->status, 503);
  EXPECT_EQ(told, 900);
  EXPECT_EQ(server.requests(), 1);
}

}  // namespace
}  // namespace lamina::http
