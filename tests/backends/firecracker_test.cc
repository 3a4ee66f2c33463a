// SPDX-License-Identifier: Apache-2.0
//
// Firecracker itself needs KVM. Here something stands in for it that takes what its published description
// (firecracker/api.json) allows, and nothing else, and hands connections on as it does.
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "backends/agent/frame.h"
#include "backends/agent/messages.h"
#include "backends/firecracker/firecracker_machine.h"
#include "backends/firecracker/requests.h"
#include "chunkstore/base/file.h"
#include "fs/engine/socket.h"

namespace lamina::backends {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// Checks values against the description.
class Description {
 public:
  Description() : text_(json::parse(ReadFileToString(FIRECRACKER_API, 1 << 20).value())) {}

  // Why a request is not allowed; empty if it is.
  std::string Refuse(const ApiRequest& request) const {
    std::string method = request.method;
    std::ranges::transform(method, method.begin(),
                           [](char letter) { return std::tolower(letter); });
    for (const auto& [path, methods] : text_["paths"].items()) {
      if (!Matches(path, request.path) || !methods.contains(method)) continue;
      return Check(methods[method], request.body, "body");
    }
    return fmt::format("there is no {} {}", request.method, request.path);
  }

 private:
  // "/pmem/{id}" matches "/pmem/pmem0".
  static bool Matches(const std::string& pattern, const std::string& path) {
    const size_t brace = pattern.find('{');
    if (brace == std::string::npos) return pattern == path;
    return path.starts_with(pattern.substr(0, brace)) && path.size() > brace &&
           path.find('/', brace) == std::string::npos;
  }

  std::string Check(const json& schema, const json& value, const std::string& where) const {
    if (schema.contains("$ref")) {
      const std::string name =
          schema["$ref"].get<std::string>().substr(std::strlen("#/definitions/"));
      return Check(text_["definitions"].at(name), value, where);
    }
    if (schema.contains("enum") && std::ranges::count(schema["enum"], value) == 0) {
      return fmt::format("{}: {} is not one of {}", where, value.dump(), schema["enum"].dump());
    }
    const std::string type = schema.value("type", "object");
    const bool right = type == "object"    ? value.is_object()
                       : type == "integer" ? value.is_number_integer()
                       : type == "boolean" ? value.is_boolean()
                       : type == "string"  ? value.is_string()
                                           : value.is_array();
    if (!right) return fmt::format("{}: {} is no {}", where, value.dump(), type);
    if (type == "integer" && ((schema.contains("minimum") && value < schema["minimum"]) ||
                              (schema.contains("maximum") && value > schema["maximum"]))) {
      return fmt::format("{}: {} is out of range", where, value.dump());
    }
    if (type != "object") return "";
    for (const json& name : schema.value("required", json::array())) {
      if (!value.contains(name)) return fmt::format("{}: {} is missing", where, name.dump());
    }
    const json properties = schema.value("properties", json::object());
    for (const auto& [name, field] : value.items()) {
      if (!properties.contains(name)) return fmt::format("{}: {} is unknown", where, name);
      std::string wrong = Check(properties[name], field, where + "." + name);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  const json text_;
};

MachinePlan Plan() {
  return {.name = "s0123456789ab",
          .kernel = {.image = "/kernel", .modules = ""},
          .initramfs = "/initramfs",
          .pmem = {{"/state/metadata", 2 << 20}, {"/state/fuse/blobs/a", 4 << 20}},
          .disk = "/state/disk.img",
          .memory_bytes = 256 << 20,
          .program_bytes = 128 << 20,
          .processors = 3};
}

std::vector<ApiRequest> AllRequests() {
  std::vector<ApiRequest> all = BootRequests(Plan());
  for (const ApiRequest& request : LoadRequests("/snapshot")) all.push_back(request);
  for (const ApiRequest& request :
       {PauseRequest(), ResumeRequest(), SnapshotRequest("/snapshot")}) {
    all.push_back(request);
  }
  return all;
}

TEST(FirecrackerRequestsTest, AreAsTheDescriptionHasThem) {
  const Description description;
  for (const ApiRequest& request : AllRequests()) {
    EXPECT_EQ(description.Refuse(request), "") << request.method << " " << request.path;
  }
  // And the description is read as it is meant.
  EXPECT_THAT(description.Refuse({"PUT", "/pmem/x", {{"id", "x"}}}), HasSubstr("path_on_host"));
  EXPECT_THAT(description.Refuse({"PUT", "/nothing", {}}), HasSubstr("there is no"));
  EXPECT_THAT(description.Refuse({"PATCH", "/vm", {{"state", "Asleep"}}}), HasSubstr("not one of"));
  EXPECT_THAT(description.Refuse({"PUT", "/actions", {{"action_type", "InstanceStart"}, {"x", 1}}}),
              HasSubstr("x is unknown"));
  EXPECT_THAT(
      description.Refuse({"PUT", "/machine-config", {{"vcpu_count", 64}, {"mem_size_mib", 1}}}),
      HasSubstr("out of range"));
}

TEST(FirecrackerRequestsTest, MakeTheMachineOfThePlan) {
  const std::vector<ApiRequest> requests = BootRequests(Plan());
  std::map<std::string, json> bodies;
  for (const ApiRequest& request : requests) bodies[request.path] = request.body;
  EXPECT_EQ(bodies["/machine-config"]["vcpu_count"], 4) << "one, or an even number";
  MachinePlan large = Plan();
  large.processors = 64;
  EXPECT_EQ(BootRequests(large)[0].body["vcpu_count"], 32) << "the most that there may be";
  EXPECT_EQ(bodies["/machine-config"]["mem_size_mib"], 256);
  EXPECT_EQ(bodies["/pmem/pmem1"]["path_on_host"], "/state/fuse/blobs/a");
  EXPECT_EQ(bodies["/pmem/pmem1"]["read_only"], true);
  EXPECT_EQ(bodies["/drives/disk"]["path_on_host"], "disk.img")
      << "a snapshot is started elsewhere";
  EXPECT_THAT(bodies["/boot-source"]["boot_args"].get<std::string>(),
              HasSubstr("lamina.layers=1 lamina.upper=disk"));
  EXPECT_EQ(requests.back().path, "/actions");
}

TEST(FirecrackerRequestsTest, GoToTheMonitorAsText) {
  const std::vector<ApiRequest> requests = AllRequests();
  const std::vector<ApiRequest> parsed = ParseRequests(SerializeRequests(requests)).value();
  ASSERT_EQ(parsed.size(), requests.size());
  for (size_t index = 0; index < parsed.size(); ++index) {
    EXPECT_EQ(parsed[index].path, requests[index].path);
    EXPECT_EQ(parsed[index].body, requests[index].body);
  }
  EXPECT_FALSE(ParseRequests("{").ok());
  EXPECT_FALSE(ParseRequests("[{}]").ok());
}

// Answers as Firecracker does, in a directory: requests on its API socket, and connections to the agent
// on its vsock, where something answers Info and sends all else back.
class StandIn {
 public:
  explicit StandIn(const std::string& directory)
      : api_(fs::ListenUnix(directory, kFirecrackerApi).value()),
        vsock_(fs::ListenUnix(directory, kFirecrackerVsock).value()) {
    Accept(api_, [this](int socket) { AnswerApi(socket); });
    Accept(vsock_, [this](int socket) { AnswerAgent(socket); });
  }
  ~StandIn() {
    for (const UniqueFd* listener : {&api_, &vsock_}) ::shutdown(listener->get(), SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
  }
  const std::vector<std::string>& asked() const { return asked_; }
  void set_refuses(bool refuses) { refuses_ = refuses; }

 private:
  void Accept(const UniqueFd& listener, std::function<void(int)> answer) {
    threads_.emplace_back([&listener, answer = std::move(answer)] {
      while (true) {
        const UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!socket.valid()) return;
        answer(socket.get());
      }
    });
  }

  void AnswerApi(int socket) {
    std::string text;
    char byte = 0;
    while (!text.ends_with("\r\n\r\n") && ::recv(socket, &byte, 1, 0) == 1) text.push_back(byte);
    const size_t at = text.find("Content-Length: ");
    ASSERT_NE(at, std::string::npos);
    std::string body(std::stoul(text.substr(at + 16)), '\0');
    ASSERT_EQ(::recv(socket, body.data(), body.size(), MSG_WAITALL),
              static_cast<ssize_t>(body.size()));
    const size_t space = text.find(' ');
    const ApiRequest request{text.substr(0, space),
                             text.substr(space + 1, text.find(' ', space + 1) - space - 1),
                             json::parse(body)};
    asked_.push_back(request.method + " " + request.path);
    std::string wrong = description_.Refuse(request);
    if (refuses_) wrong = "The requested operation is not supported";
    const std::string fault = json{{"fault_message", wrong}}.dump();
    const std::string answer =
        wrong.empty() ? "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"
                      : fmt::format(
                            "HTTP/1.1 400 \r\nContent-Type: application/json\r\n"
                            "Content-Length: {}\r\n\r\n{}",
                            fault.size(), fault);
    std::ignore = ::send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
  }

  void AnswerAgent(int socket) {
    std::string line;
    char byte = 0;
    while (!line.ends_with('\n') && ::recv(socket, &byte, 1, 0) == 1) line.push_back(byte);
    if (line != "CONNECT 1024\n") return;
    if (refused_connections_++ == 0) return;  // the guest boots
    std::ignore = ::send(socket, "OK 1073741824\n", 14, MSG_NOSIGNAL);
    const absl::StatusOr<agent::Frame> request = agent::ReadFrame(socket);
    if (!request.ok()) return;
    if (request->type == agent::FrameType::kInfo) {
      agent::WriteFrame(socket, agent::FrameType::kInfoReply, agent::Encode(agent::InfoMessage{}))
          .IgnoreError();
    } else {
      agent::WriteFrame(socket, request->type, request->content).IgnoreError();
    }
  }

  const Description description_;
  const UniqueFd api_;
  const UniqueFd vsock_;
  std::vector<std::string> asked_;
  std::atomic<bool> refuses_ = false;
  std::atomic<int> refused_connections_ = 0;
  std::vector<std::thread> threads_;
};

class FirecrackerMachineTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Machine>> Start(const std::vector<ApiRequest>& requests) {
    return StartFirecrackerMachine({"sleep", "1000"}, directory_.path(), requests, STDERR_FILENO);
  }
  TemporaryDirectory directory_ = *TemporaryDirectory::Create("/tmp", "firecracker-test-");
  StandIn firecracker_{directory_.path()};
};

TEST_F(FirecrackerMachineTest, BootsPausesAndIsSaved) {
  const std::unique_ptr<Machine> machine = Start(BootRequests(Plan())).value();
  EXPECT_EQ(machine->AwaitAgent(std::chrono::seconds(10)), absl::OkStatus());
  EXPECT_EQ(machine->Pause(), absl::OkStatus());
  EXPECT_EQ(machine->SaveMemory("/snapshot"), absl::OkStatus());
  EXPECT_EQ(machine->Resume(), absl::OkStatus());
  EXPECT_THAT(firecracker_.asked(),
              ElementsAre("PUT /machine-config", "PUT /boot-source", "PUT /vsock", "PUT /balloon",
                          "PUT /pmem/pmem0", "PUT /pmem/pmem1", "PUT /drives/disk", "PUT /actions",
                          "PATCH /vm", "PUT /snapshot/create", "PATCH /vm"));
}

TEST_F(FirecrackerMachineTest, ConnectionsReachTheAgent) {
  const std::unique_ptr<Machine> machine = Start(LoadRequests("/snapshot")).value();
  ASSERT_EQ(machine->AwaitAgent(std::chrono::seconds(10)), absl::OkStatus());
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd ours(ends[0]);
  machine->Connect(UniqueFd(ends[1]));
  const std::string content(1'000'000, 'x');
  std::thread writer(
      [&] { EXPECT_TRUE(agent::WriteFrame(ours.get(), agent::FrameType::kData, content).ok()); });
  const absl::StatusOr<agent::Frame> back = agent::ReadFrame(ours.get());
  writer.join();
  ASSERT_EQ(back.status(), absl::OkStatus());
  EXPECT_TRUE(back->content == content);
}

TEST_F(FirecrackerMachineTest, AFaultIsSaidInItsOwnWords) {
  firecracker_.set_refuses(true);
  EXPECT_THAT(std::string(Start(BootRequests(Plan())).status().message()),
              HasSubstr("PUT /machine-config: The requested operation is not supported"));
}

TEST_F(FirecrackerMachineTest, ThatItEndedIsSaid) {
  const auto machine = StartFirecrackerMachine({"true"}, directory_.path(), {}, STDERR_FILENO);
  ASSERT_EQ(machine.status(), absl::OkStatus());
  EXPECT_THAT(std::string((*machine)->AwaitAgent(std::chrono::seconds(10)).message()),
              HasSubstr("ended before its agent"));
}

}  // namespace
}  // namespace lamina::backends
