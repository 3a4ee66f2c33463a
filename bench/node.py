# SPDX-License-Identifier: Apache-2.0
"""The machine that is measured: programs, mounts, caches; all of it put back at the end."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

MS_RDONLY = 1
MNT_DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass
class Run:
    seconds: float
    processor_seconds: float  # of all its threads, user and system
    peak_bytes: int  # of resident memory


def run(*command, quiet: bool = True) -> Run:
    """Runs a program to its end; it must succeed."""
    output = subprocess.DEVNULL if quiet else None
    start = time.monotonic()
    process = subprocess.Popen([str(word) for word in command], stdout=output)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def output(*command) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True,
                          text=True).stdout


def in_parallel(calls: list) -> list:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def drop_caches() -> None:
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def read_into_cache(path: pathlib.Path) -> None:
    """Reads a file, or all files of a tree, so that it comes from memory the next time."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        with open(file, "rb", buffering=0) as content:
            while content.read(1 << 20):
                pass


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process: Rss, Pss, and what of Rss is its own (Anonymous)."""
    found = {}
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        if name in ("Rss", "Pss", "Anonymous"):
            found[name] = int(value.split()[0]) * 1024
    return found


def engines(state_prefix: str) -> list[int]:
    """Processes that serve mounts with a state directory that starts like this."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
            if words[1:2] == ["serve"] and any(
                    word.startswith(f"--state={state_prefix}") for word in words):
                found.append(int(process.name))
    return found


def parent_of(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


def end_engines_below(directory: pathlib.Path) -> None:
    """Engines without mounts end by themselves; one that hangs is ended."""
    deadline = time.monotonic() + 10
    while (left := engines(f"{directory}/")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def unmount_below(directory: pathlib.Path) -> None:
    """Unmounts what something that failed left there."""
    mounts = pathlib.Path("/proc/self/mounts").read_text().splitlines()
    for target in reversed([line.split()[1] for line in mounts]):
        if target.startswith(f"{directory}/"):
            libc.umount2(os.fsencode(target), MNT_DETACH)


class Node:
    """Use in a with statement: mounts and files made here are gone at its end."""

    def __init__(self, cache: pathlib.Path, build: pathlib.Path):
        self.lamina = build / "tools/lamina/lamina"
        self.laminad = build / "tools/laminad/laminad"
        self.containerd_client = build / "tests/snapshotter/containerd_client"
        self.drivers = build / "bench"
        self._cache = cache
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Node":
        # So that the end of the with statement is reached.
        signal.signal(signal.SIGTERM, lambda *_: exit(1))
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="work-", dir=self._cache))
        self._cleanup.callback(shutil.rmtree, self.work)
        self._cleanup.callback(end_engines_below, self.work)
        self._cleanup.callback(unmount_below, self.work)
        return self

    def __exit__(self, *_) -> None:
        self._cleanup.close()

    def directory(self, name: str) -> pathlib.Path:
        path = self.work / name
        path.mkdir(exist_ok=True)
        return path

    def convert(self, source: str, name: str, *options: str) -> str:
        """Converts into the work directory and returns the image."""
        image = f"oci:{self.work / name}:latest"
        run(self.lamina, "convert", source, image, *options)
        return image

    @contextlib.contextmanager
    def mount(self, image: str, state: pathlib.Path, name: str, *options: str):
        target = self.directory(name)
        run(self.lamina, "mount", image, target, f"--state={state}", *options)
        try:
            yield target
        finally:
            self.unmount(target, state)

    def unmount(self, target: pathlib.Path, state: pathlib.Path) -> None:
        run(self.lamina, "umount", target, f"--state={state}")

    @contextlib.contextmanager
    def mount_local_erofs(self, tree: pathlib.Path, name: str):
        """The kernel's EROFS on a local file; mount(8) would put a loop device in between."""
        image = self.work / f"{name}.erofs"
        run("mkfs.erofs", "--quiet", image, tree)
        target = self.directory(name)
        if libc.mount(os.fsencode(image), os.fsencode(target), b"erofs", MS_RDONLY, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount {image}")
        try:
            yield target
        finally:
            libc.umount2(os.fsencode(target), MNT_DETACH)
            image.unlink()

    def stats(self, target: pathlib.Path, state: pathlib.Path) -> dict:
        return json.loads(output(self.lamina, "stats", target, f"--state={state}", "--json"))[0]

    def engine(self, state: pathlib.Path) -> int:
        """The process that serves the mounts of a state directory."""
        found = engines(str(state))
        # An engine has a helper, its child, that mounts.
        found = [pid for pid in found if parent_of(pid) not in found]
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} engines of {state}")
        return found[0]

    def read_bench(self, operation: str, samples: int, *options,
                   **trees: pathlib.Path) -> dict[str, dict[str, list[float]]]:
        """Measures trees side by side: {tree: {figure: samples}}."""
        report = json.loads(output(
            self.drivers / "read_bench", operation, f"--samples={samples}", *options,
            *(f"{name}={path}" for name, path in trees.items())))
        return {name: {figure: [sample[figure] for sample in runs] for figure in runs[0]}
                for name, runs in report["samples"].items()}
