# SPDX-License-Identifier: Apache-2.0
"""A node without the image, and a registry at the end of a slow network: starting and reading it
lazily against pulling and unpacking it."""

import json
import pathlib
import shutil
import subprocess
import time

import variants
from inputs import Inputs
from node import Node, drop_caches, output, run
from report import Row, compared, limited
from wire import Wire

RATE = "200mbit"
DELAY_MILLISECONDS = 20
PROGRAM = ["python3", "-c", "import json, ssl, sqlite3; print('ready')"]
IMAGE = "bench/service"
MIB = 1 << 20


def measure(node: Node, inputs: Inputs, samples: int) -> list[Row]:
    with Wire(node.directory("wire")) as wire:
        touched = variants.publish(node, wire, inputs.service_image(), IMAGE, PROGRAM)
        bench = NetworkBench(node, wire, touched)
        return [*bench.starts(samples), *bench.warm_start(samples), *bench.full_reads(samples),
                *bench.prefetches(samples)]


class NetworkBench:
    def __init__(self, node: Node, wire: Wire, touched: int):
        self._node = node
        self._wire = wire
        self._touched = touched

    def _metered(self, suffix: str) -> str:
        return f"docker://{self._wire.metered}/{IMAGE}{suffix}:latest"

    def starts(self, samples: int) -> list[Row]:
        rows = []
        for network, rate, delay in ((f"{RATE}", RATE, 0),
                                     (f"{DELAY_MILLISECONDS} ms a request", None,
                                      DELAY_MILLISECONDS)):
            times: dict[str, list[float]] = {}
            used: dict[str, list[dict[str, int]]] = {}
            with self._wire.shaped(rate, delay):
                for _ in range(samples):
                    for name, start in (("pull", self._pull_and_start),
                                        ("lazy", self._start_lazily),
                                        ("profiled", self._start_lazily),
                                        ("laid-out", self._start_lazily),
                                        ("packed", self._start_lazily)):
                        before = self._wire.counts()
                        drop_caches()
                        seconds, written = start(name)
                        after = self._wire.counts()
                        times.setdefault(name, []).append(seconds)
                        used.setdefault(name, []).append({
                            "written": written,
                            "requests": after["requests"] - before["requests"],
                            "ranges": after["ranges"] - before["ranges"],
                            "bytes": after["bytes"] - before["bytes"]})
            for name, least in (("lazy", 10), ("profiled", 20), ("laid-out", 20), ("packed", 20)):
                rows.append(compared(f"start of Python, no data on the node, {name}, {network}",
                                     "s", times[name], "skopeo, umoci, crun", times["pull"],
                                     least=least if rate else None, lower_is_better=True))
                rows.append(compared(f"same: bytes written, {name}", "MiB",
                                     [run["written"] / MIB for run in used[name]], "same",
                                     [run["written"] / MIB for run in used["pull"]],
                                     least=10, lower_is_better=True))
                rows.append(limited(f"same: received, {name}", "MiB",
                                    [run["bytes"] / MIB for run in used[name]]))
                # Of content and its tables; what is asked for by its whole name are documents.
                rows.append(limited(
                    f"same: requests of ranges for each 4 MiB of frames touched, {name}", "",
                    [run["ranges"] / (self._touched / (4 * MIB)) for run in used[name]],
                    most=1 if name in ("laid-out", "packed") else None))
                rows.append(limited(f"same: documents, {name}", "",
                                    [run["requests"] - run["ranges"] for run in used[name]]))
        return rows

    def _start_lazily(self, name: str) -> tuple[float, int]:
        state = self._node.work / "lazy-state"
        start = time.monotonic()
        run(self._node.lamina, "run", "--plain-http", f"--state={state}", self._metered(f"-{name}"),
            "--", *PROGRAM)
        seconds = time.monotonic() - start
        written = bytes_on_disk(state)
        shutil.rmtree(state)
        return seconds, written

    def _pull_and_start(self, _: str) -> tuple[float, int]:
        work = self._node.directory("pulled")
        start = time.monotonic()
        self._pull(work)
        run_in(work / "bundle/rootfs")
        seconds = time.monotonic() - start
        written = bytes_on_disk(work)
        shutil.rmtree(work)
        return seconds, written

    def _pull(self, work: pathlib.Path) -> None:
        run("skopeo", "copy", "--quiet", "--src-tls-verify=false", self._metered(variants.ORIGINAL),
            f"oci:{work}/image:latest")
        run("umoci", "--log=error", "unpack", "--image", f"{work}/image:latest", work / "bundle")

    def warm_start(self, samples: int) -> list[Row]:
        state = self._node.directory("warm-state")
        lazy, local = [], []
        with self._node.mount(self._metered(variants.LAZY), state, "warm", "--plain-http") as target:
            tree = self._node.directory("warm-tree")
            run("cp", "-a", f"{target}/.", tree)
            with self._node.mount_local_erofs(tree, "local") as local_target:
                for sample in range(-2, samples * 3):  # the first two fill the page cache
                    ours, theirs = run_in(target), run_in(local_target)
                    if sample >= 0:
                        lazy.append(ours * 1000)
                        local.append(theirs * 1000)
            shutil.rmtree(tree)
        return [compared("start of Python, all in memory", "ms", lazy,
                         "kernel EROFS, local file", local, least=0.95, lower_is_better=True)]

    def full_reads(self, samples: int) -> list[Row]:
        rows = []
        for network, rate in (("not shaped", None), (RATE, RATE)):
            lazy, pulled = [], []
            with self._wire.shaped(rate):
                for _ in range(samples):
                    drop_caches()
                    state = self._node.directory("full-state")
                    start = time.monotonic()
                    with self._node.mount(self._metered(variants.LAZY), state, "full",
                                          "--plain-http") as target:
                        read_all(target)
                        lazy.append(time.monotonic() - start)
                    shutil.rmtree(state)

                    drop_caches()
                    work = self._node.directory("pulled")
                    start = time.monotonic()
                    self._pull(work)
                    read_all(work / "bundle/rootfs")
                    pulled.append(time.monotonic() - start)
                    shutil.rmtree(work)
            rows.append(compared(f"tar of the whole image, no data on the node, {network}", "s",
                                 lazy, "skopeo, umoci, tar", pulled, least=1, lower_is_better=True))
        return rows

    def prefetches(self, samples: int) -> list[Row]:
        """Not through the meter, which is slower than the registry."""
        image = f"docker://{self._wire.registry}/{IMAGE}-lazy:latest"
        report = json.loads(output(self._node.lamina, "inspect", "--plain-http", "--json", image))
        layer = max(report["layers"], key=lambda layer: layer["bytes"])
        url = f"http://{self._wire.registry}/v2/{IMAGE}-lazy/blobs/{layer['digest']}"
        lazy, curl = [], []
        for _ in range(samples):
            state = self._node.directory("prefetch-state")
            start = time.monotonic()
            run(self._node.lamina, "prefetch", "--plain-http", f"--state={state}", image)
            lazy.append(layer["bytes"] / MIB / (time.monotonic() - start))
            shutil.rmtree(state)
            start = time.monotonic()
            run("curl", "--silent", "--fail", "--output", self._node.work / "blob", url)
            curl.append(layer["bytes"] / MIB / (time.monotonic() - start))
        return [compared("prefetch of an image", "MiB/s of the blob", lazy, "curl of the blob", curl,
                         least=0.9)]


def run_in(root: pathlib.Path) -> float:
    start = time.monotonic()
    run("chroot", root, *PROGRAM)
    return time.monotonic() - start


def read_all(tree: pathlib.Path) -> None:
    # GNU tar does not read at all when its output is /dev/null.
    subprocess.run(f"tar -C {tree} -cf - . | cat >/dev/null", shell=True, check=True)


def bytes_on_disk(directory: pathlib.Path) -> int:
    return int(output("du", "--summarize", "--block-size=1", directory).split()[0])
