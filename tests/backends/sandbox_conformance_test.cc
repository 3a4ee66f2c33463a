// SPDX-License-Identifier: Apache-2.0
//
// What every backend promises (backends/sandbox.h). A test of what a backend has not asks for the
// error that says so.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "backends/agent/pseudo_file.h"
#include "backends/agent_client.h"
#include "backends/cgroup.h"
#include "backends/launcher.h"
#include "fs/engine/socket.h"
#include "tests/backends/sandbox_testing.h"

namespace lamina::backends {

// As part of a test's name, which is to be the same in each run.
static void PrintTo(const Backend* backend, std::ostream* out) { *out << backend->name(); }

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class SandboxTest : public testing::TestWithParam<const Backend*> {
 protected:
  static void SetUpTestSuite() { machine_ = new TestMachine(); }
  static void TearDownTestSuite() {
    if (shared_ != nullptr) {
      EXPECT_EQ(shared_->Stop(), absl::OkStatus());
    }
    shared_.reset();
    delete machine_;
    machine_ = nullptr;
  }
  void SetUp() override { ASSERT_EQ(GetParam()->Available(), absl::OkStatus()); }
  void TearDown() override {
    for (std::unique_ptr<Sandbox>& sandbox : made_) {
      EXPECT_EQ(sandbox->Stop(), absl::OkStatus());
    }
    EXPECT_THAT(Leftovers(), IsEmpty());
  }

  // Without those of the one that tests share.
  static std::vector<std::string> Leftovers() {
    std::vector<std::string> found = machine_->Leftovers();
    std::erase_if(found, [](const std::string& name) {
      return shared_ != nullptr && name.find(shared_->id()) != std::string::npos;
    });
    return found;
  }

  Launcher& launcher() { return machine_->launcher(); }
  Capabilities can() const { return GetParam()->capabilities(); }
  SandboxOptions Options() const { return {.image = machine_->image()}; }

  Sandbox& Make(SandboxOptions options) {
    absl::StatusOr<std::unique_ptr<Sandbox>> made = launcher().Create(*GetParam(), options);
    if (!made.ok()) throw std::runtime_error(made.status().ToString());
    made_.push_back(*std::move(made));
    return *made_.back();
  }
  // One that is as it was made but for files, sessions and programs of other tests: machines boot for
  // seconds.
  Sandbox& Make() {
    if (!can().own_kernel) return Make(Options());
    if (shared_ != nullptr && shared_->State() == SandboxState::kDead) {
      EXPECT_EQ(shared_->Stop(), absl::OkStatus());
      shared_.reset();
    }
    if (shared_ == nullptr) {
      Make(Options());
      shared_ = std::move(made_.back());
      made_.pop_back();
    }
    EXPECT_EQ(shared_->Resume(), absl::OkStatus());
    return *shared_;
  }

  static ExecResult Run(Sandbox& sandbox, ExecRequest request) {
    absl::StatusOr<ExecResult> result = sandbox.Exec(request);
    if (!result.ok()) throw std::runtime_error(result.status().ToString());
    return *std::move(result);
  }
  static ExecResult Shell(Sandbox& sandbox, std::string script) {
    return Run(sandbox, {.script = std::move(script)});
  }
  // What a script prints; its exit code must be 0.
  static std::string Output(Sandbox& sandbox, std::string script) {
    const ExecResult result = Shell(sandbox, std::move(script));
    EXPECT_EQ(result.Verdict(), "accepted") << result.standard_error << result.detail;
    return result.standard_output;
  }

  static TestMachine* machine_;
  static std::unique_ptr<Sandbox> shared_;
  std::vector<std::unique_ptr<Sandbox>> made_;
};
TestMachine* SandboxTest::machine_ = nullptr;
std::unique_ptr<Sandbox> SandboxTest::shared_;

TEST_P(SandboxTest, RunsAProgramAndGivesItsOutputAndExitCode) {
  Sandbox& sandbox = Make();
  const ExecResult result =
      Run(sandbox, {.arguments = {"sh", "-c", "echo out; echo err >&2; exit 7"}});
  EXPECT_EQ(result.ending, ExecEnding::kExited);
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(result.Verdict(), "non-zero exit");
  EXPECT_EQ(result.standard_output, "out\n");
  EXPECT_EQ(result.standard_error, "err\n");
  EXPECT_EQ(result.output_bytes, 8);
  EXPECT_GT(result.wall_time.count(), 0);
  EXPECT_EQ(Shell(sandbox, "true").Verdict(), "accepted");
}

TEST_P(SandboxTest, ArgumentsArriveAsTheyAre) {
  const ExecResult result =
      Run(Make(), {.arguments = {"sh", "-c", "for a in \"$@\"; do echo \"<$a>\"; done", "x", "",
                                 "a b", "$HOME", "*", "caf\xe9", "\n"}});
  EXPECT_EQ(result.standard_output, "<>\n<a b>\n<$HOME>\n<*>\n<caf\xe9>\n<\n>\n");
}

TEST_P(SandboxTest, EndingsAreNotConfused) {
  Sandbox& sandbox = Make();
  const ExecResult killed = Shell(sandbox, "kill -TERM $$");
  EXPECT_EQ(killed.ending, ExecEnding::kSignalled);
  EXPECT_EQ(killed.signal, SIGTERM);
  EXPECT_EQ(killed.ShellCode(), 128 + SIGTERM);
  const ExecResult killed_hard = Shell(sandbox, "kill -KILL $$");
  EXPECT_EQ(killed_hard.ending, ExecEnding::kSignalled) << "nobody ran out of memory";
  EXPECT_EQ(killed_hard.signal, SIGKILL);
  const ExecResult pretends = Shell(sandbox, "exit 137");
  EXPECT_EQ(pretends.ending, ExecEnding::kExited) << "an exit code is no signal";
  EXPECT_EQ(pretends.exit_code, 137);
  const ExecResult missing = Run(sandbox, {.arguments = {"/no/such/program"}});
  EXPECT_EQ(missing.ending, ExecEnding::kCannotStart);
  EXPECT_EQ(missing.exit_code, 127);
  const ExecResult not_executable = Run(sandbox, {.arguments = {"/etc/passwd"}});
  EXPECT_EQ(not_executable.ending, ExecEnding::kCannotStart);
  EXPECT_EQ(not_executable.exit_code, 126);
  const ExecResult nowhere = Run(sandbox, {.arguments = {"true"}, .working_directory = "/nowhere"});
  EXPECT_EQ(nowhere.ending, ExecEnding::kCannotStart);
  EXPECT_THAT(nowhere.detail, HasSubstr("working directory"));
}

TEST_P(SandboxTest, TimeoutKillsAndIsTold) {
  Sandbox& sandbox = Make();
  const auto start = steady_clock::now();
  const ExecResult result =
      Run(sandbox, {.script = "echo before; sleep 1000 & sleep 1000", .timeout = seconds(2)});
  EXPECT_EQ(result.ending, ExecEnding::kTimeLimit);
  EXPECT_EQ(result.standard_output, "before\n");
  EXPECT_LT(steady_clock::now() - start, seconds(20));
  const ExecResult spun =
      Run(sandbox, {.script = "while :; do :; done", .cpu_time = milliseconds(1000)});
  EXPECT_EQ(spun.ending, ExecEnding::kTimeLimit);
  EXPECT_GE(spun.cpu_time, milliseconds(500));
}

TEST_P(SandboxTest, ProgramsStartWithOrdinarySignals) {
  // Neither blocked nor ignored, whatever the launcher does with its own. (Not through ash, which ignores
  // SIGQUIT.)
  EXPECT_EQ(Run(Make(), {.arguments = {"grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"}})
                .standard_output,
            "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
}

TEST_P(SandboxTest, OutOfMemoryIsToldFromKill) {
  SandboxOptions options = Options();
  options.limits.memory_bytes = 64 << 20;
  Sandbox& sandbox = Make(options);
  const ExecResult result =
      Run(sandbox, {.arguments = {"dd", "if=/dev/zero", "of=/dev/null", "bs=256M", "count=1"}});
  EXPECT_EQ(result.ending, ExecEnding::kMemoryLimit) << result.standard_error;
  EXPECT_EQ(result.Verdict(), "memory limit");
  EXPECT_EQ(Shell(sandbox, "kill -KILL $$").ending, ExecEnding::kSignalled);
  EXPECT_EQ(Output(sandbox, "echo still here"), "still here\n");
}

TEST_P(SandboxTest, SwapCountsAtTheLimitOfMemory) {
  if (can().own_kernel || Cgroup::Version().value() != 1) return;
  SandboxOptions options = Options();
  options.limits.memory_bytes = 64 << 20;
  const Sandbox& sandbox = Make(options);
  const std::string group = fmt::format("/sys/fs/cgroup/memory/lamina/{}{}", sandbox.id(),
                                        can().call_files ? "/slot0" : "");
  for (const char* file : {"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"}) {
    const std::string path = fmt::format("{}/{}", group, file);
    if (::access(path.c_str(), F_OK) != 0) continue;  // a machine that does not count swap
    EXPECT_EQ(agent::ReadPseudoFile(path), fmt::format("{}\n", 64 << 20)) << file;
  }
}

TEST_P(SandboxTest, FloodsOfOutputAreBounded) {
  Sandbox& sandbox = Make();
  uint64_t seen = 0;
  const ExecResult kept = Run(
      sandbox, {.script = "head -c 30000000 /dev/zero",
                .kept_output = 1000,
                .on_output = [&seen](Stream, std::string_view bytes) { seen += bytes.size(); }});
  EXPECT_EQ(kept.ending, ExecEnding::kExited);
  EXPECT_EQ(kept.standard_output.size(), 1000);
  EXPECT_EQ(kept.output_bytes, 30'000'000);
  EXPECT_EQ(seen, 30'000'000);
  const ExecResult flood = Run(sandbox, {.arguments = {"yes"}, .output_limit = 100'000});
  EXPECT_EQ(flood.ending, ExecEnding::kOutputLimit);
  EXPECT_EQ(flood.standard_output.size(), 100'000);
  const ExecResult file = Run(
      sandbox, {.script = "cd /tmp && head -c 3000000 /dev/zero > big", .file_limit = 1'000'000});
  EXPECT_NE(file.Verdict(), "accepted");
}

TEST_P(SandboxTest, StandardInputIsStreamed) {
  Sandbox& sandbox = Make();
  const std::string text(3'000'000, 'x');
  EXPECT_EQ(Run(sandbox, {.arguments = {"wc", "-c"}, .stdin_text = text}).standard_output,
            "3000000\n");
  EXPECT_EQ(Run(sandbox, {.arguments = {"true"}, .stdin_text = text}).Verdict(), "accepted");
  EXPECT_EQ(Shell(sandbox, "cat").standard_output, "") << "without input there is an end at once";
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd reading(ends[0]);
  std::thread writer([&] {
    const UniqueFd writing(ends[1]);
    for (int line = 0; line < 3; ++line) {
      EXPECT_EQ(::write(writing.get(), "line\n", 5), 5);
      std::this_thread::sleep_for(milliseconds(20));
    }
  });
  EXPECT_EQ(Run(sandbox, {.arguments = {"cat"}, .stdin_fd = reading.get()}).standard_output,
            "line\nline\nline\n");
  writer.join();
}

TEST_P(SandboxTest, InputAndOutputDoNotWaitForEachOther) {
  Sandbox& sandbox = Make();
  const std::string input = machine_->path("input");
  ASSERT_EQ(WriteFileAtomically(input, std::string(5'000'000, 'i')), absl::OkStatus());
  const absl::StatusOr<UniqueFd> file = OpenFile(input, O_RDONLY);
  ASSERT_EQ(file.status(), absl::OkStatus());
  // More than any buffer holds, both ways.
  const ExecResult result = Run(sandbox, {.script = "head -c 3000000 /dev/zero; cat",
                                          .stdin_fd = file->get(),
                                          .kept_output = 0,
                                          .timeout = seconds(60)});
  EXPECT_EQ(result.Verdict(), "accepted");
  EXPECT_EQ(result.output_bytes, 8'000'000);
}

TEST_P(SandboxTest, SignalsDoNotWaitBehindInput) {
  Sandbox& sandbox = Make();
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd reading(ends[0]);
  const UniqueFd writing(ends[1]);
  const ExecResult result = Run(
      sandbox,
      {.script = "trap 'exit 3' USR1; echo ready; while :; do sleep 0.05; done",
       .stdin_text = std::string(3'000'000, 'x'),
       .on_output = [&](Stream, std::string_view) { std::ignore = ::write(writing.get(), "!", 1); },
       .signal_fd = reading.get(),
       .next_signal =
           [&] {
             char byte = 0;
             return ::read(reading.get(), &byte, 1) == 1 ? SIGUSR1 : 0;
           },
       .timeout = seconds(30)});
  EXPECT_EQ(result.ending, ExecEnding::kExited);
  EXPECT_EQ(result.exit_code, 3);
}

TEST_P(SandboxTest, SignalsArePassedOn) {
  Sandbox& sandbox = Make();
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd reading(ends[0]);
  const UniqueFd writing(ends[1]);
  const ExecResult result =
      Run(sandbox,
          {.script = "trap 'echo caught; exit 3' USR1; echo ready; while :; do sleep 0.05; done",
           .on_output =
               [&](Stream, std::string_view text) {
                 if (text.starts_with("ready")) std::ignore = ::write(writing.get(), "!", 1);
               },
           .signal_fd = reading.get(),
           .next_signal =
               [&] {
                 char byte = 0;
                 return ::read(reading.get(), &byte, 1) == 1 ? SIGUSR1 : 0;
               }});
  EXPECT_EQ(result.standard_output, "ready\ncaught\n");
  EXPECT_EQ(result.exit_code, 3);
}

TEST_P(SandboxTest, EnvironmentIsTheImagesAndWhatWasGiven) {
  SandboxOptions options = Options();
  options.environment = {"COLOUR=red", "EMPTY="};
  Sandbox& sandbox = Make(options);
  const ExecResult result = Run(sandbox, {.script = "echo $COLOUR,$SIZE,$EMPTY,${HOST_SECRET-none}",
                                          .environment = {"SIZE=2", "COLOUR=blue"}});
  EXPECT_EQ(result.standard_output, "blue,2,,none\n");
  EXPECT_EQ(sandbox.Exec({.script = "true", .environment = {"=x"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(SandboxTest, TheWorkingDirectoryIsTheOneThatWasAskedFor) {
  SandboxOptions options = Options();
  options.working_directory = "/etc";
  Sandbox& sandbox = Make(options);
  EXPECT_EQ(Output(sandbox, "pwd"), "/etc\n");
  EXPECT_EQ(Run(sandbox, {.script = "pwd", .working_directory = "/bin"}).standard_output, "/bin\n");
  EXPECT_EQ(Output(Make(), "pwd"), can().call_files ? "/tmp\n" : "/\n");
}

TEST_P(SandboxTest, TheDiskHasTheSizeThatWasAskedFor) {
  SandboxOptions options = Options();
  options.limits.disk_bytes = 8 << 20;
  Sandbox& sandbox = Make(options);
  EXPECT_EQ(Shell(sandbox, "head -c 4000000 /dev/zero > /tmp/file").Verdict(), "accepted");
  EXPECT_NE(Shell(sandbox, "head -c 9000000 /dev/zero > /tmp/file").Verdict(), "accepted");
  const std::string directory = SandboxesDirectory(machine_->options()) + "/" + sandbox.id();
  EXPECT_EQ(std::filesystem::exists(directory + "/disk.img"), !can().call_files)
      << "calls write to memory, and need no file system";
}

TEST_P(SandboxTest, ManyProgramsRunAtATime) {
  SandboxOptions options = Options();
  options.warm = 4;
  Sandbox& sandbox = Make(options);
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  const int count = Repetitions(20);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int turn = 0; turn < count; ++turn) {
        const absl::StatusOr<ExecResult> result =
            sandbox.Exec({.script = fmt::format("echo {}-{}; exit {}", thread, turn, turn % 7)});
        if (result.ok() && result->standard_output == fmt::format("{}-{}\n", thread, turn) &&
            result->exit_code == turn % 7 && result->ending == ExecEnding::kExited) {
          ++right;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4 * count);
}

TEST_P(SandboxTest, OneRequestTooManyIsToldWhyItIsRefused) {
  Sandbox& sandbox = Make();
  const std::string directory = SandboxesDirectory(machine_->options()) + "/" + sandbox.id();
  {
    std::vector<UniqueFd> idle;
    for (int connection = 0; connection < 512; ++connection) {
      absl::StatusOr<UniqueFd> connected = fs::ConnectUnix(directory, kAgentSocket);
      ASSERT_EQ(connected.status(), absl::OkStatus());
      idle.push_back(*std::move(connected));
    }
    const absl::Status refused = sandbox.Exec({.script = "true"}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("512 requests"));
  }
  const auto runs = [&] { return sandbox.Exec({.script = "true"}).ok(); };
  for (int turn = 0; turn < 500 && !runs(); ++turn) ::usleep(10'000);
  EXPECT_TRUE(runs());
}

TEST_P(SandboxTest, SessionsKeepDirectoryAndEnvironment) {
  Sandbox& sandbox = Make();
  const auto in = [&](std::string session, std::string script) {
    return sandbox.Exec({.script = std::move(script), .session = std::move(session)});
  };
  if (!can().sessions) {
    EXPECT_EQ(in("a", "true").status().code(), absl::StatusCode::kUnimplemented);
    return;
  }
  ASSERT_EQ(in("a", "mkdir -p '/tmp/it is'; cd '/tmp/it is'; export WORD='a b' OTHER=1").status(),
            absl::OkStatus());
  ASSERT_EQ(in("b", "cd /etc; export WORD=b").status(), absl::OkStatus());
  EXPECT_EQ(in("a", "unset OTHER; pwd; echo \"$WORD\"").value().standard_output,
            "/tmp/it is\na b\n");
  EXPECT_EQ(in("b", "pwd; echo $WORD").value().standard_output, "/etc\nb\n");
  EXPECT_EQ(in("a", "echo ${OTHER-none}; exit 9").value().exit_code, 9);
  EXPECT_EQ(in("a", "echo ${OTHER-none}").value().standard_output, "none\n");
  EXPECT_EQ(in("a", "cd /bin; kill -KILL $$").value().ending, ExecEnding::kSignalled);
  EXPECT_EQ(in("a", "pwd").value().standard_output, "/tmp/it is\n")
      << "as the last one left it that could";
  EXPECT_EQ(sandbox.Exec({.arguments = {"pwd"}, .session = "a"}).value().standard_output,
            "/tmp/it is\n");
  const ExecResult long_state =
      in("a", "export LONG=$(head -c 150000 /dev/zero | tr '\\0' x); cd /").value();
  EXPECT_EQ(long_state.Verdict(), "accepted");
  EXPECT_THAT(long_state.detail, HasSubstr("stays as it was"));
  EXPECT_EQ(in("a", "echo ${LONG-none}; pwd").value().standard_output, "none\n/tmp/it is\n");
  EXPECT_THAT(sandbox.Stats().value().sessions, ElementsAre("a", "b"));
  // Others than this launcher see them as well.
  EXPECT_EQ(launcher()
                .Find(sandbox.id())
                .value()
                ->Exec({.script = "pwd", .session = "b"})
                .value()
                .standard_output,
            "/etc\n");
  const absl::Status others =
      sandbox.Exec({.script = "pwd", .user = "app", .session = "b"}).status();
  EXPECT_EQ(others.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(others.message()), HasSubstr("is of user 0"));
  EXPECT_EQ(sandbox.CloseSession("a"), absl::OkStatus());
  EXPECT_EQ(in("a", "pwd").value().standard_output, "/\n");
  EXPECT_EQ(sandbox.CloseSession("c").code(), absl::StatusCode::kNotFound);
}

TEST_P(SandboxTest, FilesGoInAndOut) {
  Sandbox& sandbox = Make();
  if (!can().files) {
    EXPECT_EQ(sandbox.WriteFile("/tmp/x", "x").code(), absl::StatusCode::kUnimplemented);
    return;
  }
  const std::string binary("a\0b\xff", 4);
  ASSERT_EQ(sandbox.WriteFile("/tmp/new", binary, 0640), absl::OkStatus());
  EXPECT_EQ(sandbox.ReadFile("/tmp/new", 100).value(), binary);
  EXPECT_EQ(Output(sandbox, "stat -c %a /tmp/new"), "640\n");
  EXPECT_EQ(sandbox.ReadFile("/tmp/new", 3).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(sandbox.ReadFile("/no/file", 3).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(sandbox.ReadFile("/tmp", 3).status().code(), absl::StatusCode::kFailedPrecondition);

  const std::string tree = machine_->path("tree");
  std::filesystem::create_directories(tree + "/a/b");
  ASSERT_EQ(WriteFileAtomically(tree + "/a/b/file", std::string(200'000, 'z')), absl::OkStatus());
  std::filesystem::create_symlink("../b/file", tree + "/a/link");
  ASSERT_EQ(sandbox.CopyIn(tree, "/tmp/tree").status(), absl::OkStatus());
  EXPECT_EQ(
      Output(sandbox, "cd /tmp/tree/a; wc -c < b/file; ls -l link | tr -s ' ' | grep -o '[^ ]*$'"),
      "200000\n../b/file\n");
  ASSERT_EQ(Shell(sandbox, "echo more > /tmp/tree/a/more; mkfifo /tmp/tree/fifo").exit_code, 0);
  const std::string back = machine_->path("back");
  const absl::StatusOr<CopyCount> count = sandbox.CopyOut("/tmp/tree", back);
  ASSERT_EQ(count.status(), absl::OkStatus());
  EXPECT_EQ(ReadFileToString(back + "/a/more", 100).value(), "more\n");
  EXPECT_EQ(ReadFileToString(back + "/a/b/file", 1 << 20).value().size(), 200'000);
  EXPECT_EQ(std::filesystem::read_symlink(back + "/a/link"), "../b/file");
  EXPECT_FALSE(std::filesystem::exists(back + "/fifo"));
  EXPECT_EQ(sandbox.CopyOut("/tmp/tree", machine_->path("small"), 100).status().code(),
            absl::StatusCode::kResourceExhausted);
  for (const char* made : {"tree", "back", "small"})
    std::filesystem::remove_all(machine_->path(made));
}

TEST_P(SandboxTest, FilesGoWithACallUpToANumber) {
  Sandbox& sandbox = Make();
  std::vector<std::string> names;
  for (size_t file = 0; file < agent::kMaxCallFiles; ++file)
    names.push_back(fmt::format("{}", file));
  ExecRequest request{.script = "cat in; echo made > 7",
                      .files_in = {{.path = "in", .content = "given"}},
                      .files_out = names};
  if (!can().call_files) {
    EXPECT_EQ(sandbox.Exec(request).status().code(), absl::StatusCode::kUnimplemented);
    return;
  }
  const ExecResult result = Run(sandbox, request);
  EXPECT_EQ(result.standard_output, "given");
  ASSERT_EQ(result.files_out.size(), names.size());
  EXPECT_EQ(result.files_out[7].content, "made\n");
  EXPECT_THAT(result.files_out[8].error, HasSubstr("No such file"));
  request.files_out.push_back("more");
  EXPECT_EQ(sandbox.Exec(request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(SandboxTest, UsersAreTheImages) {
  SandboxOptions options = Options();
  options.user = "app";
  if (!can().root) {
    EXPECT_EQ(launcher().Create(*GetParam(), options).status().code(),
              absl::StatusCode::kUnimplemented);
    EXPECT_NE(Output(Make(), "id -u"), "0\n");
    return;
  }
  Sandbox& sandbox = Make(options);
  EXPECT_EQ(Output(sandbox, "echo $(id -u) $(id -g) $HOME"), "1234 1235 /home/app\n");
  EXPECT_EQ(Run(sandbox, {.script = "echo $(id -u) $HOME", .user = "root"}).standard_output,
            "0 /root\n");
  EXPECT_EQ(Run(sandbox, {.script = "id -u; id -g", .user = "5:6"}).standard_output, "5\n6\n");
  EXPECT_EQ(sandbox.Exec({.script = "id", .user = "ghost"}).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_EQ(sandbox.WriteFile("/home/app/mine", "x"), absl::OkStatus());
  EXPECT_EQ(Output(sandbox, "stat -c %u:%g /home/app/mine"), "1234:1235\n");
}

TEST_P(SandboxTest, StreamsCanBeOpenedByName) {
  Sandbox& sandbox = Make();
  const ExecResult result =
      Run(sandbox, {.script = "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin",
                    .user = can().root ? "app" : "",
                    .session = can().sessions ? "named" : "",
                    .stdin_text = "in\n"});
  EXPECT_EQ(result.standard_output, "out\nin\n");
  EXPECT_EQ(result.standard_error, "err\n");
  if (can().sessions) {
    EXPECT_EQ(sandbox.CloseSession("named"), absl::OkStatus());
  }
}

TEST_P(SandboxTest, LimitsHold) {
  SandboxOptions options = Options();
  options.limits.processes = 20;
  options.limits.cpu_millis = 500;
  Sandbox& sandbox = Make(options);
  const auto fork_bomb = [&] {
    return Run(sandbox, {.script = "for i in $(seq 100); do sleep 1000 & done; wait",
                         .timeout = seconds(30)});
  };
  EXPECT_THAT(fork_bomb().standard_error, HasSubstr("fork"));
  EXPECT_EQ(Shell(sandbox, "true").Verdict(), "accepted");
  if (!can().files) return;
  // The sleeps stay: whoever looks at the sandbox is served all the same, and a program that is asked
  // for starts. It is counted as well, and cannot start others.
  const absl::StatusOr<SandboxStats> stats = sandbox.Stats();
  ASSERT_EQ(stats.status(), absl::OkStatus());
  EXPECT_LE(stats->processes, 30);
  EXPECT_GE(std::stoi(Output(sandbox, "set -- /proc/[0-9]*; echo $#")), 20);
  EXPECT_EQ(Run(sandbox, {.arguments = {"true"}}).Verdict(), "accepted");
  EXPECT_THAT(fork_bomb().standard_error, HasSubstr("fork"));
  EXPECT_EQ(sandbox.WriteFile("/tmp/written", "x"), absl::OkStatus());
  EXPECT_EQ(Output(sandbox, "kill -KILL -1; echo freed"), "freed\n");
  EXPECT_EQ(Output(sandbox, "sleep 0 & wait; echo $(cat /tmp/written)"), "x\n");
}

TEST_P(SandboxTest, ProcessorTimeEndsAlsoThoseWhoIgnoreIt) {
  const ExecResult result =
      Run(Make(), {.script = "trap '' XCPU; while :; do :; done", .cpu_time = milliseconds(1000)});
  EXPECT_EQ(result.ending, ExecEnding::kTimeLimit) << result.signal;
}

TEST_P(SandboxTest, ASlotThatIsKilledIsReplaced) {
  if (!can().call_files) return;
  SandboxOptions options = Options();
  options.warm = 1;
  Sandbox& sandbox = Make(options);
  const Cgroup slot = Cgroup::Of("lamina/" + sandbox.id() + "/slot0").value();
  const auto kill_slot = [&slot] {
    for (const pid_t process : slot.Processes()) ::kill(process, SIGKILL);
  };
  kill_slot();
  for (int turn = 0; turn < 1000 && !slot.Processes().empty(); ++turn) ::usleep(10'000);
  EXPECT_EQ(Shell(sandbox, "true").Verdict(), "accepted") << "it was idle";
  const absl::Status lost = sandbox
                                .Exec({.script = "echo runs; sleep 1000",
                                       .on_output = [&](Stream, std::string_view) { kill_slot(); }})
                                .status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Shell(sandbox, "true").Verdict(), "accepted");
}

TEST_P(SandboxTest, ACallsTimeoutBeginsWhenItsJailIsThere) {
  if (!can().call_files) return;
  SandboxOptions options = Options();
  options.warm = 1;
  Sandbox& sandbox = Make(options);
  const Cgroup group = Cgroup::Of("lamina/" + sandbox.id() + "/slot0").value();
  // Of the slot and its jail the slot is the older one.
  const pid_t slot = group.Processes().front();
  // The slot makes its next jail after the call, and is held up at that.
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, slot, 0, PTRACE_O_TRACEFORK), 0);
  std::thread before([&] { EXPECT_EQ(Shell(sandbox, "true").Verdict(), "accepted"); });
  int status = 0;
  while (::waitpid(slot, &status, __WALL) == slot && status >> 16 != PTRACE_EVENT_FORK) {
    ::ptrace(PTRACE_CONT, slot, 0, WSTOPSIG(status));
  }
  before.join();
  ExecResult late;
  std::thread caller([&] { late = Run(sandbox, {.script = "true", .timeout = seconds(1)}); });
  std::this_thread::sleep_for(seconds(2));
  unsigned long jail = 0;
  ASSERT_EQ(::ptrace(PTRACE_GETEVENTMSG, slot, 0, &jail), 0);
  EXPECT_EQ(::waitpid(static_cast<pid_t>(jail), nullptr, __WALL), jail);
  EXPECT_EQ(::ptrace(PTRACE_DETACH, jail, 0, 0), 0);
  EXPECT_EQ(::ptrace(PTRACE_DETACH, slot, 0, 0), 0);
  caller.join();
  EXPECT_EQ(late.Verdict(), "accepted");
}

TEST_P(SandboxTest, MemoryThatNoProcessHasIsTheCallsAllTheSame) {
  if (!can().call_files) return;
  SandboxOptions options = Options();
  options.warm = 1;
  options.limits.memory_bytes = 24 << 20;
  Sandbox& sandbox = Make(options);
  for (int turn = 0; turn < 4; ++turn) {
    const ExecResult result = Shell(sandbox, "head -c 60000000 /dev/zero > /tmp/big");
    EXPECT_EQ(result.Verdict(), "memory limit") << result.detail;
    EXPECT_EQ(Shell(sandbox, "true").Verdict(), "accepted");
  }
}

TEST_P(SandboxTest, WhatLiesAtDevNullHoldsNobodyUp) {
  if (!can().root || can().own_kernel) return;
  Sandbox& sandbox = Make(Options());
  ASSERT_EQ(Shell(sandbox, "rm /dev/null; mkfifo /dev/null").exit_code, 0);
  const ExecResult result =
      Run(sandbox, {.script = "cat; test -c /dev/stdin", .timeout = seconds(10)});
  EXPECT_EQ(result.Verdict(), "accepted");
}

TEST_P(SandboxTest, ThereIsNoNetworkButALoopbackDevice) {
  EXPECT_EQ(Output(Make(), "cd /sys/class/net 2>/dev/null && ls || ip -o link | wc -l"),
            can().files ? "lo\n" : "1\n");
}

TEST_P(SandboxTest, PauseStopsTheProcessor) {
  Sandbox& sandbox = Make(Options());
  if (!can().pause) {
    EXPECT_EQ(sandbox.Pause().code(), absl::StatusCode::kUnimplemented);
    return;
  }
  ASSERT_EQ(Shell(sandbox, "(while :; do :; done) >/dev/null 2>&1 &").exit_code, 0);
  ASSERT_EQ(sandbox.Pause(), absl::OkStatus());
  EXPECT_EQ(sandbox.State(), SandboxState::kPaused);
  EXPECT_EQ(sandbox.Pause(), absl::OkStatus());
  EXPECT_EQ(sandbox.Exec({.script = "true"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const auto used = sandbox.Stats().value().cpu_time;
  std::this_thread::sleep_for(milliseconds(200));
  // A machine's monitor goes on, and answers.
  EXPECT_LT(sandbox.Stats().value().cpu_time, used + milliseconds(can().own_kernel ? 50 : 1));
  ASSERT_EQ(sandbox.Resume(), absl::OkStatus());
  EXPECT_EQ(sandbox.State(), SandboxState::kRunning);
  EXPECT_EQ(Output(sandbox, "echo on"), "on\n");
  ASSERT_EQ(sandbox.Pause(), absl::OkStatus()) << "and a paused one can be stopped";
}

TEST_P(SandboxTest, ACommitsPauseHoldsProgramsUpAndFailsNone) {
  if (!can().pause || can().own_kernel) return;
  Sandbox& sandbox = Make();
  const Cgroup group = Cgroup::Of("lamina/" + sandbox.id()).value();
  absl::StatusOr<UniqueFd> lock = group.Lock();
  ASSERT_EQ(lock.status(), absl::OkStatus());
  ASSERT_EQ(group.Freeze(), absl::OkStatus());
  std::thread commit([&] {
    std::this_thread::sleep_for(milliseconds(300));
    EXPECT_EQ(group.Thaw(), absl::OkStatus());
    lock->Reset();
  });
  EXPECT_EQ(Output(sandbox, "echo here"), "here\n");
  commit.join();
}

TEST_P(SandboxTest, SnapshotsStartOthers) {
  Sandbox& sandbox = Make();
  if (!can().disk_snapshot) {
    EXPECT_EQ(sandbox.Snapshot("x").code(), absl::StatusCode::kUnimplemented);
    return;
  }
  ASSERT_EQ(
      Shell(sandbox, "echo kept > /tmp/kept; rm /etc/hostname; echo more >> /etc/group").exit_code,
      0);
  ASSERT_EQ(sandbox.Snapshot("first"), absl::OkStatus());
  EXPECT_EQ(sandbox.Snapshot("first").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(sandbox.Snapshot("../first").code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(Shell(sandbox, "rm /tmp/kept").exit_code, 0);
  Sandbox& copy = Make({.snapshot = "first"});
  Sandbox& other = Make({.snapshot = "first"});
  EXPECT_EQ(Output(copy, "cat /tmp/kept; ls /etc; tail -n 1 /etc/group"),
            "kept\ngroup\npasswd\nmore\n");
  ASSERT_EQ(Shell(copy, "rm /tmp/kept").exit_code, 0);
  EXPECT_EQ(Output(other, "cat /tmp/kept"), "kept\n");
  EXPECT_THAT(launcher().Snapshots().value(), ElementsAre("first"));
  EXPECT_EQ(launcher().RemoveSnapshot("first"), absl::OkStatus());
  EXPECT_EQ(launcher().RemoveSnapshot("first").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(launcher().Create(*GetParam(), {.snapshot = "first"}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_P(SandboxTest, SnapshotsOfMemoryGoOnWhereTheyWere) {
  if (!can().memory_snapshot) {
    EXPECT_FALSE(can().own_kernel);
    return;
  }
  SandboxOptions options = Options();
  options.limits.disk_bytes = 64 << 20;
  Sandbox& sandbox = Make(options);
  ASSERT_EQ(Shell(sandbox,
                  "(n=0; while :; do n=$((n+1)); echo $n > /tmp/count; sleep 0.05; done) "
                  ">/dev/null 2>&1 & echo disk > /written")
                .Verdict(),
            "accepted");
  ASSERT_EQ(sandbox.Exec({.script = "cd /etc; export KEPT=1", .session = "s"}).status(),
            absl::OkStatus());
  ASSERT_EQ(sandbox.Snapshot("warm"), absl::OkStatus());
  EXPECT_EQ(Output(sandbox, "echo original goes on; rm /written"), "original goes on\n");
  Sandbox& copy = Make({.snapshot = "warm"});
  EXPECT_EQ(copy.Exec({.script = "pwd; echo $KEPT", .session = "s"}).value().standard_output,
            "/etc\n1\n");
  EXPECT_EQ(
      Output(copy, "cat /written; a=$(cat /tmp/count); sleep 1; test $(cat /tmp/count) -gt $a"),
      "disk\n");
  const int64_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  EXPECT_NEAR(std::stod(Output(copy, "date +%s")), static_cast<double>(now), 60);
  EXPECT_THAT(launcher().List().value(), testing::SizeIs(shared_ == nullptr ? 2 : 3));
  EXPECT_EQ(launcher()
                .Create(*GetParam(), {.snapshot = "warm", .limits = {.memory_bytes = 1 << 30}})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(launcher().RemoveSnapshot("warm"), absl::OkStatus());
}

TEST_P(SandboxTest, SandboxesOutliveTheLauncherThatIsKilled) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd reading(ends[0]);
  UniqueFd writing(ends[1]);
  const pid_t launcher_process = ::fork();
  if (launcher_process == 0) {
    Launcher other(machine_->options());
    const absl::StatusOr<std::unique_ptr<Sandbox>> made = other.Create(*GetParam(), Options());
    if (made.ok()) std::ignore = ::write(writing.get(), (*made)->id().data(), (*made)->id().size());
    ::raise(SIGKILL);
  }
  writing.Reset();
  std::array<char, 64> id{};
  const ssize_t size = ::read(reading.get(), id.data(), id.size());
  ASSERT_GT(size, 0);
  ASSERT_EQ(::waitpid(launcher_process, nullptr, 0), launcher_process);
  absl::StatusOr<std::unique_ptr<Sandbox>> found =
      launcher().Find(std::string(id.data(), static_cast<size_t>(size)));
  ASSERT_EQ(found.status(), absl::OkStatus());
  made_.push_back(*std::move(found));
  EXPECT_EQ(made_.back()->State(), SandboxState::kRunning);
  EXPECT_EQ(Output(*made_.back(), "echo found"), "found\n");
  EXPECT_EQ(launcher().List().value().size(), shared_ == nullptr ? 1 : 2);
}

TEST_P(SandboxTest, AProgramWhoseCallerGoesIsKilled) {
  Sandbox& sandbox = Make();
  const pid_t caller = ::fork();
  if (caller == 0) {
    std::ignore = sandbox.Exec({.script = "sleep 1000"});
    ::_exit(0);
  }
  const auto running = [&] { return sandbox.Stats().value().running_execs; };
  for (int turn = 0; turn < 500 && running() == 0; ++turn) ::usleep(10'000);
  EXPECT_EQ(running(), 1);
  ::kill(caller, SIGKILL);
  ::waitpid(caller, nullptr, 0);
  for (int turn = 0; turn < 500 && running() != 0; ++turn) ::usleep(10'000);
  EXPECT_EQ(running(), 0);
}

TEST_P(SandboxTest, TheEndOfTheSandboxIsToldFromTheEndOfTheProgram) {
  Sandbox& sandbox = Make(Options());
  ExecResult result;
  std::thread waiting([&] { result = Shell(sandbox, "echo here; sleep 1000"); });
  for (int turn = 0; turn < 500 && sandbox.Stats().value().running_execs == 0; ++turn)
    ::usleep(10'000);
  const auto other = launcher().Find(sandbox.id());
  EXPECT_EQ(other.value()->Stop(), absl::OkStatus());
  waiting.join();
  EXPECT_EQ(result.ending, ExecEnding::kSandboxDied);
  EXPECT_EQ(result.Verdict(), "internal error");
  EXPECT_EQ(sandbox.Exec({.script = "true"}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(launcher().Find(sandbox.id()).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(SandboxTest, TimesToLiveEndSandboxes) {
  SandboxOptions options = Options();
  options.ttl = milliseconds(400);
  Sandbox& limited = Make(options);
  options = Options();
  options.idle_ttl = milliseconds(400);
  Sandbox& idle = Make(options);
  EXPECT_EQ(Shell(idle, "sleep 0.8; echo busy").standard_output, "busy\n");
  const auto wait_for_end = [](Sandbox& sandbox) {
    for (int turn = 0; turn < 1000 && sandbox.State() != SandboxState::kDead; ++turn) {
      ::usleep(10'000);
    }
    EXPECT_EQ(sandbox.State(), SandboxState::kDead);
  };
  wait_for_end(limited);
  wait_for_end(idle);
  EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
  EXPECT_THAT(Leftovers(), IsEmpty());
}

TEST_P(SandboxTest, AClockThatIsSetEndsNothing) {
  if (can().own_kernel) return;
  SandboxOptions options = Options();
  options.ttl = std::chrono::hours(1);
  Sandbox& sandbox = Make(options);
  const std::string directory = SandboxesDirectory(machine_->options()) + "/" + sandbox.id();
  Record record = ReadRecord(directory).value();
  record.created_ms = 1;
  ASSERT_EQ(WriteRecord(directory, record), absl::OkStatus());
  EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
  EXPECT_EQ(Output(sandbox, "echo still here"), "still here\n");
  record.boot_id = "another";
  ASSERT_EQ(WriteRecord(directory, record), absl::OkStatus());
  EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
  EXPECT_EQ(sandbox.State(), SandboxState::kDead) << "one of another boot has ended with it";
}

TEST_P(SandboxTest, SnapshotsThatWereLeftHalfMadeAreRemoved) {
  const std::string half =
      SnapshotsDirectory(machine_->options()) + "/" + std::string(kHalfMadeSnapshot) + "test";
  std::filesystem::create_directories(half + "/image");
  {
    const absl::StatusOr<UniqueFd> lock = LockDirectory(half);
    ASSERT_EQ(lock.status(), absl::OkStatus());
    EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
    EXPECT_TRUE(std::filesystem::exists(half)) << "somebody makes it";
  }
  EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(half));
}

TEST_P(SandboxTest, ASandboxWhoseRecordCannotBeReadIsLeftAlone) {
  Sandbox& sandbox = Make(Options());
  const std::string record =
      SandboxesDirectory(machine_->options()) + "/" + sandbox.id() + "/record.json";
  ASSERT_EQ(WriteFileAtomically(record, R"({"version": 2})"), absl::OkStatus());
  EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
  EXPECT_EQ(Output(sandbox, "echo still here"), "still here\n");
  std::vector<ListedSandbox> listed = launcher().List().value();
  std::erase_if(listed, [](const ListedSandbox& other) { return other.problem.ok(); });
  ASSERT_EQ(listed.size(), 1);
  EXPECT_EQ(listed[0].record.id, sandbox.id());
  EXPECT_FALSE(listed[0].problem.ok());
  EXPECT_EQ(launcher().Remove(sandbox.id()), absl::OkStatus());
  EXPECT_EQ(launcher().Remove(sandbox.id()).code(), absl::StatusCode::kNotFound);
}

TEST_P(SandboxTest, WhoeverRemovesLeftoversIsNotInTheWayOfOthers) {
  std::atomic<bool> stop = false;
  std::thread sweeper([&] {
    while (!stop) EXPECT_EQ(launcher().RemoveLeftovers(), absl::OkStatus());
  });
  const int count = Repetitions(can().own_kernel ? 1 : 3);
  for (int turn = 0; turn < count; ++turn) {
    const auto made = launcher().Create(*GetParam(), Options());
    EXPECT_EQ(made.status(), absl::OkStatus());
    if (!made.ok()) continue;
    EXPECT_EQ(Output(**made, "echo up"), "up\n");
    EXPECT_EQ((*made)->Stop(), absl::OkStatus());
  }
  stop = true;
  sweeper.join();
}

// What only containers have.
class ContainerTest : public SandboxTest {};

// crun takes the filter that it compiled for the first one.
TEST_P(ContainerTest, AFilterThatWasCompiledForOthersHolds) {
  const auto seen = [this] {
    Sandbox& sandbox = Make();
    // Namespaces of users need no capability.
    const std::string text = Output(sandbox,
                                    "grep Seccomp: /proc/self/status; "
                                    "/bin/busybox unshare --user true 2>&1; echo $?");
    EXPECT_THAT(text, HasSubstr("Seccomp:\t2"));
    EXPECT_THAT(text, HasSubstr("Operation not permitted"));
    const absl::StatusOr<std::string> config = ReadFileToString(
        fmt::format("{}/{}/config.json", SandboxesDirectory(machine_->options()), sandbox.id()),
        1 << 20);
    EXPECT_EQ(config.status(), absl::OkStatus());
    EXPECT_THAT(*config, HasSubstr("SCMP_ACT_ERRNO"));
    const bool is_given = config->find("run.oci.seccomp_bpf_data") != std::string::npos;
    return std::pair(is_given, text);
  };
  const auto first = seen();
  const auto second = seen();
  EXPECT_EQ(first.second, second.second);
  const std::string directory = SandboxesDirectory(machine_->options());
  EXPECT_TRUE(second.first);
  // What is damaged is compiled again.
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (!entry.path().filename().string().starts_with(".filter-")) continue;
    ASSERT_EQ(WriteFileAtomically(entry.path(), "no filter"), absl::OkStatus());
  }
  EXPECT_FALSE(seen().first);
  EXPECT_TRUE(seen().first);
}

TEST_P(SandboxTest, NothingIsLeftOfManySandboxes) {
  const int count = Repetitions(can().own_kernel ? 2 : 5);
  for (int turn = 0; turn < count; ++turn) {
    const auto made = launcher().Create(*GetParam(), Options());
    ASSERT_EQ(made.status(), absl::OkStatus());
    ASSERT_EQ(Shell(**made, "sleep 1000 & echo up > /tmp/file").Verdict(), "accepted");
    ASSERT_EQ((*made)->Stop(), absl::OkStatus());
    ASSERT_EQ((*made)->Stop(), absl::OkStatus());
  }
  EXPECT_THAT(Leftovers(), IsEmpty());
}

TEST_P(SandboxTest, NothingIsLeftOfASandboxThatCannotStart) {
  SandboxOptions options = Options();
  options.user = can().root ? "ghost" : "";
  options.warm = can().root ? 2 : 0;
  EXPECT_FALSE(launcher().Create(*GetParam(), options).ok());
  EXPECT_THAT(Leftovers(), IsEmpty());
}

std::string BackendName(const testing::TestParamInfo<const Backend*>& info) {
  return std::string(info.param->name());
}
// All but those that this kind of machine never has: without KVM there is nothing to test.
std::vector<const Backend*> TestedBackends() {
  std::vector<const Backend*> tested = Backends();
  std::erase_if(tested, [](const Backend* backend) {
    return backend->name() == "firecracker" && !backend->Available().ok();
  });
  return tested;
}
INSTANTIATE_TEST_SUITE_P(Backends, SandboxTest, testing::ValuesIn(TestedBackends()), BackendName);
INSTANTIATE_TEST_SUITE_P(Backends, ContainerTest, testing::Values(FindBackend("container").value()),
                         BackendName);

}  // namespace
}  // namespace lamina::backends
