# SPDX-License-Identifier: Apache-2.0
"""laminad: mounts that live on when it is killed, upgraded or restarted."""

import errno
import os
import random
import signal
import subprocess
import time

from daemon import Daemon, Readers
from harness import (TRANSPORTS, check, check_equal, need_root, noise, repetitions, small_image, test,
                     wait_until)

MIB = 1 << 20
FILES = {f"file{i}": noise(size, i)
         for i, size in enumerate((5, 4096, 100_000, MIB + 17, 3 * MIB, 6 * MIB + 123))}
# Every way an image can be mounted.
MODES = (["--transport=erofs"], ["--transport=fuse"], ["--transport=erofs", "--loop"],
         ["--transport=erofs", "--writable"], ["--transport=fuse", "--writable"])


def mount_all_modes(workspace, image):
    directories = []
    for mode in MODES:
        directories.append(workspace.new_directory("mnt"))
        workspace.lamina("mount", image, directories[-1], f"--state={workspace.state}", *mode)
    return directories


def umount_all(workspace, directories):
    for directory in directories:
        workspace.lamina("umount", directory, f"--state={workspace.state}")


def expect_content(directory, files=None):
    for name, content in (files or FILES).items():
        check((directory / name).read_bytes() == content, f"{directory / name} is wrong")


@test("daemon.serves-mounts-and-ends-cleanly")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace) as daemon:
        directories = mount_all_modes(workspace, image)
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories[:2])
        # The rest is unmounted by laminad.
        daemon.stop()
    check_equal(workspace.mounts(), [], "what is still mounted")
    check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")


@test("daemon.killed-under-readers-is-not-noticed")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    generator = random.Random(1)
    with Daemon(workspace) as daemon:
        directories = mount_all_modes(workspace, image)
        with Readers(directories, FILES) as readers:
            readers.wait_for_progress(16)
            for _ in range(repetitions(8)):
                killed = daemon.kill_worker()
                daemon.wait_for_successor(killed)
                # From before it serves to when all is as usual.
                time.sleep(generator.choice((0, 0.01, 0.05, 0.2)))
            readers.wait_for_progress(16)
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories)
