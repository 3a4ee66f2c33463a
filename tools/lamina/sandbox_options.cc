// SPDX-License-Identifier: Apache-2.0
#include "tools/lamina/sandbox_options.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>

#include "chunkstore/base/file.h"
#include "chunkstore/base/output_file.h"
#include "chunkstore/base/signals.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using backends::ExecEnding;
using backends::ExecRequest;
using backends::ExecResult;
using backends::Stream;
using nlohmann::json;
using std::chrono::milliseconds;

absl::StatusOr<uint64_t> SizeOrNone(const std::string& text, std::string_view option) {
  if (text.empty()) return 0;
  ASSIGN_OR_RETURN(const uint64_t size, ParseSize(text), "{}", option);
  return size;
}

absl::StatusOr<milliseconds> DurationOrNone(const std::string& text, std::string_view option) {
  if (text.empty()) return milliseconds(0);
  ASSIGN_OR_RETURN(const milliseconds duration, ParseDuration(text), "{}", option);
  return duration;
}

// Takes the signals that people and supervisors send, for as long as it lives.
class PassedSignals {
 public:
  PassedSignals() {
    const sigset_t signals = StopSignalSet();
    ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
    fd_.Reset(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~PassedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  PassedSignals(const PassedSignals&) = delete;
  PassedSignals& operator=(const PassedSignals&) = delete;

  int fd() const { return fd_.get(); }
  int Next() {
    signalfd_siginfo info{};
    if (::read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return 0;
    const auto signal = static_cast<int>(info.ssi_signo);
    const bool stops = signal == SIGTERM || signal == SIGINT;
    // The second one is meant.
    return stops && ++stops_ > 1 ? SIGKILL : signal;
  }

 private:
  sigset_t before_{};
  UniqueFd fd_;
  int stops_ = 0;
};

// "HOST=INSIDE", or a name that is the same on both sides.
std::pair<std::string, std::string> SplitPair(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) return {text, std::filesystem::path(text).filename().string()};
  return {text.substr(0, equals), text.substr(equals + 1)};
}

json ToJson(const ExecResult& result) {
  json value = {
      {"verdict", result.Verdict()},
      {"ending", backends::EndingName(result.ending)},
      {"exit_code", result.exit_code},
      {"signal", result.signal},
      {"stdout", result.standard_output},
      {"stderr", result.standard_error},
      {"output_bytes", result.output_bytes},
      {"wall_ms", std::chrono::duration<double, std::milli>(result.wall_time).count()},
      {"cpu_ms", std::chrono::duration<double, std::milli>(result.cpu_time).count()},
      {"peak_memory_bytes", result.peak_memory},
      {"memory_kills", result.memory_kills},
  };
  if (!result.detail.empty()) value["detail"] = result.detail;
  if (!result.files_out.empty()) {
    json files = json::object();
    for (const agent::CallFile& file : result.files_out) {
      files[file.path] =
          file.error.empty() ? json{{"bytes", file.content.size()}} : json{{"error", file.error}};
    }
    value["files"] = files;
  }
  return value;
}

}  // namespace

absl::StatusOr<milliseconds> ParseDuration(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  double factor = 0;
  if (unit == "ms") factor = 1;
  if (unit == "s") factor = 1000;
  if (unit == "m") factor = 60 * 1000;
  if (unit == "h") factor = 3600 * 1000;
  if (unit == "d") factor = 24 * 3600 * 1000;
  constexpr double kMost = 1e13;
  if (error != std::errc() || factor == 0 || !(value > 0) || value * factor > kMost) {
    return absl::InvalidArgumentError(
        fmt::format("'{}' is no duration: 500ms, 30s, 10m, 2h and 1d are", text));
  }
  return milliseconds(std::max<int64_t>(static_cast<int64_t>(value * factor), 1));
}

void AddSandboxFlags(CLI::App& command, SandboxFlags& flags) {
  command
      .add_option(
          "--backend", flags.backend,
          "fncall: stateless calls in warm jails. container: crun or runc. firecracker and "
          "qemu: virtual machines. auto: the lightest that is enough, said on standard error")
      ->capture_default_str();
  command
      .add_option("--needs", flags.needs,
                  "For auto, what the task needs: stateless, state, root, own-kernel")
      ->allow_extra_args(false)  // else it takes the image for one as well
      ->delimiter(',')
      ->check(CLI::IsMember({"stateless", "state", "root", "own-kernel"}));
  command.add_option("--memory", flags.memory, "Limit, as in 512M")->type_name("SIZE");
  command.add_option("--cpus", flags.cpus, "Limit in processors, as in 0.5")
      ->check(CLI::Range(0.001, 100000.0));
  command.add_option("--processes", flags.processes, "Limit");
  command.add_option("--disk", flags.disk, "Limit of what it may write")->type_name("SIZE");
  command.add_option("--env,-e", flags.environment, "NAME=value, beyond the image's")
      ->allow_extra_args(false);
  command.add_option("--user", flags.user, "User in the image [the image's]");
  command.add_option("--workdir", flags.working_directory, "Working directory [the image's]");
  command.add_option("--network", flags.network, "none, or host: the host's")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "host"}));
  command.add_option("--ttl", flags.ttl, "End after that time")->type_name("DURATION");
  command.add_option("--idle-ttl", flags.idle_ttl, "End after that time without a command")
      ->type_name("DURATION");
  command.add_option("--warm", flags.warm, "fncall: calls at a time, each with a jail ready")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  command.add_option("--runtime", flags.runtime, "container: crun or runc. qemu: kvm or tcg")
      ->check(CLI::IsMember({"crun", "runc", "kvm", "tcg"}));
  command.add_flag("--keep-memory", flags.keep_memory,
                   "Machines: what is not used stays theirs, and does not go back to the host");
}

absl::StatusOr<backends::SandboxOptions> ToSandboxOptions(const SandboxFlags& flags) {
  backends::SandboxOptions options;
  ASSIGN_OR_RETURN(options.limits.memory_bytes, SizeOrNone(flags.memory, "--memory"));
  ASSIGN_OR_RETURN(options.limits.disk_bytes, SizeOrNone(flags.disk, "--disk"));
  options.limits.cpu_millis = static_cast<uint64_t>(flags.cpus * 1000);
  options.limits.processes = flags.processes;
  options.environment = flags.environment;
  options.user = flags.user;
  options.working_directory = flags.working_directory;
  options.network = flags.network == "host" ? backends::Network::kHost : backends::Network::kNone;
  ASSIGN_OR_RETURN(options.ttl, DurationOrNone(flags.ttl, "--ttl"));
  ASSIGN_OR_RETURN(options.idle_ttl, DurationOrNone(flags.idle_ttl, "--idle-ttl"));
  options.warm = flags.warm;
  options.runtime = flags.runtime;
  options.reclaim = !flags.keep_memory;
  return options;
}

absl::StatusOr<backends::Choice> ToBackend(const SandboxFlags& flags, bool stateless) {
  if (flags.backend != "auto") {
    const auto named = backends::FindBackend(flags.backend);
    if (!named.ok()) return UsageError(named.status());
    return backends::Choice{*named, (*named)->Note()};
  }
  backends::TaskNeeds needs{.stateless = stateless,
                            .root = !flags.user.empty() || flags.network == "host"};
  for (const std::string& need : flags.needs) {
    if (need == "stateless") needs.stateless = true;
    if (need == "state") needs.state = true;
    if (need == "root") needs.root = true;
    if (need == "own-kernel") needs.own_kernel = true;
  }
  return backends::ChooseBackend(needs);
}

void AddExecFlags(CLI::App& command, ExecFlags& flags) {
  command.add_option("--timeout", flags.timeout, "Kill it after that time")->type_name("DURATION");
  command.add_option("--cpu-time", flags.cpu_time, "Kill it after that processor time")
      ->type_name("DURATION");
  command.add_option("--output-limit", flags.output_limit, "Kill it when it has written more")
      ->type_name("SIZE");
  command.add_option("--file-limit", flags.file_limit, "Size of a file that it writes")
      ->type_name("SIZE");
  command
      .add_option("--in", flags.files_in,
                  "fncall: HOST[=NAME], a file for the call's working directory")
      ->allow_extra_args(false);
  command
      .add_option("--out", flags.files_out, "fncall: HOST[=NAME], where to put a file from there")
      ->allow_extra_args(false);
  command.add_flag("--interactive,-i", flags.interactive, "Pass on standard input");
}

absl::StatusOr<int> ExecInSandbox(backends::Sandbox& sandbox, ExecRequest request,
                                  const ExecFlags& flags) {
  ASSIGN_OR_RETURN(request.timeout, DurationOrNone(flags.timeout, "--timeout"));
  ASSIGN_OR_RETURN(request.cpu_time, DurationOrNone(flags.cpu_time, "--cpu-time"));
  ASSIGN_OR_RETURN(request.output_limit, SizeOrNone(flags.output_limit, "--output-limit"));
  ASSIGN_OR_RETURN(request.file_limit, SizeOrNone(flags.file_limit, "--file-limit"));
  for (const std::string& pair : flags.files_in) {
    const auto [host, inside] = SplitPair(pair);
    agent::CallFile file{.path = inside};
    ASSIGN_OR_RETURN(file.content, ReadFileToString(host, agent::kMaxCallBytes), "--in");
    file.mode = ::access(host.c_str(), X_OK) == 0 ? 0755 : 0644;
    request.files_in.push_back(std::move(file));
  }
  for (const std::string& pair : flags.files_out) {
    request.files_out.push_back(SplitPair(pair).second);
  }
  if (flags.interactive) request.stdin_fd = STDIN_FILENO;
  if (!flags.json) {
    request.kept_output = 0;
    request.on_output = [](Stream stream, std::string_view bytes) {
      std::FILE* file = stream == Stream::kStdout ? stdout : stderr;
      WriteText(file, bytes);
      std::fflush(file);
    };
  }
  PassedSignals signals;
  request.signal_fd = signals.fd();
  request.next_signal = [&signals] { return signals.Next(); };
  ASSIGN_OR_RETURN(const ExecResult result, sandbox.Exec(request));

  for (size_t index = 0; index < result.files_out.size(); ++index) {
    const agent::CallFile& file = result.files_out[index];
    const std::string host = SplitPair(flags.files_out.at(index)).first;
    if (!file.error.empty()) {
      PrintError(fmt::format("--out {}: {}", file.path, file.error));
    } else {
      RETURN_IF_ERROR(WriteOutputFile(host, file.content, file.mode), "--out");
    }
  }
  if (flags.json) {
    PrintJson(ToJson(result));
  } else if (result.ending != ExecEnding::kExited && result.ending != ExecEnding::kSignalled) {
    PrintError(result.detail.empty()
                   ? std::string(backends::EndingName(result.ending))
                   : fmt::format("{}: {}", backends::EndingName(result.ending), result.detail));
  }
  return result.ending == ExecEnding::kSandboxDied ? kExitFailure : result.ShellCode();
}

absl::StatusOr<backends::LauncherOptions> ToLauncherOptions(const std::string& state,
                                                            const CacheFlags& cache) {
  backends::LauncherOptions options{.state = state, .program = ProgramPath()};
  ASSIGN_OR_RETURN(options.engine_options, EngineArguments(cache));
  options.helpers = HelperDirectory();
  return options;
}

void RemoveLeftovers(backends::Launcher& launcher) {
  const absl::Status removed = launcher.RemoveLeftovers();
  if (!removed.ok()) PrintError(std::string(removed.message()));
}

}  // namespace lamina::cli
