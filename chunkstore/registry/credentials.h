// SPDX-License-Identifier: Apache-2.0
//
// User names and passwords for registries, from where docker and podman keep them: files with "auths",
// "credHelpers" and "credsStore" (docker's config.json, containers-auth.json(5)), and the helper
// programs that those name.
#ifndef LAMINA_CHUNKSTORE_REGISTRY_CREDENTIALS_H_
#define LAMINA_CHUNKSTORE_REGISTRY_CREDENTIALS_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"

namespace lamina::registry {

struct Credential {
  std::string username;
  std::string password;
  std::string identity_token;  // an OAuth2 refresh token, in place of the password

  // "USER:PASSWORD". The error does not repeat the text.
  static absl::StatusOr<Credential> Parse(std::string_view text);
  // The value of an Authorization header.
  std::string Basic() const;
  bool operator==(const Credential&) const = default;
};

// What is known of credentials, as the user said it and before any file is read. Holds secrets: it
// must not be logged or written to a disk.
struct CredentialSources {
  struct Given {
    std::string host;  // empty: for whatever registry the image is in
    Credential credential;
  };
  std::vector<Given> given;
  std::vector<std::string> files;  // absolute paths; the first that knows a registry decides
};

// The files that this process' environment names, with absolute paths, whether they are there or not:
// $REGISTRY_AUTH_FILE alone if it is set; else ${XDG_RUNTIME_DIR}/containers/auth.json, or without
// that variable /run/containers/UID/auth.json (containers-auth.json(5)), then
// ${XDG_CONFIG_HOME:-~/.config}/containers/auth.json and ${DOCKER_CONFIG:-~/.docker}/config.json.
absl::StatusOr<std::vector<std::string>> AuthFilesOfEnvironment();

// The credential for a repository, if there is one. Reads files and runs helpers each time, since
// either may change. Files that are not there or empty are passed over, and so is /dev/null; one that
// cannot be read or understood, and a helper that fails, is an error. Any thread.
absl::StatusOr<std::optional<Credential>> FindCredential(const CredentialSources& sources,
                                                         std::string_view host,
                                                         std::string_view repository);

// What an auth file says of a repository: a credential, the name of a helper to ask, or neither.
struct AuthFileEntry {
  std::optional<Credential> credential;
  std::string helper;
};
absl::StatusOr<AuthFileEntry> FindInAuthFile(std::string_view json, std::string_view document,
                                             std::string_view host, std::string_view repository);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_CREDENTIALS_H_
