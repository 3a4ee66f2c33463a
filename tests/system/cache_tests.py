# SPDX-License-Identifier: Apache-2.0
"""What a node keeps of images: limits while everything is mounted, no cache at all, and `lamina cache`."""

import concurrent.futures
import json
import os
import pathlib
import random
import signal
import stat

from harness import (check, check_equal, drop_caches, for_each_transport, need_root, noise,
                     repetitions, small_image, test, wait_until)
from mount_tests import expect_content, server_of
from oci_layout import Image

MIB = 1 << 20
LARGE = {f"file{i}": noise(2 * MIB + 77 * i, 100 + i) for i in range(12)}
SMALL = {"a": noise(MIB + 5, 1), "b": noise(MIB, 2), "c": b"small\n"}


def cache(workspace, *arguments, **options):
    command, *rest = arguments
    result = workspace.lamina("cache", command, *rest, f"--state={workspace.state}", "--json",
                              **options)
    return json.loads(result.stdout) if result.stdout else result


def disk_bytes(directory):
    """Bytes that the files below a directory take on its disk."""
    # RocksDB allocates more than it writes.
    device = pathlib.Path(directory).stat().st_dev
    return sum(min(info.st_size, info.st_blocks * 512)
               for info in (path.lstat() for path in pathlib.Path(directory).rglob("*"))
               if stat.S_ISREG(info.st_mode) and info.st_dev == device)


def data_bytes(workspace):
    return sum(path.stat().st_blocks * 512 for path in workspace.state.glob("blobs/*/data"))


def image_of(report, reference):
    found = [image for image in report["images"] if image["image"] == reference]
    check_equal(len(found), 1, f"number of records of {reference}")
    return found[0]


@for_each_transport("cache.limit-holds-while-everything-is-mounted")
def _(workspace, transport):
    limit = 4 * MIB
    images = [workspace.converted(small_image(LARGE), "large"),
              workspace.converted(small_image({name: data[::-1] for name, data in LARGE.items()}),
                                  "reversed")]
    options = (f"--transport={transport}", f"--cache-size={limit}", "--cache-free=0")
    with workspace.mounted(images[0], *options) as first, \
            workspace.mounted(images[1], *options) as second:

        def read(seed):
            chance = random.Random(seed)
            for _ in range(repetitions(150)):
                name = chance.choice(list(LARGE))
                offset = chance.randrange(len(LARGE[name]))
                size = chance.randrange(1, 300_000)
                with open((first, second)[seed % 2] / name, "rb") as file:
                    # Past the page cache of this file, or soon everything would be in it.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    got = os.pread(file.fileno(), size, offset)
                content = LARGE[name] if seed % 2 == 0 else LARGE[name][::-1]
                check(got == content[offset:offset + size], f"{name}: wrong bytes at {offset}")

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            running = [pool.submit(read, seed) for seed in range(6)]
            while not all(future.done() for future in running):
                # What readers are waiting for comes on top, and a frame for each thread.
                check(data_bytes(workspace) <= limit + 6 * MIB, "far above the limit")
                concurrent.futures.wait(running, timeout=0.1)
            for future in running:
                future.result()
        drop_caches()
        expect_content(first, LARGE)
        wait_until(lambda: data_bytes(workspace) <= limit + MIB // 2, "the limit holds")
        report = cache(workspace, "ls")
        check_equal(report["limit_bytes"], limit, "the limit")
        check(report["used_bytes"] <= limit, f"{report['used_bytes']} bytes are used")
        check(all(image["mounted"] for image in report["images"]), "not mounted")


@for_each_transport("cache.none-writes-nothing")
def _(workspace, transport):
    image = workspace.converted(small_image(LARGE), "large")
    with workspace.mounted(image, f"--transport={transport}", "--cache=none") as mounted:
        written = pathlib.Path(f"/proc/{server_of(workspace)}/io")

        def write_bytes():
            fields = dict(line.split(": ") for line in written.read_text("ascii").splitlines())
            return int(fields["write_bytes"])

        before = write_bytes()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(expect_content, mounted, LARGE) for _ in range(4)]:
                done.result()
        drop_caches()
        expect_content(mounted, LARGE)
        stats = workspace.stats(mounted)[0]
        check_equal(stats["written_bytes"], 0, "bytes written")
        check(write_bytes() - before < MIB, f"{write_bytes() - before} bytes went to a disk")
        check_equal(disk_bytes(workspace.state / "blobs"), 0, "bytes of blobs on the disk")
        # Merged metadata are there for the kernel to mount.
        rest = sum(disk_bytes(workspace.state / name) for name in ("blobs", "index", "mounts"))
        check(rest < MIB, f"{rest} bytes are in the state directory")
        check(disk_bytes(workspace.state / "images") < 3 * MIB, "metadata are too large")
        check(stats["frames_present"] * 256 * 1024 <= 33 * MIB, "too much is in memory")


@test("cache.list-shows-what-is-there-also-after-a-kill")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(LARGE), "large")
    with workspace.mounted(image) as mounted:
        (mounted / "file3").read_bytes()
        live = cache(workspace, "ls")
        entry = image_of(live, image)
        check(entry["mounted"] and not entry["pinned"], f"{entry}")
        check(len(LARGE["file3"]) <= entry["present_bytes"] < entry["content_bytes"], f"{entry}")
        check_equal(entry["present_bytes"], live["used_bytes"], "bytes used")
        check_equal(live["blobs"][0]["present_bytes"], live["used_bytes"], "bytes of the blob")
    text = workspace.lamina("cache", "ls", f"--state={workspace.state}").stdout
    check("large" in text and "MiB" in text, text)
    directory = workspace.new_directory("mnt")
    workspace.lamina("mount", image, directory, f"--state={workspace.state}")
    os.kill(server_of(workspace), signal.SIGKILL)
    wait_until(lambda: not workspace.processes(), "the server ends")
    after = cache(workspace, "ls")
    check_equal(after["used_bytes"], live["used_bytes"], "bytes used after a kill")
    check(not image_of(after, image)["mounted"], "still mounted after a kill")


@test("cache.gc-evicts-and-forgets-what-no-image-needs")
def _(workspace):
    need_root()
    images = [workspace.converted(small_image(LARGE), "large"),
              workspace.converted(small_image(SMALL), "small")]
    for image, files in zip(images, (LARGE, SMALL)):
        with workspace.mounted(image) as mounted:
            expect_content(mounted, files)
    before = cache(workspace, "ls")
    small = image_of(before, images[1])["present_bytes"]
    # Down to what the image used last needs: the other one goes.
    cleanup = cache(workspace, "gc", f"--to={small}")
    check(cleanup["freed_bytes"] >= before["used_bytes"] - small, f"{cleanup}")
    after = cache(workspace, "ls")
    check(after["used_bytes"] <= small, f"{after['used_bytes']} bytes are used")
    with workspace.mounted(images[0]) as mounted:
        expect_content(mounted, LARGE)
    # Blobs of an image whose record is lost, and other leftovers.
    record = workspace.state / "images" / (
        image_of(after, images[1])["manifest_digest"].removeprefix("sha256:") + ".json")
    record.unlink()
    (workspace.state / "images" / "leftover").mkdir()
    check_equal(cache(workspace, "gc")["removed_blobs"], 1, "blobs removed")
    check(not (workspace.state / "images" / "leftover").exists(), "a leftover is still there")
    cleanup = cache(workspace, "gc", "--to=0")
    check_equal((cleanup["removed_images"], cleanup["removed_blobs"]), (1, 1), "what was removed")
    check_equal(list((workspace.state / "blobs").iterdir()), [], "blobs left")
    check_equal(list((workspace.state / "images").iterdir()), [], "images left")
    with workspace.mounted(images[0]) as mounted:
        expect_content(mounted, LARGE)


@test("cache.gc-leaves-what-is-mounted-readable")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(LARGE), "large")
    # What is evicted while the image is streamed to its reader would come back.
    with workspace.mounted(image, "--no-prefetch") as mounted:
        for _ in range(repetitions(5)):
            drop_caches()
            expect_content(mounted, LARGE)
            cache(workspace, "gc", "--to=0")
            check(data_bytes(workspace) <= MIB // 2, "something was not evicted")
        drop_caches()
        expect_content(mounted, LARGE)


@test("cache.pinned-images-stay")
def _(workspace):
    need_root()
    large = workspace.converted(small_image(LARGE), "large")
    small = workspace.converted(small_image(SMALL), "small")
    cache(workspace, "pin", small)  # before it was ever used
    with workspace.mounted(small) as mounted:
        expect_content(mounted, SMALL)
    with workspace.mounted(large, "--cache-size=4M", "--cache-free=0") as mounted:
        expect_content(mounted, LARGE)
    cache(workspace, "gc", "--to=0")
    entry = image_of(cache(workspace, "ls"), small)
    check(entry["pinned"], f"{entry}")
    check_equal(entry["present_bytes"], entry["content_bytes"], "bytes of the pinned image")
    with workspace.mounted(small) as mounted:
        expect_content(mounted, SMALL)
        check_equal(workspace.stats(mounted)[0]["fetched_frames"], 0, "frames fetched")
    cache(workspace, "pin", "--off", entry["manifest_digest"])
    cache(workspace, "gc", "--to=0")
    check_equal(cache(workspace, "ls")["images"], [], "images left")


@test("cache.rm-refuses-what-is-mounted-and-keeps-what-others-need")
def _(workspace):
    need_root()
    base, derived = small_image(SMALL), Image()
    derived.layers += base.layers
    with derived.layer() as layer:
        layer.file("other", noise(100_000, 9))
    images = [workspace.converted(base, "base"), workspace.converted(derived, "derived")]
    with workspace.mounted(images[0]) as first:
        expect_content(first, SMALL)
        with workspace.mounted(images[1]) as second:
            (second / "other").read_bytes()
            result = workspace.lamina("cache", "rm", images[1], f"--state={workspace.state}", status=1)
            check("is mounted" in result.stderr, result.stderr)
        check_equal(cache(workspace, "rm", images[1]),
                    {"freed_bytes": 102_400, "removed_images": 1, "removed_blobs": 1}, "the result")
        drop_caches()
        expect_content(first, SMALL)
        stats = workspace.stats(first)[0]  # the other image's prefetch may have brought some
        check(stats["fetched_frames"] <= stats["frames"], f"frames were fetched again: {stats}")
    check_equal(cache(workspace, "rm", images[0])["removed_blobs"], 1, "blobs removed")
    check_equal(list((workspace.state / "blobs").iterdir()), [], "blobs left")
    for name in (images[0], "sha256:0123456789ab", f"oci:{workspace.path('nothing')}"):
        result = workspace.lamina("cache", "rm", name, f"--state={workspace.state}", status=1)
        check("no image" in result.stderr, result.stderr)


@test("cache.equal-content-of-two-images-is-fetched-once")
def _(workspace):
    need_root()
    first, second = small_image(LARGE), Image()
    with second.layer() as layer:
        for name, content in LARGE.items():
            layer.file(f"elsewhere/{name}", content)
        layer.file("own", noise(300_000, 77))
    images = [workspace.converted(first, "first"), workspace.converted(second, "second")]
    with workspace.mounted(images[0]) as one:
        expect_content(one, LARGE)
        with workspace.mounted(images[1]) as two:
            # The chunks are indexed in the background; "own" is not anywhere else.
            wait_until(lambda: copied_more(workspace, two), "chunks are copied on the node")
            expect_content(two / "elsewhere", LARGE)
            stats = workspace.stats(two)[0]
            check(stats["fetched_bytes"] < 2 * MIB, f"{stats['fetched_bytes']} bytes were fetched")
            check(stats["copied_frames"] * 256 * 1024 > 20 * MIB, "too little was copied")


def copied_more(workspace, mounted):
    """Reads a little more of an image, and says if it was copied from another blob."""
    before = workspace.stats(mounted)[0]["copied_frames"]
    copied_more.offset = getattr(copied_more, "offset", 0) + MIB // 4
    with open(mounted / "elsewhere" / "file11", "rb") as file:
        os.pread(file.fileno(), 1, copied_more.offset % len(LARGE["file11"]))
    return workspace.stats(mounted)[0]["copied_frames"] > before


@test("cache.options-must-make-sense")
def _(workspace):
    image = workspace.converted(small_image(SMALL), "small")
    directory = workspace.new_directory("mnt")
    for option in ("--cache-size=lots", "--cache-size=-1", "--cache-size=101%", "--cache-size=5X",
                   "--cache-free=x", "--cache-size=1e3", "--cache-free=0%"):
        result = workspace.lamina("mount", image, directory, f"--state={workspace.state}", option,
                                  status=2)
        check(option.split("=", maxsplit=1)[0] in result.stderr, result.stderr)
    workspace.lamina("mount", image, directory, f"--state={workspace.state}", "--cache=ram", status=2)
    check(not workspace.processes(), "a server was started")
