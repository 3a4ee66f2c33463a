# SPDX-License-Identifier: Apache-2.0
"""How fast a mounted image is read: from memory, from the node's cache, and the first time."""

import contextlib
import pathlib
import shutil

from inputs import Inputs
from node import Node, drop_caches, output, read_into_cache, run
from report import Row, compared, limited

KERNEL = "kernel EROFS"
PYTHON = ["/usr/bin/python3", "-c", "import json, ssl, sqlite3"]


def measure(node: Node, inputs: Inputs, samples: int) -> list[Row]:
    tree = inputs.tree()
    image = node.convert(f"oci:{inputs.tree_image()}:latest", "tree.oci")
    rows = []
    state = node.directory("state")
    with node.mount_local_erofs(tree, "local") as local, \
         node.mount(image, state, "erofs", "--transport=erofs") as erofs, \
         node.mount(image, state, "fuse", "--transport=fuse") as fuse:
        rows += measure_warm(node, samples, erofs=erofs, local=local, fuse=fuse)
        rows += measure_cold_pages(node, samples, erofs, local)
    rows += measure_cold_sequential(node, inputs, samples)
    rows += measure_python(node, tree / "root", samples)
    return rows


def measure_warm(node: Node, samples: int, **trees: pathlib.Path) -> list[Row]:
    operations = {
        "sequential": ("big", "MB/s", "sequential read"),
        "random": ("big", "reads/s", "random 4 KiB"),
        "stat": (".", "files/s", "stat"),
        "readdir": (".", "names/s", "readdir"),
        "getxattr": ("small", "files/s", "getxattr"),
        "open-read": ("small", "files/s", "open and read 10,000 small files"),
    }
    rows = []
    information = []
    for operation, (part, unit, what) in operations.items():
        found = node.read_bench(operation, samples,
                                **{name: path / part for name, path in trees.items()})
        rates = {name: figures["rate"] for name, figures in found.items()}
        rows.append(compared(f"warm {what}", unit, rates["erofs"], KERNEL, rates["local"],
                             least=0.95))
        information.append(compared(f"warm {what}, transport fuse", unit, rates["fuse"], KERNEL,
                                    rates["local"]))
    return rows + information


def measure_cold_pages(node: Node, samples: int, erofs: pathlib.Path,
                       local: pathlib.Path) -> list[Row]:
    """4 KiB that EROFS does not have in its page cache, but the node has in its own: what a read
    through FUSE costs when nothing must be fetched. The file's pages are dropped with
    POSIX_FADV_DONTNEED, which leaves those of the file below; POSIX_FADV_RANDOM keeps the kernel
    from reading ahead; each page is read once."""
    found: dict[int, dict[str, dict[str, list[float]]]] = {1: {}, 2: {}}
    for _ in range(samples):
        for readers, figures in found.items():
            once = node.read_bench("cold-page", 1, f"--readers={readers}", erofs=erofs / "big",
                                   local=local / "big")
            for tree, values in once.items():
                for figure, value in values.items():
                    figures.setdefault(tree, {}).setdefault(figure, []).extend(value)
    one, two = found[1], found[2]
    rows = [
        limited("cold page, 4 KiB from the node's cache: median", "us", one["erofs"]["p50_us"],
                most=18),
        limited("cold page, 4 KiB from the node's cache: p99", "us", one["erofs"]["p99_us"]),
        compared("cold page, 4 KiB from the node's cache: rate", "reads/s", one["erofs"]["rate"],
                 KERNEL, one["local"]["rate"]),
        compared("cold page, 2 readers", "reads/s", two["erofs"]["rate"], "1 reader",
                 one["erofs"]["rate"], least=1.6),
    ]
    rows.append(compared("cold page, 2 readers, kernel EROFS for information", "reads/s",
                         two["local"]["rate"], "1 reader", one["local"]["rate"]))
    return rows


def measure_cold_sequential(node: Node, inputs: Inputs, samples: int) -> list[Row]:
    """All files of tree/big through a new mount of a new node, against decompressing a tar file of
    them to nowhere."""
    image = node.convert(f"dir:{inputs.tree() / 'big'}", "big.oci")
    origin = node.work / "big.oci"
    archive = inputs.big_archive()
    megabytes = sum(file.stat().st_size for file in (inputs.tree() / "big").iterdir()) / 1e6
    rows = []
    for source in ("in memory", "on the disk"):
        lamina, zstd = [], []
        for _ in range(samples):
            with fresh_mount(node, image) as target:
                prepare_source(source, origin)
                lamina += node.read_bench("cold-sequential", 1, big=target)["big"]["rate"]
            prepare_source(source, archive)
            zstd.append(megabytes / run("zstd", "-q", "-dc", archive).seconds)
        rows.append(compared(f"cold sequential read, source {source}", "MB/s", lamina, "zstd -dc",
                             zstd, least=0.8))
    return rows


@contextlib.contextmanager
def fresh_mount(node: Node, image: str):
    state = node.directory("fresh")
    with node.mount(image, state, "target", "--transport=erofs") as target:
        yield target
    shutil.rmtree(state)


def prepare_source(where: str, source: pathlib.Path) -> None:
    drop_caches()
    if where == "in memory":
        read_into_cache(source)


def measure_python(node: Node, root: pathlib.Path, samples: int) -> list[Row]:
    """What is fetched to start Python. What it touches is counted without readahead, which would
    otherwise count as touched what nobody asked for."""
    image = node.convert(f"dir:{root}", "python.oci")
    touched = pages_touched(node, root)
    figures: dict[str, list[float]] = {"fetched": [], "decompressed": [], "requested": []}
    for _ in range(samples):
        with fresh_mount(node, image) as target:
            run("chroot", target, *PYTHON)
            stats = node.stats(target, node.work / "fresh")
            figures["fetched"].append(stats["fetched_bytes"] / touched)
            figures["decompressed"].append(stats["decompressed_bytes"] / touched)
            figures["requested"].append(stats["read_bytes"] / touched)
    return [
        limited("start of Python: bytes touched", "MB", [touched / 1e6]),
        limited("start of Python: fetched (compressed) / touched", "x", figures["fetched"],
                most=2.0),
        limited("start of Python: decompressed / touched", "x", figures["decompressed"]),
        limited("start of Python: asked for by the kernel / touched", "x", figures["requested"]),
    ]


def pages_touched(node: Node, root: pathlib.Path) -> int:
    """Bytes of pages that come into memory on a local EROFS that does not read ahead."""
    bdi = pathlib.Path("/sys/class/bdi")
    before = set(bdi.iterdir())
    with node.mount_local_erofs(root, "untouched") as target:
        for device in set(bdi.iterdir()) - before:
            (device / "read_ahead_kb").write_text("0")
        run("chroot", target, *PYTHON)
        return int(output(node.drivers / "cached_pages", target))
