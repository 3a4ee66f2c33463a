# SPDX-License-Identifier: Apache-2.0
"""What the system tests share: the registry of tests, a workspace that cleans up after itself, and
the programs under test.

A test is a function that takes a Workspace and raises Failure (or any exception) if something is wrong.
From the environment come LAMINA, LAMINAD and COMPARE_TREES, paths of the built programs; LAMINA_SOAK, a factor for
the counts of the tests that repeat things (1 if not set); and LAMINA_TEST_DIR, where workspaces are made
(/tmp if not set).
"""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import tempfile
import time

from oci_layout import Image

TESTS = {}
TRANSPORTS = ("erofs", "fuse")
COMMAND_TIMEOUT = 300
COMPARE_TIMEOUT = 1500


class Failure(Exception):
    """Something is not as it must be."""


class Skip(Exception):
    """This machine lacks something that the test needs; says what."""


def test(name):
    """Registers a function under a name for ctest."""

    def register(function):
        if name in TESTS:
            raise ValueError(f"two tests are called {name}")
        TESTS[name] = function
        return function

    return register


def repetitions(count):
    return count * int(os.environ.get("LAMINA_SOAK") or 1)


def check(condition, message):
    if not condition:
        raise Failure(message)


def check_equal(actual, expected, what):
    check(actual == expected, f"{what} is {actual!r}, not {expected!r}")


def need_root(reason="mounting EROFS and making device nodes need root"):
    if os.geteuid() != 0:
        raise Skip(reason)


def program(variable):
    path = os.environ.get(variable)
    if not path or not os.access(path, os.X_OK):
        raise Failure(f"{variable} does not name a program: {path!r}")
    return path


def for_each_transport(name):
    """A test for each transport, called NAME.TRANSPORT, which gets that as its second argument."""

    def register(function):
        for transport in TRANSPORTS:
            @test(f"{name}.{transport}")
            def _(workspace, transport=transport):
                need_root()
                function(workspace, transport)

        return function

    return register


class Workspace:
    """A directory for one test, with its own state directory. As a context manager it ends what the
    test left running or mounted, and removes everything."""

    def __init__(self):
        # Not below the user's TMPDIR: sockets in the state directory need a short path.
        parent = os.environ.get("LAMINA_TEST_DIR") or "/tmp"
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="lamina-test-", dir=parent))
        self.state = self.root / "state"
        self.counter = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.clean_up()

    def path(self, name):
        return self.root / name

    def new_directory(self, prefix="dir"):
        self.counter += 1
        path = self.root / f"{prefix}{self.counter}"
        path.mkdir()
        return path

    # Running Lamina.

    def lamina(self, *arguments, status=0, **options):
        """Runs lamina and checks its exit status (None: any). Returns the completed process, with
        stdout and stderr as text."""
        options.setdefault("timeout", COMMAND_TIMEOUT)
        options.setdefault("stdin", subprocess.DEVNULL)
        command = [program("LAMINA"),
                   *(a if isinstance(a, bytes) else str(a) for a in arguments)]
        # Files, not pipes: the server process may keep them open after the command has ended.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                code = subprocess.run(command, check=False, stdout=out, stderr=err,
                                      **options).returncode
            except subprocess.TimeoutExpired as error:
                raise Failure(f"lamina {shown(arguments)} hangs") from error
            out.seek(0)
            err.seek(0)
            result = subprocess.CompletedProcess(command, code, out.read().decode(errors="replace"),
                                                 err.read().decode(errors="replace"))
        if status is not None and code != status:
            raise Failure(f"lamina {shown(arguments)} exited with {code}, not {status}:\n"
                          f"{result.stdout}{result.stderr}")
        return result

    def convert(self, source, destination="converted", *options):
        """Converts and verifies, and returns the reference of the result."""
        reference = f"oci:{self.path(destination)}:latest"
        self.lamina("convert", source, reference, *options)
        self.lamina("verify", reference)
        return reference

    def converted(self, image, destination="converted"):
        """Writes an Image and converts it."""
        source = self.path(destination + "-source")
        image.write(source)
        return self.convert(f"oci:{source}", destination)

    @contextlib.contextmanager
    def mounted(self, reference, *options, state=None, directory=None):
        """Mounts for the length of a with block."""
        directory = directory or self.new_directory("mnt")
        self.lamina("mount", reference, directory, f"--state={state or self.state}", *options)
        try:
            yield directory
        finally:
            self.lamina("umount", directory, f"--state={state or self.state}")
        check(not os.path.ismount(directory), f"{directory} is still mounted")

    def stats(self, directory):
        return json.loads(
            self.lamina("stats", directory, f"--state={self.state}", "--json").stdout)

    # What a test leaves behind.

    def mounts(self):
        """Mounts on or of something below the workspace, in the order they were made."""
        return [target for target, line in mount_table() if f"{self.root}/" in line]

    def processes(self):
        """Lamina processes that work below the workspace."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    arguments = (entry / "cmdline").read_bytes()
                    if os.fsencode(self.root) in arguments and b"lamina" in arguments:
                        found.append(int(entry.name))
        return found

    def loop_devices(self):
        found = []
        for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if f"{self.root}/" in path.read_text(encoding="utf-8"):
                    found.append(path.parts[3])
        return found

    def check_nothing_left(self):
        """No mount, loop device or process of the workspace is left, once the server had the time
        to notice that it is not needed."""
        wait_until(lambda: not self.processes(), "the server process ends after the last umount")
        check_equal(self.mounts(), [], "what is still mounted")
        wait_until(lambda: not self.loop_devices(), "loop devices are freed")

    def kill_processes(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def clean_up(self):
        for target in reversed(self.mounts()):
            subprocess.run(["umount", "--lazy", target], check=False, stderr=subprocess.DEVNULL)
        self.kill_processes()
        with contextlib.suppress(Failure):
            wait_until(lambda: not self.processes(), "processes end")
        for target in reversed(self.mounts()):
            subprocess.run(["umount", "--lazy", target], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--one-file-system", self.root], check=False)


def shown(arguments):
    return " ".join(map(str, arguments))


def mount_table():
    """(mount point, line of mountinfo) of all mounts, in order."""
    lines = pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return [(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split()[4]), line)
            for line in lines]


def wait_until(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, f"never true: {what}")
        time.sleep(0.02)


def compare(expected, actual, *options):
    result = subprocess.run([program("COMPARE_TREES"), *options, str(expected), str(actual)],
                            check=False, capture_output=True, timeout=COMPARE_TIMEOUT)
    check(result.returncode == 0,
          f"{actual} is not as expected (left is expected, right what Lamina shows):\n"
          + (result.stdout + result.stderr).decode(errors="replace"))


def expect_error(path, *allowed):
    """Reading must fail, with one of the errors, and must not hang."""
    result = subprocess.run(["cat", "--", path], check=False, capture_output=True, timeout=60)
    check(result.returncode != 0, f"{path} can be read, but should not be")
    texts = [os.strerror(number).encode() for number in allowed]
    check(any(text in result.stderr for text in texts), f"the error is {result.stderr!r}")


def small_image(files=None, config=None):
    """An image of one layer with the given files, for tests whose subject is something else."""
    image = Image()
    image.config.update(config or {})
    with image.layer() as layer:
        for name, content in (files or {"hello": b"hello, world\n"}).items():
            layer.file(name, content)
    return image


def noise(size, seed=1):
    """Bytes that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def drop_caches():
    os.sync()
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
