# SPDX-License-Identifier: Apache-2.0
"""laminad with many mounts: how long a take-over takes, and what memory it has.

    take_over.py [--mounts N] [--images M] [--layers L]

Needs root, and LAMINA and LAMINAD, or a release build. Mounts M small images at N places, kills the
worker, and reads a byte that no cache has, which waits for the successor.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("LAMINA", str(ROOT / "build/release/tools/lamina/lamina"))
os.environ.setdefault("LAMINAD", str(ROOT / "build/release/tools/laminad/laminad"))
sys.path.insert(0, str(ROOT / "tests" / "system"))

from daemon import Daemon  # noqa: E402
from harness import Workspace, noise  # noqa: E402
from oci_layout import Image  # noqa: E402


def resident(pid):
    """Resident and private memory of a process in MiB."""
    fields = {}
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            fields[name] = int(value.split()[0]) / 1024
    return fields["Rss"], fields["Private_Clean"] + fields["Private_Dirty"]


def make_image(workspace, number, layers):
    image = Image()
    for layer_number in range(layers):
        with image.layer() as layer:
            for i in range(50):
                layer.file(f"image{number}/layer{layer_number}/file{i}",
                           noise(20_000, number * 1000 + layer_number * 50 + i))
    return workspace.converted(image, f"image{number}")


def read_one_byte(path, offset):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    byte = os.pread(fd, 1, offset)
    os.close(fd)
    return byte


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mounts", type=int, default=1000)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--transport", default="erofs")
    options = parser.parse_args()
    results = vars(options).copy()
    with Workspace() as workspace:
        images = [make_image(workspace, i, options.layers) for i in range(options.images)]
        with Daemon(workspace) as daemon:
            start = time.monotonic()
            directories = []
            for i in range(options.mounts):
                directories.append(workspace.new_directory("mnt"))
                workspace.lamina("mount", images[i % len(images)], directories[-1],
                                 f"--state={workspace.state}", f"--transport={options.transport}")
            results["mount_ms"] = (time.monotonic() - start) * 1000 / options.mounts
            for i, directory in enumerate(directories):
                read_one_byte(directory / f"image{i % options.images}/layer0/file0", 0)
            results["rss_before_mib"], results["private_before_mib"] = resident(daemon.worker())
            times = []
            for i in range(5):
                path = directories[i] / f"image{i}/layer1/file{i + 1}"
                start = time.monotonic()
                daemon.kill_worker()
                read_one_byte(path, 0)
                times.append(time.monotonic() - start)
                workspace.stats("--all")
            results["take_over_s"] = sorted(times)
            time.sleep(1)
            results["rss_after_mib"], results["private_after_mib"] = resident(daemon.worker())
            results["supervisor_rss_mib"] = resident(daemon.process.pid)[0]
            results["log"] = [line for line in daemon.log_text().splitlines() if "took over" in line]
            start = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait(timeout=300)
            results["clean_end_s"] = time.monotonic() - start
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
