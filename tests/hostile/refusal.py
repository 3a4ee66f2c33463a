# SPDX-License-Identifier: Apache-2.0
"""How hostile input must be met: one line of error that names what is wrong, within bounded memory and
time, with nothing made and nothing touched."""

import os
import re
import subprocess
import threading

from harness import Failure, check, check_equal, program, small_image

MAX_MEMORY_KIB = 256 << 10
TIMEOUT = 120


def run_measured(*arguments):
    """Runs lamina; returns exit code, standard error and peak memory in KiB. A hang is a Failure."""
    with open(os.devnull, "rb") as null:
        process = subprocess.Popen([program("LAMINA"), *map(str, arguments)], stdin=null,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    hung = threading.Event()

    def end():
        hung.set()
        process.kill()

    timer = threading.Timer(TIMEOUT, end)
    timer.start()
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if hung.is_set():
        raise Failure(f"lamina {' '.join(map(str, arguments))} hangs")
    return process.returncode, error.decode(errors="replace"), usage.ru_maxrss


def snapshot(directory):
    """Everything below a directory, to see whether anything was made, changed or removed."""
    found = {}
    for path, directories, files in os.walk(directory):
        for name in directories:  # whose times change when temporary files come and go
            status = os.lstat(os.path.join(path, name))
            found[os.path.join(path, name)] = (status.st_mode, status.st_ino)
        for name in files:
            status = os.lstat(os.path.join(path, name))
            found[os.path.join(path, name)] = (status.st_mode, status.st_ino, status.st_mtime_ns,
                                               status.st_size)
    return found


def check_refused(workspace, pattern, *arguments, expected_code=1):
    """`lamina ARGUMENTS` must fail with an error that matches `pattern`, leaving everything below the
    workspace as it was."""
    before = snapshot(workspace.root)
    code, error, memory = run_measured(*arguments)
    check_equal(code, expected_code, f"exit code ({error!r})")
    check(error.startswith("lamina: ") and error.endswith("\n") and error.count("\n") == 1,
          f"not one line of error: {error!r}")
    check(re.search(pattern, error), f"the error does not match {pattern!r}: {error!r}")
    check(memory <= MAX_MEMORY_KIB, f"{memory} KiB of memory were used")
    after = snapshot(workspace.root)
    check_equal(sorted(after.keys() ^ before.keys()), [], "what appeared or went")
    check_equal([path for path in before if before[path] != after[path]], [], "what changed")


def check_conversion_refused(workspace, source, pattern, expected_code=1):
    """As above, for a conversion to a new layout and into one that exists."""
    check_refused(workspace, pattern, "convert", source, f"oci:{workspace.path('destination')}:new",
                  expected_code=expected_code)
    existing = workspace.path("existing")
    if not existing.exists():
        small_image().write(workspace.path("good"))
        workspace.lamina("convert", f"oci:{workspace.path('good')}", f"oci:{existing}:kept")
    check_refused(workspace, pattern, "convert", source, f"oci:{existing}:new",
                  expected_code=expected_code)


def check_contained(workspace, source):
    """A conversion that may be refused or not, but must stay in its destination and in bounds. Returns
    the reference of the result, or None."""
    destination = workspace.path("destination")
    before = snapshot(workspace.root)
    code, error, memory = run_measured("convert", source, f"oci:{destination}:latest")
    check(code in (0, 1), f"exit code {code}: {error!r}")
    check(memory <= MAX_MEMORY_KIB, f"{memory} KiB of memory were used")
    after = {path: what for path, what in snapshot(workspace.root).items()
             if not path.startswith(str(destination))}
    check_equal(after, before, "what is outside of the destination")
    return f"oci:{destination}:latest" if code == 0 else None
