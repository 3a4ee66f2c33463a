# SPDX-License-Identifier: Apache-2.0
"""The density benchmark's results as JSON, as a page of tables with goals, and as pictures."""

import pathlib
import statistics

from plots import pyplot, save
from report import Row, compared, markdown, number, publish as publish_rows

MIB = 1 << 20
LEAST_OF_DISKS = round(1 / (1 - 0.4), 3)
LEAST_OF_KEPT = round(1 / (1 - 0.2), 3)
METHOD = """
Every second: the proportional share (PSS) of all processes that run for the machines or containers,
Lamina's engine and monitors among them, without what they map of images; and the pages that the page
cache has of images' files (mincore(2)), wherever they are: disk images, unpacked trees, blob files, and
those as FUSE and EROFS have them. So a page counts once, and a copy of it as another. Not counted: the
kernel's own memory, and the origin. A container's mapped files are taken to be the image's. Caches are
empty when the machines start, what Lamina needs is on the node, and the clock starts with the scripts,
when all machines have booted. Mean: memory-time, divided by the time.
"""


def publish(runs: list[dict], settings: dict, here: dict, directory: pathlib.Path) -> None:
    """Writes density.json, density.md and pictures, and prints the goals."""
    page = ["", f"{settings['machines']} at a time, images of {settings['mebibytes']} MiB. Each runs",
            "", f"    {settings['script']}", *METHOD.splitlines()]
    directory.mkdir(parents=True, exist_ok=True)
    for kind, images in sorted({(run["kind"], run["images"]) for run in runs}, reverse=True):
        chosen = [run for run in runs if (run["kind"], run["images"]) == (kind, images)]
        picture = f"{kind}-{images}".replace(" ", "-")
        draw(chosen, f"Host memory, {settings['machines']} {kind}, {images}", directory / picture)
        page += ["", f"## {kind}, {images}", "", f"![host memory]({picture}.svg)", "",
                 *markdown(["arm", "peak MiB", "mean MiB", "at the end MiB: processes", "page cache",
                            "script s"],
                           [[arm, *figures(chosen, arm)] for arm in arms(chosen)])]
    publish_rows("density", rows(runs), here, directory, {"settings": settings, "runs": runs}, page)


def rows(runs: list[dict]) -> list[Row]:
    found = []

    def add(what: str, figure: str, ours: tuple, against: tuple, least: float | None = None) -> None:
        def values(kind: str, images: str, arm: str) -> list[float]:
            return [run[figure] / MIB for run in runs
                    if (run["kind"], run["images"], run["arm"]) == (kind, images, arm)]

        pairs = list(zip(values(*ours), values(*against)))
        if pairs:
            found.append(compared(f"{ours[0]}, {ours[1]}: {what}", "MiB", [pair[0] for pair in pairs],
                                  against[2], [pair[1] for pair in pairs], least, True))

    for images in sorted({run["images"] for run in runs}, reverse=True):
        lamina = ("machines", images, "lamina")
        reclaiming = ("machines", images, "lamina, reclaim")
        disks = ("machines", images, "virtio-blk")
        add("peak", "peak_bytes", lamina, disks, LEAST_OF_DISKS)
        add("mean", "mean_bytes", lamina, disks)
        add("mean, reclaim", "mean_bytes", reclaiming, lamina, LEAST_OF_KEPT)
        add("mean, reclaim", "mean_bytes", reclaiming, disks)
        add("mean, reclaim", "mean_bytes", reclaiming, ("machines", images, "virtio-blk, reclaim"))
        for other in ("copies", "overlayfs"):
            add("peak", "peak_bytes", ("containers", images, "lamina"), ("containers", images, other))
    return found


def arms(runs: list[dict]) -> list[str]:
    return sorted({run["arm"] for run in runs}, reverse=True)


def figures(runs: list[dict], arm: str) -> list[str]:
    """Medians."""
    chosen = [run for run in runs if run["arm"] == arm]
    values = [[run["peak_bytes"] / MIB, run["mean_bytes"] / MIB, run["samples"][-1]["processes"] / MIB,
               run["samples"][-1]["cache"] / MIB, run["done_seconds"]] for run in chosen]
    return [number(statistics.median(column)) for column in zip(*values)]


def draw(runs: list[dict], title: str, path: pathlib.Path) -> None:
    """Memory over time, the first run of each arm."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for arm in arms(runs):
        run = next(run for run in runs if run["arm"] == arm)
        line, = axes.plot([sample["seconds"] for sample in run["samples"]],
                          [(sample["processes"] + sample["cache"]) / MIB for sample in run["samples"]],
                          label=arm)
        axes.axvline(run["done_seconds"], color=line.get_color(), linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the scripts were started (dotted: all have ended)")
    axes.set_ylabel("MiB of the host's memory")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
