# SPDX-License-Identifier: Apache-2.0
"""Virtual machines: sandboxes with a kernel of their own that mount the image's layers themselves."""

import contextlib
import json
import os
import pathlib
import shutil
import signal

from harness import Skip, check, check_equal, noise, test, wait_until
from oci_layout import Image
from run_container_tests import busybox_image
from sandbox_tests import Sandbox, listed, sandbox

BIG = 24 << 20


def need_qemu():
    if not shutil.which("qemu-system-x86_64"):
        raise Skip("QEMU is not installed")


def layered_image(workspace):
    """Busybox, and above it a layer with a file that does not compress."""
    image = Image()
    with image.layer() as layer:
        layer.directory("bin")
        layer.file("bin/busybox", pathlib.Path("/bin/busybox").read_bytes(), mode=0o755)
        layer.symlink("bin/sh", "busybox")
        layer.file("below", b"below\n")
        layer.file("hidden", b"hidden\n")
    with image.layer() as layer:
        layer.file("big", noise(BIG))
        layer.file(".wh.hidden", b"")
    return workspace.converted(image)


def machine_processes(box):
    """The processes of a sandbox's machine, by name."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if box.id.encode() in arguments and b"lamina" in arguments:
                found[pathlib.Path(arguments.split(b"\0")[0].decode()).name] = int(entry.name)
    return found


def host_reads(workspace, box):
    """Bytes that were read of the image's content on the host, by all its machines."""
    mount = workspace.state / "sandboxes" / box.id / "rootfs"
    return workspace.stats(mount)[0]["read_bytes"]


@test("sandbox.machines-share-what-they-read-of-a-layer")
def _(workspace):
    need_qemu()
    image = layered_image(workspace)
    with Sandbox(workspace, image, "--backend=qemu") as first:
        check_equal(first.output("cat /proc/version").split()[0], "Linux", "the kernel's name")
        check_equal(first.output("cat /below; test -e /hidden || echo gone"), "below\ngone\n",
                    "what the layers are together")
        script = "busybox grep -w -e Cached -e Buffers /proc/meminfo; busybox md5sum /big; " \
                 "busybox grep -w -e Cached -e Buffers /proc/meminfo"
        lines = first.output(script).splitlines()
        before, after = (sum(int(line.split()[1]) for line in part)
                         for part in (lines[:2], lines[3:]))
        check(after - before < 2048, f"the guest keeps copies: {before} kB, {after} kB")
        read = host_reads(workspace, first)
        check(read >= BIG, f"only {read} bytes were read on the host")

        with Sandbox(workspace, image, "--backend=qemu") as second:
            check_equal(second.output("busybox md5sum /big").split()[0], lines[2].split()[0],
                        "the sum in another machine")
            check(host_reads(workspace, second) - read < BIG / 4,
                  "another machine had what was read read again")
            second.output("echo mine > /below")
            check_equal(first.output("cat /below"), "below\n", "what the other one wrote to")
            # The one does not live without the other, and nothing of them stays.
            os.kill(machine_processes(second)["lamina-vm"], signal.SIGKILL)
            wait_until(lambda: not machine_processes(second), "the machine ends with its monitor")
            check_equal(listed(workspace)[second.id], ("qemu", "dead"), "the list")
            second.exec("true", status=1)
        os.kill(machine_processes(first)["qemu-system-x86_64"], signal.SIGKILL)
        wait_until(lambda: not machine_processes(first), "the monitor ends with its machine")
        check_equal(listed(workspace)[first.id], ("qemu", "dead"), "the list")


@test("sandbox.run-starts-a-machine-for-what-needs-a-kernel")
def _(workspace):
    need_qemu()
    image = busybox_image(workspace)
    result = workspace.lamina("run", "--backend=auto", "--needs=own-kernel", image,
                              f"--state={workspace.state}", "--", "sh", "-c",
                              "echo $(id -u); cat /proc/version; exit 3", status=3)
    check(result.stdout.startswith("0\nLinux version"), f"the user, and the kernel: {result.stdout}")
    check(result.stdout.split()[3] != os.uname().release, "it is the host's kernel")
    check("qemu" in result.stderr and "KVM" in result.stderr, f"no reason: {result.stderr}")


@test("sandbox.without-a-kernel-to-boot-it-is-said-what-to-do")
def _(workspace):
    need_qemu()
    image = busybox_image(workspace)
    environment = {**os.environ, "LAMINA_GUEST_KERNEL": str(workspace.path("nothing"))}
    result = workspace.lamina("sandbox", "create", image, f"--state={workspace.state}",
                              "--backend=qemu", status=1, env=environment)
    check("tools/guest-kernel" in result.stderr, result.stderr)
    result = workspace.lamina("run", "--backend=auto", "--needs=own-kernel", image,
                              f"--state={workspace.state}", "true", status=1, env=environment)
    check("container has no kernel of its own" in result.stderr, result.stderr)


@test("sandbox.a-machine-gives-cold-pages-back")
def _(workspace):
    need_qemu()
    image = layered_image(workspace)
    with Sandbox(workspace, image, "--backend=qemu", "--disk=256M") as box:
        state = "/sys/kernel/mm/damon/admin/kdamonds/0/state"
        check_equal(box.output(f"cat {state}"), "on\n", "DAMON's state")
        stats = json.loads(sandbox(workspace, "stats", box.id, "--json").stdout)
        check(stats["memory_bytes"] > 0, f"it uses nothing: {stats}")
    with Sandbox(workspace, image, "--backend=qemu", "--keep-memory") as box:
        check_equal(box.output("cat /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds"), "0\n",
                    "kdamonds where memory is kept")
