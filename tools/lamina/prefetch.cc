// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <fstream>
#include <iostream>
#include <memory>
#include <thread>

#include "fs/engine/client.h"
#include "fs/engine/prefetch_messages.h"
#include "fs/image/image_store.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"

namespace lamina::cli {
namespace {

using nlohmann::json;

constexpr std::chrono::milliseconds kPollInterval(50);
// Of one image, by engines that were killed while they fetched it.
constexpr int kMaxStarts = 5;

struct Options {
  std::vector<std::string> images;
  std::string list;
  bool profile_only = false;
  std::string rate;
  size_t jobs = 4;
  std::string state;
  CacheFlags cache;
  RegistryOptions registry;
  bool json = false;
};

// What some editors write in front of UTF-8.
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

// One image to a line; empty lines and those that start with # are skipped. "-" is standard input.
absl::StatusOr<std::vector<std::string>> ReadList(const std::string& path) {
  std::ifstream file;
  if (path != "-") {
    file.open(path);
    if (!file) return ErrnoStatus(errno, "open " + path);
  }
  std::istream& input = path == "-" ? std::cin : file;
  std::vector<std::string> images;
  bool first = true;
  for (std::string line; std::getline(input, line); first = false) {
    if (first && line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos || line[begin] == '#') continue;
    images.push_back(line.substr(begin, line.find_last_not_of(" \t\r") - begin + 1));
  }
  if (input.bad()) return ErrnoStatus(errno, "read " + path);
  return images;
}

// One image on its way.
struct Running {
  size_t index = 0;  // of its result
  uint64_t id = 0;
  int starts = 1;
};

absl::StatusOr<uint64_t> Begin(fs::Client& client, const std::string& image,
                               const Options& options) {
  fs::PrefetchRequest request{.profile_only = options.profile_only};
  ASSIGN_OR_RETURN(request.image, AbsoluteReference(image));
  if (!options.rate.empty()) {
    ASSIGN_OR_RETURN(request.bytes_per_second, ParseSize(options.rate), "--prefetch-rate");
  }
  ASSIGN_OR_RETURN(request.registry, ToSettings(options.registry));
  json message = ToJson(request);
  message["op"] = "prefetch-start";
  ASSIGN_OR_RETURN(const json reply, client.Call(message, /*start_engine=*/true));
  return reply.value("id", uint64_t{0});
}

absl::StatusOr<fs::PrefetchReport> Ask(fs::Client& client, const Running& job,
                                       const std::string& image) {
  ASSIGN_OR_RETURN(const json reply, client.Call({{"op", "prefetch-report"}, {"id", job.id}},
                                                 /*start_engine=*/false));
  ASSIGN_OR_RETURN(fs::PrefetchReport report, fs::ParsePrefetchReport(reply));
  ASSIGN_OR_RETURN(const std::string asked, AbsoluteReference(image));
  if (report.image != asked) {
    return absl::InternalError(fmt::format("the engine reported about {}", report.image));
  }
  report.image = image;
  return report;
}

// As Ask, of a job that is started again if its engine has gone: what was fetched is not fetched again.
absl::StatusOr<fs::PrefetchReport> AskOrRestart(fs::Client& client, Running& job,
                                                const std::string& image, const Options& options) {
  absl::StatusOr<fs::PrefetchReport> report = Ask(client, job, image);
  const bool gone = absl::IsNotFound(report.status()) || absl::IsUnavailable(report.status());
  if (!gone) return report;
  if (job.starts == kMaxStarts) {
    return Annotate(report.status(),
                    fmt::format("the engine was restarted meanwhile, {} times", kMaxStarts));
  }
  ++job.starts;
  ASSIGN_OR_RETURN(job.id, Begin(client, image, options), "again, as the engine was restarted");
  return fs::PrefetchReport{.image = image};
}

void ShowProgress(ProgressLine& line, const std::vector<fs::PrefetchReport>& reports) {
  uint64_t done = 0;
  uint64_t total = 0;
  size_t finished = 0;
  for (const fs::PrefetchReport& report : reports) {
    done += report.bytes;
    total += std::max(report.bytes_missing, report.bytes);
    finished += report.finished ? 1 : 0;
  }
  line.Update(fmt::format("{} of {} images", finished, reports.size()), done, total);
}

std::vector<fs::PrefetchReport> PrefetchAll(fs::Client& client,
                                            const std::vector<std::string>& images,
                                            const Options& options) {
  std::vector<fs::PrefetchReport> reports(images.size());
  std::deque<Running> running;
  ProgressLine line;
  const auto fail = [&](size_t index, absl::Status status) {
    reports[index].status = std::move(status);
    reports[index].finished = true;
  };
  for (size_t next = 0; next < images.size() || !running.empty();) {
    while (next < images.size() && running.size() < options.jobs) {
      const size_t index = next++;
      reports[index].image = images[index];
      const absl::StatusOr<uint64_t> id = Begin(client, images[index], options);
      if (id.ok()) {
        running.push_back({index, *id});
      } else {
        fail(index, Annotate(id.status(), "prefetch " + images[index]));
      }
    }
    std::this_thread::sleep_for(running.empty() ? std::chrono::milliseconds(0) : kPollInterval);
    for (Running& job : running) {
      absl::StatusOr<fs::PrefetchReport> report =
          AskOrRestart(client, job, images[job.index], options);
      if (report.ok()) {
        reports[job.index] = *std::move(report);
      } else {
        fail(job.index, Annotate(report.status(), "prefetch " + images[job.index]));
      }
    }
    std::erase_if(running, [&](const Running& job) { return reports[job.index].finished; });
    ShowProgress(line, reports);
  }
  return reports;
}

void Print(const std::vector<fs::PrefetchReport>& reports) {
  for (const fs::PrefetchReport& report : reports) {
    if (!report.status.ok()) {
      PrintError(std::string(report.status.message()));
      continue;
    }
    PrintText("{}: {} in {} requests, {:.1f} s\n", report.image, HumanSize(report.bytes),
              report.requests, report.seconds);
  }
}

absl::StatusOr<int> Run(const Options& options) {
  std::vector<std::string> images = options.images;
  if (!options.list.empty()) {
    ASSIGN_OR_RETURN(const std::vector<std::string> listed, ReadList(options.list), "--from-file");
    images.insert(images.end(), listed.begin(), listed.end());
  }
  if (images.empty()) return UsageError(absl::InvalidArgumentError("prefetch: no image was given"));
  ASSIGN_OR_RETURN(const registry::Settings settings, ToSettings(options.registry));
  RETURN_IF_ERROR(UsageError(fs::CheckCredentials(images, settings)));
  ASSIGN_OR_RETURN(std::vector<std::string> engine, EngineArguments(options.cache));
  fs::Client client(options.state, ProgramPath(), std::move(engine));
  const std::vector<fs::PrefetchReport> reports = PrefetchAll(client, images, options);
  if (options.json) {
    json list = json::array();
    for (const fs::PrefetchReport& report : reports) list.push_back(fs::ToJson(report));
    PrintJson(list);
  } else {
    Print(reports);
  }
  const bool all_ok = std::ranges::all_of(
      reports, [](const fs::PrefetchReport& report) { return report.status.ok(); });
  return all_ok ? kExitOk : kExitFailure;
}

}  // namespace

void AddPrefetch(CLI::App& app, Action& run) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("prefetch", "Fetch images onto this node, so that later mounts need not");
  command->add_option("images", options->images, kImageHelp);
  command->add_option("--from-file", options->list,
                      "Also the images that this file lists, one a line; - is standard input");
  command->add_flag("--profile-only", options->profile_only,
                    "Only what each image's profile names");
  command->add_option("--prefetch-rate", options->rate,
                      "Bytes a second for each image, as in 20M [no limit]");
  command->add_option("--jobs", options->jobs, "Images at the same time")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  AddRegistryOptions(*command, options->registry);
  AddStateOption(*command, options->state);
  AddCacheOptions(*command, options->cache);
  command->add_flag("--json", options->json, "Print one report for each image as JSON");
  command->callback([options, &run] { run = [options] { return Run(*options); }; });
}

}  // namespace lamina::cli
