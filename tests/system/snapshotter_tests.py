# SPDX-License-Identifier: Apache-2.0
"""laminad as the snapshotter of Debian's containerd: ordinary images, converted ones, and both."""

import hashlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

from containerd import busybox_image, node
from harness import check, check_equal, need_root, noise, repetitions, test, wait_until
from oci_layout import Image

MIB = 1 << 20
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
SCRIPT = "cat /data/hello; [ ! -e /data/gone ] && echo removed; ls -A /data/opaque"
OUTPUT = "hello\nremoved\nnew\n"


def changes(layer):
    """On top of base(): a file replaced, one removed, a directory that hides what was in it."""
    layer.directory("data")
    layer.file("data/hello", "hello\n")
    layer.whiteout("data/gone")
    layer.directory("data/opaque")
    layer.opaque("data/opaque")
    layer.file("data/opaque/new", "new\n")


def base(layer):
    layer.directory("data")
    layer.file("data/hello", "wrong\n")
    layer.file("data/gone", "wrong\n")
    layer.directory("data/opaque")
    layer.file("data/opaque/old", "wrong\n")
    layer.file("data/large", noise(8 * MIB))


def three_layers():
    return busybox_image(base, changes)


def check_nothing_left(node_, namespaces=("test",)):
    """Removes all images; containers are removed already."""
    for namespace in namespaces:
        for name in node_.containerd.images(namespace):  # CRI gives an image several names
            node_.containerd.remove_image(name, namespace=namespace)
        wait_until(lambda namespace=namespace: not node_.containerd.snapshots(namespace),
                   "the garbage collection removes all snapshots")
    snapshots = node_.workspace.state / "snapshots"
    wait_until(lambda: sorted(os.listdir(snapshots)) == ["db"], "directories and layers are gone")
    check_equal(node_.layer_mounts(), [], "mounted layers")


@test("snapshotter.ordinary-images-are-pulled-run-and-removed")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push(three_layers(), "plain")
        here.containerd.ctr("images", "pull", "--plain-http", "--snapshotter=lamina", image)
        check_equal(here.containerd.run(image, "one", "sh", "-c", SCRIPT), OUTPUT, "the output")
        check_equal(here.layer_mounts(), [], "mounted layers")
        # A container writes, is stopped, and goes on with what it has written.
        here.containerd.start_container(image, "two", "sleep", "1000")
        here.containerd.execute("two", "sh", "-c", "echo kept > /data/written; rm /data/hello")
        here.containerd.ctr("tasks", "delete", "--force", "two")
        here.containerd.ctr("tasks", "start", "--detach", "two")
        check_equal(here.containerd.execute("two", "sh", "-c", "cat /data/written; ls /data"),
                    "kept\nlarge\nopaque\nwritten\n", "the output")
        usage = here.containerd.ctr("snapshots", "--snapshotter=lamina", "usage", "two").stdout
        check("two" in usage, usage)
        here.containerd.remove_container("two")
        check_nothing_left(here)


@test("snapshotter.a-container-becomes-an-image")
def _(workspace):
    need_root()
    with node(workspace) as here:
        plain = here.push(three_layers(), "plain")
        here.containerd.ctr("images", "pull", "--plain-http", "--snapshotter=lamina", plain)
        lazy = here.push_converted(three_layers(), "lazy")
        here.containerd.client("pull", lazy)
        for name, image in (("plain", plain), ("lazy", lazy)):
            here.containerd.start_container(image, name, "sleep", "1000")
            here.containerd.execute(name, "sh", "-c",
                                    "echo new > /data/added; rm /data/hello; rm -r /data/opaque; "
                                    "mkdir /data/opaque")
            here.containerd.client("commit", name, f"{name}-committed")
            here.containerd.remove_container(name)
            check_equal(here.containerd.run(f"{name}-committed", "again", "sh", "-c",
                                            "ls /data; cat /data/added; ls /data/opaque"),
                        "added\nlarge\nopaque\nnew\n", f"the output of {name}")


PULLS = ("pull", "pull-labels", "cri-pull")


def for_each_pull(name):
    def register(function):
        for pull in PULLS:
            @test(f"{name}.{pull}")
            def _(workspace, pull=pull):
                need_root()
                function(workspace, pull)
        return function
    return register


def namespace_of(pull):
    return "k8s.io" if pull == "cri-pull" else "test"


@for_each_pull("snapshotter.converted-images-are-not-downloaded")
def _(workspace, pull):
    namespace = namespace_of(pull)
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        here.containerd.client(pull, image, namespace=namespace)
        sizes = here.containerd.content_sizes(namespace)
        check(sum(sizes.values()) < 64 * 1024, f"containerd downloaded {sizes}")
        kinds = [kind for _, kind in here.containerd.snapshots(namespace).values()]
        check_equal(kinds, ["Committed"] * 3, "the snapshots")
        check_equal(here.containerd.run(image, "one", "sh", "-c", SCRIPT, namespace=namespace), OUTPUT,
                    "the output")
        stats = json.loads(workspace.lamina("stats", "--all", f"--state={workspace.state}",
                                            "--json").stdout)
        fetched = sum(mount["fetched_bytes"] for mount in stats)
        check(fetched < 4 * MIB, f"{fetched} bytes were fetched")
        check_equal(len(here.layer_mounts()), 3, "mounted layers")
        check_nothing_left(here, namespaces=(namespace,))


@for_each_pull("snapshotter.the-original-name-of-a-converted-image-is-lazy")
def _(workspace, pull):
    namespace = namespace_of(pull)
    with node(workspace) as here:
        image = here.push(three_layers(), "original")
        workspace.lamina("convert", f"docker://{image}", "--as-referrer")
        here.containerd.client(pull, image, namespace=namespace)
        sizes = here.containerd.content_sizes(namespace)
        check(sum(sizes.values()) < 64 * 1024, f"containerd downloaded {sizes}")
        check_equal(here.containerd.run(image, "one", "sh", "-c", SCRIPT, namespace=namespace), OUTPUT,
                    "the output")
        check_equal(len(here.layer_mounts()), 3, "mounted layers")


@test("snapshotter.an-ordinary-image-is-unpacked-though-referrers-are-looked-for")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push(three_layers(), "plain")
        here.containerd.client("pull", image)
        check_equal(here.containerd.run(image, "one", "sh", "-c", SCRIPT), OUTPUT, "the output")
        check_equal(here.layer_mounts(), [], "mounted layers")


@test("snapshotter.a-registry-that-does-not-answer-is-waited-for-once")
def _(workspace):
    need_root()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        with node(workspace, registries=[f"localhost:{silent.getsockname()[1]}"]) as here:
            layers = [lambda layer, i=i: layer.file(f"file{i}", "x\n") for i in range(7)]
            image = here.push(busybox_image(*layers), "plain")
            start = time.monotonic()
            here.containerd.client("pull", image)
            took = time.monotonic() - start
            check(took < 40, f"the pull took {took:.0f} s")
            check("is unpacked" in here.daemon.log_text(), "it was not looked for")
            check_equal(here.containerd.run(image, "one", "cat", "/file6"), "x\n", "the output")


@test("snapshotter.layers-are-mounted-once-and-go-when-they-are-idle")
def _(workspace):
    need_root()
    with node(workspace) as here:
        first = here.push_converted(busybox_image(base, changes), "first")
        second = here.push_converted(busybox_image(base, lambda layer: layer.file("other", "x\n")),
                                     "second")
        for image in (first, second):
            here.containerd.client("pull", image)
        for name, image in (("a", first), ("b", first), ("c", second), ("d", second)):
            here.containerd.start_container(image, name, "sleep", "1000")
        # Two of the three layers are the same.
        check_equal(len(here.layer_mounts()), 4, "mounted layers")
        for name in ("a", "b", "c", "d"):
            here.containerd.remove_container(name)
        wait_until(lambda: not here.layer_mounts(), "idle layers are unmounted")
        check_equal(here.containerd.run(second, "again", "sh", "-c", "cat /other"), "x\n", "output")


@test("snapshotter.long-chains-mount")
def _(workspace):
    need_root()

    def numbered(number):
        def fill(layer):
            layer.file(f"file{number}", f"{number}\n")
            if number > 3:
                layer.whiteout(f"file{number - 3}")
        return fill

    with node(workspace) as here:
        image = here.push_converted(busybox_image(*(numbered(i) for i in range(126))), "long")
        here.containerd.client("pull", image)
        check_equal(here.containerd.run(image, "one", "sh", "-c", "cat /file*; ls -d /file*"),
                    "0\n123\n124\n125\n/file0\n/file123\n/file124\n/file125\n", "the output")
        here.containerd.ctr("snapshots", "--snapshotter=lamina", "prepare", "top",
                            next(key for key, (_, kind) in here.containerd.snapshots().items()
                                 if kind == "Committed" and key not in
                                 {parent for parent, _ in here.containerd.snapshots().values()}))
        mounts = here.containerd.ctr("snapshots", "--snapshotter=lamina", "mounts", "/mnt", "top").stdout
        check(len(mounts) < 1000, f"mount options: {mounts}")


@test("snapshotter.attributes-are-those-of-the-image")
def _(workspace):
    need_root()

    def implied(layer):
        layer.file("tmp/below", "x\n")  # says nothing of /tmp itself
        layer.file("owned/below", "x\n")

    def owned(layer):
        layer.directory("owned", mode=0o750, uid=7, gid=8)

    image = busybox_image(owned, implied)
    script = "stat -c '%a %u %g' / /tmp /owned /tmp/below"
    with node(workspace) as here:
        lazy, plain = here.push_converted(image, "lazy"), here.push(image, "plain")
        here.containerd.client("pull", lazy)
        expected = "755 0 0\n1777 0 0\n750 7 8\n644 0 0\n"
        check_equal(here.containerd.run(lazy, "one", "sh", "-c", script), expected, "lazy")
        here.containerd.client("pull", plain, namespace="other")
        check_equal(here.containerd.run(plain, "one", "sh", "-c", script, namespace="other"), expected,
                    "plain")


@test("snapshotter.attributes-are-those-of-the-image-on-unpacked-layers")
def _(workspace):
    need_root()

    def implied(layer):
        layer.file("tmp/below", "x\n")
        layer.file("owned/below", "x\n")

    def owned(layer):
        layer.directory("owned", mode=0o750, uid=7, gid=8)

    def explicit(layer):
        layer.file("x", "x\n")

    with node(workspace) as here:
        below = here.push(busybox_image(owned), "below")
        here.containerd.client("pull", below)
        attached = here.push(busybox_image(owned, implied), "attached")
        workspace.lamina("convert", f"docker://{attached}", "--as-referrer")
        here.containerd.client("pull", attached)
        check_equal(here.containerd.run(attached, "one", "stat", "-c", "%a %u %g", "/tmp", "/owned"),
                    "1777 0 0\n750 7 8\n", "attributes")
        other = here.push_converted(busybox_image(owned, lambda layer: layer.file("tmp/x", "x\n")),
                                    "other")
        refused = here.containerd.client("pull", other, status=1)
        check("says nothing of the attributes" in refused.stderr, refused.stderr)
        here.containerd.client("pull", other, namespace="other")
        check_equal(here.containerd.run(other, "one", "stat", "-c", "%a %u %g", "/tmp", "/owned",
                                        namespace="other"), "1777 0 0\n750 7 8\n", "attributes")
        kit = Image()
        with kit.layer() as layer:
            implied(layer)
        here.push_converted(kit, "kit")
        refused = here.containerd.client("prepare", below, "labelled", "containerd.io/snapshot/"
                                         f"lamina.layers={here.server.reference('kit')}", status=1)
        check("says nothing of the attributes" in refused.stderr, refused.stderr)
        # Nothing is implied by this one, so it is mounted on what was unpacked.
        lazy = here.push_converted(busybox_image(owned, explicit), "lazy")
        here.containerd.client("pull", lazy)
        check_equal(here.containerd.run(lazy, "one", "stat", "-c", "%a %u %g", "/tmp", "/owned"),
                    "1777 0 0\n750 7 8\n", "attributes")
        check(here.layer_mounts(), "no layer is mounted")


@test("snapshotter.name-spaces-share-converted-layers-and-nothing-else")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        for namespace in ("one", "two"):
            here.containerd.client("pull", image, namespace=namespace)
            check_equal(here.containerd.run(image, "c", "sh", "-c", SCRIPT, namespace=namespace),
                        OUTPUT, f"the output in {namespace}")
        check_equal(len(here.layer_mounts()), 3, "mounted layers")
        here.containerd.remove_image(image, namespace="one")
        check_equal(here.containerd.run(image, "c", "sh", "-c", SCRIPT, namespace="two"), OUTPUT,
                    "the output after the other name space has removed it")
        check_nothing_left(here, namespaces=("two",))


def claim_chain(here, image, other):
    """Has the configuration of a converted image claim the layers of another image."""
    base = f"http://{here.server.host}/v2"

    def send(method, url, data=None, media_type="application/octet-stream"):
        request = urllib.request.Request(url, data=data, method=method,
                                         headers={"Content-Type": media_type, "Accept": MANIFEST})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.headers, response.read()

    def documents(name):
        manifest = json.loads(send("GET", f"{base}/{name}/manifests/latest")[1])
        return manifest, json.loads(send("GET", f"{base}/{name}/blobs/{manifest['config']['digest']}")[1])

    (manifest, config), (_, claimed) = documents(image), documents(other)
    config["rootfs"]["diff_ids"] = claimed["rootfs"]["diff_ids"][:len(config["rootfs"]["diff_ids"])]
    text = json.dumps(config).encode()
    manifest["config"].update(size=len(text), digest="sha256:" + hashlib.sha256(text).hexdigest())
    place = urllib.parse.urljoin(
        base, send("POST", f"{base}/{image}/blobs/uploads/", data=b"")[0]["Location"])
    send("PUT", f"{place}{'&' if '?' in place else '?'}digest={manifest['config']['digest']}", data=text)
    send("PUT", f"{base}/{image}/manifests/latest", json.dumps(manifest).encode(), MANIFEST)


@test("snapshotter.a-chain-of-another-name-space-is-not-believed")
def _(workspace):
    need_root()

    def evil(layer):
        layer.directory("data")
        layer.file("data/hello", "evil\n")

    with node(workspace) as here:
        plain = here.push(three_layers(), "plain")
        lazy = here.push_converted(three_layers(), "lazy")
        wrong = here.push_converted(busybox_image(evil, evil), "wrong")
        claim_chain(here, "wrong", "plain")
        # Some before the others' names and some behind them, because containerd takes the first.
        for namespace in ("a-untrusted", "z-untrusted"):
            here.containerd.client("pull", wrong, namespace=namespace)
            check_equal(here.containerd.run(wrong, "w", "cat", "/data/hello", namespace=namespace),
                        "evil\n", "what the image has")
        for namespace, image, mounted in (("k-plain", plain, False), ("l-lazy", lazy, True),
                                          ("m-plain", plain, False), ("n-lazy", lazy, True)):
            here.containerd.client("pull", image, namespace=namespace)
            check_equal(here.containerd.run(image, "c", "sh", "-c", SCRIPT, namespace=namespace),
                        OUTPUT, f"the output in {namespace}")
            sizes = here.containerd.content_sizes(namespace)
            check((sum(sizes.values()) < 64 * 1024) == mounted, f"{namespace}: downloaded {sizes}")
        here.containerd.client("pull", wrong, namespace="again")
        check_equal(here.containerd.run(wrong, "w", "cat", "/data/hello", namespace="again"), "evil\n",
                    "what the image has")
        check_nothing_left(here, namespaces=("a-untrusted", "z-untrusted", "again", "k-plain", "l-lazy",
                                             "m-plain", "n-lazy"))


@test("snapshotter.wrong-layers-are-named")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        manifest = json.loads(workspace.lamina("inspect", f"docker://{image}", "--json").stdout)
        digest = manifest["layers"][1]["digest"]
        path = here.server.blob_path(digest)
        good = path.read_bytes()
        path.write_bytes(good[:-100] + bytes(100))  # its tables
        result = here.containerd.client("pull", image, status=1)
        check(digest in result.stderr, f"the error does not name {digest}: {result.stderr}")
        path.write_bytes(good)
        # containerd's next pull counts on layers that it sees, though its garbage collection may be
        # about to remove those of the pull that failed.
        wait_until(lambda: not here.containerd.snapshots(), "the good layer below is removed")
        here.containerd.client("pull", image)
        check_equal(here.containerd.run(image, "one", "sh", "-c", SCRIPT), OUTPUT, "the output")


@test("snapshotter.containers-go-on-when-daemons-are-restarted")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        here.containerd.client("pull", image)
        here.containerd.start_container(image, "c", "sleep", "1000")
        for what in ("worker", "containerd", "worker", "both"):
            if what in ("worker", "both"):
                here.daemon.wait_for_successor(here.daemon.kill_worker())
            if what in ("containerd", "both"):
                here.containerd.stop()
                here.containerd.start()
            check_equal(here.containerd.execute("c", "sh", "-c", SCRIPT), OUTPUT, f"after {what}")
            # containerd's connection comes back within its backoff of 3 s; calls fail meanwhile.
            wait_until(lambda: here.containerd.ctr("snapshots", "--snapshotter=lamina", "list",
                                                   status=None).returncode == 0,
                       "containerd finds the snapshotter again")
            check_equal(here.containerd.run(image, "n", "sh", "-c", SCRIPT), OUTPUT,
                        f"a new container after {what}")
        here.containerd.remove_container("c")
        check_nothing_left(here)


@test("snapshotter.cycles-leave-nothing")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        here.containerd.client("pull", image)
        for number in range(repetitions(10)):
            here.containerd.run(image, f"c{number}", "true")
        check_nothing_left(here)
    check_equal(workspace.mounts(), [], "what is still mounted")


@test("snapshotter.many-at-once")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        here.containerd.client("pull", image)
        failures = []

        def one(number):
            try:
                check_equal(here.containerd.run(image, f"c{number}", "sh", "-c", SCRIPT), OUTPUT,
                            "the output")
            except Exception as error:  # pylint: disable=broad-except
                failures.append(error)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_equal(failures, [], "failures")
        check_nothing_left(here)


@test("snapshotter.a-container-is-committed-as-one-more-layer")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        here.containerd.client("pull", image)
        here.containerd.start_container(image, "one", "sh", "-c",
                                        "echo new > /data/added; rm /data/hello; rm -r /data/opaque; "
                                        "i=0; while :; do i=$((i+1)); echo $i > /a; echo $i > /b; done")

        def commit(reference, status=0):
            return workspace.lamina("commit", "one", reference, "--namespace=test", "--json",
                                    f"--state={workspace.state}", status=status)

        wait_until(lambda: here.containerd.execute("one", "sh", "-c", "[ -e /b ] && echo yes; true"),
                   "the container writes")
        committed = here.server.reference("committed")
        result = json.loads(commit(committed).stdout)
        check_equal(result["layers_mounted"], 3, "layers of the other repository")
        check(0 < result["pause_ms"] < 5000, f"paused for {result['pause_ms']} ms")
        counter = here.containerd.execute("one", "cat", "/a")
        wait_until(lambda: here.containerd.execute("one", "cat", "/a") not in ("", counter),
                   "the container goes on")
        # The tag of its image may lead elsewhere meanwhile.
        here.push_converted(busybox_image(changes), "lazy")
        commit(here.server.reference("again"))
        here.containerd.ctr("tasks", "delete", "--force", "one")
        commit(here.server.reference("stopped"))
        here.containerd.remove_container("one")
        commit(here.server.reference("gone"), status=1)
        for repository in ("committed", "again", "stopped"):
            workspace.lamina("verify", here.server.reference(repository))
            name = here.name(repository)
            here.containerd.client("pull", name)
            output = here.containerd.run(name, "two", "sh", "-c", "ls /data; cat /data/added; cat /a /b")
            lines = output.splitlines()
            check_equal(lines[:3], ["added", "large", "new"], "the output")
            if len(lines) == 5:  # else a file was just being written
                check(0 <= int(lines[3]) - int(lines[4]) <= 1, f"a and b are {lines[3:]}")


@test("snapshotter.what-was-unpacked-is-not-committed")
def _(workspace):
    need_root()
    with node(workspace) as here:
        plain = here.push(three_layers(), "plain")
        here.containerd.ctr("images", "pull", "--plain-http", "--snapshotter=lamina", plain)
        here.containerd.start_container(plain, "one", "sleep", "1000")
        result = workspace.lamina("commit", "one", here.server.reference("x"), "--namespace=test",
                                  f"--state={workspace.state}", status=1)
        check("unpacked" in result.stderr, result.stderr)
        here.containerd.remove_container("one")


@test("snapshotter.a-label-puts-images-on-top")
def _(workspace):
    need_root()
    with node(workspace) as here:
        image = here.push_converted(three_layers(), "lazy")
        here.containerd.client("pull", image)
        for other in ("oci:/etc/hidden:x", "docker://other.example/kit"):
            refused = here.containerd.client("prepare", image, "wrong",
                                             f"containerd.io/snapshot/lamina.layers={other}", status=1)
            check("layer-images" in refused.stderr, refused.stderr)

        def toolkit(layer):
            layer.file("opt/kit/tool", b"tool\n")
            layer.file("data/hello", b"of the toolkit\n")

        kit = Image()
        with kit.layer() as layer:
            toolkit(layer)
        here.push_converted(kit, "kit")
        here.containerd.client("prepare", image, "labelled",
                               f"containerd.io/snapshot/lamina.layers={here.server.reference('kit')}")
        here.daemon.wait_for_successor(here.daemon.kill_worker())
        wait_until(lambda: here.containerd.ctr("snapshots", "--snapshotter=lamina", "list",
                                               status=None).returncode == 0, "containerd connects")
        directory = workspace.new_directory("mnt")
        mount = here.containerd.ctr("snapshots", "--snapshotter=lamina", "mounts", str(directory),
                                    "labelled").stdout
        subprocess.run(["sh", "-ec", mount], check=True)
        check_equal((directory / "opt/kit/tool").read_bytes(), b"tool\n", "the tool")
        check_equal((directory / "data/hello").read_bytes(), b"of the toolkit\n", "a file of both")
        check(not (directory / "data/gone").exists(), "a file that the image deletes")
        (directory / "written").write_bytes(b"x")
        subprocess.run(["umount", directory], check=True)
        here.containerd.ctr("snapshots", "--snapshotter=lamina", "remove", "labelled")
        here.containerd.client("prepare", image, "wrong", "containerd.io/snapshot/lamina.layers="
                               + here.server.reference("nothing"), status=1)
