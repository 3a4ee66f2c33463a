# SPDX-License-Identifier: Apache-2.0
"""Sandboxes against what one has without Lamina: calls against bubblewrap, containers against crun run
of an unpacked tree, machines against the same kernel in QEMU with busybox; and the agent's round trip."""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator

from inputs import Inputs, make_busybox_tree
from node import Node, run
from report import Row, compared, limited
from sandboxes import READY, BusyboxMachine, Sandbox, hide_unified_cgroups, write_bundle

TRUE = "/bin/true"
CALLS_A_SAMPLE = 100
LEAST_CALLS = 300
MOST_OF_CRUN = 1.1
MOST_OF_BUSYBOX = 1.2
MOST_CONTAINER_TRIP = 2
MOST_MACHINE_TRIP = 10
MOST_BOOTS = 5  # they take seconds
BARE = f"/bin/busybox true && echo {READY}\nexec /bin/busybox sleep 1000000\n"
# As the agent does: the modules that all machines load, in the order of their names.
WITH_MODULES = ("for module in /modules/*.ko*; do /bin/busybox insmod $module; done\n" + BARE)


def measure(node: Node, _: Inputs, samples: int) -> list[Row]:
    tree = node.directory("tree")
    make_busybox_tree(tree)
    image = node.convert(f"dir:{tree}", "image")
    state = node.directory("state")
    # A node in use: an engine runs, and the image's content is there.
    with node.mount(image, state, "kept") as kept:
        for file in ("busybox", "true"):
            (kept / "bin" / file).read_bytes()
        bench = BackendsBench(node, tree, image, state)
        return [*bench.calls(samples), *bench.containers(samples), *bench.machines(samples)]


class BackendsBench:
    def __init__(self, node: Node, tree: pathlib.Path, image: str, state: pathlib.Path):
        self._node = node
        self._tree = tree
        self._image = image
        self._state = state

    def _sandbox(self, backend: str, *options: str) -> Sandbox:
        return Sandbox(self._node, self._state, self._image, f"--backend={backend}", *options)

    def calls(self, samples: int) -> list[Row]:
        print("calls", flush=True)
        jail = bubblewrap(self._tree)
        with self._sandbox("fncall") as calls:
            ours, theirs = side_by_side(samples, CALLS_A_SAMPLE,
                                        lambda: calls.agent.exec(TRUE), lambda: spawn(jail))
        # One processor for the caller, the pool, and what gets the next jail ready.
        with on_one_processor(), self._sandbox("fncall") as calls:
            our_rates, their_rates = side_by_side(
                samples, CALLS_A_SAMPLE, lambda: calls.agent.exec(TRUE), lambda: spawn(jail), rate)
        return [compared("call of true, two jails warm", "ms", ours,
                         "bwrap, the same namespaces", theirs, least=1, lower_is_better=True),
                limited("calls on one processor, with the caller's work", "/s", our_rates,
                        least=LEAST_CALLS),
                compared("same", "/s", our_rates, "bwrap, the same namespaces", their_rates)]

    def containers(self, samples: int) -> list[Row]:
        print("containers", flush=True)
        bundle = self._node.work / "bundle"
        with self._sandbox("container") as container:
            write_bundle(bundle, container.configuration(), self._tree, [TRUE])
            trips, infos = side_by_side(samples, CALLS_A_SAMPLE,
                                        lambda: container.agent.exec(TRUE), container.agent.info)
            by_command = [timed(lambda: run(self._node.lamina, "sandbox", "exec", container.id,
                                            f"--state={self._state}", "--", TRUE))
                          for _ in range(samples)]
        phases: dict[str, list[float]] = {"create": [], "exec": [], "rm": []}
        crun = ["crun", f"--root={self._node.work}/crun", "run", f"--bundle={bundle}",
                f"lamina-bench-{os.getpid()}"]

        def ours() -> None:
            start = time.monotonic()
            container = self._sandbox("container")
            created = time.monotonic()
            container.agent.exec(TRUE)
            done = time.monotonic()
            container.remove()
            for phase, seconds in (("create", created - start), ("exec", done - created),
                                   ("rm", time.monotonic() - done)):
                phases[phase].append(seconds * 1000)

        times, of_crun = side_by_side(samples, 5, ours, lambda: in_other_thread(run_hidden, *crun))
        starts, crun_starts = side_by_side(samples, 5, lambda: run(self._node.lamina, "--version"),
                                           lambda: run("crun", "--version"))
        return [
            compared("container: create (command), exec true (socket), rm (command)", "ms", times,
                     "crun run, unpacked tree", of_crun, least=round(1 / MOST_OF_CRUN, 3),
                     lower_is_better=True),
            *(limited(f"of that {phase}", "ms", values) for phase, values in phases.items()),
            compared("start of the program for --version", "ms", starts, "crun", crun_starts,
                     lower_is_better=True),
            limited("container: exec true over the agent's socket", "ms", trips,
                    most=MOST_CONTAINER_TRIP),
            limited("same: a question to the agent (info)", "ms", infos),
            limited("same: by the command `lamina sandbox exec`", "ms", by_command)]

    def machines(self, samples: int) -> list[Row]:
        print("machines", flush=True)
        with self._sandbox("qemu") as machine:
            command = machine.machine()[1]
            accelerator = "KVM" if any("accel=kvm" in word for word in command) else "TCG"
            trips, infos = side_by_side(samples, CALLS_A_SAMPLE // 5,
                                        lambda: machine.agent.exec(TRUE), machine.agent.info)
            initramfs = self._node.work / "kept-initramfs"
            shutil.copy(command[command.index("-initrd") + 1], initramfs)
            command[command.index("-initrd") + 1] = str(initramfs)
        times: dict[str, list[float]] = {"ours": [], "before QEMU": [], "bare": [], "modules": []}
        for _ in range(min(samples, MOST_BOOTS)):
            clock, start = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
            with self._sandbox("qemu") as machine:
                machine.agent.exec(TRUE)
                times["ours"].append((time.monotonic() - start) * 1000)
                times["before QEMU"].append((start_of(machine.machine()[0]) - clock) * 1000)
            for name, script in (("bare", BARE), ("modules", WITH_MODULES)):
                start = time.monotonic()
                with BusyboxMachine(command, self._node.work, script) as busybox:
                    busybox.wait_for(READY)
                    times[name].append((time.monotonic() - start) * 1000)
        return [
            compared(f"machine ({accelerator}): create to the end of exec true", "ms", times["ours"],
                     "same kernel, initramfs, busybox", times["bare"],
                     least=round(1 / MOST_OF_BUSYBOX, 3), lower_is_better=True),
            compared("same", "ms", times["ours"], "same, modules loaded", times["modules"],
                     lower_is_better=True),
            limited("of that before QEMU starts", "ms", times["before QEMU"]),
            limited(f"machine ({accelerator}): exec true over the agent's socket", "ms", trips,
                    most=MOST_MACHINE_TRIP if accelerator == "TCG" else None),
            limited("same: a question to the agent (info)", "ms", infos)]


def bubblewrap(tree: pathlib.Path) -> list[str]:
    return ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc",
            "--unshare-uts", "--unshare-cgroup", "--hostname", "call", "--uid", "1000", "--gid", "1000",
            "--die-with-parent", "--new-session", "--ro-bind", str(tree), "/", "--proc", "/proc",
            "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/", TRUE]


def run_hidden(*command: str) -> None:
    """Leaves the thread without a part of the control groups."""
    hide_unified_cgroups()
    run(*command)


def in_other_thread(call: Callable[..., object], *arguments: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(call, *arguments).result()


def spawn(command: list[str]) -> None:
    """With less work than subprocess has with it."""
    pid = os.posix_spawnp(command[0], command, os.environ)
    status = os.waitpid(pid, 0)[1]
    if status != 0:
        raise RuntimeError(f"{command} ended with status {status:#x}")


@contextlib.contextmanager
def on_one_processor() -> Iterator[None]:
    """This process, and those that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start_of(pid: int) -> float:
    """Seconds since this machine booted."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.monotonic()
    call()
    return (time.monotonic() - start) * 1000


def rate(times: list[float]) -> float:
    """A second, of calls one after the other."""
    return 1000 / statistics.mean(times)


def side_by_side(samples: int, calls: int, ours: Callable[[], object], theirs: Callable[[], object],
                 summary: Callable[[list[float]], float] = statistics.median,
                 ) -> tuple[list[float], list[float]]:
    """A sample is the summary of some calls; the two take turns, after calls that are not counted."""
    found: tuple[list[float], list[float]] = ([], [])
    for sample in range(-1, samples):
        for kept, call in zip(found, (ours, theirs)):
            times = [timed(call) for _ in range(calls if sample >= 0 else 2)]
            if sample >= 0:
                kept.append(summary(times))
    return found
