// SPDX-License-Identifier: Apache-2.0
#include "backends/qemu/command_line.h"

#include <absl/strings/str_replace.h>

#include "backends/qemu/qemu_machine.h"

namespace lamina::backends {
namespace {

// Of the slots of q35's bus those that hold nothing else; each has eight functions.
constexpr size_t kFirstPmemSlot = 4;
constexpr size_t kLastPmemSlot = 30;
constexpr size_t kFunctions = 8;

// A value in a list of options.
std::string Value(const std::string& text) { return absl::StrReplaceAll(text, {{",", ",,"}}); }

}  // namespace

absl::StatusOr<std::vector<std::string>> QemuCommandLine(const MachinePlan& plan,
                                                         const std::string& accelerator,
                                                         bool incoming) {
  const bool kvm = accelerator == "kvm";
  if (plan.pmem.size() > (kLastPmemSlot - kFirstPmemSlot + 1) * kFunctions) {
    return absl::InvalidArgumentError(fmt::format(
        "an image of {} layers has more than a machine has places for", plan.pmem.size() - 1));
  }
  uint64_t most = plan.memory_bytes;
  for (const PmemFile& pmem : plan.pmem) most += pmem.bytes;
  // Without mitigations where there is no processor that speculates.
  const std::string parameters =
      fmt::format("console=ttyS0 quiet panic=-1 random.trust_cpu=on {}{}",
                  kvm ? "" : "mitigations=off no_timer_check ", GuestParameters(plan));
  std::vector<std::string> words = {
      kQemuProgram, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name",
      Value(plan.name), "-machine", "q35,usb=off,vmport=off,smbus=off,sata=off", "-accel",
      // Else translated code may take an eighth of the host's memory, up to a gigabyte.
      kvm ? accelerator : accelerator + ",tb-size=256", "-cpu", kvm ? "host" : "max", "-smp",
      std::to_string(plan.processors), "-m",
      fmt::format("size={}B,maxmem={}B", plan.memory_bytes, most), "-kernel", plan.kernel.image,
      "-initrd", plan.initramfs, "-append", parameters,
      // A guest that has taken QEMU over finds little to do with it.
      "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
      "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console", "-chardev",
      fmt::format("socket,id=qmp,fd={}", kQemuQmpDescriptor), "-mon", "chardev=qmp,mode=control",
      "-device", "virtio-serial-pci,addr=1,max_ports=2", "-chardev",
      fmt::format("socket,id=agent,fd={}", kQemuAgentDescriptor), "-device",
      "virtserialport,chardev=agent,name=lamina.agent", "-device",
      fmt::format("virtio-balloon-pci,addr=2,free-page-reporting={},deflate-on-oom=on",
                  plan.reclaim ? "on" : "off"),
      // Tells a machine that starts from a snapshot that it is another one, and needs other random
      // numbers.
      "-device", "vmgenid,guid=auto"};
  const auto add = [&words](std::initializer_list<std::string> more) {
    words.insert(words.end(), more);
  };
  if (!plan.disk.empty()) {
    add({"-drive",
         fmt::format("file={},if=none,id=disk,format=raw,discard=unmap,cache=writeback",
                     Value(plan.disk)),
         "-device", "virtio-blk-pci,addr=3,drive=disk"});
  }
  for (size_t index = 0; index < plan.pmem.size(); ++index) {
    // Read-only: else what a guest writes reaches the file that all share.
    add({"-object",
         fmt::format("memory-backend-file,id=pmem{},mem-path={},size={}B,share=on,readonly=on",
                     index, Value(plan.pmem[index].path), plan.pmem[index].bytes),
         "-device",
         fmt::format("virtio-pmem-pci,memdev=pmem{},addr={:x}.{}{}", index,
                     kFirstPmemSlot + index / kFunctions, index % kFunctions,
                     index % kFunctions == 0 ? ",multifunction=on" : "")});
  }
  if (incoming) add({"-incoming", "defer"});
  return words;
}

}  // namespace lamina::backends
