// SPDX-License-Identifier: Apache-2.0
//
// Where docker and podman look for the authorities of one registry: <directory>/<HOST[:PORT]>/ca.crt
// (containers-certs.d(5)).
#ifndef LAMINA_CHUNKSTORE_REGISTRY_CA_FILE_H_
#define LAMINA_CHUNKSTORE_REGISTRY_CA_FILE_H_

#include <string>
#include <vector>

namespace lamina::registry {

// In /etc: of containers, then of docker.
std::vector<std::string> CertificateDirectories();
// The first that there is; empty if there is none.
std::string FindCaFile(const std::string& host, const std::vector<std::string>& directories);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_CA_FILE_H_
