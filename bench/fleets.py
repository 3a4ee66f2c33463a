# SPDX-License-Identifier: Apache-2.0
"""Machines and containers of the density benchmark, several of a kind at a time: started together, and
asked to run its script together. A fleet says which processes it is, and where the files are that it has
in memory."""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import subprocess

from containers import descendants
from node import Node, end_engines_below, in_parallel, run, unmount_below
from sandboxes import (READY, BusyboxMachine, Sandbox, command_lines, hide_unified_cgroups,
                       write_bundle)

DONE = "the script is done"
DAMON = "/sys/kernel/mm/damon/admin/kdamonds"
CONTEXT = "0/contexts/0"
SCHEME = f"{CONTEXT}/schemes/0"
DISK_MACHINE = """
for kind in devtmpfs:/dev proc:/proc sysfs:/sys; do
  /bin/busybox mkdir -p ${{kind#*:}}
  /bin/busybox mount -t ${{kind%:*}} none ${{kind#*:}}
done
for module in /modules/*.ko* /modules/disk/*.ko*; do /bin/busybox insmod $module; done
/bin/busybox rm -r /modules /init
/bin/busybox mkdir /image
/bin/busybox mount -t erofs -o ro /dev/vda /image
/bin/busybox mount -t tmpfs none /image/tmp
/bin/busybox mount -t devtmpfs none /image/dev
{reclaim}
echo {ready}
read line
/bin/busybox chroot /image /bin/sh -c '{script}' && echo {done} || /bin/busybox poweroff -f
exec /bin/busybox sleep 1000000
"""


class Fleet:
    """Use in a with statement."""

    def __init__(self, node: Node, script: str):
        self.node = node
        self.script = script
        self.cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_) -> None:
        self.cleanup.close()

    def start(self) -> None:
        raise NotImplementedError

    def run_script(self) -> None:
        raise NotImplementedError

    def containers(self) -> list[int]:
        """First processes."""
        return []

    def directories(self) -> list[pathlib.Path]:
        """Of all files of images that may be in the host's page cache on behalf of the fleet."""
        raise NotImplementedError


class LaminaFleet(Fleet):
    """One sandbox of each image; an image may be there several times. All of it is on the node."""

    def __init__(self, node: Node, script: str, images: list[str], *options: str):
        super().__init__(node, script)
        self._images = images
        self._options = options
        work = node.directory("fleet")
        self._state = work / "state"
        self._sandboxes: list[Sandbox] = []
        self.cleanup.callback(shutil.rmtree, work)
        self.cleanup.callback(unmount_below, work)
        self.cleanup.callback(end_engines_below, work)
        run(node.lamina, "prefetch", f"--state={self._state}", *set(images))

    def start(self) -> None:
        in_parallel([lambda image=image: self._start(image) for image in self._images])

    def _start(self, image: str) -> None:
        sandbox = Sandbox(self.node, self._state, image, *self._options)
        self._sandboxes.append(sandbox)
        self.cleanup.push(sandbox)

    def run_script(self) -> None:
        in_parallel([lambda sandbox=sandbox: sandbox.agent.exec("/bin/sh", "-c", self.script)
                     for sandbox in self._sandboxes])

    def containers(self) -> list[int]:
        return [pid for sandbox in self._sandboxes if (pid := sandbox.first_process()) > 0]

    def directories(self) -> list[pathlib.Path]:
        below = [self._state / name for name in ("blobs", "images", "guest", "fuse/blobs")]
        # Images that the host's kernel mounts; those mounts that are one file system once.
        mounts = {}
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[4].startswith(f"{self._state}/") and " - erofs " in line:
                mounts[fields[2]] = pathlib.Path(fields[4])
        return [path for path in [*below, *mounts.values()] if path.exists()]


class DiskFleet(Fleet):
    """Machines like Lamina's that have each image as a disk of their own."""

    def __init__(self, node: Node, script: str, command: list[str], images: list[pathlib.Path],
                 reclaim: str):
        super().__init__(node, script)
        self._command = command
        self._work = node.directory("disks")
        self.cleanup.callback(shutil.rmtree, self._work)
        self._disks = [self._work / f"disk-{number}" for number in range(len(images))]
        self._reclaim = reclaim
        self._machines: list[BusyboxMachine] = []
        for disk, image in zip(self._disks, images):
            shutil.copy(image, disk)

    def start(self) -> None:
        script = DISK_MACHINE.format(reclaim=self._reclaim, ready=READY, script=self.script, done=DONE)
        for number, disk in enumerate(self._disks):
            work = self._work / f"machine-{number}"
            work.mkdir()
            self._machines.append(self.cleanup.enter_context(
                BusyboxMachine(self._command, work, script, disk)))
        in_parallel([lambda machine=machine: machine.wait_for(READY) for machine in self._machines])

    def run_script(self) -> None:
        for machine in self._machines:
            machine.say("go")
        in_parallel([lambda machine=machine: machine.wait_for(DONE) for machine in self._machines])

    def directories(self) -> list[pathlib.Path]:
        return [self._work]


class CrunFleet(Fleet):
    """Containers of crun on unpacked trees: `layers` of each, lowest first, copied together or in an
    overlay."""

    def __init__(self, node: Node, script: str, like: str, layers: list[list[pathlib.Path]],
                 copy: bool):
        super().__init__(node, script)
        self._work = node.directory("crun")
        self._files = [self._work] if copy else sorted({tree for trees in layers for tree in trees})
        self._bundles: list[pathlib.Path] = []
        self._waiting: list[subprocess.Popen] = []
        self.cleanup.callback(shutil.rmtree, self._work)
        for number, trees in enumerate(layers):
            bundle = self._work / f"bundle-{number}"
            root = bundle / "root"
            root.mkdir(parents=True)
            for tree in trees if copy else []:
                run("cp", "--archive", f"{tree}/.", root)
            if not copy:
                for name in ("upper", "work"):
                    (bundle / name).mkdir()
                lower = ":".join(str(tree) for tree in reversed(trees))
                run("mount", "-t", "overlay", "-o", f"lowerdir={lower},upperdir={bundle}/upper,"
                    f"workdir={bundle}/work", "overlay", root)
                self.cleanup.callback(run, "umount", root)
            write_bundle(bundle, like, root,
                         ["/bin/sh", "-c", f"read line; {script}; echo {DONE}; exec sleep 1000000"])
            self._bundles.append(bundle)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, initializer=hide_unified_cgroups)
        self.cleanup.callback(self._thread.shutdown)

    def _crun(self, *words, **options) -> subprocess.Popen:
        command = ["crun", f"--root={self._work}/run", *map(str, words)]
        return self._thread.submit(subprocess.Popen, command, **options).result()

    def start(self) -> None:
        for bundle in self._bundles:
            name = f"lamina-bench-{os.getpid()}-{bundle.name}"
            self.cleanup.callback(lambda name=name: self._crun("delete", "--force", name).wait())
            process = self._crun("run", "--detach", f"--bundle={bundle}", f"--pid-file={bundle}/pid",
                                 name, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.cleanup.callback(process.stdout.close)
            if process.wait() != 0:
                raise RuntimeError(f"crun run ended with {process.returncode}")
            self._waiting.append(process)

    def run_script(self) -> None:
        for process in self._waiting:
            process.stdin.write("go\n")
            process.stdin.close()
        for process in self._waiting:
            if DONE not in process.stdout.readline():
                raise RuntimeError("a container ended early")

    def containers(self) -> list[int]:
        return [int((bundle / "pid").read_text()) for bundle in self._bundles]

    def directories(self) -> list[pathlib.Path]:
        return self._files


def processes(fleet: Fleet) -> dict[int, bool]:
    """What runs for a fleet, and whether it is in a container."""
    found = {pid: False for pid, words in command_lines()
             if any(str(fleet.node.work) in word for word in words)}
    for first in fleet.containers():
        found |= dict.fromkeys([first, *descendants(first)], True)
    return found


def reclaim_script(machine: Sandbox) -> str:
    """Gives the guest that runs it the settings of DAMON that Lamina's agent has made in `machine`. The
    host's DAMON is none of our business."""
    def read(names: list[str]) -> list[str]:
        return machine.agent.exec("/bin/cat", *(f"{DAMON}/{name}" for name in names)).decode().split()

    regions = int(read([f"{CONTEXT}/targets/0/regions/nr_regions"])[0])
    names = ["nr_kdamonds", "0/contexts/nr_contexts", f"{CONTEXT}/operations",
             *(f"{CONTEXT}/monitoring_attrs/intervals/{name}_us"
               for name in ("sample", "aggr", "update")),
             f"{CONTEXT}/targets/nr_targets", f"{CONTEXT}/targets/0/regions/nr_regions",
             *(f"{CONTEXT}/targets/0/regions/{region}/{end}" for region in range(regions)
               for end in ("start", "end")),
             f"{CONTEXT}/schemes/nr_schemes", f"{SCHEME}/action",
             *(f"{SCHEME}/access_pattern/{what}/{limit}" for what in ("sz", "nr_accesses", "age")
               for limit in ("min", "max")),
             f"{SCHEME}/quotas/ms", f"{SCHEME}/quotas/reset_interval_ms",
             f"{SCHEME}/filters/nr_filters", f"{SCHEME}/filters/0/type", f"{SCHEME}/filters/0/matching",
             "0/state"]
    values = read(names)
    return "\n".join(f"echo {value} >{DAMON}/{name}"
                     for name, value in zip(names, values, strict=True))
