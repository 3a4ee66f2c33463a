// SPDX-License-Identifier: Apache-2.0
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <utility>

#include "fs/image/oci.h"

namespace lamina::oci {
namespace {

// Names of uname(2) and what Go calls them (GOARCH), which is what images use.
struct Machine {
  std::string_view uname;
  std::string_view architecture;
  std::string_view variant;
};
constexpr std::array kMachines = {
    Machine{"x86_64", "amd64", ""},
    Machine{"aarch64", "arm64", "v8"},
    Machine{"armv7l", "arm", "v7"},
    Machine{"armv6l", "arm", "v6"},
    Machine{"i686", "386", ""},
    Machine{"riscv64", "riscv64", ""},
    Machine{"ppc64le", "ppc64le", ""},
    Machine{"s390x", "s390x", ""},
    Machine{"loongarch64", "loong64", ""},
};

bool IsWord(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
  });
}

}  // namespace

absl::StatusOr<Platform> Platform::Parse(std::string_view text) {
  std::array<std::string, 3> parts;
  size_t count = 0;
  for (std::string_view rest = text;;) {
    const size_t slash = rest.find('/');
    const std::string_view part = rest.substr(0, slash);
    if (count == parts.size() || !IsWord(part)) {
      count = 0;
      break;
    }
    parts[count++] = std::string(part);
    if (slash == std::string_view::npos) break;
    rest.remove_prefix(slash + 1);
  }
  if (count < 2) {
    return absl::InvalidArgumentError(
        fmt::format("platform '{}': not of the form OS/ARCHITECTURE[/VARIANT], "
                    "such as linux/amd64 or linux/arm64/v8",
                    text.substr(0, 100)));
  }
  return Platform{std::move(parts[0]), std::move(parts[1]), std::move(parts[2])};
}

Platform Platform::Host() {
  utsname name{};
  ::uname(&name);  // fails only for a bad pointer
  for (const Machine& machine : kMachines) {
    if (machine.uname == name.machine) {
      return {"linux", std::string(machine.architecture), std::string(machine.variant)};
    }
  }
  return {"linux", name.machine, ""};
}

std::string Platform::ToString() const {
  std::string text = fmt::format("{}/{}", os, architecture);
  if (!variant.empty()) text += "/" + variant;
  return text;
}

bool Platform::Matches(const Platform& other) const {
  return os == other.os && architecture == other.architecture &&
         (variant.empty() || other.variant.empty() || variant == other.variant);
}

}  // namespace lamina::oci
