# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found: rows of a table for people, the same with every sample as JSON."""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics


@dataclasses.dataclass
class Spread:
    """Median, least and greatest of some samples."""
    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def text(self) -> str:
        return f"{number(self.median)} ({number(min(self.samples))}-{number(max(self.samples))})"

    def json(self) -> dict:
        return {"median": self.median, "min": min(self.samples), "max": max(self.samples),
                "samples": self.samples}


@dataclasses.dataclass
class Row:
    """One measured thing. `against` is what it was compared with, turn by turn."""
    what: str
    unit: str
    lamina: Spread
    against_name: str = ""
    against: Spread | None = None
    ratio: Spread | None = None  # oriented so that more is better for lamina
    goal: str = ""
    reached: bool | None = None  # None: there is no goal


def compared(what: str, unit: str, lamina: list[float], against_name: str, against: list[float],
             least: float | None = None, lower_is_better: bool = False) -> Row:
    """A row whose figure is the ratio of samples taken side by side, with a goal of `least`."""
    pairs = zip(lamina, against, strict=True)
    ratio = Spread([theirs / ours if lower_is_better else ours / theirs for ours, theirs in pairs])
    return Row(what, unit, Spread(lamina), against_name, Spread(against), ratio,
               "" if least is None else f"ratio >= {least}",
               None if least is None else ratio.median >= least)


def limited(what: str, unit: str, samples: list[float], most: float | None = None,
            least: float | None = None) -> Row:
    """A row for a figure with an absolute goal, or none."""
    spread = Spread(samples)
    if most is not None:
        return Row(what, unit, spread, goal=f"<= {number(most)} {unit}",
                   reached=spread.median <= most)
    if least is not None:
        return Row(what, unit, spread, goal=f">= {number(least)} {unit}",
                   reached=spread.median >= least)
    return Row(what, unit, spread)


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


HEAD = ["what", "lamina", "unit", "against", "", "ratio", "goal", "reached"]


def cells(row: Row) -> list[str]:
    return [row.what, row.lamina.text(), row.unit, row.against_name,
            row.against.text() if row.against else "", row.ratio.text() if row.ratio else "",
            row.goal, {None: "", True: "yes", False: "NO"}[row.reached]]


def table(rows: list[Row]) -> str:
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
                     for line in lines)


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]


def machine() -> dict:
    def field(path: str, name: str) -> str:
        for line in pathlib.Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
        return "unknown"

    return {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "cpu": field("/proc/cpuinfo", "model name"), "cpus": os.cpu_count(),
            "kernel": platform.release(), "memory": field("/proc/meminfo", "MemTotal"),
            "load": os.getloadavg()[0]}


def publish(bench: str, rows: list[Row], here: dict, directory: pathlib.Path,
            more: dict | None = None, page: list[str] | None = None) -> None:
    """Prints the table and writes <directory>/<bench>.json and .md, with what else belongs to them."""
    where = (f"{here['date']}, {here['cpus']} x {here['cpu']}, {here['memory']} of memory, "
             f"Linux {here['kernel']}, load {here['load']:.1f} at the start")
    legend = "median (least-greatest); ratio: more is better for lamina"
    print(f"\n{where}\n{legend}\n\n{table(rows)}")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{bench}.json"
    report = {"bench": bench, "machine": here, "rows": [row_json(row) for row in rows], **(more or {})}
    path.write_text(json.dumps(report, indent=2) + "\n")
    lines = [f"# {bench}", "", f"{where}; {legend}.", "", *markdown(HEAD, list(map(cells, rows))),
             *(page or [])]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path} and .md")


def row_json(row: Row) -> dict:
    value = {"what": row.what, "unit": row.unit, "lamina": row.lamina.json()}
    if row.against is not None:
        value["against"] = {"name": row.against_name, **row.against.json()}
    if row.ratio is not None:
        value["ratio"] = row.ratio.json()
    if row.reached is not None:
        value |= {"goal": row.goal, "reached": row.reached}
    return value
