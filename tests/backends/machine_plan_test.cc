// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "backends/qemu/command_line.h"
#include "backends/vm/guest_kernel.h"
#include "backends/vm/machine.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class GuestKernelTest : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(path("boot"));
    std::filesystem::create_directories(path("lib/modules/6.9"));
    ::setenv("LAMINA_GUEST_KERNEL", directory_.path().c_str(), 1);
  }
  void TearDown() override { ::unsetenv("LAMINA_GUEST_KERNEL"); }
  std::string path(const std::string& name) const { return directory_.path() + "/" + name; }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_EQ(WriteFileAtomically(path(name), text), absl::OkStatus());
  }
  void WriteModules(const std::string& dependencies) {
    Write("boot/vmlinuz-6.9", "kernel");
    Write("lib/modules/6.9/modules.dep", dependencies);
    Write("lib/modules/6.9/modules.builtin",
          "kernel/drivers/virtio/virtio_pci.ko\nkernel/drivers/char/virtio_console.ko\n"
          "kernel/fs/ext4/ext4.ko\nkernel/drivers/block/virtio_blk.ko\n"
          "kernel/drivers/virtio/virtio_balloon.ko\n");
  }
  static constexpr const char* kDependencies =
      "kernel/nd_pmem.ko: kernel/nd_btt.ko kernel/libnvdimm.ko\n"
      "kernel/virtio_pmem.ko.xz: kernel/nd_virtio.ko kernel/libnvdimm.ko\n"
      "kernel/erofs.ko: kernel/libcrc32c.ko\n"
      "kernel/overlay.ko:\n"
      "kernel/other.ko: kernel/more.ko\n";

  TemporaryDirectory directory_ = *TemporaryDirectory::Create("/tmp", "guest-kernel-test-");
};

TEST_F(GuestKernelTest, WhatIsMissingIsSaid) {
  EXPECT_THAT(std::string(FindGuestKernel().status().message()),
              HasSubstr("tools/guest-kernel gets one"));
  Write("boot/vmlinuz-6.9", "kernel");
  EXPECT_THAT(std::string(FindGuestKernel().status().message()), HasSubstr("run depmod"));
  WriteModules("kernel/overlay.ko:\n");
  EXPECT_THAT(std::string(GuestModules(*FindGuestKernel()).status().message()),
              HasSubstr("vmlinuz-6.9 has no virtio_pmem"));
}

TEST_F(GuestKernelTest, TheNewestIsTaken) {
  WriteModules(kDependencies);
  Write("boot/vmlinuz-6.10", "kernel");
  std::filesystem::create_directories(path("lib/modules/6.10"));
  Write("lib/modules/6.10/modules.dep", "");
  EXPECT_EQ(FindGuestKernel().value().image, path("boot/vmlinuz-6.10"));
}

TEST_F(GuestKernelTest, ModulesComeAfterWhatTheyDependOn) {
  WriteModules(kDependencies);
  std::vector<std::string> files;
  const std::vector<GuestModule> modules = GuestModules(*FindGuestKernel()).value();
  for (const GuestModule& module : modules) {
    EXPECT_EQ(module.set, "");
    files.push_back(module.file);
  }
  EXPECT_THAT(files,
              ElementsAre("kernel/libnvdimm.ko", "kernel/nd_virtio.ko", "kernel/virtio_pmem.ko.xz",
                          "kernel/nd_btt.ko", "kernel/nd_pmem.ko", "kernel/libcrc32c.ko",
                          "kernel/erofs.ko", "kernel/overlay.ko"));
}

TEST_F(GuestKernelTest, EachSetHasWhatItDependsOn) {
  WriteModules(std::string(kDependencies) +
               "kernel/ext4.ko: kernel/jbd2.ko kernel/libcrc32c.ko kernel/ring.ko\n"
               "kernel/virtio_mmio.ko: kernel/ring.ko\n");
  const std::vector<GuestModule> modules = GuestModules(*FindGuestKernel()).value();
  EXPECT_THAT(std::vector<GuestModule>(modules.begin() + 8, modules.end()),
              ElementsAre(GuestModule{"kernel/ring.ko", kDiskModules},
                          GuestModule{"kernel/jbd2.ko", kDiskModules},
                          GuestModule{"kernel/ext4.ko", kDiskModules},
                          GuestModule{"kernel/ring.ko", kVsockModules},
                          GuestModule{"kernel/virtio_mmio.ko", kVsockModules}));
}

TEST_F(GuestKernelTest, AnInitramfsIsMadeOnceForAnAgentAndAKernel) {
  WriteModules(
      "kernel/virtio_pmem.ko:\nkernel/nd_pmem.ko:\nkernel/erofs.ko:\nkernel/overlay.ko:\n");
  std::filesystem::create_directories(path("lib/modules/6.9/kernel"));
  for (const char* name : {"virtio_pmem", "nd_pmem", "erofs", "overlay"}) {
    Write(fmt::format("lib/modules/6.9/kernel/{}.ko", name), fmt::format("module {}", name));
  }
  Write("agent", "program");
  const GuestKernel kernel = FindGuestKernel().value();
  const std::string made = GetInitramfs(kernel, path("agent"), path("cache")).value();
  const std::string content = ReadFileToString(made, 1 << 20).value();
  EXPECT_THAT(content, HasSubstr("modules/002-erofs.ko"));
  EXPECT_THAT(content, HasSubstr("module overlay"));
  EXPECT_EQ(GetInitramfs(kernel, path("agent"), path("cache")).value(), made);
  Write("agent", "another program");
  EXPECT_NE(GetInitramfs(kernel, path("agent"), path("cache")).value(), made);
}

TEST(CpioTest, EntriesAreAsTheKernelReadsThem) {
  std::string archive;
  AppendCpioEntry(archive, "init", S_IFREG | 0700, "12345");
  AppendCpioEnd(archive);
  EXPECT_TRUE(archive.starts_with("070701"));
  EXPECT_EQ(archive.size() % 4, 0);
  EXPECT_EQ(archive.substr(14, 8), "000081c0");  // mode
  EXPECT_EQ(archive.substr(54, 8), "00000005");  // size
  EXPECT_EQ(archive.substr(94, 8), "00000005");  // of the name, with its end
  EXPECT_EQ(archive.substr(110, 5), std::string("init\0", 5));
  EXPECT_EQ(archive.substr(116, 5), "12345");
  EXPECT_EQ(archive.substr(124, 6), "070701");
  EXPECT_THAT(archive, HasSubstr("TRAILER!!!"));
}

TEST(QemuCommandLineTest, DevicesAreReadOnlySharedAndInTheirPlaces) {
  MachinePlan plan{
      .name = "s1", .kernel = {.image = "/k"}, .initramfs = "/i", .memory_bytes = 1 << 27};
  for (int layer = 0; layer < 10; ++layer)
    plan.pmem.push_back({fmt::format("/a,b/{}", layer), 2 << 20});
  const std::vector<std::string> words = QemuCommandLine(plan, "tcg", false).value();
  EXPECT_THAT(words, Contains("memory-backend-file,id=pmem9,mem-path=/a,,b/9,size=2097152B,"
                              "share=on,readonly=on"));
  EXPECT_THAT(words, Contains("virtio-pmem-pci,memdev=pmem0,addr=4.0,multifunction=on"));
  EXPECT_THAT(words, Contains("virtio-pmem-pci,memdev=pmem9,addr=5.1"));
  EXPECT_THAT(words, Contains("tcg,tb-size=256"));
  EXPECT_THAT(words, Contains(HasSubstr("lamina.layers=9")));
  EXPECT_THAT(words, Contains("size=134217728B,maxmem=155189248B"));
  EXPECT_THAT(words, Not(Contains("-incoming")));
  EXPECT_THAT(QemuCommandLine(plan, "kvm", true).value(), Contains("-incoming"));
  plan.pmem.resize(300);
  EXPECT_EQ(QemuCommandLine(plan, "tcg", false).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CopySparseFileTest, KeepsContentAndHoles) {
  const TemporaryDirectory directory = *TemporaryDirectory::Create("/tmp", "sparse-test-");
  const std::string from = directory.path() + "/from";
  {
    const UniqueFd file = *OpenFile(from, O_RDWR | O_CREAT);
    ASSERT_EQ(::ftruncate(file.get(), 64 << 20), 0);
    ASSERT_EQ(WriteFull(file.get(), 32 << 20, AsBytes("content")), absl::OkStatus());
  }
  const std::string to = directory.path() + "/to";
  ASSERT_EQ(CopySparseFile(from, to), absl::OkStatus());
  EXPECT_TRUE(ReadFileToString(from, 1 << 30).value() == ReadFileToString(to, 1 << 30).value());
  struct stat info {};
  ASSERT_EQ(::stat(to.c_str(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 1 << 20);
  EXPECT_FALSE(CopySparseFile(from, to).ok()) << "what is there is not written over";
}

}  // namespace
}  // namespace lamina::backends
