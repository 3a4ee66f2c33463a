// SPDX-License-Identifier: Apache-2.0
#include "fs/prefetch/program_file.h"

#include <elf.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

namespace lamina::fs {
namespace {

// As much of a script's first line as the kernel looks at (BINPRM_BUF_SIZE, Linux 5.1 and later).
constexpr size_t kScriptLine = 256;
// Limits on what an ELF file may make us read and keep.
constexpr uint64_t kMaxTable = 1 << 20;
constexpr size_t kMaxHeaders = 256;
constexpr size_t kMaxLibraries = 256;
constexpr size_t kMaxSearchPaths = 64;
constexpr size_t kMaxName = 4096;

class ElfFile {
 public:
  ElfFile(uint64_t size, const ReadAt& read) : size_(size), read_(read) {}

  absl::StatusOr<ProgramNeeds> Read() {
    Elf64_Ehdr header{};
    RETURN_IF_ERROR(ReadInto(0, std::as_writable_bytes(std::span(&header, 1)), "header"));
    if (header.e_phentsize != sizeof(Elf64_Phdr)) return ProgramNeeds();
    segments_.resize(std::min<size_t>(header.e_phnum, kMaxHeaders));
    RETURN_IF_ERROR(
        ReadInto(header.e_phoff, std::as_writable_bytes(std::span(segments_)), "program headers"));
    ProgramNeeds needs;
    if (header.e_machine == EM_X86_64) needs.machine_directory = "x86_64-linux-gnu";
    if (header.e_machine == EM_AARCH64) needs.machine_directory = "aarch64-linux-gnu";
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type == PT_INTERP) {
        std::string name(std::min<uint64_t>(segment.p_filesz, kMaxName), '\0');
        RETURN_IF_ERROR(
            ReadInto(segment.p_offset, std::as_writable_bytes(std::span(name)), "interpreter"));
        needs.interpreter = name.c_str();  // up to the first zero
      } else if (segment.p_type == PT_DYNAMIC) {
        RETURN_IF_ERROR(ReadDynamic(segment, needs));
      }
    }
    return needs;
  }

 private:
  absl::Status ReadInto(uint64_t offset, std::span<std::byte> into, const char* what) const {
    if (into.empty()) return absl::OkStatus();
    if (offset > size_ || into.size() > size_ - offset) {
      return absl::InvalidArgumentError(fmt::format("ELF: {} of {} bytes at {}, in a file of {}",
                                                    what, into.size(), offset, size_));
    }
    return read_(offset, into);
  }

  // Where in the file the byte at an address comes from.
  std::optional<uint64_t> OffsetOf(uint64_t address) const {
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type == PT_LOAD && address >= segment.p_vaddr &&
          address - segment.p_vaddr < segment.p_filesz) {
        const uint64_t offset = address - segment.p_vaddr;
        if (segment.p_offset > UINT64_MAX - offset) return std::nullopt;
        return segment.p_offset + offset;
      }
    }
    return std::nullopt;
  }

  absl::Status ReadDynamic(const Elf64_Phdr& segment, ProgramNeeds& needs) const {
    std::vector<Elf64_Dyn> entries(std::min(segment.p_filesz, kMaxTable) / sizeof(Elf64_Dyn));
    RETURN_IF_ERROR(
        ReadInto(segment.p_offset, std::as_writable_bytes(std::span(entries)), "dynamic section"));
    uint64_t strings_address = 0;
    uint64_t strings_size = 0;
    std::vector<uint64_t> names;
    std::optional<uint64_t> run_path;
    std::optional<uint64_t> old_run_path;
    for (const Elf64_Dyn& entry : entries) {
      if (entry.d_tag == DT_NULL) break;
      if (entry.d_tag == DT_STRTAB) strings_address = entry.d_un.d_ptr;
      if (entry.d_tag == DT_STRSZ) strings_size = entry.d_un.d_val;
      if (entry.d_tag == DT_RUNPATH) run_path = entry.d_un.d_val;
      if (entry.d_tag == DT_RPATH) old_run_path = entry.d_un.d_val;
      if (entry.d_tag == DT_NEEDED && names.size() < kMaxLibraries) {
        names.push_back(entry.d_un.d_val);
      }
    }
    const std::optional<uint64_t> offset = OffsetOf(strings_address);
    if (!offset) return absl::OkStatus();
    std::string strings(std::min(strings_size, kMaxTable), '\0');
    RETURN_IF_ERROR(ReadInto(*offset, std::as_writable_bytes(std::span(strings)), "strings"));
    const auto string_at = [&strings](uint64_t position) {
      if (position >= strings.size()) return std::string();
      return std::string(strings.c_str() + position).substr(0, kMaxName);
    };
    for (const uint64_t name : names) {
      if (std::string text = string_at(name); !text.empty()) {
        needs.libraries.push_back(std::move(text));
      }
    }
    if (!run_path) run_path = old_run_path;
    if (!run_path) return absl::OkStatus();
    const std::string paths = string_at(*run_path);
    for (size_t begin = 0; begin < paths.size() && needs.search_paths.size() < kMaxSearchPaths;) {
      const size_t end = std::min(paths.find(':', begin), paths.size());
      if (end > begin) needs.search_paths.push_back(paths.substr(begin, end - begin));
      begin = end + 1;
    }
    return absl::OkStatus();
  }

  const uint64_t size_;
  const ReadAt& read_;
  std::vector<Elf64_Phdr> segments_;
};

// "#!/usr/bin/env python3" names a path and the arguments behind it.
ProgramNeeds ParseScript(std::string_view head) {
  head.remove_prefix(2);
  head = head.substr(0, head.find('\n'));
  ProgramNeeds needs;
  while (true) {
    const size_t begin = head.find_first_not_of(" \t\r");
    if (begin == std::string_view::npos) return needs;
    const size_t end = std::min(head.find_first_of(" \t\r", begin), head.size());
    std::string word(head.substr(begin, end - begin));
    if (needs.interpreter.empty()) {
      needs.interpreter = std::move(word);
    } else {
      needs.arguments.push_back(std::move(word));
    }
    head.remove_prefix(end);
  }
}

}  // namespace

absl::StatusOr<ProgramNeeds> ReadProgramNeeds(uint64_t size, const ReadAt& read) {
  std::string head(std::min<uint64_t>(size, kScriptLine), '\0');
  if (head.empty()) return ProgramNeeds();
  RETURN_IF_ERROR(read(0, std::as_writable_bytes(std::span(head))));
  if (head.starts_with("#!")) return ParseScript(head);
  const bool is_elf = head.size() >= sizeof(Elf64_Ehdr) && head.starts_with(ELFMAG) &&
                      head[EI_CLASS] == ELFCLASS64 && head[EI_DATA] == ELFDATA2LSB;
  if (!is_elf) return ProgramNeeds();
  return ElfFile(size, read).Read();
}

}  // namespace lamina::fs
