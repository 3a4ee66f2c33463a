// SPDX-License-Identifier: Apache-2.0
//
// Debian's docker-registry, run for a test on a free port of the loopback interface.
#ifndef LAMINA_TESTS_REGISTRY_REGISTRY_SERVER_H_
#define LAMINA_TESTS_REGISTRY_REGISTRY_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/file.h"

namespace lamina::registry {

class RegistryServer {
 public:
  // A failure is a failure of the test.
  static std::unique_ptr<RegistryServer> Start();
  ~RegistryServer();

  // "127.0.0.1:PORT".
  const std::string& host() const { return host_; }

  // Blobs of the repository "test", put into the server's storage behind its back: their digests may
  // be wrong.
  void Put(const Digest& digest, const std::string& content);
  void Truncate(const Digest& digest, uint64_t size);
  void Remove(const Digest& digest);

 private:
  RegistryServer(TemporaryDirectory directory, pid_t pid, std::string host)
      : directory_(std::move(directory)), pid_(pid), host_(std::move(host)) {}
  std::string DataPath(const Digest& digest) const;

  TemporaryDirectory directory_;
  pid_t pid_;
  std::string host_;
};

}  // namespace lamina::registry

#endif  // LAMINA_TESTS_REGISTRY_REGISTRY_SERVER_H_
