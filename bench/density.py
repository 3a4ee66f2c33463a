# SPDX-License-Identifier: Apache-2.0
"""Host memory of several machines, and of several containers, that read an image's files: Lamina's
against machines with a disk image each, and against unpacked trees. All machines have one kernel."""

import argparse
import contextlib
import dataclasses
import pathlib
import random
import re
import threading
import time
from collections.abc import Callable

import density_report
from fleets import CrunFleet, DiskFleet, Fleet, LaminaFleet, processes, reclaim_script
from inputs import Inputs
from mount import make_local_image
from node import Node, drop_caches, output
from sandboxes import Sandbox

MIB = 1 << 20
PERIOD_SECONDS = 1
CONTAINERS_HOLD_SECONDS = 5
OWN_MEBIBYTES = 96
SCRIPT = ("for file in /data/*; do dd if=$file of=/dev/null bs=1M 2>/dev/null; done; "
          f"dd if=/dev/zero of=/dev/null bs={OWN_MEBIBYTES}M count=1 2>/dev/null")
ONE, SHARED = "one image", "images that share layers"
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


@dataclasses.dataclass(frozen=True)
class Sample:
    seconds: float  # since the scripts were started
    processes: int  # bytes of theirs, with what they map and is in no image
    cache: int  # bytes of images in the page cache


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machines", type=int,
                        help="machines, or containers, at a time [4, with --quick 2]")
    parser.add_argument("--mebibytes", type=int, help="of each image [300, with --quick 60]")
    parser.add_argument("--hold", type=int, metavar="SECONDS",
                        help="how long machines are looked at when their work is done [90, with --quick 60]")
    parser.add_argument("--samples", type=int, help="of each [3, with --quick 1]")
    parser.add_argument("--only", choices=["machines", "containers"], help="one kind [both]")


def measure(node: Node, inputs: Inputs, arguments: argparse.Namespace, here: dict) -> None:
    quick = arguments.quick
    machines = arguments.machines or (2 if quick else 4)
    mebibytes = arguments.mebibytes or (60 if quick else 300)
    bench = DensityBench(node, inputs.density_images(machines, mebibytes), machines,
                         arguments.hold or (60 if quick else 90))
    runs: list[dict] = []
    try:
        for _ in range(arguments.samples or (1 if quick else 3)):
            for run in bench.shuffled(arguments.only):
                runs.append(run())
    finally:  # also of what was measured before it was stopped
        if runs:
            settings = {"machines": machines, "mebibytes": mebibytes, "script": SCRIPT}
            density_report.publish(runs, settings, here,
                                   arguments.out or arguments.build / "bench/density")


class DensityBench:
    def __init__(self, node: Node, images: pathlib.Path, machines: int, hold: int):
        self._node = node
        self._layers = images
        self._machines = machines
        self._hold = hold
        names = [f"image-{number}" for number in range(machines)]
        self._images = [node.convert(f"oci:{images}/{name}.oci:latest", name) for name in names]
        self._disks = []
        for number, image in enumerate(self._images):
            disk = make_local_image(node, image)
            self._disks.append(disk.rename(node.work / f"local-{number}.erofs"))
        # What the machines and containers of others shall be like.
        state = node.directory("first-state")
        with Sandbox(node, state, self._images[0], "--backend=container") as container:
            self._configuration = container.configuration()
        with Sandbox(node, state, self._images[0], "--backend=qemu") as machine:
            self._command = machine.machine()[1]
            self._reclaim = reclaim_script(machine)
            initramfs = node.work / "initramfs"
            at = self._command.index("-initrd") + 1
            initramfs.write_bytes(pathlib.Path(self._command[at]).read_bytes())
            self._command[at] = str(initramfs)

    def shuffled(self, only: str | None) -> list[Callable[[], dict]]:
        runs = []
        for images in (ONE, SHARED):
            for reclaim in (False, True) if only != "containers" else ():
                runs += [lambda images=images, reclaim=reclaim: self._disk_machines(images, reclaim),
                         lambda images=images, reclaim=reclaim: self._dax_machines(images, reclaim)]
            if only != "machines":
                runs += [lambda images=images: self._containers(images),
                         lambda images=images: self._crun(images, copy=True),
                         lambda images=images: self._crun(images, copy=False)]
        return random.sample(runs, len(runs))

    def _each(self, images: str, of: list) -> list:
        """For each machine what it gets of a list that has something for each image."""
        return [of[0]] * self._machines if images == ONE else of

    def _disk_machines(self, images: str, reclaim: bool) -> dict:
        command = self._command
        if not reclaim:
            command = [word.replace("free-page-reporting=on", "free-page-reporting=off")
                       for word in command]
        return self._watch("machines", images, "virtio-blk", reclaim, lambda: DiskFleet(
            self._node, SCRIPT, command, self._each(images, self._disks),
            self._reclaim if reclaim else ""))

    def _dax_machines(self, images: str, reclaim: bool) -> dict:
        options = ["--backend=qemu", *([] if reclaim else ["--keep-memory"])]
        return self._watch("machines", images, "lamina", reclaim, lambda: LaminaFleet(
            self._node, SCRIPT, self._each(images, self._images), *options))

    def _containers(self, images: str) -> dict:
        return self._watch("containers", images, "lamina", False, lambda: LaminaFleet(
            self._node, SCRIPT, self._each(images, self._images), "--backend=container"))

    def _crun(self, images: str, copy: bool) -> dict:
        base = self._layers / "base"
        layers = self._each(images, [[base, self._layers / f"top-{number}"]
                                     for number in range(self._machines)])
        return self._watch("containers", images, "copies" if copy else "overlayfs", False,
                           lambda: CrunFleet(self._node, SCRIPT, self._configuration, layers, copy))

    def _watch(self, kind: str, images: str, arm: str, reclaim: bool,
               make: Callable[[], Fleet]) -> dict:
        name = f"{arm}, reclaim" if reclaim else arm
        print(f"{kind}, {images}: {name}", flush=True)
        hold = self._hold if kind == "machines" else CONTAINERS_HOLD_SECONDS
        with make() as fleet:
            drop_caches()
            fleet.start()
            with Sampler(self._node, fleet) as sampler:
                start = time.monotonic()
                fleet.run_script()
                done = time.monotonic() - start
                time.sleep(hold)
                samples = sampler.stop()
        return {"kind": kind, "images": images, "arm": name, "done_seconds": done,
                "peak_bytes": max(sample.processes + sample.cache for sample in samples),
                "mean_bytes": mean(samples),
                "samples": [dataclasses.asdict(sample) for sample in samples]}


class Sampler:
    """Adds up memory in a thread, from the with statement on."""

    def __init__(self, node: Node, fleet: Fleet):
        self._cached_pages = node.drivers / "cached_pages"
        self._fleet = fleet
        self._stop = threading.Event()
        self._samples: list[Sample] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def stop(self) -> list[Sample]:
        self.__exit__()
        if self._failure is not None:
            raise self._failure
        return self._samples

    def _run(self) -> None:
        start = time.monotonic()
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                self._samples.append(self._sample(began - start))
                self._stop.wait(max(0, began + PERIOD_SECONDS - time.monotonic()))
        except Exception as failure:  # which is the other thread's to see
            self._failure = failure

    def _sample(self, seconds: float) -> Sample:
        """A page counts once: what is mapped of an image's file counts as that file's, and not for the
        process."""
        directories = self._fleet.directories()
        cache = sum(int(output(self._cached_pages, directory)) for directory in directories)
        own = 0
        for pid, in_container in processes(self._fleet).items():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                own += own_bytes(pid, ["/"] if in_container else [f"{path}/" for path in directories])
        return Sample(seconds, own, cache)


def own_bytes(pid: int, images: list[str]) -> int:
    """Proportional share of what a process has in memory, without files whose paths start like those."""
    total = 0
    counts = True
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := MAPPING.match(line):
            counts = not any(mapping[1].startswith(prefix) for prefix in images)
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def mean(samples: list[Sample]) -> float:
    """Over time: memory-time, divided by the time."""
    area = sum((after.seconds - before.seconds)
               * (before.processes + before.cache + after.processes + after.cache) / 2
               for before, after in zip(samples, samples[1:]))
    return area / (samples[-1].seconds - samples[0].seconds)
