# SPDX-License-Identifier: Apache-2.0
"""laminad for tests: one that belongs to a workspace, and readers that keep a mount busy."""

import contextlib
import mmap
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import time

from harness import check, program, wait_until

PAGE = 4096


class Daemon:
    """A laminad on the workspace's state directory. As a context manager it is ended cleanly. `listener`
    is a socket that it gets as its control socket, as from systemd. Without `give_state` its configuration
    says where its state is."""

    def __init__(self, workspace, *options, environment=None, listener=None, give_state=True):
        self.workspace = workspace
        self.options = options
        self.environment = environment
        self.listener = listener
        self.give_state = give_state
        self.process = None
        self.log = workspace.path("laminad.log")

    def start(self):
        state = [f"--state={self.workspace.state}"] if self.give_state else []
        command = [program("LAMINAD"), *state, *map(str, self.options)]
        inherited = ()
        if self.listener:
            inherited = (self.listener.fileno(),)
            variables = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=control"
            command = ["bash", "-c", f'{variables} exec "$0" "$@" 3<&{inherited[0]}', *command]
        with contextlib.suppress(FileNotFoundError):  # of one that was killed
            (self.workspace.state / "control.sock").unlink()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=self.environment, pass_fds=inherited)
        wait_until(lambda: (self.workspace.state / "control.sock").exists() or self.has_ended(),
                   "laminad listens")
        check(not self.has_ended(), f"laminad ended:\n{self.log_text()}")
        self.workspace.stats("--all")  # waits for the worker
        return self

    def has_ended(self):
        return self.process.poll() is not None

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()

    def stop(self, expected=0):
        self.process.terminate()
        code = self.process.wait(timeout=60)
        check(code == expected, f"laminad ended with {code}:\n{self.log_text()}")

    def log_text(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def worker(self):
        """Process id of the worker; 0 if there is none just now."""
        return next(iter(children(self.process.pid)), 0)

    def kill_worker(self):
        """Kills the worker that there is and returns its process id."""
        while True:
            worker = self.worker()
            if worker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                return worker
            time.sleep(0.001)

    def wait_for_successor(self, killed):
        wait_until(lambda: self.worker() not in (0, killed), "another worker is started")


def children(parent):
    with contextlib.suppress(OSError):
        text = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
        return [int(pid) for pid in text.split()]
    return []


# Readers. Each reads a file in a way of its own for as long as it is told to, and compares every byte.
# Pages are dropped all the time, so that reads reach the daemon.

def drop_pages(fd):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_at_random(path, content, generator):
    with open(path, "rb", buffering=0) as file:
        for _ in range(20):
            offset = generator.randrange(len(content))
            length = generator.choice((1, 1000, PAGE, 70_000, 300_000))
            check(os.pread(file.fileno(), length, offset) == content[offset:offset + length],
                  f"{path}: {length} bytes at {offset} are wrong")
        drop_pages(file.fileno())


def read_in_order(path, content, _):
    with open(path, "rb", buffering=0) as file:
        drop_pages(file.fileno())
        position = 0
        while piece := file.read(128 * 1024):
            check(piece == content[position:position + len(piece)], f"{path} is wrong at {position}")
            position += len(piece)
        check(position == len(content), f"{path} ends at {position}")


def read_mapped(path, content, generator):
    with open(path, "rb") as file:
        drop_pages(file.fileno())
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for _ in range(20):
                offset = generator.randrange(len(content))
                check(mapped[offset:offset + 10_000] == content[offset:offset + 10_000],
                      f"{path}: mapped bytes at {offset} are wrong")


def read_directly(path, content, generator):
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # an EROFS that is mounted from files has no direct reads
        return read_in_order(path, content, generator)
    with mmap.mmap(-1, 1 << 20) as buffer:  # page aligned, as O_DIRECT asks
        try:
            for _ in range(10):
                offset = generator.randrange(len(content)) // PAGE * PAGE
                length = generator.choice((PAGE, 16 * PAGE, 256 * PAGE))
                view = memoryview(buffer)[:length]
                got = os.preadv(file, [view], offset)
                check(buffer[:got] == content[offset:offset + length],
                      f"{path}: {length} bytes at {offset}, read directly, are wrong")
                view.release()
        finally:
            os.close(file)
    return None


def look_around(path, content, _):
    directory = path.parent
    names = os.listdir(directory)
    check(path.name in names, f"{directory} shows {names}")
    for _ in range(50):
        check(os.stat(path).st_size == len(content), f"{path} has another size")
        check(not (directory / f"absent-{random.random()}").exists(), "what is this?")


WAYS = (read_at_random, read_in_order, read_mapped, read_directly, look_around)


def _reader(seed, directory, files, stop, failures, rounds):
    generator = random.Random(seed)
    way = WAYS[seed % len(WAYS)]
    done = 0
    try:
        while not stop.is_set() or done < 1:
            name = generator.choice(sorted(files))
            way(pathlib.Path(directory) / name, files[name], generator)
            done += 1
            with rounds.get_lock():
                rounds.value += 1
    except BaseException as error:  # pylint: disable=broad-except
        failures.put(f"reader {seed} ({way.__name__}): {error!r}")


class Readers:
    """Processes that read `files` ({name: content}) of each of the directories."""

    def __init__(self, directories, files, count=16):
        self.stop = multiprocessing.Event()
        self.failures = multiprocessing.SimpleQueue()
        self.rounds = multiprocessing.Value("q", 0)
        self.processes = [
            multiprocessing.Process(target=_reader, daemon=True,
                                    args=(seed, directories[seed % len(directories)], files,
                                          self.stop, self.failures, self.rounds))
            for seed in range(count)]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def progress(self):
        return self.rounds.value

    def wait_for_progress(self, rounds):
        goal = self.progress() + rounds
        wait_until(lambda: self.progress() >= goal or not self.failures.empty(),
                   "readers get on", seconds=120)

    def __exit__(self, *exception):
        self.stop.set()
        for process in self.processes:
            process.join(timeout=120)
        hung = [process.pid for process in self.processes if process.is_alive()]
        failures = []
        while not self.failures.empty():
            failures.append(self.failures.get())
        for process in self.processes:
            process.kill()
        if exception[0] is None:
            check(not failures, "\n".join(failures[:5]))
            check(not hung, f"readers hang: {hung}")
