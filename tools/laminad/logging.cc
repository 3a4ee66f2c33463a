// SPDX-License-Identifier: Apache-2.0
#include "tools/laminad/logging.h"

#include <spdlog/formatter.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <nlohmann/json.hpp>

namespace lamina::daemon {
namespace {

constexpr const char* kTime = "%Y-%m-%dT%H:%M:%S.%e%z";

// {"time":"2026-01-31T12:00:00.123+00:00","level":"info","process":7,"message":"..."}
class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    spdlog::memory_buf_t time;
    time_.format(message, time);
    const nlohmann::ordered_json line = {
        {"time", fmt::to_string(time)},
        {"level", std::string(spdlog::level::to_string_view(message.level).data())},
        {"process", spdlog::details::os::pid()},
        {"message", std::string(message.payload.data(), message.payload.size())}};
    // What is not UTF-8 in paths is replaced.
    const std::string text =
        line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    out.append(text.data(), text.data() + text.size());
    out.push_back('\n');
  }
  std::unique_ptr<formatter> clone() const override { return std::make_unique<JsonFormatter>(); }

 private:
  spdlog::pattern_formatter time_{kTime, spdlog::pattern_time_type::local, ""};
};

}  // namespace

void SetUpLogging(const Config& config) {
  auto logger = std::make_shared<spdlog::logger>("laminad",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  if (config.log_json) {
    logger->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger->set_pattern(fmt::format("{} %l %v", kTime));
  }
  logger->set_level(spdlog::level::from_str(config.log_level));
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace lamina::daemon
