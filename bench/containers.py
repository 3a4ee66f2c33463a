# SPDX-License-Identifier: Apache-2.0
"""A node with containerd and laminad, both new and without any image, and what a container on it costs."""

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import shutil
import subprocess
import time

from images import READY
from node import Node, run, unmount_below

NAMESPACE = "bench"
TIMEOUT = 1800
CONTAINERD_CONFIG = """
version = 2
root = "{root}/containerd"
state = "{root}/run"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{root}/containerd.sock"
[proxy_plugins.lamina]
  type = "snapshot"
  address = "{root}/lamina.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
{more}
"""


@dataclasses.dataclass
class Usage:
    """Of the processor and of memory, by a daemon with all its processes."""
    seconds: float
    peak_bytes: int


class ContainerNode:
    """Use in a with statement. Each one has directories of its own, so that it knows of no image."""

    def __init__(self, node: Node, registry: str, more_config: str = ""):
        self._node = node
        self.root = node.directory("containers")
        self.address = self.root / "containerd.sock"
        self._registry = registry
        self._more_config = more_config
        self._cleanup = contextlib.ExitStack()
        self._daemon: subprocess.Popen | None = None
        self._containers: list[str] = []

    def __enter__(self) -> "ContainerNode":
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._remove_files)
            log = cleanup.enter_context(open(self.root / "daemons.log", "ab"))
            settings = {"socket": f"{self.root}/lamina.sock", "containerd": str(self.address),
                        "registries": [self._registry]}
            config = self.root / "laminad.toml"
            config.write_text("\n".join(["[snapshotter]", *(
                f"{name} = {json.dumps(value)}" for name, value in settings.items()), ""]))
            self._daemon = self._serve(cleanup, log, self._node.laminad, f"--config={config}",
                                       f"--state={self.root}/state")
            wait_until(lambda: (self.root / "lamina.sock").exists(), "laminad listens")
            config = self.root / "containerd.toml"
            config.write_text(CONTAINERD_CONFIG.format(root=self.root, more=self._more_config))
            self._serve(cleanup, log, "containerd", "--config", config)
            wait_until(lambda: subprocess.run([*self._ctr(), "version"], check=False,
                                              capture_output=True).returncode == 0,
                       "containerd answers")
            self._cleanup = cleanup.pop_all()
            # First of all that the end of the with statement does.
            self._cleanup.callback(self._remove_containers)
        return self

    def __exit__(self, *_) -> None:
        self._cleanup.close()

    def pull(self, image: str, snapshotter: str, command: str | None = None) -> None:
        if command is None:
            run(self._node.containerd_client, self.address, NAMESPACE, "pull", image, snapshotter)
            return
        subprocess.run(command, shell=True, check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL,
                       env={**os.environ, "IMAGE": image, "SNAPSHOTTER": snapshotter,
                            "CONTAINERD_ADDRESS": str(self.address),
                            "CONTAINERD_NAMESPACE": NAMESPACE})

    def create(self, image: str, snapshotter: str, name: str, *command: str) -> None:
        self._containers.append(name)
        run(*self._ctr(), "containers", "create", f"--snapshotter={snapshotter}", "--", image, name,
            *command)

    def start(self, name: str) -> subprocess.Popen:
        return subprocess.Popen([*self._ctr(), "tasks", "start", name], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE)

    def daemon_usage(self) -> Usage:
        """Of laminad."""
        return usage_of(self._daemon.pid)

    def _ctr(self) -> list[str]:
        return ["ctr", f"--address={self.address}", f"--namespace={NAMESPACE}"]

    def _remove_containers(self) -> None:
        for name in self._containers:
            for action in (["tasks", "delete", "--force"], ["containers", "delete"]):
                subprocess.run([*self._ctr(), *action, name], check=False, capture_output=True)

    def _serve(self, cleanup: contextlib.ExitStack, log, *command) -> subprocess.Popen:
        process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=log)
        cleanup.callback(process.wait)
        cleanup.callback(process.terminate)
        return process

    def _remove_files(self) -> None:
        unmount_below(self.root)
        shutil.rmtree(self.root)


def wait_for_ready(tasks: list[subprocess.Popen]) -> list[float]:
    """Waits until each of some containers has printed READY, and gives the times when they did."""
    seen = {task.pid: b"" for task in tasks}
    times = {}
    with selectors.DefaultSelector() as selector:
        for task in tasks:
            selector.register(task.stdout, selectors.EVENT_READ, task)
        while len(times) < len(tasks):
            events = selector.select(TIMEOUT)
            if not events:
                raise TimeoutError("a container does not get ready")
            for key, _ in events:
                task = key.data
                piece = os.read(task.stdout.fileno(), 1 << 16)
                seen[task.pid] += piece
                if task.pid not in times and READY in seen[task.pid]:
                    times[task.pid] = time.monotonic()
                if not piece:
                    selector.unregister(task.stdout)
                    if task.pid not in times:
                        raise RuntimeError(f"a container ended before it was ready: {seen[task.pid]}")
    return [times[task.pid] for task in tasks]


def wait_for_end(task: subprocess.Popen) -> None:
    task.stdout.read()
    if task.wait(TIMEOUT) != 0:
        raise RuntimeError(f"a container ended with {task.returncode}")


def usage_of(pid: int) -> Usage:
    """Of a process and its children."""
    usage = Usage(0, 0)
    for process in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            usage.seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    usage.peak_bytes += int(line.split()[1]) * 1024
    return usage


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain until {what}")
        time.sleep(0.02)


class WrittenBytes:
    """What goes to the disk that holds a path, by the block layer's count."""

    def __init__(self, path: pathlib.Path):
        device = path.stat().st_dev
        self._stat = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        self._before = self._count()

    def so_far(self) -> int:
        return self._count() - self._before

    def _count(self) -> int:
        os.sync()
        return int(self._stat.read_text().split()[6]) * 512
