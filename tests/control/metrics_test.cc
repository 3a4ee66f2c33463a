// SPDX-License-Identifier: Apache-2.0
#include "fs/control/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "fs/engine/socket.h"
#include "tests/engine/test_image.h"

namespace lamina::fs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "mounting without fusermount3 needs root";
    auto engine = Engine::Open({.state = image_.state()});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }
  void Mount(const std::string& target) {
    const auto mount = engine_->Mount({.image = image_.reference(), .target = target});
    ASSERT_TRUE(mount.ok()) << mount.status();
  }
  // The value of the line that starts with `name` and has the image's label; -1 if there is none.
  double Value(const std::string& name, const std::string& more_labels = "") const {
    const std::string text = MetricsText(*engine_);
    const std::string start =
        fmt::format("\n{}{{image=\"{}\"{}}} ", name, image_.reference(), more_labels);
    const size_t at = text.find(start);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + start.size()));
  }

  TestImage image_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(MetricsTest, CountWhatStatsCount) {
  Mount(image_.mountpoint());
  // All of it: what is prefetched meanwhile would count at another moment.
  Slurp(image_.mountpoint() + "/data.bin");
  Slurp(image_.mountpoint() + "/hello.txt");
  const auto report = engine_->Report(image_.mountpoint());
  const chunkstore::ReadStats& stats = *report->front().stats;
  while (stats.waiting_requests > 0) std::this_thread::yield();  // readers go on a moment before
  EXPECT_EQ(Value("lamina_reads_total"), stats.read_requests);
  EXPECT_EQ(Value("lamina_read_bytes_total"), stats.read_bytes);
  EXPECT_EQ(Value("lamina_read_misses_total"), stats.missed_requests);
  EXPECT_EQ(Value("lamina_fetched_bytes_total"), stats.fetched_bytes);
  EXPECT_EQ(Value("lamina_mounts"), 1);
  EXPECT_EQ(Value("lamina_frames_present"), report->front().frames_present);
  EXPECT_EQ(Value("lamina_reads_in_flight"), 0);
  EXPECT_EQ(Value("lamina_read_duration_seconds_count", ",result=\"miss\""),
            stats.miss_latency.count());
  EXPECT_EQ(Value("lamina_read_duration_seconds_bucket", ",result=\"miss\",le=\"+Inf\""),
            stats.miss_latency.count());
}

TEST_F(MetricsTest, CountersDoNotGoBackWhenOneMountOfSeveralGoes) {
  const std::string other = image_.mountpoint() + "-2";
  ASSERT_EQ(::mkdir(other.c_str(), 0755), 0);
  Mount(image_.mountpoint());
  Mount(other);
  Slurp(image_.mountpoint() + "/data.bin");
  while (Value("lamina_reads_in_flight") > 0) std::this_thread::yield();
  const double before = Value("lamina_read_bytes_total");
  EXPECT_GE(before, image_.data().size());
  ASSERT_TRUE(engine_->Unmount(image_.mountpoint()).ok());
  EXPECT_EQ(Value("lamina_read_bytes_total"), before);
  EXPECT_EQ(Value("lamina_mounts"), 1);
  ASSERT_TRUE(engine_->Unmount(other).ok());
  EXPECT_EQ(Value("lamina_read_bytes_total"), -1);
}

TEST_F(MetricsTest, FailedFetchesAreCountedByKindAndOrigin) {
  Mount(image_.mountpoint());
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(image_.layout() + "/blobs")) {
    if (entry.is_regular_file()) std::filesystem::resize_file(entry.path(), 0);
  }
  EXPECT_FALSE(ReadFileToString(image_.mountpoint() + "/data.bin", 1 << 30).ok());
  EXPECT_GE(Value("lamina_read_failures_total"), 1);
  EXPECT_THAT(MetricsText(*engine_),
              AllOf(HasSubstr("lamina_fetch_errors_total{image=\"" + image_.reference() +
                              "\",origin=\"oci:" + image_.layout() + "\",kind=\""),
                    Not(HasSubstr("kind=\"ok\""))));
}

class MetricsServerTest : public MetricsTest {
 protected:
  void SetUp() override {
    MetricsTest::SetUp();
    if (IsSkipped()) return;
    auto listener = ListenUnix(image_.state(), "metrics.sock");
    ASSERT_TRUE(listener.ok()) << listener.status();
    auto server = MetricsServer::Start(*engine_, *std::move(listener));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string Ask(const std::string& request) const {
    const auto socket = ConnectUnix(image_.state(), "metrics.sock");
    EXPECT_TRUE(socket.ok()) << socket.status();
    ::send(socket->get(), request.data(), request.size(), MSG_NOSIGNAL);
    std::string answer;
    char buffer[4096];
    for (ssize_t got = 0; (got = ::recv(socket->get(), buffer, sizeof(buffer), 0)) > 0;) {
      answer.append(buffer, static_cast<size_t>(got));
    }
    return answer;
  }

  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, AnswersScrapers) {
  EXPECT_THAT(Ask("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("text/plain; version=0.0.4"),
                    HasSubstr("process_resident_memory_bytes ")));
  EXPECT_THAT(Ask("GET /metrics?name=x HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(MetricsServerTest, AnswersNothingElse) {
  for (const char* request : {"GET / HTTP/1.1\r\n\r\n", "POST /metrics HTTP/1.1\r\n\r\n",
                              "GET /metricsx HTTP/1.1\r\n\r\n", "nonsense\r\n\r\n"}) {
    EXPECT_THAT(Ask(request), StartsWith("HTTP/1.1 404 Not Found\r\n")) << request;
  }
}

TEST_F(MetricsServerTest, ClientsThatSayTooMuchOrNothingDoNotHoldItUp) {
  const auto silent = ConnectUnix(image_.state(), "metrics.sock");
  EXPECT_THAT(Ask(std::string(1 << 20, 'x')), testing::Not(HasSubstr("200 OK")));
  EXPECT_THAT(Ask("GET /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(MetricsServerTest, SlowClientsHoldUpNeitherOthersNorTheEnd) {
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 20; ++i) {
    auto client = ConnectUnix(image_.state(), "metrics.sock");
    ASSERT_TRUE(client.ok()) << client.status();
    ::send(client->get(), "GET", 3, MSG_NOSIGNAL);
    clients.push_back(*std::move(client));
  }
  const auto before = std::chrono::steady_clock::now();
  EXPECT_THAT(Ask("GET /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  server_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(1));
}

TEST_F(MetricsServerTest, ClientThatSaysALittleAgainAndAgainIsClosed) {
  const auto client = ConnectUnix(image_.state(), "metrics.sock");
  ASSERT_TRUE(client.ok()) << client.status();
  const auto before = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - before < std::chrono::seconds(10) &&
         ::send(client->get(), "x", 1, MSG_NOSIGNAL) == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5));
}

}  // namespace
}  // namespace lamina::fs
