// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "fs/image/convert.h"
#include "fs/image/reference.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using nlohmann::json;

constexpr const char* kAllPlatforms = "all";

struct Options {
  fs::ConvertOptions convert;
  RegistryOptions registry;
  std::string platform;
  std::string profile;
  bool json = false;
};

json ToJson(const fs::ConvertResult& result, double seconds) {
  json layers = json::array();
  for (const fs::ConvertedLayer& layer : result.layers) {
    layers.push_back({{"source_digest", layer.source_digest.ToString()},
                      {"source_bytes", layer.source_size},
                      {"digest", layer.blob.digest.ToString()},
                      {"bytes", layer.blob.size},
                      {"reused", layer.reused},
                      {"files", layer.files},
                      {"content_bytes", layer.blob.content_bytes},
                      {"stored_bytes", layer.blob.stored_bytes},
                      {"chunks", layer.blob.chunks},
                      {"shared_chunks", layer.blob.shared_chunks},
                      {"frames", layer.blob.frames},
                      {"hot_frames", layer.blob.hot_frames}});
  }
  return {{"manifest_digest", result.manifest_digest.ToString()},
          {"layers", layers},
          {"seconds", seconds}};
}

void Print(const fs::ConvertResult& result, double seconds) {
  uint64_t source = 0;
  uint64_t content = 0;
  uint64_t blobs = 0;
  size_t reused = 0;
  for (const fs::ConvertedLayer& layer : result.layers) {
    source += layer.source_size;
    content += layer.blob.content_bytes;
    blobs += layer.blob.size;
    reused += layer.reused;
  }
  PrintText("{}\n", result.manifest_digest.ToString());
  PrintText("{} layers, {} of content, {} before, {} now, {:.1f} s\n", result.layers.size(),
            HumanSize(content), HumanSize(source), HumanSize(blobs), seconds);
  if (reused > 0) PrintText("{} of the layers were there already\n", reused);
}

absl::Status CheckReferences(const fs::ConvertOptions& options) {
  RETURN_IF_ERROR(fs::ImageReference::Parse(options.source).status());
  if (!options.destination.empty()) {  // else it goes beside the source, as a referrer
    RETURN_IF_ERROR(fs::ImageReference::ParseConverted(options.destination).status(),
                    "destination");
  }
  return absl::OkStatus();
}

// While it lives, SIGINT, SIGTERM and SIGHUP do not end the process but are noted, so that what was
// staged can be removed. A second one ends it.
class StopSignals {
 public:
  StopSignals() {
    ::sigemptyset(&signals_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals_, signal);
    ::pthread_sigmask(SIG_BLOCK, &signals_, &before_);  // threads that start from now on have it
    arrived_ = UniqueFd(::signalfd(-1, &signals_, SFD_CLOEXEC));
    stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    thread_ = std::thread([this] { Wait(); });
  }
  ~StopSignals() {
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The one that arrived, or 0.
  int signal() const { return signal_; }

 private:
  void Wait() {
    pollfd events[] = {{.fd = stop_.get(), .events = POLLIN},
                       {.fd = arrived_.get(), .events = POLLIN}};
    while (::poll(events, 2, -1) < 0) {
    }
    signalfd_siginfo info{};
    if (events[0].revents != 0) return;
    if (::read(arrived_.get(), &info, sizeof(info)) != sizeof(info)) return;
    signal_ = static_cast<int>(info.ssi_signo);
    ::pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
    while (::poll(events, 1, -1) < 0) {
    }
  }

  sigset_t signals_;
  sigset_t before_;
  UniqueFd arrived_;
  UniqueFd stop_;
  std::atomic<int> signal_ = 0;
  std::thread thread_;
};

// The line is gone when this returns: what is printed next starts where it was.
absl::StatusOr<fs::ConvertResult> ConvertWithProgress(fs::ConvertOptions options) {
  ProgressLine line;
  options.progress = [&line](const fs::ConvertOptions::Progress& progress) {
    line.Update(fmt::format("layer {} of {}", progress.layer + 1, progress.layers),
                progress.source_bytes_read, progress.source_bytes);
  };
  return fs::Convert(options);
}

absl::StatusOr<int> Run(Options& options) {
  RETURN_IF_ERROR(UsageError(CheckReferences(options.convert)));
  ASSIGN_OR_RETURN(options.convert.access.settings, ToSettings(options.registry));
  std::vector<std::string> references = {options.convert.source};
  if (!options.convert.destination.empty()) references.push_back(options.convert.destination);
  RETURN_IF_ERROR(fs::CheckCredentials(references, options.convert.access.settings));
  options.convert.all_platforms = options.platform == kAllPlatforms;
  if (!options.platform.empty() && !options.convert.all_platforms) {
    absl::StatusOr<oci::Platform> platform = oci::Platform::Parse(options.platform);
    if (!platform.ok()) return UsageError(platform.status());
    options.convert.platform = *platform;
  }
  if (!options.profile.empty()) {
    ASSIGN_OR_RETURN(const std::string text,
                     ReadFileToString(options.profile, oci::kMaxDocumentSize));
    ASSIGN_OR_RETURN(options.convert.profile, fs::Profile::Parse(text), "{}", options.profile);
  }
  const StopSignals signals;
  options.convert.cancelled = [&signals] { return signals.signal() != 0; };
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<fs::ConvertResult> converted = ConvertWithProgress(options.convert);
  if (absl::IsCancelled(converted.status())) {
    PrintError(std::string(converted.status().message()));
    return 128 + signals.signal();
  }
  RETURN_IF_ERROR(converted.status());
  const fs::ConvertResult& result = *converted;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.json) {
    PrintJson(ToJson(result, seconds));
  } else {
    Print(result, seconds);
  }
  return kExitOk;
}

}  // namespace

void AddConvert(CLI::App& app, Action& run) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("convert", "Convert an image into a lazily readable one");
  command
      ->add_option(
          "source", options->convert.source,
          "docker://HOST/REPOSITORY[:TAG][@DIGEST], oci:DIR[:TAG], oci-archive:FILE[:TAG], "
          "docker-archive:FILE[:REF] or dir:PATH (a root directory)")
      ->required();
  command->add_option("destination", options->convert.destination,
                      "oci:DIR[:TAG] or docker://HOST/REPOSITORY[:TAG]; layers that it has already "
                      "are not converted again (registries)");
  command->add_flag(
      "--as-referrer", options->convert.as_referrer,
      "Attach the result to the source, in a registry: who mounts the source gets it. "
      "The destination may be left out");
  command->add_option("--platform", options->platform,
                      "os/architecture[/variant] to take from a multi-platform image, or all of "
                      "them with 'all' [this machine's]");
  command->add_option("--level", options->convert.level, "zstd compression level")
      ->capture_default_str()
      ->check(CLI::Range(1, 19));
  command
      ->add_option("--jobs", options->convert.jobs,
                   "Compression threads, 0 for one a processor; the result is the same")
      ->capture_default_str()
      ->check(CLI::Range(0, 256));
  AddRegistryOptions(*command, options->registry);
  command->add_option("--profile", options->profile,
                      "Lay the frames that this profile names out first; recorded on this image, "
                      "converted without a profile");
  command->add_flag("--json", options->json, "Print the result as JSON");
  command->callback([options, &run] {
    if (options->convert.destination.empty() && !options->convert.as_referrer) {
      throw CLI::RequiredError("destination");
    }
    run = [options] { return Run(*options); };
  });
}

}  // namespace lamina::cli
