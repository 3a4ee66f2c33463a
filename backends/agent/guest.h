// SPDX-License-Identifier: Apache-2.0
//
// The agent as the first process of a virtual machine. Its kernel starts it from an initramfs that holds
// nothing else but modules (/modules); it mounts the image, which is on persistent memory devices (the
// merged metadata, then the layers), and something writable on top, makes that its root, and serves its
// protocol, over a serial port through Mux or over vsock.
//
// What it is to do is on the kernel's command line:
//
//   lamina.layers=N        persistent memory devices besides the first
//   lamina.upper=disk      changes are kept on the first disk (ext4), and not in memory
//   lamina.memory=BYTES, lamina.processes=N  limits of all programs together
//   lamina.hostname=NAME
//   lamina.vsock=PORT      serve on that port
//   lamina.reclaim=1       give memory back that is not used (reclaim.h)
#ifndef LAMINA_BACKENDS_AGENT_GUEST_H_
#define LAMINA_BACKENDS_AGENT_GUEST_H_

#include <string_view>

namespace lamina::agent {

// The name of the serial port that the agent serves.
inline constexpr std::string_view kAgentPort = "lamina.agent";
// The name that the kernel starts it by.
inline constexpr std::string_view kGuestInit = "/init";

// Serves until the host is gone; then, or if something fails, which it says on the console, it turns the
// machine off. Times to live are the host's business.
[[noreturn]] void RunGuest();

}  // namespace lamina::agent

#endif  // LAMINA_BACKENDS_AGENT_GUEST_H_
