# SPDX-License-Identifier: Apache-2.0
"""Where images come from and go to: archives, directories, tags, platforms, existing layouts."""

import json
import os
import signal
import socket
import subprocess

import image_case
import reference
from harness import (TRANSPORTS, check, check_equal, compare, need_root, noise, program, small_image,
                     test, wait_until)
from oci_layout import INDEX, Image, Layout

TYPICAL = "whiteout.deleted-and-created-five-times"


def skopeo(*arguments):
    subprocess.run(["skopeo", "--insecure-policy", *map(str, arguments)], check=True,
                   stdout=subprocess.DEVNULL)


def check_shows(workspace, image, expected):
    for transport in TRANSPORTS:
        with workspace.mounted(image, f"--transport={transport}") as mounted:
            compare(expected, mounted)


def typical_image(workspace):
    source, expected = workspace.path("typical"), workspace.path("expected")
    image_case.write(TYPICAL, source)
    reference.extract(source, expected)
    return source, expected


@test("source.docker-archive")
def _(workspace):
    need_root()
    source, expected = typical_image(workspace)
    archive = workspace.path("archive.tar")
    skopeo("copy", f"oci:{source}:latest", f"docker-archive:{archive}:example.test/app:1")
    check_shows(workspace, workspace.convert(f"docker-archive:{archive}"), expected)
    by_name = workspace.convert(f"docker-archive:{archive}:example.test/app:1", "by-name")
    check_shows(workspace, by_name, expected)
    result = workspace.lamina("convert", f"docker-archive:{archive}:example.test/app:2",
                              f"oci:{workspace.path('none')}", status=1)
    check("example.test/app:2" in result.stderr, f"the error does not name it: {result.stderr}")
    check(not workspace.path("none").exists(), "a destination was made all the same")


@test("source.oci-archive")
def _(workspace):
    need_root()
    source, expected = typical_image(workspace)
    archive = workspace.path("archive.tar")
    skopeo("copy", f"oci:{source}:latest", f"oci-archive:{archive}:app:1")
    check_shows(workspace, workspace.convert(f"oci-archive:{archive}"), expected)


@test("source.image-made-by-umoci")
def _(workspace):
    need_root()
    layout = workspace.path("umoci")
    rootfs = workspace.path("bundle") / "rootfs"
    umoci = ["umoci", "--log=error"]
    subprocess.run([*umoci, "init", f"--layout={layout}"], check=True)
    subprocess.run([*umoci, "new", f"--image={layout}:app"], check=True)
    subprocess.run([*umoci, "unpack", f"--image={layout}:app", workspace.path("bundle")], check=True)
    for step in range(3):
        (rootfs / f"d{step}").mkdir()
        (rootfs / f"d{step}" / "file").write_bytes(noise(5000, step))
        os.link(rootfs / f"d{step}" / "file", rootfs / f"hard{step}")
        (rootfs / f"link{step}").symlink_to(f"d{step}/file")
        if step:
            (rootfs / f"d{step - 1}" / "file").unlink()
        subprocess.run([*umoci, "repack", "--refresh-bundle", f"--image={layout}:app",
                        workspace.path("bundle")], check=True)
    expected = workspace.path("expected")
    reference.extract(layout, expected, "app")
    check_shows(workspace, workspace.convert(f"oci:{layout}:app"), expected)


@test("source.referee-agrees-with-umoci")
def _(workspace):
    # The referee itself is checked by a second unpacker. umoci leaves the mtimes of directories that
    # it changed, and those without an entry, as they happen to come out.
    need_root("umoci unpacks owners and devices only as root")
    for name in (TYPICAL, "opaque.nested", "replace.file-by-every-other-type",
                 "hard-link.to-every-type-but-directories", "attribute.owners-beyond-16-and-21-bits"):
        source = workspace.path(name)
        image_case.write(name, source)
        reference.extract(source, workspace.path(name + ".referee"))
        bundle = workspace.path(name + ".umoci")
        subprocess.run(["umoci", "--log=error", "unpack", f"--image={source}:latest", bundle],
                       check=True)
        compare(workspace.path(name + ".referee"), bundle / "rootfs", "--ignore=directory-mtime")


@test("source.directory")
def _(workspace):
    need_root()
    root = workspace.path("root")
    image_case.write("attribute.xattrs-of-every-name-space", workspace.path("layout"))
    reference.extract(workspace.path("layout"), root)
    (root / "sub").mkdir(mode=0o711)
    (root / "sub" / "file").write_bytes(noise(300_000))
    os.link(root / "sub" / "file", root / "linked")
    with open(root / "sparse", "wb") as file:
        file.truncate(5 << 30)
        file.seek(3 << 30)
        file.write(b"data in the middle")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "socket"))
    os.utime(root / "sub", ns=(1, 1_234_567_890_123_456_789))
    check_shows(workspace, workspace.convert(f"dir:{root}"), root)


@test("source.directory-stays-in-its-file-system-and-follows-no-links")
def _(workspace):
    need_root()
    root = workspace.path("root")
    (root / "mounted").mkdir(parents=True)
    (root / "link").symlink_to("/etc")
    subprocess.run(["mount", "-t", "tmpfs", "none", root / "mounted"], check=True)
    (root / "mounted" / "foreign").write_bytes(b"not part of the image")
    image = workspace.convert(f"dir:{root}")
    subprocess.run(["umount", root / "mounted"], check=True)
    with workspace.mounted(image) as mounted:
        check_equal(os.listdir(mounted / "mounted"), [], "the directory that had a mount on it")
        check_equal(os.readlink(mounted / "link"), "/etc", "the link")


@test("source.directory-with-names-like-whiteouts")
def _(workspace):
    # They mean something in a layer's archive, not on a disk.
    need_root()
    root = workspace.path("root")
    root.mkdir()
    (root / ".wh.name").write_bytes(b"ordinary")
    (root / "name").write_bytes(b"ordinary too")
    check_shows(workspace, workspace.convert(f"dir:{root}"), root)


@test("source.tags-choose-the-image")
def _(workspace):
    need_root()
    layout = workspace.path("layout")
    for tag in ("one", "two", "a.b-c_d"):
        small_image({"name": tag.encode()}).write(layout, tag)
    for tag in ("one", "two", "a.b-c_d"):
        reference_ = f"oci:{workspace.path('out')}:{tag}"
        workspace.lamina("convert", f"oci:{layout}:{tag}", reference_)
        with workspace.mounted(reference_) as mounted:
            check_equal((mounted / "name").read_bytes(), tag.encode(), "content")
    for reference_ in (f"oci:{layout}", f"oci:{layout}:three"):
        result = workspace.lamina("convert", reference_, f"oci:{workspace.path('none')}", status=1)
        check_equal(result.stderr.count("\n"), 1, "lines of the error")
        check(result.stderr.startswith("lamina: "), result.stderr)
    tags = [m["annotations"]["org.opencontainers.image.ref.name"]
            for m in Layout(workspace.path("out")).index()["manifests"]]
    check_equal(sorted(tags), ["a.b-c_d", "one", "two"], "tags of the destination")


def image_for(architecture, content):
    image = small_image({"architecture": content})
    image.platform = {"architecture": architecture, "os": "linux"}
    return image


def nest_index(layout):
    """Puts all manifests of a layout into an index of their own, as registries give it."""
    index = layout.index()
    nested = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [
        {key: value for key, value in m.items() if key != "annotations"} for m in index["manifests"]]}
    descriptor = layout.put_json(nested, INDEX)
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": "multi"}
    layout.write_index({"schemaVersion": 2, "manifests": [descriptor]})


@test("source.platform-chooses-the-image")
def _(workspace):
    need_root()
    layout = workspace.path("layout")
    for architecture in ("amd64", "arm64", "riscv64"):
        image_for(architecture, architecture.encode()).write(layout, None)
    nest_index(Layout(layout))
    for architecture in ("amd64", "arm64"):
        out = f"oci:{workspace.path(architecture)}:latest"
        workspace.lamina("convert", f"oci:{layout}:multi", out, f"--platform=linux/{architecture}")
        source_config = Layout(workspace.path(architecture))
        config = source_config.get_json(source_config.manifest()["config"]["digest"])
        check_equal(config["architecture"], architecture, "architecture of the result")
    result = workspace.lamina("convert", f"oci:{layout}:multi", f"oci:{workspace.path('none')}",
                              "--platform=linux/s390x", status=1)
    check("linux/s390x" in result.stderr, f"the error does not name the platform: {result.stderr}")


@test("convert.result-does-not-depend-on-jobs-or-place")
def _(workspace):
    image = Image()
    for seed in range(3):
        with image.layer() as layer:
            for number in range(200):
                layer.file(f"{seed}/{number}", noise(number * 37, number) + b"text" * number)
    image.write(workspace.path("source"))
    digests = set()
    for number, jobs in enumerate((1, 2, 7, 0)):
        result = workspace.lamina("convert", f"oci:{workspace.path('source')}",
                                  f"oci:{workspace.path(f'out{number}')}:t", f"--jobs={jobs}",
                                  "--json")
        digests.add(json.loads(result.stdout)["manifest_digest"])
    check_equal(len(digests), 1, "number of different results")


@test("convert.keeps-the-configuration")
def _(workspace):
    image = small_image(config={"Env": ["A=b"], "Labels": {"x": "y"}, "ExposedPorts": {"80/tcp": {}}})
    image.write(workspace.path("source"))
    workspace.convert(f"oci:{workspace.path('source')}")
    before, after = Layout(workspace.path("source")), Layout(workspace.path("converted"))
    config_before = before.get_json(before.manifest()["config"]["digest"])
    config_after = after.get_json(after.manifest()["config"]["digest"])
    check_equal(config_after["config"], config_before["config"], "configuration")
    check_equal(config_after["rootfs"], config_before["rootfs"], "diff_ids")


@test("convert.result-is-an-ordinary-oci-image")
def _(workspace):
    # Tools that do not know the layers' type can still copy the image.
    image = workspace.converted(small_image())
    copy = workspace.path("copy")
    skopeo("copy", "--preserve-digests", image, f"oci:{copy}:latest")
    workspace.lamina("verify", f"oci:{copy}:latest")


@test("convert.shares-layers-between-images")
def _(workspace):
    base, derived = small_image({"base": noise(50_000)}), Image()
    derived.layers += base.layers
    with derived.layer() as layer:
        layer.file("more", b"more")
    base.write(workspace.path("source"), "base")
    derived.write(workspace.path("source"), "derived")
    for tag in ("base", "derived"):
        workspace.lamina("convert", f"oci:{workspace.path('source')}:{tag}",
                         f"oci:{workspace.path('out')}:{tag}")
    out = Layout(workspace.path("out"))
    check_equal(out.manifest("derived")["layers"][0], out.manifest("base")["layers"][0],
                "the common layer")


@test("convert.replaces-a-tag-and-keeps-the-others")
def _(workspace):
    need_root()
    out = workspace.path("out")
    for tag, content in (("a", b"first"), ("b", b"other"), ("a", b"second")):
        source = workspace.new_directory("source")
        small_image({"file": content}).write(source)
        workspace.lamina("convert", f"oci:{source}", f"oci:{out}:{tag}")
    for tag, content in (("a", b"second"), ("b", b"other")):
        with workspace.mounted(f"oci:{out}:{tag}") as mounted:
            check_equal((mounted / "file").read_bytes(), content, f"content of {tag}")


@test("convert.an-image-that-is-not-converted-is-not-mounted")
def _(workspace):
    need_root()
    small_image().write(workspace.path("source"))
    result = workspace.lamina("mount", f"oci:{workspace.path('source')}",
                              workspace.new_directory("mnt"), f"--state={workspace.state}", status=1)
    check("lamina convert" in result.stderr, f"the error names no remedy: {result.stderr}")


@test("usage.errors-exit-with-2")
def _(workspace):
    for arguments in ((), ("frobnicate",), ("convert",), ("convert", "oci:x"), ("mount", "oci:x"),
                      ("mount", "--transport=pigeon", "oci:x", "y"), ("verify",),
                      ("convert", "oci:x", "oci:y", "--level=many"), ("stats",),
                      ("convert", "oci:x", "oci:y", "--platform=linux"), ("convert", "x", "oci:y"),
                      ("convert", "oci:x", "dir:y"), ("inspect", "docker://x"), ("verify", "x"),
                      ("run", "x"), ("mount", "oci:x:", "/")):
        workspace.lamina(*arguments, status=2)
    result = workspace.lamina("verify", "--state=", "oci:x", "oci:y", status=2)
    check("--state=: nothing after" in result.stderr, f"the error is {result.stderr!r}")
    result = workspace.lamina("frobnicate", status=2)
    check("no command 'frobnicate'" in result.stderr, f"the error is {result.stderr!r}")
    workspace.lamina("cache", "gc", "--to=much", f"--state={workspace.state}", status=2)
    for arguments in (("--help",), ("mount", "--help"), ("--version",)):
        workspace.lamina(*arguments)


@test("usage.output-that-cannot-be-written-is-a-failure")
def _(workspace):
    image = workspace.converted(small_image())
    for arguments in (("inspect", image), ("inspect", "--json", image), ("verify", image),
                      ("--version",), ("--help",), ("convert", f"dir:{workspace.new_directory()}",
                                                    f"oci:{workspace.path('other')}")):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([program("LAMINA"), *arguments], check=False, stdout=full,
                                    stderr=subprocess.PIPE, timeout=60)
        check_equal(result.returncode, 1, f"exit code of {arguments}")
        check(b"write standard output: " in result.stderr, f"the error is {result.stderr!r}")


@test("usage.errors-that-cannot-be-written-are-still-errors")
def _(workspace):
    for redirection in ("2>/dev/full", "2>&-"):
        result = subprocess.run(f"{program('LAMINA')} inspect oci:{workspace.path('no')} {redirection}",
                                shell=True, check=False, timeout=60)
        check_equal(result.returncode, 1, "exit code")


@test("convert.signals-leave-nothing")
def _(workspace):
    source = workspace.new_directory("root")
    with open(source / "large", "wb") as file:
        for _ in range(64):
            file.write(os.urandom(4 << 20))
    parent = workspace.new_directory("out")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([program("LAMINA"), "convert", f"dir:{source}",
                                    f"oci:{parent}/image", "--level=19", "--jobs=1"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_until(lambda: os.listdir(parent), "it stages")
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        check_equal(process.returncode, 128 + number, f"exit code ({error!r})")
        check(error.startswith(b"lamina: convert "), f"the error is {error!r}")
        check_equal(os.listdir(parent), [], "what is left")


@test("convert.all-platforms-keep-their-order-and-none-is-lost")
def _(workspace):
    layout = workspace.path("layout")
    platforms = [{"architecture": "amd64", "os": "linux"},
                 {"architecture": "amd64", "os": "linux", "variant": "v3"},
                 {"architecture": "arm", "os": "linux", "variant": "v6"},
                 {"architecture": "arm", "os": "linux", "variant": "v7"}]
    for architecture in ("amd64", "arm"):
        image_for(architecture, architecture.encode()).write(layout, None)
    place = Layout(layout)
    manifests = {m["platform"]["architecture"]: m for m in place.index()["manifests"]}
    # Clients take the first that fits; two platforms may have one manifest.
    place.write_index({"schemaVersion": 2, "manifests": [
        dict(manifests[platform["architecture"]], platform=platform) for platform in platforms]})
    nest_index(place)
    out = workspace.path("out")
    workspace.lamina("convert", f"oci:{layout}:multi", f"oci:{out}:multi", "--platform=all")
    result = Layout(out)
    index = result.get_json(result.index()["manifests"][0]["digest"])
    check_equal([m["platform"] for m in index["manifests"]], platforms, "platforms of the result")


@test("verify.json-tells-of-a-damaged-manifest")
def _(workspace):
    image = workspace.converted(small_image({"file": b"content"}))
    layout = Layout(workspace.path("converted"))
    digest = layout.index()["manifests"][0]["digest"]
    layout.replace_blob(digest, layout.get(digest).replace(b"layers", b"Layers"))
    result = workspace.lamina("verify", "--json", image, status=1)
    report = json.loads(result.stdout)
    check(not report["intact"] and digest in report["error"], f"the report is {report}")
    missing = workspace.lamina("verify", "--json", f"oci:{workspace.path('nowhere')}", status=1)
    check_equal(missing.stdout, "", "standard output for an image that is not there")


@test("verify.an-empty-tmpdir-is-none")
def _(workspace):
    image = workspace.converted(small_image({"file": b"content"}))
    workspace.lamina("verify", image, env=dict(os.environ, TMPDIR=""))


@test("reference.a-working-directory-with-a-colon-is-refused")
def _(workspace):
    image = workspace.converted(small_image({"file": b"content"}))
    place = workspace.path("a:b")
    place.mkdir()
    result = workspace.lamina("mount", "oci:converted:latest", workspace.new_directory(), cwd=place,
                              status=1)
    check("has a colon" in result.stderr, f"the error is {result.stderr!r}")
    workspace.lamina("verify", image, cwd=place)
