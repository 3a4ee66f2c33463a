// SPDX-License-Identifier: Apache-2.0
//
// `lamina sandbox`: makes sandboxes, runs programs in them, copies files, and takes them away.
#include <algorithm>
#include <memory>

#include "backends/launcher.h"
#include "tools/lamina/commands.h"
#include "tools/lamina/output.h"
#include "tools/lamina/sandbox_options.h"

namespace lamina::cli {
namespace {

using backends::CopyCount;
using backends::Launcher;
using backends::ListedSandbox;
using backends::Sandbox;
using nlohmann::json;

struct Options {
  std::string state;
  CacheFlags cache;
  RegistryOptions registry;
  SandboxFlags sandbox;
  ExecFlags exec;
  std::string image;
  std::string snapshot;
  std::vector<std::string> layers;
  std::string id;
  std::vector<std::string> ids;
  std::string session;
  std::string script;
  std::string from;
  std::string to;
  std::string max_bytes = "64G";
  bool snapshots = false;
  bool json = false;
  std::vector<std::string> command;
};

absl::StatusOr<Launcher> Open(const Options& options) {
  ASSIGN_OR_RETURN(backends::LauncherOptions launcher,
                   ToLauncherOptions(options.state, options.cache));
  return Launcher(std::move(launcher));
}

absl::StatusOr<std::unique_ptr<Sandbox>> Find(const Options& options) {
  ASSIGN_OR_RETURN(Launcher launcher, Open(options));
  return launcher.Find(options.id);
}

absl::StatusOr<int> Create(Options& options) {
  if (options.image.empty() == options.snapshot.empty()) {
    return UsageError(absl::InvalidArgumentError("say either an image or --snapshot"));
  }
  ASSIGN_OR_RETURN(backends::SandboxOptions sandbox_options, ToSandboxOptions(options.sandbox));
  if (!options.image.empty()) {
    ASSIGN_OR_RETURN(sandbox_options.image, AbsoluteReference(options.image));
  }
  sandbox_options.snapshot = options.snapshot;
  RETURN_IF_ERROR(MakeAbsolute(options.layers));
  sandbox_options.layers = options.layers;
  ASSIGN_OR_RETURN(sandbox_options.registry, ToSettings(options.registry));
  ASSIGN_OR_RETURN(const backends::Choice choice, ToBackend(options.sandbox, /*stateless=*/false));
  ASSIGN_OR_RETURN(Launcher launcher, Open(options));
  RemoveLeftovers(launcher);
  ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> sandbox,
                   launcher.Create(*choice.backend, sandbox_options), "create a sandbox");
  if (options.json) {
    PrintJson(
        {{"id", sandbox->id()}, {"backend", choice.backend->name()}, {"reason", choice.reason}});
  } else {
    PrintText("{}\n", sandbox->id());
    if (!choice.reason.empty()) PrintError(choice.reason);
  }
  return kExitOk;
}

absl::StatusOr<int> Exec(Options& options) {
  if (options.command.empty() == options.script.empty()) {
    return UsageError(absl::InvalidArgumentError("say either --shell SCRIPT or -- COMMAND..."));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> sandbox, Find(options));
  options.exec.json = options.json;
  return ExecInSandbox(*sandbox,
                       {.arguments = options.command,
                        .script = options.script,
                        .environment = options.sandbox.environment,
                        .user = options.sandbox.user,
                        .working_directory = options.sandbox.working_directory,
                        .session = options.session},
                       options.exec);
}

// "ID:PATH" gives both; a path of the host has a slash before any colon, or no colon.
bool SplitPlace(const std::string& text, std::string& id, std::string& path) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos || text.find('/') < colon) return false;
  id = text.substr(0, colon);
  path = text.substr(colon + 1);
  return true;
}

// A directory as destination means a place in it.
std::string IntoDirectory(const std::string& from, std::string to) {
  if (!to.ends_with('/')) return to;
  std::string name = from;
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  return to + name.substr(name.rfind('/') + 1);
}

absl::StatusOr<int> Copy(Options& options) {
  std::string path;
  const bool out = SplitPlace(options.from, options.id, path);
  std::string other;
  const bool in = SplitPlace(options.to, other, path);
  if (in == out) {
    return UsageError(absl::InvalidArgumentError("one of the places must be ID:PATH"));
  }
  if (in) options.id = other;
  ASSIGN_OR_RETURN(const uint64_t max_bytes, ParseSize(options.max_bytes), "--max-bytes");
  ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> sandbox, Find(options));
  absl::StatusOr<CopyCount> count;
  if (in) {
    count = sandbox->CopyIn(options.from, IntoDirectory(options.from, path));
  } else {
    SplitPlace(options.from, other, path);
    count = sandbox->CopyOut(path, IntoDirectory(path, options.to), max_bytes);
  }
  RETURN_IF_ERROR(count.status(), "copy {}", options.from);
  if (options.json) {
    PrintJson({{"entries", count->entries}, {"bytes", count->bytes}, {"skipped", count->skipped}});
  } else if (count->skipped > 0) {
    PrintError(fmt::format("{} sockets, FIFOs or devices were left out", count->skipped));
  }
  return kExitOk;
}

json ToJson(const ListedSandbox& listed) {
  if (!listed.problem.ok()) {
    return {{"id", listed.record.id}, {"problem", std::string(listed.problem.message())}};
  }
  return {{"id", listed.record.id},
          {"backend", listed.record.backend},
          {"state", backends::StateName(listed.state)},
          {"image", listed.record.image},
          {"manifest_digest", listed.record.manifest_digest},
          {"layers", listed.record.layers},
          {"snapshot", listed.record.from_snapshot},
          {"created_ms", listed.record.created_ms},
          {"ttl_ms", listed.record.ttl_ms},
          {"idle_ttl_ms", listed.record.idle_ttl_ms},
          {"process", listed.record.first_process}};
}

absl::StatusOr<int> List(const Options& options) {
  ASSIGN_OR_RETURN(Launcher launcher, Open(options));
  if (options.snapshots) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, launcher.Snapshots());
    if (options.json) {
      PrintJson(names);
    } else {
      for (const std::string& name : names) PrintText("{}\n", name);
    }
    return kExitOk;
  }
  RemoveLeftovers(launcher);
  ASSIGN_OR_RETURN(const std::vector<ListedSandbox> all, launcher.List());
  json array = json::array();
  std::vector<std::vector<std::string>> rows = {{"id", "backend", "state", "age", "image"}};
  for (const ListedSandbox& listed : all) {
    array.push_back(ToJson(listed));
    if (!listed.problem.ok()) {
      rows.push_back({listed.record.id, "", "", "", std::string(listed.problem.message())});
      continue;
    }
    const int64_t age = (backends::NowMilliseconds() - listed.record.created_ms) / 1000;
    rows.push_back({listed.record.id, listed.record.backend,
                    std::string(backends::StateName(listed.state)), fmt::format("{} s", age),
                    listed.record.image});
  }
  if (options.json) {
    PrintJson(array);
  } else if (all.empty()) {
    PrintText("no sandboxes\n");
  } else {
    PrintTable(rows);
  }
  return kExitOk;
}

absl::StatusOr<int> Stats(const Options& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> sandbox, Find(options));
  ASSIGN_OR_RETURN(const backends::SandboxStats stats, sandbox->Stats());
  if (options.json) {
    PrintJson({{"memory_bytes", stats.memory_bytes},
               {"memory_peak_bytes", stats.memory_peak_bytes},
               {"memory_kills", stats.memory_kills},
               {"cpu_us", stats.cpu_time.count()},
               {"processes", stats.processes},
               {"disk_bytes", stats.disk_bytes},
               {"running_execs", stats.running_execs},
               {"uptime_ms", stats.uptime.count()},
               {"sessions", stats.sessions}});
    return kExitOk;
  }
  PrintText("memory     {}, {} at the most, {} processes killed for it\n",
            HumanSize(stats.memory_bytes), HumanSize(stats.memory_peak_bytes), stats.memory_kills);
  PrintText("processor  {:.2f} s\n", static_cast<double>(stats.cpu_time.count()) / 1e6);
  PrintText("processes  {}, {} commands running\n", stats.processes, stats.running_execs);
  PrintText("disk       {} written\n", HumanSize(stats.disk_bytes));
  PrintText("up for     {:.1f} s, {} sessions\n", static_cast<double>(stats.uptime.count()) / 1e3,
            stats.sessions.size());
  return kExitOk;
}

absl::StatusOr<int> Remove(const Options& options) {
  ASSIGN_OR_RETURN(Launcher launcher, Open(options));
  if (options.ids.empty() == options.snapshot.empty()) {
    return UsageError(absl::InvalidArgumentError("say either sandboxes or --snapshot"));
  }
  if (!options.snapshot.empty()) {
    RETURN_IF_ERROR(launcher.RemoveSnapshot(options.snapshot));
    return kExitOk;
  }
  // All that can be removed are, whatever happens to the others.
  absl::Status result;
  for (const std::string& id : options.ids) result.Update(launcher.Remove(id));
  RETURN_IF_ERROR(result);
  return kExitOk;
}

using Call = absl::StatusOr<int> (*)(Options&);

CLI::App* AddCommand(CLI::App& parent, const char* name, const char* help,
                     const std::shared_ptr<Options>& options, Action& run, Call call) {
  CLI::App* command = parent.add_subcommand(name, help);
  AddStateOption(*command, options->state);
  command->callback([options, &run, call] { run = [options, call] { return call(*options); }; });
  return command;
}

void AddId(CLI::App& command, Options& options) {
  command.add_option("id", options.id, "The sandbox")->required();
}

}  // namespace

void AddSandbox(CLI::App& app, std::vector<std::string> command_line, Action& run) {
  auto options = std::make_shared<Options>();
  options->command = std::move(command_line);
  CLI::App* sandbox = app.add_subcommand("sandbox", "Sandboxes that stay, and programs in them");
  sandbox->require_subcommand(1);

  CLI::App* create =
      AddCommand(*sandbox, "create", "Start a sandbox and print its id", options, run, Create);
  create->add_option("image", options->image, kImageHelp);
  create->add_option("--snapshot", options->snapshot, "Start from a snapshot, not from an image");
  AddLayerOption(*create, options->layers);
  AddSandboxFlags(*create, options->sandbox);
  AddRegistryOptions(*create, options->registry);
  AddCacheOptions(*create, options->cache);
  create->add_flag("--json", options->json, "Print JSON");

  CLI::App* exec = AddCommand(*sandbox, "exec", "Run a program: exec ID [OPTIONS] -- COMMAND...",
                              options, run, Exec);
  AddId(*exec, *options);
  exec->add_option("--shell", options->script, "Run a script with the image's /bin/sh instead");
  exec->add_option("--session", options->session,
                   "Keep working directory and exported variables under this name");
  exec->add_option("--env,-e", options->sandbox.environment, "NAME=value")->allow_extra_args(false);
  exec->add_option("--user", options->sandbox.user, "User in the image [the sandbox's]");
  exec->add_option("--workdir", options->sandbox.working_directory,
                   "Working directory [the sandbox's]");
  AddExecFlags(*exec, options->exec);
  exec->add_flag("--json", options->json, "Print the result as JSON, with the output in it");
  // Only for the help: CutRunCommand has taken it out.
  exec->add_option("command", "After --: the program and its arguments");

  CLI::App* copy = AddCommand(
      *sandbox, "cp", "Copy a file or tree: cp FROM TO, one of them ID:PATH", options, run, Copy);
  copy->add_option("from", options->from, "PATH or ID:PATH")->required();
  copy->add_option("to", options->to, "ID:PATH or PATH; one that ends with / is a directory")
      ->required();
  copy->add_option("--max-bytes", options->max_bytes, "Of file content, coming out")
      ->type_name("SIZE")
      ->capture_default_str();
  copy->add_flag("--json", options->json, "Print counts as JSON");

  AddId(*AddCommand(*sandbox, "pause", "Stop the processor for a sandbox", options, run,
                    [](Options& o) -> absl::StatusOr<int> {
                      ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> found, Find(o));
                      RETURN_IF_ERROR(found->Pause());
                      return kExitOk;
                    }),
        *options);
  AddId(*AddCommand(*sandbox, "resume", "Let a paused sandbox go on", options, run,
                    [](Options& o) -> absl::StatusOr<int> {
                      ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> found, Find(o));
                      RETURN_IF_ERROR(found->Resume());
                      return kExitOk;
                    }),
        *options);
  CLI::App* snapshot =
      AddCommand(*sandbox, "snapshot", "Keep a sandbox's disk under a name, to start others from",
                 options, run, [](Options& o) -> absl::StatusOr<int> {
                   ASSIGN_OR_RETURN(const std::unique_ptr<Sandbox> found, Find(o));
                   RETURN_IF_ERROR(found->Snapshot(o.snapshot));
                   return kExitOk;
                 });
  AddId(*snapshot, *options);
  snapshot->add_option("name", options->snapshot, "Name of the snapshot")->required();

  CLI::App* list = AddCommand(*sandbox, "ls", "List sandboxes", options, run,
                              [](Options& o) { return List(o); });
  list->add_flag("--snapshots", options->snapshots, "List snapshots instead");
  list->add_flag("--json", options->json, "Print JSON");
  CLI::App* stats = AddCommand(*sandbox, "stats", "What a sandbox uses", options, run,
                               [](Options& o) { return Stats(o); });
  AddId(*stats, *options);
  stats->add_flag("--json", options->json, "Print JSON");
  CLI::App* remove = AddCommand(*sandbox, "rm", "Kill and remove sandboxes", options, run,
                                [](Options& o) { return Remove(o); });
  remove->add_option("ids", options->ids, "The sandboxes");
  remove->add_option("--snapshot", options->snapshot, "Remove a snapshot instead");
}

}  // namespace lamina::cli
