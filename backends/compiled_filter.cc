// SPDX-License-Identifier: Apache-2.0
#include "backends/compiled_filter.h"

#include <absl/strings/escaping.h>
#include <linux/bpf_common.h>
#include <linux/filter.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "chunkstore/base/digest.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

constexpr std::string_view kPrefix = ".filter-";  // no name of a sandbox
constexpr uint64_t kMaxBytes = BPF_MAXINSNS * sizeof(sock_filter);

// As far as can be seen; the kernel checks the rest, and then the container does not start.
bool IsFilter(std::string_view bytes) {
  if (bytes.empty() || bytes.size() % sizeof(sock_filter) != 0) return false;
  sock_filter last{};
  std::memcpy(&last, bytes.data() + bytes.size() - sizeof(last), sizeof(last));
  return BPF_CLASS(last.code) == BPF_RET;
}

}  // namespace

CompiledFilter::CompiledFilter(std::string directory, std::string_view filter,
                               const std::string& crun, std::string_view boot_id)
    : directory_(std::move(directory)) {
  struct stat program {};
  if (::stat(crun.c_str(), &program) != 0) return;  // whoever starts it will say so
  constexpr size_t kDigits = 16;
  const std::string key =
      fmt::format("{}\n{}\n{} {} {} {}.{}", boot_id, filter, program.st_dev, program.st_ino,
                  program.st_size, program.st_mtim.tv_sec, program.st_mtim.tv_nsec);
  name_ = fmt::format("{}{}", kPrefix, Digest::Of(AsBytes(key)).Hex().substr(0, kDigits));
}

std::string CompiledFilter::Text() const {
  if (name_.empty()) return "";
  const absl::StatusOr<std::string> bytes = ReadFileToString(directory_ + "/" + name_, kMaxBytes);
  return bytes.ok() && IsFilter(*bytes) ? absl::Base64Escape(*bytes) : "";
}

absl::Status CompiledFilter::Keep(const std::string& compiled) const {
  if (name_.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string bytes, ReadFileToString(compiled, kMaxBytes));
  if (!IsFilter(bytes)) return absl::DataLossError(compiled + " is no system call filter");
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory_, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().filename().string().starts_with(kPrefix)) {
      std::filesystem::remove(entry->path(), ignored);
    }
  }
  return WriteFileAtomically(directory_ + "/" + name_, bytes, 0600, Durability::kCached);
}

}  // namespace lamina::backends
