// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/credentials.h"

#include <absl/strings/ascii.h>
#include <absl/strings/escaping.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "chunkstore/base/file.h"
#include "chunkstore/base/json.h"
#include "chunkstore/registry/credential_helper.h"

namespace lamina::registry {
namespace {

constexpr std::string_view kDockerHub = "docker.io";
// The key under which docker keeps what is for Docker Hub.
constexpr std::string_view kDockerHubKey = "https://index.docker.io/v1/";

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// What keys of a file may stand for a registry, whole: "host", or what docker has made of it over the
// years, "https://host/v1/".
std::string_view HostOfKey(std::string_view key) {
  for (const std::string_view scheme : {"https://", "http://"}) {
    if (key.starts_with(scheme)) key.remove_prefix(scheme.size());
  }
  const size_t slash = key.find('/');
  const std::string_view path = slash == std::string_view::npos ? "" : key.substr(slash);
  const bool is_whole = path.empty() || path == "/" || path == "/v1" || path == "/v1/" ||
                        path == "/v2" || path == "/v2/";
  if (!is_whole) return "";
  const std::string_view host = key.substr(0, slash);
  return host == "index.docker.io" || host == "registry-1.docker.io" ? kDockerHub : host;
}

absl::StatusOr<std::optional<Credential>> ReadEntry(const oci::Field& entry) {
  Credential credential;
  ASSIGN_OR_RETURN(const std::string encoded, entry.OptionalString("auth"));
  ASSIGN_OR_RETURN(credential.username, entry.OptionalString("username"));
  ASSIGN_OR_RETURN(credential.password, entry.OptionalString("password"));
  ASSIGN_OR_RETURN(credential.identity_token, entry.OptionalString("identitytoken"));
  if (!encoded.empty()) {
    std::string decoded;
    const size_t colon = absl::Base64Unescape(encoded, &decoded) ? decoded.find(':') : decoded.npos;
    if (colon == std::string::npos) return entry.Error("'auth' is not USER:PASSWORD in base64");
    credential.username = decoded.substr(0, colon);
    credential.password = decoded.substr(colon + 1);
    // Some versions of docker padded it with zeros.
    while (credential.password.ends_with('\0')) credential.password.pop_back();
  }
  if (credential == Credential()) return std::optional<Credential>();
  return credential;
}

// The entry of "auths" that is closest: the repository, the paths above it, the registry.
absl::StatusOr<std::optional<Credential>> FindInAuths(const oci::Field& auths,
                                                      std::string_view host,
                                                      std::string_view repository) {
  ASSIGN_OR_RETURN(const std::vector<std::string> keys, auths.Keys());
  std::vector<std::string> candidates;
  for (std::string path = fmt::format("{}/{}", host, repository); path.find('/') != path.npos;
       path.resize(path.rfind('/'))) {
    candidates.push_back(path);
  }
  std::vector<std::string> matching;
  for (const std::string& candidate : candidates) {
    if (std::ranges::find(keys, candidate) != keys.end()) matching.push_back(candidate);
  }
  if (std::ranges::find(keys, host) != keys.end()) matching.emplace_back(host);
  for (const std::string& key : keys) {
    if (key != host && HostOfKey(key) == host) matching.push_back(key);
  }
  for (const std::string& key : matching) {
    ASSIGN_OR_RETURN(const std::optional<oci::Field> entry, auths.Find(key));
    if (!entry) continue;
    ASSIGN_OR_RETURN(std::optional<Credential> credential, ReadEntry(*entry));
    if (credential) return credential;
  }
  return std::optional<Credential>();
}

// What a file says; empty for /dev/null, which is how people say that there is none. Reading a FIFO
// would wait for a writer.
absl::StatusOr<std::string> ReadAuthFile(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  if (S_ISCHR(info.st_mode) && info.st_rdev == makedev(1, 3)) return std::string();
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(fmt::format("{}: it is not a regular file", path));
  }
  return ReadFileToString(path, oci::kMaxDocumentSize);
}

}  // namespace

absl::StatusOr<Credential> Credential::Parse(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos || colon == 0) {
    return absl::InvalidArgumentError("credentials are given as USER:PASSWORD");
  }
  return Credential{.username = std::string(text.substr(0, colon)),
                    .password = std::string(text.substr(colon + 1))};
}

std::string Credential::Basic() const {
  return "Basic " + absl::Base64Escape(fmt::format("{}:{}", username, password));
}

absl::StatusOr<std::vector<std::string>> AuthFilesOfEnvironment() {
  const auto absolute = [](const std::string& file) -> absl::StatusOr<std::string> {
    std::error_code error;
    const std::filesystem::path path = std::filesystem::absolute(file, error);
    if (error) return ErrnoStatus(error.value(), "find " + file);
    return path.string();
  };
  if (const std::string file = Environment("REGISTRY_AUTH_FILE"); !file.empty()) {
    ASSIGN_OR_RETURN(std::string path, absolute(file));
    return std::vector<std::string>{std::move(path)};
  }
  std::vector<std::string> files;
  // Relative directories of XDG's are not valid (XDG Base Directory Specification).
  const auto add_xdg = [&files](const std::string& directory) {
    if (directory.starts_with('/')) files.push_back(directory + "/containers/auth.json");
  };
  const std::string home = Environment("HOME");
  const auto in_home = [&home](const char* variable, const char* otherwise) {
    const std::string value = Environment(variable);
    return value.empty() ? home + otherwise : value;
  };
  const std::string runtime = Environment("XDG_RUNTIME_DIR");
  if (runtime.empty()) {
    const std::string directory = fmt::format("/run/containers/{}", ::getuid());
    // For others than root it is rarely there, and often behind a directory that they may not enter.
    if (::getuid() == 0 || ::access(directory.c_str(), X_OK) == 0) {
      files.push_back(directory + "/auth.json");
    }
  }
  add_xdg(runtime);
  add_xdg(in_home("XDG_CONFIG_HOME", "/.config"));
  ASSIGN_OR_RETURN(std::string docker, absolute(in_home("DOCKER_CONFIG", "/.docker")));
  files.push_back(docker + "/config.json");
  return files;
}

absl::StatusOr<AuthFileEntry> FindInAuthFile(std::string_view json, std::string_view document,
                                             std::string_view host, std::string_view repository) {
  ASSIGN_OR_RETURN(const nlohmann::json value, oci::ParseJson(json, document));
  const oci::Field file(value, document);
  AuthFileEntry found;
  ASSIGN_OR_RETURN(const auto helpers, file.OptionalStringMap("credHelpers"));
  for (const auto& [key, helper] : helpers) {
    if (HostOfKey(key) == host) found.helper = helper;
  }
  if (!found.helper.empty()) return found;
  ASSIGN_OR_RETURN(const std::optional<oci::Field> auths, file.Find("auths"));
  if (auths) {
    ASSIGN_OR_RETURN(found.credential, FindInAuths(*auths, host, repository));
  }
  if (!found.credential) {
    ASSIGN_OR_RETURN(found.helper, file.OptionalString("credsStore"));
  }
  return found;
}

absl::StatusOr<std::optional<Credential>> FindCredential(const CredentialSources& sources,
                                                         std::string_view host,
                                                         std::string_view repository) {
  for (const bool exact : {true, false}) {
    for (const CredentialSources::Given& given : sources.given) {
      if (exact ? given.host == host : given.host.empty()) return given.credential;
    }
  }
  for (const std::string& path : sources.files) {
    const absl::StatusOr<std::string> text = ReadAuthFile(path);
    if (absl::IsNotFound(text.status())) continue;
    RETURN_IF_ERROR(text.status(), "credentials");
    if (absl::StripAsciiWhitespace(*text).empty()) continue;
    ASSIGN_OR_RETURN(AuthFileEntry entry, FindInAuthFile(*text, path, host, repository));
    if (!entry.helper.empty()) {
      const std::string_view key = host == kDockerHub ? kDockerHubKey : host;
      ASSIGN_OR_RETURN(entry.credential, AskHelper(entry.helper, key), "credentials for {}", host);
    }
    if (entry.credential) return entry.credential;
  }
  return std::optional<Credential>();
}

}  // namespace lamina::registry
