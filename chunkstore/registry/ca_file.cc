// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/ca_file.h"

#include <fmt/format.h>
#include <unistd.h>

namespace lamina::registry {

std::vector<std::string> CertificateDirectories() {
  return {"/etc/containers/certs.d", "/etc/docker/certs.d"};
}

std::string FindCaFile(const std::string& host, const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    std::string path = fmt::format("{}/{}/ca.crt", directory, host);
    if (::access(path.c_str(), F_OK) == 0) return path;
  }
  return "";
}

}  // namespace lamina::registry
