# SPDX-License-Identifier: Apache-2.0
"""How fast images are converted, against mkfs.erofs and umoci on the same content."""

import pathlib
import shutil

from inputs import Inputs
from node import Node, Run, read_into_cache, run
from report import Row, compared, limited

MIB = 1 << 20


def measure(node: Node, inputs: Inputs, samples: int) -> list[Row]:
    tree = inputs.tree()
    image = inputs.tree_image()
    content = content_bytes(tree)
    converted = node.work / "converted"
    bundle = node.work / "bundle"
    erofs = node.work / "tree.erofs"
    jobs = {
        "directory": (converted, [node.lamina, "convert", f"dir:{tree}", f"oci:{converted}:a"]),
        "mkfs": (erofs, ["mkfs.erofs", "--quiet", "-zlz4hc,9", erofs, tree]),
        "image": (converted, [node.lamina, "convert", f"oci:{image}:latest", f"oci:{converted}:a"]),
        "umoci": (bundle, ["umoci", "unpack", "--image", f"{image}:latest", bundle]),
    }
    runs: dict[str, list[Run]] = {name: [] for name in jobs}
    # Both sides read from memory: the processor is compared, not the disk.
    read_into_cache(tree)
    read_into_cache(image)
    for _ in range(samples):
        for name, (result, command) in jobs.items():
            runs[name].append(run(*command))
            remove(result)

    def seconds(name: str) -> list[float]:
        return [one.seconds for one in runs[name]]

    def speeds(name: str) -> list[float]:
        return [content / 1e6 / one.seconds for one in runs[name]]

    def processor(name: str) -> list[float]:
        return [one.processor_seconds for one in runs[name]]

    def peaks(name: str) -> list[float]:
        return [one.peak_bytes / MIB for one in runs[name]]

    return [
        compared("convert a directory, time", "s", seconds("directory"), "mkfs.erofs -zlz4hc,9",
                 seconds("mkfs"), least=1.0, lower_is_better=True),
        compared("convert an image (gzip), time", "s", seconds("image"), "umoci unpack",
                 seconds("umoci"), least=1.0, lower_is_better=True),
        limited("convert a directory, content", "MB/s", speeds("directory"), least=300),
        limited("convert an image (gzip), content", "MB/s", speeds("image"), least=300),
        limited("convert a directory, processor time", "s", processor("directory")),
        limited("convert an image (gzip), processor time", "s", processor("image")),
        limited("convert a directory, peak memory", "MiB", peaks("directory"), most=256),
        limited("convert an image (gzip), peak memory", "MiB", peaks("image"), most=256),
    ]


def content_bytes(tree: pathlib.Path) -> int:
    """Bytes of the regular files, each once however many names it has."""
    sizes = {}
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            info = path.stat()
            sizes[info.st_ino] = info.st_size
    return sum(sizes.values())


def remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
