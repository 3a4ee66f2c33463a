# SPDX-License-Identifier: Apache-2.0
"""lamina commit, lamina fork and --layer: what was written to a mount becomes a layer of an image, others
start from it, and images are put on top of each other."""

import json
import os
import pathlib
import random
import signal
import subprocess
import time

from daemon import Daemon
from harness import (check, check_equal, compare, for_each_transport, need_root, noise, program,
                     repetitions, small_image, test, wait_until)
from oci_layout import Image, Layout
from registry_server import registry
from run_container_tests import busybox_image
from sandbox_tests import Sandbox, listed, sandbox

MIB = 1 << 20
FILES = {"large": noise(9 * MIB + 5, 1), "dir/a": b"a\n", "dir/b": b"b\n", "gone": b"gone\n",
         "replaced/old": b"old\n", "script": b"#!/bin/sh\n"}

# Every kind of change that can be made to a mounted image, but sockets, which GNU tar does not keep.
CHANGES = r"""
cd "$1"
printf more >> dir/a
rm gone dir/b
rm -r replaced; mkdir -m 2755 replaced; printf new > replaced/new
mkdir -p deep/er/and; head -c 3000000 /dev/urandom > deep/er/and/noise; ln deep/er/and/noise hard
ln -s /nowhere link; mkfifo -m 600 pipe; mknod null c 1 3; mknod disk b 259 7
chmod 4755 script; chown 70000:70001 dir; setfattr -n user.note -v text dir
setfacl -m u:1234:r script
printf x > "name with spaces and $(printf '\377')"
truncate -s 5M sparse; printf end >> sparse
touch -d '1969-12-31 23:59:58.25 UTC' deep/er; touch -h -d @7.5 link
rm script; printf again > script; mkdir gone; printf dir > gone/inside
"""


def change(directory, script=CHANGES):
    subprocess.run(["sh", "-ec", script, "sh", str(directory)], check=True, timeout=120,
                   env=dict(os.environ, LC_ALL="C"))


def referee(workspace, directory):
    """What is mounted there, copied by GNU tar."""
    copy = workspace.new_directory("expected")
    options = "--numeric-owner --xattrs --xattrs-include='*' --acls --sparse"
    subprocess.run(["sh", "-ec", f"tar -C '{directory}' {options} -cf - . | tar -C '{copy}' {options} "
                    "-xpf - --same-owner --delay-directory-restore"], check=True, timeout=300)
    return copy


def commit(workspace, source, destination, *options, **other):
    result = workspace.lamina("commit", source, destination, f"--state={workspace.state}", "--json",
                              *options, **other)
    return json.loads(result.stdout) if result.returncode == 0 else result


def layout_bytes(layout):
    return sum(path.stat().st_size for path in pathlib.Path(layout).rglob("*") if path.is_file())


def base(workspace):
    return workspace.converted(small_image(FILES))


@for_each_transport("commit.what-was-written-is-in-the-image")
def _(workspace, transport):
    image = base(workspace)
    committed = f"oci:{workspace.path('converted')}:work"
    with workspace.mounted(image, "--writable", f"--transport={transport}") as mounted:
        change(mounted)
        expected = referee(workspace, mounted)
        result = commit(workspace, mounted, committed)
        # And it goes on.
        (mounted / "later").write_bytes(b"later\n")
    check_equal((result["layers_there"], result["copied_bytes"]), (1, 0), "layers below")
    workspace.lamina("verify", committed)
    # As any other node would have it.
    state = workspace.new_directory("state")
    with workspace.mounted(committed, f"--transport={transport}", state=state) as restored:
        compare(expected, restored)
    # Again on top, with what is there removed.
    with workspace.mounted(committed, "--writable") as mounted:
        change(mounted, 'cd "$1"; rm -r deep gone sparse; printf 3 > dir/third')
        expected = referee(workspace, mounted)
        commit(workspace, mounted, committed)
        (mounted / "dir" / "third").write_bytes(b"4")
        commit(workspace, mounted, committed, "--message=the tag has moved meanwhile")
    manifest = Layout(workspace.path("converted")).manifest("work")
    check_equal(len(manifest["layers"]), 3, "layers")
    (expected / "dir" / "third").write_bytes(b"4")
    with workspace.mounted(committed) as restored:
        check_equal((restored / "dir" / "third").read_bytes(), b"4", "the last file")
        check(not (restored / "deep").exists() and not (restored / "gone").exists(), "not removed")


@test("commit.takes-what-the-change-takes")
def _(workspace):
    need_root()
    image = workspace.converted(small_image({"large": noise(40 * MIB), "small": b"x"}))
    layout = workspace.path("converted")
    with workspace.mounted(image, "--writable") as mounted:
        (mounted / "new").write_bytes(noise(100_000, 7))
        before = layout_bytes(layout)
        commit(workspace, mounted, f"oci:{layout}:work")
        added = layout_bytes(layout) - before
        check(100_000 < added < 300_000, f"{added} bytes were added")
        stats = workspace.stats(mounted)[0]
        check(stats["fetched_bytes"] < MIB, f"the layers below were read: {stats}")
        other = workspace.path("other")
        result = commit(workspace, mounted, f"oci:{other}:work")
        check_equal(result["layers_linked"], 1, "links")
        digest = Layout(layout).manifest("latest")["layers"][0]["digest"]
        check(os.path.samefile(Layout(layout).path(digest), Layout(other).path(digest)),
              "the layer is not the same file")


@test("commit.of-a-writable-directory-and-of-run")
def _(workspace):
    image = busybox_image(workspace)
    kept = workspace.new_directory("kept")
    committed = f"oci:{workspace.path('converted')}:work"
    with workspace.mounted(image, f"--writable-dir={kept}") as mounted:
        (mounted / "one").write_bytes(b"1")
        commit(workspace, mounted, committed)
    # A container that runs is paused for the moment, and goes on.
    script = "i=0; while :; do i=$((i+1)); echo $i > /a; echo $i > /b; done"
    process = subprocess.Popen([program("LAMINA"), "run", f"--state={workspace.state}",
                                f"--writable-dir={kept}", committed, "--", "sh", "-c", script])
    try:
        wait_until(lambda: (kept / "upper" / "b").exists(), "the container writes")
        rootfs = [target for target in workspace.mounts() if target.endswith("/rootfs")]
        root = rootfs or [target for target, line in mount_lines(kept)]
        result = commit(workspace, root[0], f"oci:{workspace.path('converted')}:running")
        check(0 < result["pause_ms"] < 5000, f"paused for {result['pause_ms']} ms")
        counter = (kept / "upper" / "a").read_bytes()
        wait_until(lambda: (kept / "upper" / "a").read_bytes() not in (b"", counter),
                   "the container goes on")
    finally:
        for _ in range(2):  # the second kills
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        process.wait(timeout=60)
    with workspace.mounted(f"oci:{workspace.path('converted')}:running") as restored:
        check_equal((restored / "one").read_bytes(), b"1", "a file of before")
        check_consistent(restored)


def mount_lines(directory):
    from harness import mount_table
    return [(target, line) for target, line in mount_table() if str(directory) in line]


def check_consistent(directory):
    """Of the two files that are written one after the other, the first is not more than one ahead."""
    first, second = ((directory / name).read_bytes() for name in ("a", "b"))
    # A file that was just emptied to be written is a state as well.
    if first and second:
        check(0 <= int(first) - int(second) <= 1, f"a is {first}, b is {second}")


@test("commit.of-a-sandbox-that-runs")
def _(workspace):
    layout = workspace.path("converted")
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        box.exec("sh", "-c", "head -c 20000000 /dev/zero > /zeros; (i=0; while :; do i=$((i+1)); "
                 "echo $i > /a; echo $i > /b; done) > /dev/null 2>&1 &")
        for attempt in range(repetitions(3)):
            result = commit(workspace, box.id, f"oci:{layout}:s{attempt}")
            check(0 < result["pause_ms"] < 5000, f"paused for {result['pause_ms']} ms")
            counter = box.exec("cat", "/a").stdout
            wait_until(lambda: box.exec("cat", "/a").stdout not in ("", counter), "it goes on")
        sandbox(workspace, "pause", box.id)
        commit(workspace, box.id, f"oci:{layout}:paused")
        check_equal(listed(workspace), {box.id: ("container", "paused")}, "the list")
    for attempt in range(repetitions(3)):
        with workspace.mounted(f"oci:{layout}:s{attempt}") as restored:
            check_consistent(restored)
    with Sandbox(workspace, f"oci:{layout}:paused", "--backend=container") as second:
        check_equal(second.output("ls -l /zeros | grep -c 20000000"), "1\n", "a file of the first")
    commit(workspace, "s123456789abc", f"oci:{layout}:none", status=1)


@test("commit.killed-in-the-middle-shows-nothing-and-stops-nobody")
def _(workspace):
    layout = workspace.path("converted")
    generator = random.Random(4)
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        box.exec("sh", "-c", "(while :; do dd if=/dev/urandom of=/moving bs=1M count=8; done) "
                 "> /dev/null 2>&1 &")
        box.exec("sh", "-c", "dd if=/dev/urandom of=/large bs=1M count=40 2> /dev/null")
        for _ in range(repetitions(8)):
            process = subprocess.Popen([program("LAMINA"), "commit", box.id, f"oci:{layout}:work",
                                        f"--state={workspace.state}"], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            time.sleep(generator.uniform(0.01, 0.8))
            process.kill()
            process.wait()
            wait_until(lambda: listed(workspace) == {box.id: ("container", "running")},
                       "the sandbox runs")
            tags = [d["annotations"]["org.opencontainers.image.ref.name"]
                    for d in Layout(layout).index()["manifests"]]
            if "work" in tags:
                workspace.lamina("verify", f"oci:{layout}:work")
        commit(workspace, box.id, f"oci:{layout}:work")
    workspace.lamina("verify", f"oci:{layout}:work")
    left = [name for name in os.listdir(layout) if name.startswith(".lamina-tmp")]
    check_equal(left, [], "what is left of those that were killed")


@test("commit.a-full-disk-leaves-the-destination-as-it-was")
def _(workspace):
    image = base(workspace)
    small = workspace.new_directory("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12M", "tmpfs", small], check=True)
    layout = small / "layout"
    with workspace.mounted(image, "--writable") as mounted:
        (mounted / "first").write_bytes(b"1")
        commit(workspace, mounted, f"oci:{layout}:one")
        before = sorted(os.listdir(layout / "blobs" / "sha256")), (layout / "index.json").read_bytes()
        (mounted / "second").write_bytes(noise(8 * MIB, 5))
        result = commit(workspace, mounted, f"oci:{layout}:two", status=1)
        check("No space left" in result.stderr, result.stderr)
        after = sorted(os.listdir(layout / "blobs" / "sha256")), (layout / "index.json").read_bytes()
        check_equal(after, before, "the destination")
    workspace.lamina("verify", f"oci:{layout}:one")
    subprocess.run(["umount", small], check=True)


@test("commit.what-cannot-be-a-layer-is-refused-by-name")
def _(workspace):
    image = base(workspace)
    kept = workspace.new_directory("kept")
    layout = workspace.path("converted")
    index = (layout / "index.json").read_bytes()
    with workspace.mounted(image, f"--writable-dir={kept}") as mounted:
        (mounted / "dir" / "a").write_bytes(b"new")
        upper = kept / "upper" / "dir" / "a"
        for name, value in (("trusted.overlay.metacopy", b""), ("trusted.overlay.redirect", b"/x")):
            os.setxattr(upper, name, value)
            result = commit(workspace, mounted, f"oci:{layout}:work", status=1)
            check(name in result.stderr and "dir/a" in result.stderr, result.stderr)
            os.removexattr(upper, name)
    with workspace.mounted(image) as mounted:
        result = commit(workspace, mounted, f"oci:{layout}:work", status=1)
        check("read-only" in result.stderr, result.stderr)
    result = commit(workspace, workspace.path("nothing"), f"oci:{layout}:work", status=1)
    commit(workspace, mounted, "dir:/tmp/x", status=2)
    check_equal((layout / "index.json").read_bytes(), index, "the destination")


@test("commit.to-a-registry-sends-what-it-has-not")
def _(workspace):
    need_root()
    with registry(workspace.path("registry")) as server:
        source = workspace.path("source")
        small_image(FILES).write(source)
        image = server.reference("base")
        workspace.lamina("convert", f"oci:{source}:latest", image)
        with workspace.mounted(image, "--writable") as mounted:
            change(mounted)
            expected = referee(workspace, mounted)
            result = commit(workspace, mounted, server.reference("base:work"))
            check_equal(result["layers_there"], 1, "layers that were there")
            result = commit(workspace, mounted, server.reference("other:work"))
            check_equal(result["layers_mounted"], 1, "layers of the other repository")
            local = workspace.path("local")
            result = commit(workspace, mounted, f"oci:{local}:work")
            check_equal(result["layers_copied"], 1, "layers that were copied")
        for committed in (server.reference("base:work"), server.reference("other:work"),
                          f"oci:{local}:work"):
            workspace.lamina("verify", committed)
            with workspace.mounted(committed, state=workspace.new_directory("state")) as restored:
                compare(expected, restored)


# Forks.

def fork(workspace, directory, count=1, *options):
    result = workspace.lamina("fork", directory, count, f"--state={workspace.state}", *options)
    return [pathlib.Path(line) for line in result.stdout.splitlines()]


def umount(workspace, *directories):
    for directory in directories:
        workspace.lamina("umount", directory, f"--state={workspace.state}")
        check(not directory.exists(), f"{directory} is still there")


@for_each_transport("fork.starts-from-what-is-there-and-goes-its-own-way")
def _(workspace, transport):
    image = base(workspace)
    with workspace.mounted(image, "--writable", f"--transport={transport}") as source:
        change(source)
        expected = referee(workspace, source)
        forks = fork(workspace, source, 4)
        check_equal(len(set(forks)), 4, "forks")
        (source / "dir" / "a").write_bytes(b"changed in the source")
        for index, directory in enumerate(forks):
            (directory / "own").write_bytes(str(index).encode())
        for index, directory in enumerate(forks):
            check_equal((directory / "own").read_bytes(), str(index).encode(), "its own file")
            (directory / "own").unlink()
            os.utime(directory, ns=(0, (expected.stat().st_mtime_ns)))
            compare(expected, directory)
        # Of a fork, with what it has changed itself.
        change(forks[0], 'cd "$1"; rm -r deep hard; printf 0 > zero')
        grandchildren = fork(workspace, forks[0], 2)
        expected = referee(workspace, forks[0])
        umount(workspace, forks[0], forks[1])
        compare(expected, grandchildren[1])
        committed = f"oci:{workspace.path('converted')}:work"
        result = commit(workspace, grandchildren[0], committed)
        check_equal(len(result["layers"]), 3, "layers of its own and of those it is from")
        with workspace.mounted(committed) as restored:
            compare(expected, restored)
        umount(workspace, grandchildren[0], forks[2])
        # The source may go first, and umount(8) is as good.
    check_equal((forks[3] / "replaced" / "new").read_bytes(), b"new", "a file of the source")
    subprocess.run(["umount", forks[3], grandchildren[1]], check=True)
    workspace.check_nothing_left()
    check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")


@test("fork.of-mounts-that-are-none")
def _(workspace):
    image = base(workspace)
    with workspace.mounted(image) as mounted:
        result = workspace.lamina("fork", mounted, f"--state={workspace.state}", status=1)
        check("read-only" in result.stderr, result.stderr)
    workspace.lamina("fork", mounted, f"--state={workspace.state}", status=1)
    workspace.lamina("fork", mounted, 0, status=2)


@test("fork.takes-milliseconds")
def _(workspace):
    image = base(workspace)
    with workspace.mounted(image, "--writable") as source:
        change(source, 'cd "$1"; for i in 1 2 3 4 5 6 7 8 9; do echo $i > new$i; done')
        fork(workspace, source, 2)
        start = time.monotonic()
        forks = fork(workspace, source, 50)
        seconds = time.monotonic() - start
        check(seconds < 10, f"50 forks took {seconds:.1f} s")  # on a busy machine
        for directory in forks:
            check_equal((directory / "new9").read_bytes(), b"9\n", "a file")
        for target in reversed(workspace.mounts()):
            if "/mounts/" in target and target.endswith("/root"):
                subprocess.run(["umount", target], check=True)


@test("fork.survives-a-killed-daemon")
def _(workspace):
    image = base(workspace)
    with Daemon(workspace) as daemon:
        source = workspace.new_directory("mnt")
        workspace.lamina("mount", image, source, "--writable", f"--state={workspace.state}")
        (source / "new").write_bytes(b"new")
        forks = fork(workspace, source, 3)
        daemon.wait_for_successor(daemon.kill_worker())
        for directory in forks:
            check_equal((directory / "new").read_bytes(), b"new", "a file of the source")
            check((directory / "large").read_bytes() == FILES["large"], "content is wrong")
        more = fork(workspace, forks[0], 1)
        umount(workspace, *forks, *more)
        workspace.lamina("umount", source, f"--state={workspace.state}")
        check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")
        workspace.lamina("mount", image, source, "--writable", f"--state={workspace.state}")
        fork(workspace, source, 2)
    check_equal(workspace.mounts(), [], "what is still mounted")
    check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")


# Layers on top of each other.

def stack(workspace):
    """A base, a workspace that deletes and replaces, and two toolkits, as references; and what they are
    together, as GNU tar extracts one image that has all of their layers."""
    layers = {
        "base": lambda layer: [layer.directory("bin", mode=0o751), layer.file("bin/tool", b"old"),
                               layer.file("large", noise(3 * MIB, 1)), layer.file("gone", b"x"),
                               layer.directory("d"), layer.file("d/below", b"x")],
        "workspace": lambda layer: [layer.whiteout("gone"), layer.directory("d"), layer.opaque("d"),
                                    layer.file("d/work", b"work"), layer.symlink("link", "d/work")],
        "toolkit": lambda layer: [layer.file("bin/tool", b"new", mode=0o755),
                                  layer.file("opt/kit/lib", noise(2 * MIB, 2))],
        "other": lambda layer: [layer.file("bin/other", b"other"), layer.whiteout("link")],
    }
    whole = Image()
    references = {}
    for name, fill in layers.items():
        image = Image()
        for target in (image, whole):
            with target.layer() as layer:
                fill(layer)
        references[name] = workspace.converted(image, name)
    whole.write(workspace.path("whole"))
    return references


def extracted(workspace, layout):
    from reference import extract
    target = workspace.path(f"{layout}-extracted")
    extract(workspace.path(layout), target)
    return target


def layer_options(references, *names):
    return [f"--layer={references[name]}" for name in names]


@for_each_transport("layer.images-on-top-of-each-other-are-one")
def _(workspace, transport):
    references = stack(workspace)
    options = layer_options(references, "workspace", "toolkit", "other")
    expected = extracted(workspace, "whole")
    with workspace.mounted(references["base"], *options, f"--transport={transport}") as mounted:
        compare(expected, mounted)
        described = workspace.stats(mounted)[0]
        check_equal([image["image"] for image in described["layer_images"]],
                    [references[name] for name in ("workspace", "toolkit", "other")], "the images")
        check_equal(described["layers"], 4, "layers")
        # Another combination beside it, which shares what it can.
        with workspace.mounted(references["base"], *layer_options(references, "toolkit")) as second:
            check((second / "opt/kit/lib").read_bytes() == noise(2 * MIB, 2), "content is wrong")
            check((second / "gone").exists() and not (second / "d/work").exists(), "wrong layers")
            fetched = workspace.stats(second)[0]["fetched_bytes"]
            check_equal(fetched, 0, "bytes that were fetched twice")
        # Nothing in use is removed.
        workspace.lamina("cache", "gc", f"--state={workspace.state}")
        compare(expected, mounted)
    with workspace.mounted(references["base"], *options, "--writable") as mounted:
        (mounted / "d" / "mine").write_bytes(b"mine")
        committed = f"oci:{workspace.path('base')}:all"
        result = commit(workspace, mounted, committed)
        check_equal((result["layers_there"], result["layers_linked"]), (1, 3), "layers below")
    with workspace.mounted(committed) as mounted:
        check_equal((mounted / "d" / "mine").read_bytes(), b"mine", "the new file")
        check_equal((mounted / "bin" / "tool").read_bytes(), b"new", "the toolkit's file")


@test("layer.of-an-image-only-what-is-its-own-is-put-on-top")
def _(workspace):
    need_root()
    below = Image()
    with below.layer() as layer:
        layer.file("file", b"base")
        layer.file("kept", b"base")
    image = workspace.converted(below, "base")
    over = Image()
    with over.layer() as layer:
        layer.file("file", b"workspace")
    work = workspace.converted(over, "work")
    with below.layer() as layer:  # FROM base
        layer.file("tool", b"tool")
    toolkit = workspace.converted(below, "toolkit")
    with workspace.mounted(image, f"--layer={work}", f"--layer={toolkit}") as mounted:
        check_equal((mounted / "file").read_bytes(), b"workspace", "a file that the base has as well")
        check_equal((mounted / "tool").read_bytes(), b"tool", "the tool")
        check_equal(workspace.stats(mounted)[0]["layers"], 3, "layers")


@test("layer.is-taken-over-and-fetched-from-where-it-is")
def _(workspace):
    references = stack(workspace)
    expected = extracted(workspace, "whole")
    with Daemon(workspace) as daemon:
        directory = workspace.new_directory("mnt")
        workspace.lamina("mount", references["base"], directory, "--no-prefetch",
                         *layer_options(references, "workspace", "toolkit", "other"),
                         f"--state={workspace.state}")
        daemon.wait_for_successor(daemon.kill_worker())
        compare(expected, directory)
        workspace.lamina("umount", directory, f"--state={workspace.state}")


@test("layer.run-and-sandboxes-have-them-and-a-toolkit-is-updated-by-itself")
def _(workspace):
    image = busybox_image(workspace)

    def toolkit(text):
        return workspace.converted(small_image({"opt/tool": text}), "toolkit")

    first = toolkit(b"version 1\n")
    options = (f"--layer={first}",)
    result = workspace.lamina("run", f"--state={workspace.state}", *options, image, "--", "cat",
                              "/opt/tool")
    check_equal(result.stdout, "version 1\n", "the tool in a container")
    with Sandbox(workspace, image, *options, "--backend=container") as box:
        check_equal(box.output("cat /opt/tool; echo work > /work"), "version 1\n", "the tool")
        sandbox(workspace, "snapshot", box.id, "saved")
    subprocess.run(["rm", "-r", workspace.path("toolkit"), workspace.path("toolkit-source")],
                   check=True)
    toolkit(b"version 2\n")
    with Sandbox(workspace, "--snapshot=saved", "--backend=container") as box:
        check_equal(box.output("cat /opt/tool /work"), "version 2\nwork\n", "after the update")
        box.output("rm /work; echo more > /more")
        # Of a sandbox that was started from a snapshot.
        sandbox(workspace, "snapshot", box.id, "second")
        sandbox(workspace, "rm", "--snapshot=saved")
        check_equal(box.output("cat /more"), "more\n", "a file")
        with Sandbox(workspace, "--snapshot=second", "--backend=container") as other:
            check_equal(other.output("cat /opt/tool /more; [ ! -e /work ] && echo gone"),
                        "version 2\nmore\ngone\n", "the second snapshot")
