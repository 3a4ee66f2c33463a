// SPDX-License-Identifier: Apache-2.0
//
// What programs that the launcher starts have of it, and what they keep when it is killed.
#include "backends/helper_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "backends/crun.h"
#include "backends/record.h"
#include "backends/vm/machine.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class HelperProcessTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(WriteFileAtomically(path("open"), "").ok()); }

  std::string path(const std::string& name) const { return directory_.path() + "/" + name; }
  // Where the program `crun` is a script.
  void MakeCrun(const std::string& script) {
    ASSERT_TRUE(WriteFileAtomically(path("crun"), "#!/bin/sh\n" + script, 0755).ok());
    ASSERT_EQ(::chmod(path("crun").c_str(), 0755), 0);
    ::setenv("PATH", (directory_.path() + ":" + path_).c_str(), 1);
  }
  void TearDown() override { ::setenv("PATH", path_.c_str(), 1); }
  // The file `open`, as whoever starts the launcher may leave one open.
  UniqueFd Inheritable() const {
    constexpr int kNobodyElses = 50;
    const UniqueFd file(::open(path("open").c_str(), O_RDONLY | O_CLOEXEC));
    return UniqueFd(::fcntl(file.get(), F_DUPFD, kNobodyElses));
  }
  absl::StatusOr<pid_t> StartWithCrun(int lock) {
    return StartDetached({.bundle = directory_.path(),
                          .id = "test",
                          .root = path("runtime"),
                          .descriptors = {STDERR_FILENO},
                          .lock = lock});
  }
  // A process that locks a directory and calls `start` with that; killed when `start` is at work, which
  // it says with a file `at-work`. The lock lasts until the file `go-on` is there.
  void KillAtWork(const std::function<void(int lock)>& start) {
    const std::string locked = path("locked");
    ASSERT_EQ(::mkdir(locked.c_str(), 0700), 0);
    const pid_t launcher = ::fork();
    if (launcher == 0) {
      const absl::StatusOr<UniqueFd> lock = LockDirectory(locked);
      if (lock.ok()) start(lock->get());
      ::_exit(1);
    }
    const auto wait_for = [](const std::function<bool()>& condition) {
      for (int turn = 0; turn < 2000 && !condition(); ++turn) ::poll(nullptr, 0, 10);
      return condition();
    };
    EXPECT_TRUE(wait_for([&] { return ::access(path("at-work").c_str(), F_OK) == 0; }));
    ::kill(launcher, SIGKILL);
    ASSERT_EQ(::waitpid(launcher, nullptr, 0), launcher);
    EXPECT_EQ(LockDirectory(locked).status().code(), absl::StatusCode::kUnavailable);
    ASSERT_TRUE(WriteFileAtomically(path("go-on"), "").ok());
    EXPECT_TRUE(wait_for([&] { return LockDirectory(locked).ok(); }));
  }
  // For scripts.
  std::string Work() const {
    return fmt::format("touch {}; until [ -e {} ]; do sleep 0.05; done", path("at-work"),
                       path("go-on"));
  }

  const std::string path_ = ::getenv("PATH");
  TemporaryDirectory directory_ =
      TemporaryDirectory::Create(testing::TempDir(), "lamina-helper-").value();
};

TEST_F(HelperProcessTest, HelpersHaveNoDescriptorsOfTheCaller) {
  const UniqueFd open = Inheritable();
  const std::string file = std::filesystem::canonical(path("open"));
  const absl::Status said =
      StartHelper({"/bin/sh", "-c", "ls -l /proc/$$/fd >&4"}, {open.get()}, open.get());
  EXPECT_THAT(std::string(said.message()),
              AllOf(HasSubstr(" 3 -> " + file), HasSubstr(" 5 -> " + file)));
  const absl::Status without =
      StartHelper({"/bin/sh", "-c", "ls -l /proc/$$/fd >&4"}, {STDERR_FILENO}, STDERR_FILENO);
  EXPECT_THAT(std::string(without.message()), AllOf(HasSubstr(" 4 -> "), Not(HasSubstr("/open"))));
}

TEST_F(HelperProcessTest, MachinesHaveNoDescriptorsOfTheCaller) {
  const UniqueFd open = Inheritable();
  const UniqueFd output(::open(path("output").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const absl::StatusOr<ChildProcess> child =
      ChildProcess::Start({"sh", "-c", "ls -l /proc/$$/fd"}, {STDERR_FILENO}, output.get());
  ASSERT_TRUE(child.ok()) << child.status();
  pollfd ended{.fd = child->ended(), .events = POLLIN};
  ASSERT_EQ(::poll(&ended, 1, 60'000), 1);
  EXPECT_THAT(ReadFileToString(path("output"), 1 << 16).value(),
              AllOf(HasSubstr(" 3 -> "), Not(HasSubstr("/open"))));
}

TEST_F(HelperProcessTest, ALockLastsUntilTheHelperIsReady) {
  KillAtWork([this](int lock) {
    StartHelper({"/bin/sh", "-c", Work() + "; exec 4>&- 3>&-; sleep 3"}, {}, lock).IgnoreError();
  });
}

TEST_F(HelperProcessTest, ALockLastsUntilTheRuntimeHasEnded) {
  MakeCrun(Work());
  KillAtWork([this](int lock) { StartWithCrun(lock).IgnoreError(); });
}

TEST_F(HelperProcessTest, ARuntimeDoesNotHearOfTheServiceItIsStartedIn) {
  MakeCrun("for word; do case $word in --pid-file=*) echo 1234 > ${word#*=}; esac; done\nenv > " +
           path("environment"));
  for (const char* variable : {"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}) {
    ::setenv(variable, "5", 1);
  }
  EXPECT_EQ(StartWithCrun(-1).value_or(0), 1234);
  for (const char* variable : {"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}) {
    EXPECT_STREQ(::getenv(variable), "5") << "the launcher's own is another matter";
    ::unsetenv(variable);
  }
  EXPECT_THAT(
      ReadFileToString(path("environment"), 1 << 16).value(),
      AllOf(HasSubstr("PATH="), Not(HasSubstr("NOTIFY_SOCKET")), Not(HasSubstr("LISTEN_"))));
}

}  // namespace
}  // namespace lamina::backends
