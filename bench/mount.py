# SPDX-License-Identifier: Apache-2.0
"""How soon an image of 100,000 files in 20 layers is there, and what serving it costs."""

import contextlib
import json
import pathlib
import shutil

from inputs import Inputs
from node import Node, drop_caches, memory_of, output, read_into_cache, run
from report import Row, compared, limited

MIB = 1 << 20
MOST_MILLISECONDS = 20
MOST_MIB = 30


def measure(node: Node, inputs: Inputs, samples: int) -> list[Row]:
    image = node.convert(f"oci:{inputs.many_image()}:latest", "many")
    small = node.directory("small")
    (small / "file").write_text("content")
    small_image = node.convert(f"dir:{small}", "small.oci")

    times: dict[str, list[float]] = {
        "first time on the node": [],
        "first time, origin and programs not in memory": [],
        "again, no engine running": [],
        "again, engine running": [],
    }
    local: list[float] = []
    local_image = make_local_image(node, image)
    for _ in range(samples):
        local.append(time_local_mount(node, local_image))
        with fresh_state(node) as state:
            read_into_cache(node.work / "many")
            times["first time on the node"].append(time_mount(node, image, state))
            times["again, no engine running"].append(time_mount(node, image, state))
            with node.mount(small_image, state, "other"):
                times["again, engine running"].append(time_mount(node, image, state))
        with fresh_state(node) as state:
            drop_caches()
            times["first time, origin and programs not in memory"].append(
                time_mount(node, image, state))
    rows = [limited(f"mount to first byte of ls -R: {name}", "ms", values, most=MOST_MILLISECONDS)
            for name, values in times.items()]
    rows.append(compared("the same, engine running", "ms", times["again, engine running"],
                         "mount(8), local EROFS image", local, lower_is_better=True))
    return rows + measure_memory(node, image, samples)


@contextlib.contextmanager
def fresh_state(node: Node):
    state = node.directory("state")
    yield state
    shutil.rmtree(state)  # after a failure the node's end removes it, once nothing is mounted there


def time_mount(node: Node, image: str, state: pathlib.Path) -> float:
    """Milliseconds from the start of `lamina mount` to the first byte of `ls -R`."""
    target = node.directory("target")
    milliseconds = first_byte(node, target, node.lamina, "mount", image, target, f"--state={state}")
    node.unmount(target, state)
    return milliseconds


def make_local_image(node: Node, image: str) -> pathlib.Path:
    """The same tree as an ordinary EROFS image, what one would mount without Lamina."""
    local = node.work / "local.erofs"
    with fresh_state(node) as state, node.mount(image, state, "target") as target:
        run("mkfs.erofs", "--quiet", local, target)
    return local


def time_local_mount(node: Node, image: pathlib.Path) -> float:
    target = node.directory("target")
    milliseconds = first_byte(node, target, "mount", "--types=erofs", image, target)
    run("umount", target)
    return milliseconds


def first_byte(node: Node, target: pathlib.Path, *command) -> float:
    return json.loads(output(node.drivers / "mount_bench", target, "--", *command))["first_byte_ms"]


def measure_memory(node: Node, image: str, samples: int) -> list[Row]:
    found: dict[str, list[float]] = {}
    for _ in range(samples):
        with fresh_state(node) as state:
            for which in ("that merged", "that found it merged"):
                with node.mount(image, state, "target") as target:
                    engine = node.engine(state)
                    run("ls", "-lR", target)
                    note(found, f"{which}, after ls -lR", memory_of(engine))
                    read_into_cache(target)
                    note(found, f"{which}, after reading all", memory_of(engine))
    return [limited(name, "MiB", values,
                    most=MOST_MIB if name.startswith(("Rss", "Pss")) else None)
            for name, values in found.items()]


def note(found: dict[str, list[float]], when: str, memory: dict[str, int]) -> None:
    for name, value in memory.items():
        found.setdefault(f"{name} of the engine {when}", []).append(value / MIB)
