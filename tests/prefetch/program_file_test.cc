// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/program_file.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "chunkstore/base/file.h"

namespace lamina::fs {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::StartsWith;

absl::StatusOr<ProgramNeeds> Read(std::string_view content) {
  return ReadProgramNeeds(content.size(), [content](uint64_t offset, std::span<std::byte> into) {
    EXPECT_LE(offset + into.size(), content.size());
    std::memcpy(into.data(), content.data() + offset, into.size());
    return absl::OkStatus();
  });
}

TEST(ProgramFileTest, ScriptNeedsItsInterpreter) {
  const auto needs = Read("#! /usr/bin/env  -S python3 -u\nimport os\n");
  ASSERT_TRUE(needs.ok());
  EXPECT_EQ(needs->interpreter, "/usr/bin/env");
  EXPECT_THAT(needs->arguments, ElementsAre("-S", "python3", "-u"));
  EXPECT_EQ(Read("#!/bin/sh")->interpreter, "/bin/sh");
  EXPECT_EQ(Read("#!\n/bin/sh")->interpreter, "");
}

TEST(ProgramFileTest, ProgramNeedsItsLoaderAndLibraries) {
  const auto self = ReadFileToString("/bin/ls", 1 << 24);
  ASSERT_TRUE(self.ok());
  const auto needs = Read(*self);
  ASSERT_TRUE(needs.ok()) << needs.status();
  EXPECT_THAT(needs->interpreter, StartsWith("/lib"));
  EXPECT_THAT(needs->libraries, Contains(StartsWith("libc.so")));
  EXPECT_FALSE(needs->machine_directory.empty());
}

TEST(ProgramFileTest, NoMoreSearchPathsThanProgramsHave) {
  std::string strings(1, '\0');
  for (int i = 0; i < 2000; ++i) strings += "/a:";
  strings += '\0';
  struct {
    Elf64_Ehdr header{};
    Elf64_Phdr segments[2]{};
    Elf64_Dyn entries[4]{};
  } file;
  std::memcpy(file.header.e_ident, ELFMAG, SELFMAG);
  file.header.e_ident[EI_CLASS] = ELFCLASS64;
  file.header.e_ident[EI_DATA] = ELFDATA2LSB;
  file.header.e_phoff = offsetof(decltype(file), segments);
  file.header.e_phentsize = sizeof(Elf64_Phdr);
  file.header.e_phnum = 2;
  file.segments[0].p_type = PT_LOAD;
  file.segments[0].p_filesz = sizeof(file) + strings.size();
  file.segments[1].p_type = PT_DYNAMIC;
  file.segments[1].p_offset = offsetof(decltype(file), entries);
  file.segments[1].p_filesz = sizeof(file.entries);
  file.entries[0] = {.d_tag = DT_STRTAB, .d_un = {.d_ptr = sizeof(file)}};
  file.entries[1] = {.d_tag = DT_STRSZ, .d_un = {.d_val = strings.size()}};
  file.entries[2] = {.d_tag = DT_RUNPATH, .d_un = {.d_val = 1}};
  const auto needs =
      Read(std::string(reinterpret_cast<const char*>(&file), sizeof(file)) + strings);
  ASSERT_TRUE(needs.ok()) << needs.status();
  EXPECT_EQ(needs->search_paths, std::vector<std::string>(64, "/a"));
}

TEST(ProgramFileTest, OtherFilesNeedNothing) {
  for (const std::string_view content : {"", "#", "hello",
                                         "\x7f"
                                         "ELF"}) {
    const auto needs = Read(content);
    ASSERT_TRUE(needs.ok()) << needs.status();
    EXPECT_EQ(needs->interpreter, "");
    EXPECT_THAT(needs->libraries, IsEmpty());
  }
}

TEST(ProgramFileTest, DamagedProgramsAreRefusedOrRead) {
  const auto self = ReadFileToString("/bin/ls", 1 << 24);
  ASSERT_TRUE(self.ok());
  for (size_t length = 1; length < 4096; length += 7) Read(self->substr(0, length)).IgnoreError();
  for (size_t position = 0; position < 1024; ++position) {
    std::string damaged = *self;
    damaged[position] = static_cast<char>(0xff);
    Read(damaged).IgnoreError();
  }
}

}  // namespace
}  // namespace lamina::fs
