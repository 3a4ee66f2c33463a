# SPDX-License-Identifier: Apache-2.0
"""Starting containers with containerd on a node that has not got the image: lazily, and as it is done
without Lamina. All ways (arms) use the same containerd, registry, network and disk."""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import subprocess
import time
from collections.abc import Iterator

import startup_report
import variants
from containers import ContainerNode, WrittenBytes, wait_for_end, wait_for_ready
from images import IMAGES, BenchImage
from inputs import Inputs
from node import Node, drop_caches, in_parallel, run
from wire import Relay, Wire

OVERLAYFS = "overlayfs"
LAMINA = "lamina"
FULL_READ = ["sh", "-c", "tar --one-file-system -cf - / 2>/dev/null | cat >/dev/null; echo ready"]
BURST_CONTAINERS = 32


@dataclasses.dataclass(frozen=True)
class Arm:
    name: str
    snapshotter: str
    suffix: str = ""  # of the image's name
    is_local: bool = False  # pulled, and run once, before the clock is started
    pull_command: str | None = None


PULL = Arm("overlayfs pull", OVERLAYFS)
LOCAL = Arm("overlayfs local", OVERLAYFS, is_local=True)
ARMS = [PULL, LOCAL, Arm("lamina cold", LAMINA, variants.LAZY),
        Arm("lamina profile", LAMINA, variants.PROFILED), Arm("lamina pack", LAMINA, variants.PACKED),
        Arm("lamina local", LAMINA, variants.LAZY, is_local=True)]


@dataclasses.dataclass(frozen=True)
class Network:
    name: str
    rate: str | None = None
    delay_milliseconds: int = 0


NETWORKS = [Network("not shaped"), Network("200 Mbit/s", "200mbit"),
            Network("20 ms a request", delay_milliseconds=20)]


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [image.name for image in IMAGES]
    parser.add_argument("--images", default=",".join(names), metavar="NAME,...",
                        help=f"which images [{','.join(names)}]")
    parser.add_argument("--networks", default=",".join(str(i) for i in range(len(NETWORKS))),
                        metavar="N,...", help="which networks: " + ", ".join(
                            f"{i} {network.name}" for i, network in enumerate(NETWORKS)))
    parser.add_argument("--samples", type=int, help="of each [5, with --quick 1]")
    parser.add_argument("--arm", action="append", default=[],
                        metavar="NAME:SNAPSHOTTER:SUFFIX[:PULL-COMMAND]",
                        help="another way, whose images are called IMAGE+SUFFIX; the command gets "
                        "IMAGE, SNAPSHOTTER, CONTAINERD_ADDRESS and CONTAINERD_NAMESPACE")
    parser.add_argument("--convert", action="append", default=[], metavar="SUFFIX:COMMAND",
                        help="how images of another way are made: gets SOURCE and TARGET, "
                        "references in a registry that speaks http")
    parser.add_argument("--containerd-config", type=pathlib.Path,
                        help="TOML that is added to containerd's configuration, e.g. a proxy plugin")


def parse_arm(text: str) -> Arm:
    fields = text.split(":", 3)
    if len(fields) < 3 or not fields[0] or not fields[1]:
        raise SystemExit(f"tools/bench: --arm {text}: not NAME:SNAPSHOTTER:SUFFIX[:PULL-COMMAND]")
    return Arm(fields[0], fields[1], fields[2], pull_command=fields[3] if len(fields) > 3 else None)


def measure(node: Node, inputs: Inputs, arguments: argparse.Namespace, here: dict) -> None:
    arms = [*ARMS, *map(parse_arm, arguments.arm)]
    wanted = arguments.images.split(",")
    images = [image for image in IMAGES if image.name in wanted]
    if unknown := set(wanted) - {image.name for image in images}:
        raise SystemExit(f"tools/bench: no image {', '.join(sorted(unknown))}")
    networks = [NETWORKS[int(number)] for number in arguments.networks.split(",")]
    samples = arguments.samples or (1 if arguments.quick else 5)
    conversions = [text.split(":", 1) for text in arguments.convert]
    more = arguments.containerd_config.read_text() if arguments.containerd_config else ""
    layouts = [inputs.startup_image(image) for image in images]
    with contextlib.ExitStack() as cleanup:
        wire_directory = node.directory("wire")
        # The registry stands for another machine, whose memory is not emptied with this one's.
        run("mount", "-t", "tmpfs", "lamina-bench", wire_directory)
        cleanup.callback(run, "umount", wire_directory)
        wire = cleanup.enter_context(Wire(wire_directory))
        bench = StartupBench(node, wire, more)
        for image, layout in zip(images, layouts):
            bench.publish(image, layout, conversions)
        runs: list[dict] = []
        try:
            for network in networks:
                runs.extend(bench.starts(images, arms, network, samples))
            for network in networks[:2]:
                runs.extend(bench.full_reads(images, arms, network, 1 if arguments.quick else 3))
            runs.extend(bench.bursts(images, arms, 1 if arguments.quick else 3))
        finally:  # also of what was measured before it was stopped
            order = {"network": [network.name for network in networks],
                     "arm": [arm.name for arm in arms],
                     "image": ["all", *(image.name for image in images)]}
            if runs:
                startup_report.publish(runs, order, here,
                                       arguments.out or arguments.build / "bench/startup")


class StartupBench:
    def __init__(self, node: Node, wire: Wire, more_config: str):
        self._node = node
        self._wire = wire
        self._more_config = more_config

    def publish(self, image: BenchImage, layout: pathlib.Path,
                conversions: list[list[str]]) -> None:
        """The image as Lamina has it, and as other tools do."""
        print(f"publishing {image.name}", flush=True)
        variants.publish(self._node, self._wire, layout, image.name, image.command)
        source = f"{self._wire.registry}/{image.name}"
        for suffix, command in conversions:
            subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL,
                           env={**os.environ, "SOURCE": f"{source}:latest",
                                "TARGET": f"{source}{suffix}:latest"})

    def starts(self, images: list[BenchImage], arms: list[Arm], network: Network,
               samples: int) -> Iterator[dict]:
        for image, arm in shuffled(images, arms, samples):
            # Where nothing is fetched the network makes no difference.
            if arm.is_local and network.name != NETWORKS[0].name:
                continue
            show(network, arm, image)
            with self._fresh(network) as (relay, containers):
                name = reference(relay, image, arm)
                if arm.is_local:
                    containers.pull(name, arm.snapshotter, arm.pull_command)
                    containers.create(name, arm.snapshotter, "before")
                    wait_for_end(containers.start("before"))
                yield {"kind": "start", **labels(network, arm, image),
                       **self._start(containers, relay, name, arm)}

    @staticmethod
    def _start(containers: ContainerNode, relay: Relay, image: str, arm: Arm) -> dict:
        drop_caches()
        written = WrittenBytes(containers.root)
        before, daemon_before = relay.counts(), containers.daemon_usage()
        start = time.monotonic()
        if not arm.is_local:
            containers.pull(image, arm.snapshotter, arm.pull_command)
        pulled = time.monotonic()
        containers.create(image, arm.snapshotter, "measured")
        created = time.monotonic()
        task = containers.start("measured")
        ready = wait_for_ready([task])[0]
        wait_for_end(task)
        done = time.monotonic()
        after, daemon = relay.counts(), containers.daemon_usage()
        return {"pull_seconds": pulled - start, "create_seconds": created - pulled,
                "ready_seconds": ready - start, "done_seconds": done - start,
                "start_seconds": ready - pulled,
                "wire_bytes": after["bytes"] - before["bytes"],
                "requests": after["requests"] - before["requests"],
                "written_bytes": written.so_far(),
                "laminad_seconds": daemon.seconds - daemon_before.seconds,
                "laminad_peak_bytes": daemon.peak_bytes}

    def full_reads(self, images: list[BenchImage], arms: list[Arm], network: Network,
                   samples: int) -> Iterator[dict]:
        for image, arm in shuffled(images, arms, samples):
            if arm.is_local:
                continue
            show(network, arm, image, "all of it, ")
            with self._fresh(network) as (relay, containers):
                name = reference(relay, image, arm)
                drop_caches()
                start = time.monotonic()
                containers.pull(name, arm.snapshotter, arm.pull_command)
                containers.create(name, arm.snapshotter, "read", *FULL_READ)
                task = containers.start("read")
                ready = wait_for_ready([task])[0]
                wait_for_end(task)
                yield {"kind": "full read", **labels(network, arm, image),
                       "done_seconds": ready - start}

    def bursts(self, images: list[BenchImage], arms: list[Arm], samples: int) -> Iterator[dict]:
        """Many containers of all images at once, on a node that has none of them."""
        network = NETWORKS[0]
        for arm in [arm for _ in range(samples) for arm in random.sample(arms, len(arms))]:
            if arm.is_local:
                continue
            print(f"{network.name}, {arm.name}: {BURST_CONTAINERS} containers at once", flush=True)
            with self._fresh(network) as (relay, containers):
                drop_caches()
                start = time.monotonic()
                in_parallel([lambda image=image: containers.pull(
                    reference(relay, image, arm), arm.snapshotter, arm.pull_command)
                    for image in images])
                def begin(number: int) -> subprocess.Popen:
                    image = images[number % len(images)]
                    name = f"burst-{number}"
                    containers.create(reference(relay, image, arm), arm.snapshotter, name)
                    return containers.start(name)
                tasks = in_parallel([lambda number=number: begin(number)
                                     for number in range(BURST_CONTAINERS)])
                ready = max(wait_for_ready(tasks))
                for task in tasks:
                    wait_for_end(task)
                yield {"kind": "burst", "network": network.name, "arm": arm.name, "image": "all",
                       "ready_seconds": ready - start}

    @contextlib.contextmanager
    def _fresh(self, network: Network):
        wire = self._wire
        upstream = wire.metered if network.delay_milliseconds > 0 else wire.registry
        with Relay(self._node.directory("relay"), upstream) as relay, \
                ContainerNode(self._node, relay.address, self._more_config) as containers, \
                wire.shaped(network.rate, network.delay_milliseconds):
            yield relay, containers


def reference(relay: Relay, image: BenchImage, arm: Arm) -> str:
    return f"{relay.address}/{image.name}{arm.suffix}:latest"


def labels(network: Network, arm: Arm, image: BenchImage) -> dict:
    return {"network": network.name, "arm": arm.name, "image": image.name}


def show(network: Network, arm: Arm, image: BenchImage, what: str = "") -> None:
    print(f"{network.name}, {arm.name}: {what}{image.name}", flush=True)


def shuffled(images: list[BenchImage], arms: list[Arm],
             samples: int) -> list[tuple[BenchImage, Arm]]:
    """All of them once before any of them twice."""
    pairs = [(image, arm) for image in images for arm in arms]
    return [pair for _ in range(samples) for pair in random.sample(pairs, len(pairs))]
