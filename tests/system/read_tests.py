# SPDX-License-Identifier: Apache-2.0
"""Reads of every kind through each transport: short, across frames, by many at once, mapped, direct."""

import concurrent.futures
import errno
import mmap
import os
import random
import shutil
import subprocess

from harness import (TRANSPORTS, check, check_equal, drop_caches, need_root, noise, repetitions,
                     small_image, test)

MIB = 1 << 20
CONTENT = {"large": noise(6 * MIB + 123), "frame": noise(200_000, 2), "small": b"small file\n",
           "zeros": bytes(3 * MIB)}


def read_test(name):
    """A test that gets a cold mount of CONTENT, once for each transport."""

    def register(function):
        @test(f"read.{name}")
        def _(workspace):
            need_root()
            image = workspace.converted(small_image(CONTENT))
            for transport in TRANSPORTS:
                state = workspace.path(f"state-{transport}")  # of its own: every read is a miss
                with workspace.mounted(image, f"--transport={transport}", state=state) as mounted:
                    function(mounted)

        return function

    return register


@read_test("pieces-at-random")
def _(mounted):
    generator = random.Random(7)
    for name, content in CONTENT.items():
        with open(mounted / name, "rb", buffering=0) as file:
            for _ in range(repetitions(50)):
                offset = generator.randrange(len(content) + 10)
                length = generator.choice((1, 100, 4096, 5000, 70_000, 300_000))
                check(os.pread(file.fileno(), length, offset) == content[offset:offset + length],
                      f"{name}: {length} bytes at {offset} are wrong")


@read_test("around-the-end")
def _(mounted):
    for name, content in CONTENT.items():
        size = len(content)
        with open(mounted / name, "rb", buffering=0) as file:
            for offset, length in ((size - 1, 1), (size - 1, 100), (size, 1), (size + 5000, 10),
                                   (0, size + 1), (max(0, size - 4097), 10_000)):
                check(os.pread(file.fileno(), length, offset) == content[offset:offset + length],
                      f"{name}: {length} bytes at {offset} are wrong")


@read_test("backwards")
def _(mounted):
    content = CONTENT["large"]
    with open(mounted / "large", "rb", buffering=0) as file:
        for offset in range(len(content) - 1, 0, -100_003):
            check(os.pread(file.fileno(), 9000, offset) == content[offset:offset + 9000],
                  f"9000 bytes at {offset} are wrong")


@read_test("with-every-buffer-size")
def _(mounted):
    for size in (512, 4096, 65_536, 131_072, 1_000_000, 8 * MIB):
        with open(mounted / "large", "rb", buffering=0) as file:
            pieces = iter(lambda: file.read(size), b"")  # pylint: disable=cell-var-from-loop
            check(b"".join(pieces) == CONTENT["large"], f"wrong with reads of {size} bytes")


@read_test("many-readers-of-one-cold-frame")
def _(mounted):
    def read(offset):
        with open(mounted / "large", "rb", buffering=0) as file:
            return os.pread(file.fileno(), 8192, offset) == CONTENT["large"][offset:offset + 8192]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for frame in range(8):
            offsets = [frame * 700_000 + i * 100 for i in range(32)]
            check(all(pool.map(read, offsets)), f"a reader around {offsets[0]} got wrong bytes")


@read_test("many-processes-read-everything-at-once")
def _(mounted):
    command = ["sh", "-c", f"cat {' '.join(sorted(CONTENT))} | sha256sum"]
    running = [subprocess.Popen(command, cwd=mounted, stdout=subprocess.PIPE) for _ in range(8)]
    results = {process.communicate()[0] for process in running}
    expected = subprocess.run(["sha256sum"], check=True, capture_output=True,
                              input=b"".join(CONTENT[name] for name in sorted(CONTENT))).stdout
    check_equal(results, {expected}, "what the processes read")


@read_test("mapped")
def _(mounted):
    with open(mounted / "large", "rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for offset in range(0, len(mapped), 333_333):
                check_equal(mapped[offset], CONTENT["large"][offset], f"byte {offset}")
            check(mapped[:] == CONTENT["large"], "the mapping as a whole is wrong")
            # Bytes between the end of the file and the end of the page are zeros.
    with open(mounted / "small", "rb") as file:
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE,
                       prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped[0:1] = b"S"
            check_equal(mapped[:], b"Small file\n", "a private mapping that was written to")
    check_equal((mounted / "small").read_bytes(), CONTENT["small"], "the file under it")


@test("read.direct")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(CONTENT))
    content = CONTENT["large"]
    buffer = mmap.mmap(-1, MIB)  # page aligned, as O_DIRECT asks
    for mode in (["--transport=fuse"], ["--transport=erofs", "--loop"], ["--transport=erofs"]):
        with workspace.mounted(image, *mode) as mounted:
            try:
                file = os.open(mounted / "large", os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                # The kernel (6.18) has no direct reads for an EROFS that is mounted from files.
                check_equal((mode, error.errno), (["--transport=erofs"], errno.EINVAL), "refusal")
                continue
            for offset in (0, 4096, MIB, 5 * MIB, 6 * MIB):
                for length in (4096, 65_536, MIB):
                    got = os.preadv(file, [memoryview(buffer)[:length]], offset)
                    check(buffer[:got] == content[offset:offset + length],
                          f"{length} bytes at {offset} are wrong")
            os.close(file)


@read_test("spliced-and-sent")
def _(mounted):
    result = subprocess.run(["sh", "-c", "cat < large"], cwd=mounted, check=True,
                            stdout=subprocess.PIPE)
    check(result.stdout == CONTENT["large"], "cat gave other bytes")
    with open(mounted / "large", "rb") as file:
        into = os.memfd_create("copy")
        try:
            sent = 0
            while step := os.sendfile(into, file.fileno(), sent, MIB):
                sent += step
            check(os.pread(into, sent + 1, 0) == CONTENT["large"], "sendfile gave other bytes")
        finally:
            os.close(into)


@read_test("again-from-the-page-cache-and-without-it")
def _(mounted):
    for _ in range(2):
        for name, content in CONTENT.items():
            check((mounted / name).read_bytes() == content, f"{name} is wrong")
        drop_caches()


@read_test("nothing-can-be-written")
def _(mounted):
    for attempt in (lambda: open(mounted / "small", "r+b"), lambda: os.unlink(mounted / "small"),
                    lambda: os.mkdir(mounted / "new"), lambda: os.truncate(mounted / "small", 0),
                    lambda: os.chmod(mounted / "small", 0o777),
                    lambda: os.setxattr(mounted / "small", "user.x", b"")):
        try:
            attempt()
        except OSError as error:
            check_equal(error.errno, 30, "errno (EROFS is 30)")
        else:
            check(False, "a read-only image was written to")


@test("read.fetches-no-more-than-is-used")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(CONTENT))
    for transport in TRANSPORTS:
        with workspace.mounted(image, f"--transport={transport}") as mounted:
            check_equal((mounted / "small").read_bytes(), CONTENT["small"], "small")
            report = workspace.stats(mounted)[0]
            check(report["frames_present"] < report["frames"] / 2,
                  f"{report['frames_present']} of {report['frames']} frames came for one small file")
        shutil.rmtree(workspace.state)


@test("read.one-cold-frame-is-fetched-once")
def _(workspace):
    need_root()
    image = workspace.converted(small_image({"frame": CONTENT["frame"]}))
    for transport in TRANSPORTS:
        with workspace.mounted(image, f"--transport={transport}") as mounted:
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                contents = list(pool.map(lambda _: (mounted / "frame").read_bytes(), range(16)))
            check(all(content == CONTENT["frame"] for content in contents), "wrong bytes")
            check_equal(workspace.stats(mounted)[0]["fetched_frames"], 1, "frames fetched")
        shutil.rmtree(workspace.state)


@test("read.programs-run-from-the-mount")
def _(workspace):
    need_root()
    # Executed by the kernel and mapped by the loader, libraries from the mount too.
    image = workspace.path("root")
    image.mkdir()
    shutil.copy("/bin/busybox", image / "busybox")
    reference = workspace.convert(f"dir:{image}")
    for transport in TRANSPORTS:
        with workspace.mounted(reference, f"--transport={transport}") as mounted:
            out = subprocess.run([mounted / "busybox", "echo", "runs"], check=True,
                                 capture_output=True).stdout
            check_equal(out, b"runs\n", "output")
