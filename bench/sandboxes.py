# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of Lamina, and what one has without it: crun on an unpacked tree, QEMU with busybox."""

import contextlib
import json
import os
import pathlib
import re
import stat
import subprocess
import threading

from agent import Agent
from inputs import BUSYBOX
from node import MNT_DETACH, Node, libc, run

CLONE_NEWNS = 0x20000
MS_REC_SLAVE = 0x4000 | 0x80000
UNIFIED_CGROUPS = pathlib.Path("/sys/fs/cgroup/unified")
READY = "busybox is ready"
PATIENCE_SECONDS = 600


class Sandbox:
    """Use in a with statement."""

    def __init__(self, node: Node, state: pathlib.Path, image: str, *options: str):
        self._node = node
        self._state = state
        self.id = created_id(node.lamina, "sandbox", "create", image, f"--state={state}", *options)
        self.directory = state / "sandboxes" / self.id
        self.agent = Agent(self.directory)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        self.agent.close()
        run(self._node.lamina, "sandbox", "rm", self.id, f"--state={self._state}")

    def first_process(self) -> int:
        """Of a container."""
        return json.loads((self.directory / "record.json").read_text())["first_process"]

    def configuration(self) -> str:
        """Of a container, for the runtime."""
        return (self.directory / "config.json").read_text()

    def machine(self) -> tuple[int, list[str]]:
        """The process of a machine, and its command line."""
        for pid, words in command_lines():
            if words[0].startswith("qemu-system") and self.id in words:
                return pid, words
        raise RuntimeError(f"no QEMU of {self.id}")


def created_id(*command) -> str:
    done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout.split()[-1]


def command_lines() -> list[tuple[int, list[str]]]:
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:-1]
            if words:
                found.append((int(process.name), words))
    return found


def hide_unified_cgroups() -> None:
    """For this thread: crun refuses to start beside a version 2 of control groups that has controllers
    (backends/crun.cc does the same, for each container: so do it in a new thread for each)."""
    if not (UNIFIED_CGROUPS / "cgroup.controllers").exists():
        return
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, MS_REC_SLAVE, None) != 0:
        raise OSError("unshare mounts")
    libc.umount2(os.fsencode(UNIFIED_CGROUPS), MNT_DETACH)


def write_bundle(path: pathlib.Path, like: str, rootfs: pathlib.Path, command: list[str]) -> None:
    """A bundle for crun with the configuration of a container of Lamina's, but for the agent, and without
    what Lamina kept of earlier containers (the compiled system call filter)."""
    config = json.loads(like)
    config.pop("annotations", None)
    agent = config["process"]["args"][0]
    config["mounts"] = [mount for mount in config["mounts"] if mount["destination"] != agent]
    config["process"]["args"] = command
    config["root"]["path"] = str(rootfs)
    config["linux"]["cgroupsPath"] = f"/lamina/bench-{os.getpid()}-{path.name}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))


class BusyboxMachine:
    """QEMU with the options, kernel and initramfs of one of Lamina's machines (`command`), and a script
    of busybox as its first process in place of the agent. What it prints is on the console."""

    def __init__(self, command: list[str], work: pathlib.Path, script: str,
                 disk: pathlib.Path | None = None):
        words = without_agent(command)
        options = dict(zip(words[:-1], words[1:]))
        parameters = [word for word in options["-append"].split() if not word.startswith("lamina.")]
        self._initramfs = work / "initramfs"
        with open(self._initramfs, "wb") as archive:
            archive.write(pathlib.Path(options["-initrd"]).read_bytes())
            write_archive(archive, {"bin": None, "bin/busybox": BUSYBOX.read_bytes(),
                                    "start": b"#!/bin/busybox sh\n" + script.encode()})
        words[words.index("-initrd") + 1] = str(self._initramfs)
        words[words.index("-append") + 1] = " ".join([*parameters, "rdinit=/start"])
        if disk is not None:
            words += ["-drive", f"file={disk},if=none,id=disk,format=raw,readonly=on,cache=writeback",
                      "-device", "virtio-blk-pci,addr=3,drive=disk"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, errors="replace")
        self._said: list[str] = []

    def __enter__(self) -> "BusyboxMachine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, line: str) -> None:
        timer = threading.Timer(PATIENCE_SECONDS, self._process.kill)
        timer.start()
        try:
            for said in self._process.stdout:
                self._said.append(said)
                if line in said:
                    return
        finally:
            timer.cancel()
        raise RuntimeError(f"a machine did not say '{line}': {''.join(self._said)}")

    def say(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def without_agent(command: list[str]) -> list[str]:
    """The same machine without what Lamina's agent and monitor need, and without its image."""
    kept: list[str] = []
    words = list(command)
    while words:
        group = [words.pop(0)]
        while words and not (words[0].startswith("-") and len(words[0]) > 1):
            group.append(words.pop(0))
        if not any(re.search(r"fd=\d|chardev=(qmp|agent)|pmem|addr=3,", word) for word in group[1:]):
            kept += group
    return kept


def write_archive(archive, entries: dict[str, bytes | None]) -> None:
    """In the kernel's format for an initramfs; None is a directory."""
    def field(value: int) -> bytes:
        return b"%08x" % value

    def add(name: str, mode: int, content: bytes) -> None:
        header = b"070701" + field(archive.tell()) + field(mode) + field(0) * 2 + field(1) \
            + field(0) + field(len(content)) + field(0) * 4 + field(len(name) + 1) + field(0)
        for part in (header + name.encode() + b"\0", content):
            archive.write(part + bytes(-len(part) % 4))

    archive.write(bytes(-archive.tell() % 4))
    for name, content in entries.items():
        kind = stat.S_IFDIR if content is None else stat.S_IFREG
        add(name, kind | 0o755, content or b"")
    add("TRAILER!!!", 0, b"")
