# SPDX-License-Identifier: Apache-2.0
"""Runs one benchmark; tools/bench builds what this needs and calls it."""

import argparse
import os
import pathlib
import sys

import backends
import convert
import density
import mount
import network
import read
import startup
from inputs import Inputs
from node import Node
from report import machine, publish

BENCHES = {"read": read.measure, "convert": convert.measure, "mount": mount.measure,
           "network": network.measure, "backends": backends.measure}
# With options of their own, and more than a table.
OWN_REPORT = {"startup": startup, "density": density}


def main() -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="fewer samples")
    common.add_argument("--build", type=pathlib.Path, required=True, help="build directory")
    common.add_argument("--out", type=pathlib.Path, help="for results [bench/ in the build directory]")
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    for name, measure in BENCHES.items():
        benches.add_parser(name, parents=[common], help=sys.modules[measure.__module__].__doc__)
    for name, module in OWN_REPORT.items():
        module.add_options(benches.add_parser(name, parents=[common], help=module.__doc__))
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("tools/bench: needs root, to mount and to drop caches", file=sys.stderr)
        return 1
    home_cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    cache = pathlib.Path(os.environ.get("LAMINA_BENCH_CACHE", home_cache / "lamina-bench"))
    inputs = Inputs(cache)
    here = machine()
    with Node(cache, arguments.build.resolve()) as node:
        if arguments.bench in OWN_REPORT:
            OWN_REPORT[arguments.bench].measure(node, inputs, arguments, here)
            return 0
        rows = BENCHES[arguments.bench](node, inputs, 3 if arguments.quick else 7)
    publish(arguments.bench, rows, here, arguments.out or arguments.build / "bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
