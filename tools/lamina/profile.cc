// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "chunkstore/base/output_file.h"
#include "chunkstore/base/signals.h"
#include "fs/engine/client.h"
#include "fs/image/oci.h"
#include "fs/image/profile.h"
#include "fs/image/profile_artifact.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"
#include "tools/lamina/run.h"

namespace lamina::cli {
namespace {

using nlohmann::json;

struct RecordOptions {
  ContainerOptions container;
  std::string mount;  // a live mount, in place of an image
  double seconds = 0;
  std::string output = "-";
};

absl::Status Write(const std::string& path, const fs::Profile& profile) {
  const std::string text = profile.ToJson();
  if (path == "-") {
    PrintText("{}\n", text);
    return absl::OkStatus();
  }
  return WriteOutputFile(path, text + "\n");
}

// What is recorded for it would be lost.
absl::Status CheckOutput(const std::string& path) {
  return path == "-" ? absl::OkStatus() : CheckOutputFile(path);
}

absl::StatusOr<json> Call(fs::Client& client, const char* op, const std::string& target) {
  absl::StatusOr<json> reply = client.Call({{"op", op}, {"target", target}},
                                           /*start_engine=*/false);
  if (!absl::IsUnavailable(reply.status())) return reply;
  return absl::NotFoundError(
      fmt::format("no image is mounted at {}: {}", target, std::string(reply.status().message())));
}

absl::Status Start(fs::Client& client, const std::string& target) {
  return Call(client, "profile-start", target).status();
}

absl::StatusOr<fs::Profile> Stop(fs::Client& client, const std::string& target) {
  ASSIGN_OR_RETURN(const json reply, Call(client, "profile-stop", target));
  return fs::Profile::Parse(reply.value("profile", ""));
}

// Ends a recording after some time, or when it is told to, whichever is first.
class TimedRecording {
 public:
  // No time: only when it is told to.
  TimedRecording(fs::Client client, std::string target, double seconds)
      : client_(std::move(client)), target_(std::move(target)) {
    if (seconds <= 0) return;
    const BlockedSignals blocked;  // they are for who waits for the container
    timer_ = std::jthread([this, seconds](const std::stop_token& stop) {
      std::mutex mutex;
      std::condition_variable_any never;
      std::unique_lock lock(mutex);
      never.wait_for(lock, stop, std::chrono::duration<double>(seconds), [] { return false; });
      profile_ = lamina::cli::Stop(client_, target_);
    });
  }

  absl::StatusOr<fs::Profile> Stop() {
    if (!timer_.joinable()) return lamina::cli::Stop(client_, target_);
    timer_.request_stop();
    timer_.join();
    return profile_;
  }

 private:
  fs::Client client_;
  const std::string target_;
  absl::StatusOr<fs::Profile> profile_ = absl::UnknownError("not stopped");
  std::jthread timer_;
};

absl::StatusOr<int> RecordRun(const RecordOptions& options) {
  RETURN_IF_ERROR(CheckOutput(options.output), "record a profile");
  ContainerOptions container = options.container;
  container.record = true;
  std::unique_ptr<TimedRecording> recording;
  container.started = [&](fs::Client& client, const std::string& rootfs) {
    recording = std::make_unique<TimedRecording>(client, rootfs, options.seconds);
  };
  container.ended = [&](fs::Client&, const std::string&, const ContainerSummary&) -> absl::Status {
    ASSIGN_OR_RETURN(const fs::Profile profile, recording->Stop(), "record a profile");
    return Write(options.output, profile);
  };
  return RunContainer(std::move(container));
}

// Until a signal asks to stop, or the time is over.
absl::Status WaitForStop(double seconds) {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, signal);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  const UniqueFd fd(::signalfd(-1, &signals, SFD_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "signalfd");
  pollfd event = {.fd = fd.get(), .events = POLLIN};
  const int timeout = seconds > 0 ? static_cast<int>(std::min(seconds, 2e6) * 1000) : -1;
  if (::poll(&event, 1, timeout) < 0) return ErrnoStatus(errno, "wait for a signal");
  return absl::OkStatus();
}

absl::StatusOr<int> Record(RecordOptions& options) {
  if (options.mount.empty()) {
    if (options.container.image.empty()) {
      return UsageError(
          absl::InvalidArgumentError("profile record: say either an image or --mount DIR"));
    }
    if (options.container.state.empty()) options.container.state = fs::DefaultStateDirectory();
    return RecordRun(options);
  }
  if (!options.container.image.empty()) {
    return UsageError(
        absl::InvalidArgumentError("profile record: an image or --mount DIR, not both"));
  }
  ASSIGN_OR_RETURN(const std::string target, ExistingDirectory(options.mount), "--mount");
  ASSIGN_OR_RETURN(std::string state, StateFor(options.container.state, target));
  fs::Client client(std::move(state), ProgramPath());
  RETURN_IF_ERROR(CheckOutput(options.output), "record a profile");
  RETURN_IF_ERROR(Start(client, target), "record a profile");
  const absl::Status waited = WaitForStop(options.seconds);
  ASSIGN_OR_RETURN(const fs::Profile profile, Stop(client, target), "record a profile");
  RETURN_IF_ERROR(waited);
  RETURN_IF_ERROR(Write(options.output, profile));
  return kExitOk;
}

struct LiveOptions {
  std::string mount;
  std::string state;
  std::string output = "-";
};

absl::StatusOr<int> StartLive(const LiveOptions& options) {
  ASSIGN_OR_RETURN(const std::string target, ExistingDirectory(options.mount));
  ASSIGN_OR_RETURN(std::string state, StateFor(options.state, target));
  fs::Client client(std::move(state), ProgramPath());
  RETURN_IF_ERROR(Start(client, target), "record a profile");
  return kExitOk;
}

absl::StatusOr<int> StopLive(const LiveOptions& options) {
  ASSIGN_OR_RETURN(const std::string target, ExistingDirectory(options.mount));
  ASSIGN_OR_RETURN(std::string state, StateFor(options.state, target));
  fs::Client client(std::move(state), ProgramPath());
  RETURN_IF_ERROR(CheckOutput(options.output), "the recording goes on");
  ASSIGN_OR_RETURN(const fs::Profile profile, Stop(client, target), "record a profile");
  RETURN_IF_ERROR(Write(options.output, profile));
  return kExitOk;
}

struct AttachOptions {
  std::string image;
  std::string file;
  RegistryOptions registry;
  bool pack = false;
  bool json = false;
};

json ToJson(const fs::AttachedProfile& attached) {
  json value = {{"manifest_digest", attached.manifest_digest.ToString()},
                {"created", attached.created},
                {"profile_digest", attached.profile_digest.ToString()},
                {"frames", attached.profile.touches.size()}};
  if (attached.pack) {
    value["pack_digest"] = attached.pack->digest.ToString();
    value["pack_bytes"] = attached.pack->size;
  }
  return value;
}

absl::StatusOr<fs::Profile> ReadProfile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, oci::kMaxDocumentSize));
  ASSIGN_OR_RETURN(fs::Profile profile, fs::Profile::Parse(text), "{}", path);
  return profile;
}

absl::StatusOr<int> Attach(const AttachOptions& options) {
  ASSIGN_OR_RETURN(const fs::Profile profile, ReadProfile(options.file));
  ASSIGN_OR_RETURN(registry::Settings settings, ToSettings(options.registry));
  const fs::RegistryAccess access{.settings = std::move(settings)};
  ASSIGN_OR_RETURN(const fs::Image image,
                   fs::OpenImage(options.image, oci::Platform::Host(), access));
  ASSIGN_OR_RETURN(const fs::AttachedProfile attached,
                   fs::AttachProfile(image, profile, options.pack, access));
  if (options.json) {
    PrintJson(ToJson(attached));
  } else {
    PrintText("{}\n{} frames{}\n", attached.manifest_digest.ToString(), profile.touches.size(),
              attached.pack ? fmt::format(", a pack of {}", HumanSize(attached.pack->size)) : "");
  }
  return kExitOk;
}

absl::StatusOr<int> List(const AttachOptions& options) {
  ASSIGN_OR_RETURN(registry::Settings settings, ToSettings(options.registry));
  ASSIGN_OR_RETURN(const fs::Image image, fs::OpenImage(options.image, oci::Platform::Host(),
                                                        {.settings = std::move(settings)}));
  ASSIGN_OR_RETURN(const std::vector<absl::StatusOr<fs::AttachedProfile>> profiles,
                   fs::ListProfiles(image));
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {{"profile", "created", "frames", "pack"}};
  for (const absl::StatusOr<fs::AttachedProfile>& profile : profiles) {
    if (!profile.ok()) {
      PrintError(std::string(profile.status().message()));
      continue;
    }
    list.push_back(ToJson(*profile));
    rows.push_back({profile->profile_digest.ToString().substr(0, 19), profile->created,
                    fmt::format("{}", profile->profile.touches.size()),
                    profile->pack ? HumanSize(profile->pack->size) : "-"});
  }
  if (options.json) {
    PrintJson(list);
  } else if (profiles.empty()) {
    PrintText("no profile is attached\n");
  } else {
    PrintTable(rows);
  }
  return kExitOk;
}

struct ShowOptions {
  std::string file;
  RegistryOptions registry;
  bool json = false;
};

// A file, or what is attached to an image.
absl::StatusOr<fs::Profile> FileOrAttached(const ShowOptions& options) {
  const std::string& name = options.file;
  if (!name.starts_with("oci:") && !name.starts_with("docker:")) return ReadProfile(name);
  ASSIGN_OR_RETURN(registry::Settings settings, ToSettings(options.registry));
  ASSIGN_OR_RETURN(const fs::Image image,
                   fs::OpenImage(name, oci::Platform::Host(), {.settings = std::move(settings)}));
  ASSIGN_OR_RETURN(fs::AttachedProfile attached, fs::FindProfile(image), "{}", name);
  return std::move(attached.profile);
}

absl::StatusOr<int> Show(const ShowOptions& options) {
  ASSIGN_OR_RETURN(const fs::Profile profile, FileOrAttached(options));
  if (options.json) {
    PrintJson(json::parse(profile.ToJson()));
    return kExitOk;
  }
  if (profile.image) PrintText("recorded on {}\n", profile.image->ToString());
  PrintText("{} frames in {:.3f} s\n", profile.touches.size(),
            profile.touches.empty()
                ? 0.0
                : static_cast<double>(profile.touches.back().microseconds) / 1e6);
  std::vector<uint64_t> frames(profile.blobs.size());
  for (const chunkstore::Touch& touch : profile.touches) ++frames[touch.blob];
  std::vector<std::vector<std::string>> rows = {{"layer", "frames"}};
  for (size_t i = 0; i < frames.size(); ++i) {
    rows.push_back({profile.blobs[i].digest.ToString(), fmt::format("{}", frames[i])});
  }
  PrintTable(rows);
  return kExitOk;
}

void AddRecord(CLI::App& profile, std::vector<std::string> command_line, Action& run) {
  auto options = std::make_shared<RecordOptions>();
  options->container.command = std::move(command_line);
  CLI::App* command = profile.add_subcommand(
      "record", "Record which frames a command, or the readers of a mount, touch first");
  command->add_option("image", options->container.image,
                      "An image, mounted anew to run the command in, as by run");
  AddRegistryOptions(*command, options->container.registry);
  // Only for the help: CutRunCommand has taken it out.
  command->add_option("command", "Command and arguments, behind --, in place of the image's");
  command->add_option("--mount", options->mount,
                      "Record the readers of the image mounted here, until a signal or --for");
  command->add_option("--for", options->seconds, "Seconds after which to stop recording")
      ->check(CLI::PositiveNumber);
  command->add_option("--output,-o", options->output, "Where to write it; - is standard output")
      ->capture_default_str();
  AddStateOfMountOption(*command, options->container.state);
  AddCacheOptions(*command, options->container.cache);
  AddPrefetchOptions(*command, options->container.prefetch);
  command->callback([options, &run] { run = [options] { return Record(*options); }; });
}

void AddLive(CLI::App& profile, Action& run, const char* name, const char* description,
             absl::StatusOr<int> (*function)(const LiveOptions&)) {
  auto options = std::make_shared<LiveOptions>();
  CLI::App* command = profile.add_subcommand(name, description);
  command->add_option("directory", options->mount, "Where the image is mounted")->required();
  AddStateOfMountOption(*command, options->state);
  if (function == StopLive) {
    command->add_option("--output,-o", options->output, "Where to write it; - is standard output")
        ->capture_default_str();
  }
  command->callback(
      [options, &run, function] { run = [options, function] { return function(*options); }; });
}

void AddAttach(CLI::App& profile, Action& run) {
  auto options = std::make_shared<AttachOptions>();
  CLI::App* command = profile.add_subcommand(
      "attach", "Store a profile with its image, for all later mounts to follow");
  command->add_option("image", options->image, kImageHelp)->required();
  AddRegistryOptions(*command, options->registry);
  command->add_option("profile", options->file, "A profile that was recorded on it")->required();
  command->add_flag("--pack", options->pack,
                    "Also store the frames that it names, as one object: a start then reads one "
                    "object from front to back");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return Attach(*options); }; });
}

void AddList(CLI::App& profile, Action& run) {
  auto options = std::make_shared<AttachOptions>();
  CLI::App* command = profile.add_subcommand("ls", "List the profiles attached to an image");
  command->add_option("image", options->image, kImageHelp)->required();
  AddRegistryOptions(*command, options->registry);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return List(*options); }; });
}

void AddShow(CLI::App& profile, Action& run) {
  auto options = std::make_shared<ShowOptions>();
  CLI::App* command = profile.add_subcommand("show", "Show what a profile names");
  command->add_option("file", options->file, "A profile, or an image that has one")->required();
  AddRegistryOptions(*command, options->registry);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return Show(*options); }; });
}

}  // namespace

void AddProfile(CLI::App& app, std::vector<std::string> command, Action& run) {
  CLI::App* profile = app.add_subcommand(
      "profile", "Record what a start reads, so that later starts have it fetched in advance");
  profile->require_subcommand(1);
  AddRecord(*profile, std::move(command), run);
  AddLive(*profile, run, "start", "Start recording the readers of a mount", StartLive);
  AddLive(*profile, run, "stop", "Stop recording, and write the profile", StopLive);
  AddAttach(*profile, run);
  AddList(*profile, run);
  AddShow(*profile, run);
}

}  // namespace lamina::cli
