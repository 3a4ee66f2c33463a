// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "chunkstore/base/file.h"
#include "chunkstore/registry/reference.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {
namespace {

// "[HOST=]USER:PASSWORD". A host is told from a user name by its dot, or is "localhost".
absl::StatusOr<registry::CredentialSources::Given> ParseCredentials(const std::string& text) {
  registry::CredentialSources::Given given;
  std::string rest = text;
  const std::string host = text.substr(0, text.find('='));
  const bool looks_like_host =
      host.find('.') != std::string::npos || host.starts_with("localhost") || host.starts_with('[');
  if (host.size() < text.size() && looks_like_host && registry::CheckHost(host).ok()) {
    given.host = host;
    rest = text.substr(host.size() + 1);
  }
  ASSIGN_OR_RETURN(given.credential, registry::Credential::Parse(rest), "--creds");
  return given;
}

}  // namespace

void AddRegistryOptions(CLI::App& command, RegistryOptions& options) {
  const auto add = [&command](const char* name, auto& value, const char* text) {
    return command.add_option(name, value, text)->group("Registries");
  };
  add("--creds", options.credentials,
      "[HOST=]USER:PASSWORD, in place of what docker login or podman login have kept")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add("--mirror", options.mirrors,
      "[HOST=]URL of a server to ask before the registry; may be given several times")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add("--ca-file", options.ca_file, "Certificate authorities (PEM) beside the system's");
  command
      .add_flag("--plain-http", options.plain_http,
                "Use http, without encryption (loopback addresses need no leave)")
      ->group("Registries");
}

absl::StatusOr<registry::Settings> ToSettings(const RegistryOptions& options) {
  registry::Settings settings{.plain_http = options.plain_http};
  ASSIGN_OR_RETURN(settings.credentials.files, registry::AuthFilesOfEnvironment());
  for (const std::string& text : options.credentials) {
    ASSIGN_OR_RETURN(registry::CredentialSources::Given given, ParseCredentials(text));
    settings.credentials.given.push_back(std::move(given));
  }
  for (const std::string& text : options.mirrors) {
    ASSIGN_OR_RETURN(registry::Mirror mirror, registry::Mirror::Parse(text));
    settings.mirrors.push_back(std::move(mirror));
  }
  if (!options.ca_file.empty()) {
    std::error_code error;
    const std::filesystem::path path = std::filesystem::canonical(options.ca_file, error);
    if (error) return ErrnoStatus(error.value(), "--ca-file " + options.ca_file);
    settings.ca_file = path.string();
  }
  return settings;
}

}  // namespace lamina::cli
