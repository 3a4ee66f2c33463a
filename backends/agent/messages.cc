// SPDX-License-Identifier: Apache-2.0
#include "backends/agent/messages.h"

#include <algorithm>
#include <limits>

#include "backends/agent/frame.h"

namespace lamina::agent {
namespace {

// Error texts of an agent end up on a terminal.
constexpr size_t kMaxErrorText = 4096;
constexpr uint64_t kMaxId = 0x7fffffff;
constexpr size_t kMaxGroups = 65536;  // NGROUPS_MAX

// Reads a number that must fit into 32 bits; `good` becomes false if it does not.
uint32_t Small(FieldReader& reader, bool& good, uint64_t most = kMaxId) {
  const uint64_t value = reader.Number();
  if (value > most) {
    good = false;
    return 0;
  }
  return static_cast<uint32_t>(value);
}

void Write(FieldWriter& writer, const std::vector<CallFile>& files) {
  writer.Number(files.size());
  for (const CallFile& file : files) {
    writer.Text(file.path).Number(file.mode).Text(file.content).Text(file.error);
  }
}

std::vector<CallFile> Files(FieldReader& reader, bool& good) {
  const uint64_t count = reader.Number();
  if (count > kMaxCallFiles) good = false;
  std::vector<CallFile> files;
  for (uint64_t index = 0; good && index < count; ++index) {
    CallFile file;
    file.path = reader.Text();
    file.mode = Small(reader, good, 07777);
    file.content = reader.Text();
    file.error = reader.Text();
    files.push_back(std::move(file));
  }
  return files;
}

// Of a text that ends up on a terminal: without bytes that do something there, the control characters of
// Unicode (U+0080 to U+009F) included.
std::string Printable(std::string_view text) {
  std::string printable;
  for (size_t index = 0; index < text.size(); ++index) {
    const auto byte = static_cast<unsigned char>(text[index]);
    const auto next = static_cast<unsigned char>(index + 1 < text.size() ? text[index + 1] : 0);
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      printable += fmt::format("\\x{:02x}\\x{:02x}", byte, next);
      ++index;
    } else if (byte < 0x20 || byte == 0x7f) {
      printable += fmt::format("\\x{:02x}", byte);
    } else {
      printable.push_back(text[index]);
    }
  }
  return printable;
}

absl::Status Checked(const FieldReader& reader, bool good, std::string_view what) {
  RETURN_IF_ERROR(reader.Finish(what));
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{}: a number is out of range", what));
}

}  // namespace

std::string Encode(const ExecMessage& message) {
  FieldWriter writer;
  writer.Texts(message.arguments).Texts(message.environment).Text(message.working_directory);
  writer.Number(message.uid).Number(message.gid).Number(message.groups.size());
  for (const uint32_t group : message.groups) writer.Number(group);
  writer.Text(message.session).Number(message.has_stdin ? 1 : 0).Number(message.timeout_ms);
  writer.Number(message.cpu_ms).Number(message.output_limit).Number(message.file_limit);
  Write(writer, message.files_in);
  writer.Texts(message.files_out);
  return writer.Take();
}

absl::StatusOr<ExecMessage> DecodeExec(std::string_view bytes) {
  FieldReader reader(bytes);
  bool good = true;
  ExecMessage message;
  message.arguments = reader.Texts();
  message.environment = reader.Texts();
  message.working_directory = reader.Text();
  message.uid = Small(reader, good);
  message.gid = Small(reader, good);
  const uint64_t groups = reader.Number();
  if (groups > kMaxGroups || groups > bytes.size() / 8) good = false;
  for (uint64_t index = 0; good && index < groups; ++index) {
    message.groups.push_back(Small(reader, good));
  }
  message.session = reader.Text();
  message.has_stdin = Small(reader, good, 1) != 0;
  message.timeout_ms = reader.Number();
  message.cpu_ms = reader.Number();
  message.output_limit = reader.Number();
  message.file_limit = reader.Number();
  message.files_in = Files(reader, good);
  message.files_out = reader.Texts();
  if (message.files_out.size() > kMaxCallFiles) good = false;
  RETURN_IF_ERROR(Checked(reader, good, "exec request"));
  if (message.arguments.empty()) return absl::InvalidArgumentError("exec request: no arguments");
  const auto has_zero = [](const std::string& text) { return text.find('\0') != text.npos; };
  if (std::ranges::any_of(message.arguments, has_zero) ||
      std::ranges::any_of(message.environment, has_zero) ||
      std::ranges::any_of(message.files_out, has_zero) || has_zero(message.working_directory)) {
    return absl::InvalidArgumentError("exec request: a zero byte in an argument, variable or path");
  }
  return message;
}

std::string Encode(const EndedMessage& message) {
  FieldWriter writer;
  writer.Number(static_cast<uint64_t>(message.ending)).Number(static_cast<uint32_t>(message.code));
  writer.Number(message.wall_us).Number(message.cpu_us).Number(message.peak_bytes);
  writer.Number(message.output_bytes).Text(message.detail);
  Write(writer, message.files_out);
  return writer.Take();
}

absl::StatusOr<EndedMessage> DecodeEnded(std::string_view bytes) {
  FieldReader reader(bytes);
  bool good = true;
  EndedMessage message;
  message.ending = static_cast<Ending>(Small(reader, good, kLastEnding));
  message.code = static_cast<int32_t>(Small(reader, good));
  message.wall_us = reader.Number();
  message.cpu_us = reader.Number();
  message.peak_bytes = reader.Number();
  message.output_bytes = reader.Number();
  message.detail = Printable(reader.Text().substr(0, kMaxErrorText));
  message.files_out = Files(reader, good);
  RETURN_IF_ERROR(Checked(reader, good, "end of a process"));
  return message;
}

std::string Encode(const TreeMessage& message) {
  FieldWriter writer;
  writer.Text(message.path).Number(message.uid).Number(message.gid).Number(message.limit);
  return writer.Take();
}

absl::StatusOr<TreeMessage> DecodeTree(std::string_view bytes) {
  FieldReader reader(bytes);
  bool good = true;
  TreeMessage message;
  message.path = reader.Text();
  message.uid = Small(reader, good);
  message.gid = Small(reader, good);
  message.limit = reader.Number();
  RETURN_IF_ERROR(Checked(reader, good, "file request"));
  if (!message.path.starts_with('/') || message.path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        fmt::format("file request: '{}' is no absolute path", message.path));
  }
  return message;
}

std::string Encode(const InfoMessage& message) {
  FieldWriter writer;
  writer.Number(message.uptime_ms).Number(message.running).Number(message.idle_ms);
  writer.Texts(message.sessions);
  return writer.Take();
}

absl::StatusOr<InfoMessage> DecodeInfo(std::string_view bytes) {
  FieldReader reader(bytes);
  InfoMessage message;
  message.uptime_ms = reader.Number();
  message.running = reader.Number();
  message.idle_ms = reader.Number();
  message.sessions = reader.Texts();
  RETURN_IF_ERROR(reader.Finish("state of an agent"));
  return message;
}

std::string Encode(const absl::Status& error) {
  FieldWriter writer;
  writer.Number(static_cast<uint64_t>(error.code()))
      .Text(std::string(error.message()).substr(0, kMaxErrorText));
  return writer.Take();
}

absl::Status DecodeError(std::string_view bytes) {
  FieldReader reader(bytes);
  const uint64_t code = reader.Number();
  const std::string_view text = reader.Text().substr(0, kMaxErrorText);
  if (!reader.Finish("error").ok() || code == 0 || code > 16) {
    return absl::DataLossError("the agent's error cannot be read");
  }
  return absl::Status(static_cast<absl::StatusCode>(code), Printable(text));
}

}  // namespace lamina::agent
