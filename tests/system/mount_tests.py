# SPDX-License-Identifier: Apache-2.0
"""Mounts in trouble: killed servers, origins that go, lie and return, full and damaged disks; and
what mounts share and leave behind."""

import concurrent.futures
import contextlib
import ctypes
import errno
import glob
import mmap
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time

from harness import (TRANSPORTS, check, check_equal, drop_caches, expect_error,
                     for_each_transport, need_root, noise, program, repetitions, small_image, test,
                     wait_until)
from oci_layout import Image, Layout

MIB = 1 << 20
FILES = {"a": noise(MIB + 5, 1), "b": noise(MIB, 2), "c": b"small\n"}


def expect_content(directory, files=None):
    for name, content in (files or FILES).items():
        check((directory / name).read_bytes() == content, f"{directory / name} is wrong")


def server_of(workspace):
    processes = [pid for pid in workspace.processes()
                 if b"\0serve\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                 and pathlib.Path(f"/proc/{pid}/comm").read_text() != "lamina-mounter\n"]
    check_equal(len(processes), 1, "number of server processes")
    return processes[0]


def layer_blob(workspace):
    """Path of the largest layer of the converted image."""
    layout = Layout(workspace.path("converted"))
    layer = max(layout.manifest("latest")["layers"], key=lambda descriptor: descriptor["size"])
    return pathlib.Path(layout.path(layer["digest"]))


@test("mount.cycles-leave-nothing")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    modes = (["--transport=erofs"], ["--transport=fuse"], ["--transport=erofs", "--loop"],
             ["--writable"])
    for cycle in range(repetitions(8)):
        with workspace.mounted(image, *modes[cycle % len(modes)]) as mounted:
            expect_content(mounted)
        workspace.check_nothing_left()


@test("mount.cycles-leave-the-server-no-descriptors")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))

    def cycles(count):
        for transport in TRANSPORTS * count:
            with workspace.mounted(image, f"--transport={transport}") as mounted:
                expect_content(mounted, {"c": FILES["c"]})

    def descriptors():
        """But for files of the index: RocksDB opens more as records come and go, and merges them."""
        opened = glob.glob(f"/proc/{server_of(workspace)}/fd/*")
        return sum(1 for path in opened if not in_index(path))

    def in_index(path):
        try:
            return os.readlink(path).startswith(f"{workspace.state}/index/")
        except FileNotFoundError:
            return True  # closed just now

    def threads():
        return len(os.listdir(f"/proc/{server_of(workspace)}/task"))

    with workspace.mounted(image, "--transport=erofs"):
        cycles(1)
        before = descriptors(), threads()
        cycles(repetitions(8))
        wait_until(lambda: (descriptors(), threads()) <= before,
                   f"descriptors and threads are back to {before}")


@for_each_transport("mount.killed-server-is-recovered-from-by-umount")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    mount = ["mount", image, directory, f"--state={workspace.state}", f"--transport={transport}"]
    for _ in range(repetitions(2)):
        workspace.lamina(*mount)
        expect_content(directory, {"c": FILES["c"]})
        os.kill(server_of(workspace), signal.SIGKILL)
        wait_until(lambda: not workspace.processes(), "the server is dead")
        expect_error(directory / "b", errno.EIO, errno.ENOTCONN, errno.ECONNABORTED)
        workspace.lamina("umount", directory, f"--state={workspace.state}")
        check(not os.path.ismount(directory), "it is still mounted")
        workspace.check_nothing_left()
    workspace.lamina(*mount)
    expect_content(directory)
    workspace.lamina("umount", directory, f"--state={workspace.state}")


@for_each_transport("mount.killed-server-is-recovered-from-by-mount")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    mount = ["mount", image, directory, f"--state={workspace.state}", f"--transport={transport}"]
    workspace.lamina(*mount)
    os.kill(server_of(workspace), signal.SIGKILL)
    wait_until(lambda: not workspace.processes(), "the server is dead")
    with workspace.mounted(image):  # starts a server, which cleans up
        workspace.lamina(*mount)
        expect_content(directory)
        workspace.lamina("umount", directory, f"--state={workspace.state}")


@for_each_transport("mount.killed-in-mid-read-serves-right-bytes-afterwards")
def _(workspace, transport):
    files = {f"f{i}": noise(MIB, i) for i in range(12)}
    image = workspace.converted(small_image(files))
    for round_ in range(repetitions(2)):
        directory = workspace.new_directory("mnt")
        workspace.lamina("mount", image, directory, f"--state={workspace.state}",
                         f"--transport={transport}")
        readers = [subprocess.Popen(["cat", directory / name], stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL) for name in files]
        threading.Event().wait(0.01 * (round_ + 1))
        os.kill(server_of(workspace), signal.SIGKILL)
        for reader in readers:
            reader.wait(timeout=60)
        workspace.lamina("umount", directory, f"--state={workspace.state}")
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        expect_content(mounted, files)


@test("mount.killed-at-any-moment-of-mount-and-umount")
def _(workspace):
    """Whoever is killed, command or server, the next commands work and leave nothing."""
    need_root()
    image = workspace.converted(small_image(FILES))
    directory, other = workspace.new_directory("mnt"), workspace.new_directory("mnt")
    state = f"--state={workspace.state}"
    modes = (("--transport=erofs",), ("--transport=fuse",), ("--loop",), ("--writable",))
    generator = random.Random(3)

    def killed(*command):
        victims = generator.choice(("command", "all"))
        with subprocess.Popen([program("LAMINA"), *map(str, command), state],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(generator.random() * 0.12)
            if victims == "all":
                workspace.kill_processes()
            process.kill()

    for cycle in range(repetitions(6)):
        mode = modes[cycle % len(modes)]
        killed("mount", image, directory, *mode)
        workspace.lamina("mount", image, other, *mode, state)
        expect_content(other)
        if os.path.ismount(directory):  # the command was killed when it was done, or its server went on
            workspace.lamina("umount", directory, state)
        killed("umount", other)
        workspace.lamina("umount", other, state, status=None)
        for target in (directory, other):
            check(not os.path.ismount(target), f"{target} is still mounted (cycle {cycle}, {mode})")
        workspace.check_nothing_left()


@for_each_transport("mount.origin-loses-its-blob-and-gets-it-back")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    blob = layer_blob(workspace)
    content = blob.read_bytes()
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        expect_content(mounted, {"c": FILES["c"]})
        with open(blob, "r+b") as file:  # in place: the server may hold it open
            file.truncate(0)
        expect_error(mounted / "a", errno.EIO)
        expect_error(mounted / "a", errno.EIO)
        expect_content(mounted, {"c": FILES["c"]})  # what is on the node still reads
        with open(blob, "r+b") as file:
            file.write(content)
        expect_content(mounted)


@for_each_transport("mount.origin-is-moved-away-and-back")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        expect_content(mounted, {"c": FILES["c"]})
        os.rename(workspace.path("converted"), workspace.path("moved"))
        # An open blob may still be read: but wrong bytes or a hang are not allowed.
        result = subprocess.run(["cat", mounted / "a"], check=False, capture_output=True, timeout=60)
        check(result.returncode != 0 or result.stdout == FILES["a"], "wrong bytes")
        expect_content(mounted, {"c": FILES["c"]})
        os.rename(workspace.path("moved"), workspace.path("converted"))
        expect_content(mounted)


@for_each_transport("mount.origin-with-other-bytes-is-never-believed")
def _(workspace, transport):
    image = workspace.converted(small_image({"a": FILES["a"]}))
    blob = layer_blob(workspace)
    content = blob.read_bytes()
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        blob.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        expect_error(mounted / "a", errno.EIO)
        blob.write_bytes(content)
        expect_content(mounted, {"a": FILES["a"]})


@contextlib.contextmanager
def small_disk(workspace):
    """Mounts an ext4 of 64 MiB at the state directory (the kernel's EROFS takes no files from tmpfs);
    gives a file that fills two thirds of it."""
    disk = workspace.path("disk")
    with open(disk, "wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    workspace.state.mkdir()
    subprocess.run(["mount", "-o", "loop", disk, workspace.state], check=True)
    try:
        (workspace.state / "lock").touch()  # it is one: without, a directory of others is refused
        filler = workspace.state / "filler"
        filler.write_bytes(bytes(40 * MIB))
        yield filler
    finally:
        subprocess.run(["umount", "--lazy", workspace.state], check=True)


@for_each_transport("mount.full-disk-evicts-and-reads-on")
def _(workspace, transport):
    files = {f"f{i}": noise(4 * MIB, i) for i in range(8)}
    image = workspace.converted(small_image(files))
    with small_disk(workspace) as filler:
        with workspace.mounted(image, f"--transport={transport}", "--cache-free=0") as mounted:
            expect_content(mounted, files)  # 32 MiB go through less
            # Now others take the last block.
            rest = workspace.state / "rest"
            with open(rest, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(64 << 10))
            drop_caches()
            expect_content(mounted, files)
            rest.unlink()
            filler.unlink()
            expect_content(mounted, files)
        wait_until(lambda: not workspace.processes(), "the server ends")


def cached_bytes(path):
    """What the page cache has of a file (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, \
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        pages = (ctypes.c_ubyte * (-(-len(mapping) // mmap.PAGESIZE)))()
        result = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping)), pages)
        del first  # or the mapping could not be closed
        check_equal(result, 0, "mincore")
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


@test("mount.file-of-a-blob-that-machines-map-is-cached-once")
def _(workspace):
    need_root()
    image = workspace.converted(small_image({f"f{i}": noise(4 * MIB, i) for i in range(4)}))
    with workspace.mounted(image, "--no-prefetch") as mounted:
        subprocess.run(f"cat {mounted}/* > /dev/null", shell=True, check=True)
        os.sync()  # pages that are not written yet stay
        drop_caches()
        shared, = (workspace.state / "fuse/blobs").iterdir()
        shared.read_bytes()
        data, = workspace.state.glob("blobs/*/data")
        check(cached_bytes(shared) >= 16 * MIB, "what machines map is cached")
        check(cached_bytes(data) < 4 * MIB, f"{cached_bytes(data)} bytes are cached twice")


@for_each_transport("mount.state-directory-below-another-of-its-names-is-found")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    for parent in ("images", "mounts"):
        for option in (f"--transport={transport}", "--writable"):
            state = workspace.path("there") / parent / "lamina"
            state.parent.mkdir(parents=True, exist_ok=True)
            directory = workspace.new_directory(f"mnt-{parent}{len(option)}")
            workspace.lamina("mount", image, directory, f"--state={state}", option)
            workspace.lamina("umount", directory)


@test("mount.full-disk-before-the-server-starts-is-told")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with small_disk(workspace):
        with workspace.mounted(image, "--cache-free=0"):
            pass
        wait_until(lambda: not workspace.processes(), "the server ends")
        rest = workspace.state / "rest"
        with open(rest, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4 << 10))
        directory = workspace.new_directory("mnt")
        error = workspace.lamina("mount", image, directory, f"--state={workspace.state}", status=1).stderr
        check("no space left" in error.lower(), error)
        rest.unlink()
        with workspace.mounted(image, "--cache-free=0") as mounted:
            expect_content(mounted, FILES)
        wait_until(lambda: not workspace.processes(), "the server ends")


@for_each_transport("mount.cache-survives-the-server")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    for expected in (False, True):
        with workspace.mounted(image, f"--transport={transport}") as mounted:
            expect_content(mounted)
            check_equal(workspace.stats(mounted)[0]["fetched_frames"] == 0, expected,
                        "that nothing was fetched")


@for_each_transport("mount.damaged-cache-is-noticed")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        expect_content(mounted)
    for path in (workspace.state / "blobs").glob("*/data"):
        with open(path, "r+b") as file:
            for offset in range(0, os.path.getsize(path), 100_000):
                file.seek(offset)
                file.write(b"damage")
    drop_caches()
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        expect_content(mounted)


@test("mount.damaged-state-files-are-noticed")
def _(workspace):
    # Whatever happens to a file of the state directory, a mount gives right bytes or an error.
    need_root()
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image) as mounted:
        expect_content(mounted)
    pristine = workspace.path("pristine")
    shutil.copytree(workspace.state, pristine, ignore=shutil.ignore_patterns("*.sock"))
    damaged = sorted(path.relative_to(pristine) for path in pristine.rglob("*")
                     if path.is_file() and path.parts[-2] != "index")
    check(damaged, "there is no state to damage")
    for path in damaged:
        for damage in (lambda data: data[:len(data) // 2], lambda data: b"",
                       lambda data: data[:-1] + bytes([data[-1] ^ 0x80]) if data else b"x",
                       lambda data: bytes(byte ^ 0xFF for byte in data[:64]) + data[64:]):
            shutil.rmtree(workspace.state)
            shutil.copytree(pristine, workspace.state)
            content = (workspace.state / path).read_bytes()
            (workspace.state / path).write_bytes(damage(content))
            directory = workspace.new_directory("mnt")
            result = workspace.lamina("mount", image, directory, f"--state={workspace.state}",
                                      status=None)
            if result.returncode == 0:
                expect_content(directory)
                workspace.lamina("umount", directory, f"--state={workspace.state}")
            else:
                check(result.stderr.startswith("lamina: "), f"{path}: {result.stderr}")


@test("mount.two-mounts-of-an-image-share-what-was-read")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image, "--transport=erofs") as first:
        expect_content(first)
        read = workspace.stats(first)[0]
        with workspace.mounted(image, "--transport=erofs") as second:
            # What one has read is in memory for the other.
            expect_content(second)
            both = workspace.stats(second)[0]
            check_equal(both["sharing"], 2, "mounts that are counted together")
            check_equal(both["read_bytes"], read["read_bytes"], "bytes read of the blobs")
            drop_caches()
            expect_content(second)
            check_equal(workspace.stats(second)[0]["fetched_frames"], read["fetched_frames"],
                        "frames fetched")
            with workspace.mounted(image, "--transport=fuse") as third:
                drop_caches()
                expect_content(third)
                check_equal(workspace.stats(third)[0]["sharing"], 1, "mounts counted for FUSE")
                check_equal(workspace.stats(third)[0]["fetched_frames"], 0, "frames fetched")
        expect_content(first)


@test("mount.images-share-layers-and-equal-content")
def _(workspace):
    need_root()
    base = small_image(FILES)
    same_layer, same_content = Image(), Image()
    same_layer.layers += base.layers
    for image in (same_layer, same_content):
        with image.layer() as layer:
            layer.file("other", noise(10_000, 9))
            for name, content in FILES.items():
                layer.file(f"copy/{name}", content)
    references = [workspace.converted(image, f"image{i}")
                  for i, image in enumerate((base, same_layer, same_content))]
    with workspace.mounted(references[0]) as mounted:
        expect_content(mounted)
        with workspace.mounted(references[1]) as second:
            expect_content(second)
            check_equal(workspace.stats(second)[0]["fetched_frames"], 0, "frames fetched")
        with workspace.mounted(references[2]) as third:
            expect_content(third / "copy")
            check(workspace.stats(third)[0]["copied_frames"] > 0, "nothing was copied on the node")


@test("mount.engine-without-threads-for-requests-goes-on")
def _(workspace):
    need_root()
    content = noise(MIB)
    with workspace.mounted(workspace.converted(small_image({"file": content}))) as directory:
        check((directory / "file").read_bytes() == content, "content")
        server = server_of(workspace)
        limit = resource.prlimit(server, resource.RLIMIT_AS)
        status = pathlib.Path(f"/proc/{server}/status").read_text(encoding="ascii")
        size = int(re.search(r"VmSize:\s+(\d+)", status)[1]) << 10
        # Not enough for the stacks of two threads.
        resource.prlimit(server, resource.RLIMIT_AS, (size + 12 * MIB, limit[1]))
        answers = []
        with contextlib.ExitStack() as clients:
            for _ in range(30):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(0.2)
                client.connect(str(workspace.state / "control.sock"))
                with contextlib.suppress(OSError):
                    answers.append(client.recv(4096))
            resource.prlimit(server, resource.RLIMIT_AS, limit)
        check(any(b"no thread for the request" in answer for answer in answers), answers)
        check_equal(server_of(workspace), server, "the engine")
        drop_caches()
        check((directory / "file").read_bytes() == content, "content afterwards")


@test("mount.many-at-once-start-one-server")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    directories = [workspace.new_directory("mnt") for _ in range(12)]

    def mount(directory):
        transport = TRANSPORTS[directories.index(directory) % 2]
        workspace.lamina("mount", image, directory, f"--state={workspace.state}",
                         f"--transport={transport}")
        expect_content(directory)

    def umount(directory):
        workspace.lamina("umount", directory, f"--state={workspace.state}")

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(mount, directories))
        server_of(workspace)
        list(pool.map(umount, directories))


@for_each_transport("mount.busy-mount-stays-until-it-is-free")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image, f"--transport={transport}") as mounted:
        with open(mounted / "a", "rb") as file:
            result = workspace.lamina("umount", mounted, f"--state={workspace.state}", status=1)
            check("busy" in result.stderr or "in use" in result.stderr, result.stderr)
            check(file.read() == FILES["a"], "the open file is wrong")
        expect_content(mounted)


@for_each_transport("mount.unmounted-by-another-program")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    workspace.lamina("mount", image, directory, f"--state={workspace.state}",
                     f"--transport={transport}")
    expect_content(directory)
    subprocess.run(["umount", directory], check=True)
    workspace.check_nothing_left()


@for_each_transport("mount.server-told-to-end-unmounts")
def _(workspace, transport):
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    workspace.lamina("mount", image, directory, f"--state={workspace.state}",
                     f"--transport={transport}")
    os.kill(server_of(workspace), signal.SIGTERM)
    wait_until(lambda: not workspace.processes(), "the server ends")
    check(not os.path.ismount(directory), "it is still mounted")


@test("mount.refusals-say-why-and-leave-nothing")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    file = workspace.path("file")
    file.write_bytes(b"")
    directory = workspace.new_directory("mnt")
    for reference, target, text in (
            (image, workspace.path("nowhere"), "nowhere"), (image, file, "not a directory"),
            (f"oci:{workspace.path('no-image')}:x", directory, "no-image"),
            (image.replace(":latest", ":other"), directory, "other"),
            (f"docker:{workspace.path('converted')}", directory, "docker")):
        result = workspace.lamina("mount", reference, target, f"--state={workspace.state}",
                                  status=2 if text == "docker" else 1)
        check_equal(result.stderr.count("\n"), 1, "lines of the error")
        check(result.stderr.startswith("lamina: ") and text in result.stderr, result.stderr)
        check(not os.path.ismount(directory), "something was mounted")
    workspace.lamina("umount", directory, f"--state={workspace.state}", status=1)
    with workspace.mounted(image, directory=directory):
        workspace.lamina("mount", image, directory, f"--state={workspace.state}", status=1)
        expect_content(directory)


@test("mount.state-may-be-relative")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    workspace.lamina("mount", image, directory, "--state=state", cwd=workspace.root)
    check(workspace.path("state/lock").exists(), "the state is somewhere else")
    expect_content(directory)
    workspace.lamina("umount", directory)


@test("mount.umount-does-not-wait-for-readers-of-another-mount")
def _(workspace):
    """One that was detached while it was read keeps the engine, but nobody who unmounts."""
    need_root()
    image = workspace.converted(small_image(FILES))
    busy, other = workspace.new_directory("mnt"), workspace.new_directory("mnt")
    for directory in (busy, other):
        workspace.lamina("mount", image, directory, f"--state={workspace.state}")
    with open(busy / next(iter(FILES)), "rb") as file:
        subprocess.run(["umount", "--lazy", busy], check=True)
        start = time.monotonic()
        workspace.lamina("umount", other, f"--state={workspace.state}")
        seconds = time.monotonic() - start
        check(seconds < 4, f"it took {seconds:.1f} s")
        check(file.read() == next(iter(FILES.values())), "the file is wrong")


@test("mount.state-is-not-put-into-a-directory-of-something-else")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    mine = workspace.new_directory("mine")
    (mine / "letter").write_text("dear", encoding="ascii")
    result = workspace.lamina("mount", image, directory, f"--state={mine}", status=1)
    check("neither empty nor a state directory" in result.stderr, result.stderr)
    check_equal(os.listdir(mine), ["letter"], "what is there")
    (mine / "letter").unlink()
    mine.chmod(0o750)
    with workspace.mounted(image, state=mine, directory=directory):
        check_equal(mine.stat().st_mode & 0o7777, 0o750, "the mode of a directory that was there")


@test("mount.server-keeps-no-descriptor-of-its-caller")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    ends = os.pipe()
    workspace.lamina("mount", image, directory, f"--state={workspace.state}", pass_fds=ends)
    os.close(ends[1])
    check_equal(os.read(ends[0], 1), b"", "what a pipe gives whose writer has ended")
    os.close(ends[0])
    workspace.lamina("umount", directory)


@test("mount.works-without-standard-streams")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mnt")
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        for command in (f"mount {image} {directory}", f"umount {directory}"):
            subprocess.run(f"{program('LAMINA')} {command} --state={workspace.state} {closed}",
                           shell=True, check=True, timeout=60)
        check(not os.path.ismount(directory), "it is still mounted")


@test("mount.two-servers-cannot-have-one-state")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image) as mounted:
        result = workspace.lamina("serve", f"--state={workspace.state}", status=1)
        check("in use" in result.stderr, result.stderr)
        expect_content(mounted)


@test("mount.writable-forgets-its-changes")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    for _ in range(2):
        with workspace.mounted(image, "--writable") as mounted:
            expect_content(mounted)
            check(not (mounted / "new").exists(), "a change was kept")
            (mounted / "new").write_bytes(b"new")
            (mounted / "c").unlink()
            with open(mounted / "a", "r+b") as file:
                file.write(b"changed")
            check_equal((mounted / "a").read_bytes(), b"changed" + FILES["a"][7:], "the file")


@test("mount.writable-directory-keeps-changes")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    kept = workspace.new_directory("kept")
    with workspace.mounted(image, "--writable", f"--writable-dir={kept}") as mounted:
        (mounted / "new").write_bytes(b"new")
        (mounted / "c").unlink()
    with workspace.mounted(image, "--writable", f"--writable-dir={kept}") as mounted:
        check_equal((mounted / "new").read_bytes(), b"new", "the new file")
        check(not (mounted / "c").exists(), "the removed file is back")
    with workspace.mounted(image) as mounted:
        expect_content(mounted)


@test("mount.stats-count-what-readers-cause")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image) as mounted:
        before = workspace.stats(mounted)[0]
        expect_content(mounted)
        after = workspace.stats(mounted)[0]
        check_equal(before["read_bytes"], 0, "bytes read before anything was")
        for field in ("read_requests", "fetched_bytes", "fetched_frames", "decompressed_bytes"):
            check(after[field] > 0, f"{field} is {after[field]}")
        check(after["read_bytes"] >= sum(map(len, FILES.values())), "too few bytes were read")
        check_equal(after["frames_present"], after["frames"], "frames present")


UNPRIVILEGED = """
set -e
# Where udev does not run, /dev/fuse is for root alone. This script has a mount name space of its own.
if ! setpriv --reuid=65534 --regid=65534 --clear-groups test -w /dev/fuse; then
  mknod "$HOME/fuse" c 10 229
  chmod 666 "$HOME/fuse"
  mount --bind "$HOME/fuse" /dev/fuse
fi
exec setpriv --reuid=65534 --regid=65534 --clear-groups sh -ec '
  cd "$HOME"
  ./lamina mount "$1" mnt
  cmp mnt/a a
  ./lamina stats mnt
  ./lamina umount mnt
  test -z "$(ls mnt)"
' sh "$1"
"""


@test("mount.unprivileged-user-mounts-over-fuse")
def _(workspace):
    need_root("it becomes another user")
    image = workspace.converted(small_image(FILES))
    home = workspace.new_directory("home")
    shutil.copy(program("LAMINA"), home / "lamina")  # the build may be where other users cannot go
    (home / "a").write_bytes(FILES["a"])
    (home / "mnt").mkdir()
    for path in (home, home / "mnt"):
        os.chown(path, 65534, 65534)
    os.chmod(workspace.root, 0o755)
    result = subprocess.run(["unshare", "--mount", "sh", "-c", UNPRIVILEGED, "sh", image],
                            check=False, timeout=120, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env=dict(os.environ, HOME=str(home)))
    check(result.returncode == 0, result.stdout.decode(errors="replace"))
    check(b"transport    fuse" in result.stdout, f"it says {result.stdout!r}")


@test("mount.writable-directory-serves-one-mount-and-keeps-what-is-the-users")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    directory = workspace.new_directory("mine")
    (directory / "work").mkdir()
    (directory / "work" / "thesis").write_text("precious")
    with workspace.mounted(image, f"--writable-dir={directory}") as mounted:
        (mounted / "new").write_text("new")
        other = workspace.new_directory("other")
        result = workspace.lamina("mount", image, other, f"--state={workspace.state}",
                                  f"--writable-dir={directory}", status=1)
        check("is the writable directory of another mount" in result.stderr, result.stderr)
        (mounted / "newer").write_text("newer")  # the first one goes on
    check_equal((directory / "upper" / "newer").read_text(), "newer", "what was written")
    check_equal((directory / "work" / "thesis").read_text(), "precious", "the user's own file")
    check_equal(sorted(os.listdir(directory)), ["upper", "work"], "what is left")


@test("mount.engine-in-another-mount-namespace-is-an-error")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    inside = workspace.new_directory("inside")
    subprocess.run(["unshare", "--mount", program("LAMINA"), "mount", image, inside,
                    f"--state={workspace.state}"], check=True, capture_output=True)
    outside = workspace.new_directory("outside")
    result = workspace.lamina("mount", image, outside, f"--state={workspace.state}", status=1)
    check("another mount namespace" in result.stderr, result.stderr)
    for process in workspace.processes():
        os.kill(process, signal.SIGTERM)
    wait_until(lambda: not workspace.processes(), "the server ends")


@test("mount.paths-that-requests-cannot-carry-are-refused")
def _(workspace):
    image = workspace.converted(small_image(FILES))
    target = os.fsencode(workspace.root) + b"/caf\xe9"
    os.mkdir(target)
    result = workspace.lamina("mount", image, target, f"--state={workspace.state}", status=1)
    check("not UTF-8" in result.stderr, result.stderr)


@test("mount.state-on-tmpfs-uses-loop-devices")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    workspace.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", workspace.state], check=True)
    try:
        with workspace.mounted(image) as mounted:
            expect_content(mounted)
            check_equal(workspace.stats(mounted)[0]["loop"], True, "loop devices are used")
        wait_until(lambda: not workspace.processes(), "the server ends")
    finally:
        subprocess.run(["umount", "--lazy", workspace.state], check=True)


@test("mount.requests-that-are-none-leave-the-server-alone")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with workspace.mounted(image) as mounted:
        for text in (b"[]\n", b"{\n", b'"mount"\n', b"7\n", b'{"op": 7}\n', b"\xff\n") * 20:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(workspace.state / "control.sock"))
                client.send(text)  # and does not wait for the answer
        expect_content(mounted)


@test("mount.left-by-a-killed-server-is-unmounted-however-long-its-state-path-is")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    state = workspace.new_directory("long") / ("x" * 200) / ("y" * 100)
    state.parent.mkdir()
    for options in ((), ("--writable",), ("--loop",)):
        directory = workspace.new_directory("mnt")
        workspace.lamina("mount", image, directory, f"--state={state}", *options)
        workspace.kill_processes()
        workspace.lamina("umount", directory, f"--state={state}")
        check(not os.path.ismount(directory), f"{directory} is still mounted ({options})")
    wait_until(lambda: not workspace.processes(), "the server ends")


@test("mount.says-what-is-needed-where-it-cannot-tell-its-state")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    home = workspace.new_directory("home")
    for name, options, tells in (("x" * 200, (), False), ("x" * 200, ("--loop",), True),
                                 ("back\\slash", (), False), ("back\\slash", ("--writable",), False),
                                 ("new\nline", (), True), ("new\nline", ("--loop",), True),
                                 ("new\nline", ("--writable",), True)):
        state = home / name
        directory = workspace.new_directory("mnt")
        workspace.lamina("mount", "--transport=erofs", image, directory, f"--state={state}", *options)
        stats = workspace.lamina("stats", directory, status=None)
        case = f"{name!r} {options}"
        check_equal(stats.returncode == 0, tells, f"stats without --state, {case}: {stats.stderr}")
        if not tells:
            check("--state" in stats.stderr, f"{case}: {stats.stderr}")
            workspace.lamina("umount", directory, status=1)
        workspace.lamina("umount", directory, *(() if tells else (f"--state={state}",)))
        check(not os.path.ismount(directory), f"{directory} is still mounted, {case}")


@test("mount.umount-of-nothing-makes-no-state")
def _(workspace):
    state = workspace.path("state")
    workspace.lamina("umount", workspace.new_directory("mnt"), f"--state={state}", status=1)
    check(not state.exists(), "umount made a state directory")
