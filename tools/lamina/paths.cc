// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <system_error>

#include "fs/engine/client.h"
#include "fs/image/reference.h"
#include "tools/lamina/commands.h"

namespace lamina::cli {

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  if (path.empty() || path.starts_with('/')) return path;
  const std::filesystem::path here = std::filesystem::current_path(error);
  return error ? path : fmt::format("{}/{}", here.string(), path);
}

absl::StatusOr<std::string> ExistingDirectory(const std::string& path) {
  std::error_code error;
  const std::filesystem::path resolved = std::filesystem::canonical(path, error);
  if (error) return ErrnoStatus(error.value(), path);
  if (!std::filesystem::is_directory(resolved, error)) {
    return absl::InvalidArgumentError(path + ": not a directory");
  }
  return resolved.string();
}

absl::StatusOr<std::string> AbsoluteReference(const std::string& reference) {
  constexpr std::string_view kPrefix = "oci:";
  const absl::Status valid = fs::ImageReference::ParseConverted(reference).status();
  if (!valid.ok()) return UsageError(valid);
  if (!reference.starts_with(kPrefix)) return reference;
  const std::string path = reference.substr(kPrefix.size());
  const std::string absolute = AbsolutePath(path);
  // The first colon of a reference ends the directory.
  const size_t added = absolute.size() - path.size();
  if (absolute.find(':') < added) {
    return absl::InvalidArgumentError(
        fmt::format("{}: the working directory has a colon, which no oci: reference can name: use "
                    "it through a symbolic link without one",
                    reference));
  }
  return fmt::format("{}{}", kPrefix, absolute);
}

absl::Status MakeAbsolute(std::vector<std::string>& references) {
  for (std::string& reference : references) {
    ASSIGN_OR_RETURN(reference, AbsoluteReference(reference));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> StateFor(const std::string& given, const std::string& target) {
  if (!given.empty()) return given;
  absl::StatusOr<std::string> state = fs::StateOfMount(target);
  if (absl::IsNotFound(state.status())) return fs::DefaultStateDirectory();
  return state;
}

}  // namespace lamina::cli
