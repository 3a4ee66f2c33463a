// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/base/output_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "chunkstore/base/file.h"
#include "tests/base/directory_testing.h"

namespace lamina {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class OutputFileTest : public DirectoryTest {};

TEST_F(OutputFileTest, OutputGoesThroughSymbolicLinksWhichStay) {
  std::filesystem::create_directory(Path("d"));
  std::filesystem::create_symlink("d/f", Path("first"));
  std::filesystem::create_symlink("first", Path("second"));
  for (const char* content : {"made", "replaced"}) {  // at first it leads to nothing
    ASSERT_EQ(CheckOutputFile(Path("second")), absl::OkStatus());
    ASSERT_EQ(WriteOutputFile(Path("second"), content), absl::OkStatus());
    EXPECT_EQ(*ReadFileToString(Path("d/f"), 100), content);
  }
  EXPECT_TRUE(std::filesystem::is_symlink(Path("first")));
  EXPECT_TRUE(std::filesystem::is_symlink(Path("second")));
  EXPECT_THAT(Names(), testing::UnorderedElementsAre("d", "first", "second"));
}

TEST_F(OutputFileTest, OutputIsWrittenIntoWhatIsNoFile) {
  ASSERT_EQ(::mkfifo(Path("fifo").c_str(), 0600), 0);
  std::filesystem::create_symlink("fifo", Path("link"));
  const UniqueFd reader(*OpenFile(Path("fifo"), O_RDONLY | O_NONBLOCK));
  for (const char* name : {"fifo", "link"}) {
    ASSERT_EQ(CheckOutputFile(Path(name)), absl::OkStatus());
    ASSERT_EQ(WriteOutputFile(Path(name), "text"), absl::OkStatus());
    char buffer[10];
    EXPECT_EQ(::read(reader.get(), buffer, sizeof(buffer)), 4) << name;
  }
  EXPECT_TRUE(std::filesystem::is_fifo(std::filesystem::symlink_status(Path("fifo"))));
  EXPECT_TRUE(std::filesystem::is_symlink(Path("link")));
}

TEST_F(OutputFileTest, OutputIsWrittenIntoAFileThatHasNoNameAnyMore) {
  const UniqueFd file(*OpenFile(Path("f"), O_RDWR | O_CREAT));
  std::filesystem::remove(Path("f"));
  const std::string path = fmt::format("/proc/self/fd/{}", file.get());
  ASSERT_EQ(CheckOutputFile(path), absl::OkStatus());
  ASSERT_EQ(WriteOutputFile(path, "text"), absl::OkStatus());
  EXPECT_EQ(*FileSize(file.get()), 4);
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_F(OutputFileTest, OutputThatCannotBeWrittenIsKnownBefore) {
  EXPECT_FALSE(CheckOutputFile(Path("none/f")).ok());
  EXPECT_FALSE(CheckOutputFile(directory_->path()).ok());
  std::filesystem::create_symlink("loop", Path("loop"));
  EXPECT_FALSE(CheckOutputFile(Path("loop")).ok());
  EXPECT_EQ(CheckOutputFile(Path("f")), absl::OkStatus());
  EXPECT_THAT(Names(), ElementsAre("loop"));
}

}  // namespace
}  // namespace lamina
