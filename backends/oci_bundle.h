// SPDX-License-Identifier: Apache-2.0
//
// OCI runtime bundles (runtime-spec config.json) for containers that run an image.
#ifndef LAMINA_BACKENDS_OCI_BUNDLE_H_
#define LAMINA_BACKENDS_OCI_BUNDLE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"
#include "fs/image/oci.h"

namespace lamina::backends {

// A user as the kernel knows it.
struct User {
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> additional_gids;
  std::string home = "/";
};

// Resolves the `user` of an image configuration ("", "name", "uid", "name:group", "uid:gid"; either
// side of the colon may be empty) against etc/passwd and etc/group below `rootfs`, as Docker does:
// what is a number is an id, listed or not, never a name. Symbolic links are followed inside rootfs
// only, and nothing but a regular file is opened. kNotFound, naming what is missing, for a name that
// is not listed; kInvalidArgument for ids that are not below 2^31.
absl::StatusOr<User> ResolveUser(const std::string& rootfs, std::string_view user);

struct BundleOptions {
  std::string rootfs;  // absolute path of the mounted image
  oci::ImageConfig config;
  std::vector<std::string> command;  // replaces the image's command if not empty
  std::string agent;                 // the program lamina-agent on the host
  bool terminal = false;
  std::string hostname = "lamina";
};

// Variables: `environment`, then `added`, which replace those of the same name. kInvalidArgument for
// what is no "NAME=value", not UTF-8 or has a NUL.
absl::StatusOr<std::vector<std::string>> WithVariables(std::vector<std::string> environment,
                                                       const std::vector<std::string>& added);
// The same, with PATH and HOME if nothing gives them: what a program of the user starts with.
absl::StatusOr<std::vector<std::string>> ProgramEnvironment(std::vector<std::string> environment,
                                                            const std::vector<std::string>& added,
                                                            const User& user);

// The text of config.json: pid, mount, ipc and uts namespaces, the host's network, the system call
// filter, capabilities, masked paths and devices that container engines give by default. The agent becomes the program, or ends with
// 127 or 126 if it cannot. Fails if neither image nor options say what to run, and with
// kInvalidArgument if an argument or variable is not UTF-8 or has a NUL.
absl::StatusOr<std::string> BundleConfig(const BundleOptions& options);

// A container that holds a sandbox: its first process is the agent, which starts all others.
struct SandboxBundleOptions {
  std::string rootfs;                  // absolute path of the mounted image
  std::string agent;                   // the agent's program on the host
  std::vector<std::string> arguments;  // the agent's, without its name
  std::string hostname = "lamina";
  std::string cgroup;  // below each controller's root
  bool host_network = false;
  std::string compiled_filter;  // the default system call filter (CompiledFilter), if there is one
  // The agent is the last to be killed for want of memory. For launchers with CAP_SYS_RESOURCE.
  bool protect_agent = false;
};

// The text of its config.json: namespaces of its own for all but, if asked for, the network; the
// default system call filter, capabilities, masked paths and devices. The agent has one capability more
// than kSandboxCapabilities says, so that nothing it starts can trace it; it takes it from them.
absl::StatusOr<std::string> SandboxBundleConfig(const SandboxBundleOptions& options);

// What programs in a container may have, as bits (capabilities(7)).
extern const uint64_t kSandboxCapabilities;

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_OCI_BUNDLE_H_
