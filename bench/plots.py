# SPDX-License-Identifier: Apache-2.0
"""Pictures, on machines without a screen."""

import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 (after the choice of a back end)

__all__ = ["pyplot", "save"]


def save(figure: pyplot.Figure, path: pathlib.Path) -> None:
    """As PNG and as SVG."""
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
    pyplot.close(figure)
