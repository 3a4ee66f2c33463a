# SPDX-License-Identifier: Apache-2.0
"""The startup benchmark's results as JSON, as a page of tables with goals, and as pictures."""

import json
import pathlib
import statistics

from plots import pyplot, save
from report import markdown

MIB = 1 << 20
PULL = "overlayfs pull"
LOCAL = "overlayfs local"


class Runs:
    """Runs of one kind, to be asked for medians."""

    def __init__(self, runs: list[dict], kind: str, order: dict[str, list[str]]):
        self._runs = [run for run in runs if run["kind"] == kind]
        self._order = order

    def names(self, field: str) -> list[str]:
        """Different values of a field, in the order in which they were given."""
        return [name for name in self._order[field]
                if any(run[field] == name for run in self._runs)]

    def values(self, figure: str, **where: str) -> list[float]:
        return [run[figure] for run in self._runs
                if all(run[name] == value for name, value in where.items())]

    def median(self, figure: str, **where: str) -> float | None:
        values = self.values(figure, **where)
        return statistics.median(values) if values else None

    def p95(self, figure: str, **where: str) -> float:
        values = sorted(self.values(figure, **where))
        return values[min(len(values) - 1, round(0.95 * len(values)))]


def publish(runs: list[dict], order: dict[str, list[str]], here: dict,
            directory: pathlib.Path) -> None:
    """Writes startup.json, startup.md and pictures, and prints the goals. `order`: in which values of
    "network", "arm" and "image" are shown."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "startup.json").write_text(
        json.dumps({"bench": "startup", "machine": here, "runs": runs}, indent=2) + "\n")
    starts = Runs(runs, "start", order)
    reads = Runs(runs, "full read", order)
    reached = goals(starts, reads)
    page = ["# Pull against lazy: starting containers with containerd", "",
            f"{here['date']}, {here['cpus']} x {here['cpu']}, {here['memory']} of memory, Linux "
            f"{here['kernel']}, load {here['load']:.1f} at the start.", "",
            "Every container starts on a node that has nothing of the image (\"local\": has all of it, "
            "on the disk). Times are from the beginning of the pull to what the container prints when "
            "it is ready: medians, in brackets the 95th percentile.", "", "## Goals", "",
            *markdown(["what", "reached", "goal", ""], reached), ""]
    for network in starts.names("network"):
        picture = f"ready-{starts.names('network').index(network)}"
        draw(starts, network, directory / picture)
        page += [f"## {network}", "", f"![{network}]({picture}.svg)", "",
                 "Seconds until ready", "", *by_image(starts, network, "ready_seconds", 1), "",
                 "Seconds: pull, create, start to ready; MiB on the wire; requests; MiB written to "
                 "disk; laminad's processor seconds and peak MiB (medians of all images)", "",
                 *of_arms(starts, network), ""]
    for network in reads.names("network"):
        page += [f"## All of the image read, {network}", "", "Seconds, with the pull", "",
                 *by_image(reads, network, "done_seconds", 1), ""]
    bursts = Runs(runs, "burst", order)
    if bursts.names("arm"):
        page += ["## 32 containers of all images at once, not shaped", "", *markdown(
            ["arm", "seconds until the last is ready"],
            [[arm, cell(bursts, "ready_seconds", 1, arm=arm)] for arm in bursts.names("arm")]), ""]
    path = directory / "startup.md"
    path.write_text("\n".join(page))
    print("\n" + "\n".join(markdown(["what", "reached", "goal", ""], reached)))
    print(f"\nwritten to {path}")


def goals(starts: Runs, reads: Runs) -> list[list[str]]:
    rows = []

    def add(what: str, ratios: list[float | None], most: float, summary=statistics.median) -> None:
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            ratio = summary(known)
            rows.append([what, f"{ratio:.3g}", f"<= {most:.3g}", "yes" if ratio <= most else "NO"])

    def ratios(runs: Runs, figure: str, network: str, arm: str, base: str) -> list[float | None]:
        found = []
        for image in runs.names("image"):
            ours = runs.median(figure, network=network, arm=arm, image=image)
            theirs = runs.median(figure, network=network, arm=base, image=image)
            found.append(ours / theirs if ours is not None and theirs else None)
        return found

    for arm, most in (("lamina profile", 1.15), ("lamina pack", 1.15), ("lamina cold", 1.5)):
        add(f"ready, {arm} / {LOCAL}, not shaped",
            ratios(starts, "ready_seconds", "not shaped", arm, LOCAL), most)
    for network in starts.names("network"):
        for arm in ("lamina cold", "lamina profile", "lamina pack"):
            against = ratios(starts, "ready_seconds", network, arm, PULL)
            if network == "200 Mbit/s":
                add(f"ready, {arm} / {PULL}, {network}", against, 1 / 8)
            add(f"the worst image of that, {arm}, {network}", against, 1, max)
    for network in reads.names("network"):
        for arm in ("lamina cold", "lamina profile", "lamina pack"):
            add(f"full read, {arm} / {PULL}, worst image, {network}",
                ratios(reads, "done_seconds", network, arm, PULL), 1, max)
    add(f"bytes written, lamina cold / {PULL}, not shaped",
        ratios(starts, "written_bytes", "not shaped", "lamina cold", PULL), 0.1)
    add(f"create and start, lamina local / {LOCAL}",
        ratios(starts, "ready_seconds", "not shaped", "lamina local", LOCAL), 1.05)
    return rows


def by_image(runs: Runs, network: str, figure: str, scale: float) -> list[str]:
    arms = [arm for arm in runs.names("arm") if runs.values(figure, network=network, arm=arm)]
    return markdown(["image", *arms],
                 [[image, *(cell(runs, figure, scale, network=network, arm=arm, image=image)
                            for arm in arms)] for image in runs.names("image")])


def of_arms(runs: Runs, network: str) -> list[str]:
    figures = [("pull", "pull_seconds", 1), ("create", "create_seconds", 1),
               ("start to ready", "start_seconds", 1), ("wire MiB", "wire_bytes", MIB),
               ("requests", "requests", 1), ("written MiB", "written_bytes", MIB),
               ("laminad s", "laminad_seconds", 1), ("laminad MiB", "laminad_peak_bytes", MIB)]
    rows = []
    for arm in runs.names("arm"):
        if runs.values("ready_seconds", network=network, arm=arm):
            rows.append([arm, *(f"{runs.median(figure, network=network, arm=arm) / scale:.3g}"
                                for _, figure, scale in figures)])
    return markdown(["arm", *(name for name, _, _ in figures)], rows)


def cell(runs: Runs, figure: str, scale: float, **where: str) -> str:
    median = runs.median(figure, **where)
    if median is None:
        return ""
    return f"{median / scale:.3g} ({runs.p95(figure, **where) / scale:.3g})"


def draw(runs: Runs, network: str, path: pathlib.Path) -> None:
    """Bars for each image, one for each arm; on a logarithmic scale, as they differ that much."""
    images = runs.names("image")
    arms = [arm for arm in runs.names("arm")
            if runs.values("ready_seconds", network=network, arm=arm)]
    figure, axes = pyplot.subplots(figsize=(2 + 1.4 * len(images), 5), layout="constrained")
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        heights = [runs.median("ready_seconds", network=network, arm=arm, image=image) or 0
                   for image in images]
        axes.bar([place + (number - (len(arms) - 1) / 2) * width for place in range(len(images))],
                 heights, width, label=arm)
    axes.set_yscale("log")
    axes.set_xticks(range(len(images)), images)
    axes.set_ylabel("seconds until ready")
    axes.set_title(f"Start of a container, {network}")
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.legend()
    save(figure, path)
