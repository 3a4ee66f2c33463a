# SPDX-License-Identifier: Apache-2.0
"""Hard links: link counts, one inode under several names, data through any name."""

from harness import noise
from image_case import case
from tar_writer import header


@case("hard-link.two-names")
def _(image):
    with image.layer() as layer:
        layer.file("first", b"content")
        layer.hardlink("second", "first")


@case("hard-link.across-directories")
def _(image):
    with image.layer() as layer:
        layer.directory("a")
        layer.file("a/file", noise(10_000))
        layer.hardlink("b/c/link", "a/file")
        layer.hardlink("link", "b/c/link")


@case("hard-link.name-that-sorts-before-its-target")
def _(image):
    with image.layer() as layer:
        layer.file("z", b"last")
        layer.hardlink("a", "z")


@case("hard-link.thousand-names")
def _(image):
    with image.layer() as layer:
        layer.file("target", b"many")
        for number in range(1, 1000):
            layer.hardlink(f"{number % 7}/{number}", "target")


@case("hard-link.to-every-type-but-directories", loop=True)
def _(image):
    with image.layer() as layer:
        layer.symlink("symlink", "nowhere")
        layer.char_device("char", 1, 3)
        layer.block_device("block", 7, 0)
        layer.fifo("fifo")
        layer.file("empty")
        for name in ("symlink", "char", "block", "fifo", "empty"):
            layer.hardlink(f"links/{name}", name)


@case("hard-link.names-in-other-spellings")
def _(image):
    with image.layer() as layer:
        layer.directory("./d")
        layer.file("./d/file", b"content")
        layer.hardlink("dot", "./d/file")
        layer.hardlink("/absolute", "/d/file")
        layer.hardlink("d//slashes", "d//./file")


@case("hard-link.long-target")
def _(image):
    name = "/".join(["d" * 90] * 5) + "/file"
    with image.layer() as layer:
        layer.file(name, b"far away")
        layer.hardlink("near", name)
        layer.hardlink(name + "-too", name)


@case("hard-link.keeps-content-of-a-name-that-is-replaced-later")
def _(image):
    with image.layer() as layer:
        layer.file("first", b"old")
        layer.hardlink("second", "first")
        layer.file("first", b"new content")


@case("hard-link.to-itself")
def _(image):
    with image.layer() as layer:
        layer.file("name", b"content")
        layer.hardlink("name", "name")


@case("hard-link.replaces-a-file")
def _(image):
    with image.layer() as layer:
        layer.file("first", b"first")
        layer.file("second", b"second")
        layer.hardlink("second", "first")


@case("hard-link.with-a-size-in-the-header")
def _(image):
    # Some writers repeat the size of the target though no data follows.
    with image.layer() as layer:
        layer.file("first", b"content")
        layer.raw(header("second", b"1", size=7, linkname="first"))
        layer.file("third", b"after")


@case("hard-link.group-loses-a-name-to-a-whiteout")
def _(image):
    with image.layer() as layer:
        layer.file("a", b"content")
        layer.hardlink("b", "a")
        layer.hardlink("c", "a")
    with image.layer() as layer:
        layer.whiteout("a")


@case("hard-link.group-loses-a-name-to-a-file-above")
def _(image):
    with image.layer() as layer:
        layer.file("a", b"content")
        layer.hardlink("b", "a")
    with image.layer() as layer:
        layer.file("b", b"other content")


@case("hard-link.groups-of-two-layers-stay-apart")
def _(image):
    for number in range(2):
        with image.layer() as layer:
            layer.file(f"{number}/a", b"the same in both layers")
            layer.hardlink(f"{number}/b", f"{number}/a")


@case("hard-link.with-xattrs-and-special-bits")
def _(image):
    with image.layer() as layer:
        layer.file("a", b"#!", mode=0o6755, uid=1000, gid=100, xattrs={"user.note": b"shared"})
        layer.hardlink("b", "a")
