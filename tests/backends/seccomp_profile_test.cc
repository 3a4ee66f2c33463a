// SPDX-License-Identifier: Apache-2.0
//
// The profile as libseccomp, and so a container runtime, understands it.
#include "backends/seccomp_profile.h"

#include <gmock/gmock.h>
#include <seccomp.h>
#include <sys/mman.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using testing::HasSubstr;
using testing::Not;

// The filter that a runtime makes of the profile, as libseccomp prints it.
std::string FilterAsText() {
  const nlohmann::json profile = SeccompForContainers();
  EXPECT_EQ(profile["defaultAction"], "SCMP_ACT_ERRNO");
  const std::unique_ptr<void, void (*)(scmp_filter_ctx)> filter(
      ::seccomp_init(SCMP_ACT_ERRNO(ENOSYS)), ::seccomp_release);
  for (const std::string name : profile["architectures"]) {
    std::string known = name.substr(name.rfind("ARCH_") + 5);
    for (char& letter : known) letter = static_cast<char>(std::tolower(letter));
    const uint32_t architecture = ::seccomp_arch_resolve_name(known.c_str());
    EXPECT_NE(architecture, 0) << name;
    const int added = ::seccomp_arch_add(filter.get(), architecture);
    EXPECT_TRUE(added == 0 || added == -EEXIST) << name;
  }
  for (const nlohmann::json& rule : profile["syscalls"]) {
    const uint32_t action =
        rule["action"] == "SCMP_ACT_ALLOW" ? SCMP_ACT_ALLOW : SCMP_ACT_ERRNO(EPERM);
    std::vector<scmp_arg_cmp> arguments;
    for (const nlohmann::json& argument : rule.value("args", nlohmann::json::array())) {
      const bool masked = argument["op"] == "SCMP_CMP_MASKED_EQ";
      arguments.push_back({.arg = argument["index"],
                           .op = masked ? SCMP_CMP_MASKED_EQ : SCMP_CMP_LE,
                           .datum_a = argument["value"],
                           .datum_b = argument["valueTwo"]});
    }
    for (const std::string name : rule["names"]) {
      const int number = ::seccomp_syscall_resolve_name(name.c_str());
      if (number == __NR_SCMP_ERROR) continue;  // newer than libseccomp
      ::seccomp_rule_add_array(filter.get(), action, number,
                               static_cast<unsigned>(arguments.size()), arguments.data());
    }
  }
  const UniqueFd file(::memfd_create("filter", MFD_CLOEXEC));
  EXPECT_EQ(::seccomp_export_pfc(filter.get(), file.get()), 0);
  std::string text(FileSize(file.get()).value(), '\0');
  EXPECT_TRUE(ReadFull(file.get(), 0, std::as_writable_bytes(std::span(text))).ok());
  return text;
}

TEST(SeccompProfileTest, ProgramsOf32BitsHaveNoOtherWayToSockets) {
#if !defined(__x86_64__)
  GTEST_SKIP() << "socketcall is x86's";
#endif
  const std::string text = FilterAsText();
  const size_t start = text.find("# filter for arch x86 (");
  ASSERT_NE(start, std::string::npos) << text;
  const std::string of_32_bits = text.substr(start);
  const size_t call = of_32_bits.find("syscall \"socketcall\" (102)");
  ASSERT_NE(call, std::string::npos) << of_32_bits;
  const std::string rule = of_32_bits.substr(call, of_32_bits.find("# filter", call) - call);
  EXPECT_THAT(rule, HasSubstr("action ERRNO(1)"));
  EXPECT_THAT(rule, Not(HasSubstr("ALLOW")));
  EXPECT_THAT(of_32_bits, HasSubstr("syscall \"socket\" (359)"));
}

}  // namespace
}  // namespace lamina::backends
