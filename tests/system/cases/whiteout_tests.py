# SPDX-License-Identifier: Apache-2.0
"""Whiteouts and opaque directories (image-spec, layer.md) over two layers and more."""

import os

from image_case import case


def base(image):
    with image.layer() as layer:
        layer.directory("d", mode=0o750, uid=5, gid=6, mtime="1500000000.5")
        layer.file("d/one", b"1")
        layer.file("d/two", b"22")
        layer.directory("d/sub")
        layer.file("d/sub/three", b"333")
        layer.symlink("link", "d/one")
        layer.file("file", b"file")


@case("whiteout.file")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d", mode=0o711)
        layer.whiteout("d/one")
        layer.whiteout("link")


@case("whiteout.directory")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("d")


@case("whiteout.of-what-is-not-there")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("nothing")
        layer.whiteout("d/nothing")
        layer.whiteout("new/nothing")


@case("whiteout.below-what-replaced-the-directory", tar_status=(0, 2))
def _(image):
    # umoci writes such layers: the directory became a file or a link, and each of its files gets a
    # whiteout all the same. GNU tar cannot extract those; there is nothing for them to hide.
    with image.layer() as layer:
        for directory in ("becomes-file", "becomes-link", "stays"):
            layer.file(f"{directory}/x", b"x")
    with image.layer() as layer:
        layer.file("becomes-file", b"file")
        layer.whiteout("becomes-file/x")
        layer.symlink("becomes-link", "nowhere")
        layer.whiteout("becomes-link/x")


@case("whiteout.in-the-lowest-layer")
def _(image):
    with image.layer() as layer:
        layer.whiteout("nothing")
        layer.opaque("d")
        layer.file("d/file", b"content")


@case("whiteout.then-created-again")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("d")
        layer.whiteout("file")
    with image.layer() as layer:
        layer.directory("d", mode=0o700)
        layer.file("d/four", b"4444")
        layer.file("file", b"again")


@case("whiteout.deleted-and-created-five-times", loop=True)
def _(image):
    for number in range(5):
        with image.layer() as layer:
            layer.directory("d", mode=0o700 + number)
            layer.file(f"d/{number}", b"x" * number)
            layer.file("file", b"y" * number)
        with image.layer() as layer:
            layer.whiteout("d")
            layer.whiteout("file")
    with image.layer() as layer:
        layer.file("d/last", b"last")


@case("whiteout.directory-then-parent-without-an-entry")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("d")
    with image.layer() as layer:
        layer.file("d/sub/new", b"new")


@case("whiteout.directory-and-same-name-in-one-layer")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("d")
        layer.directory("d")
        layer.file("d/new", b"new")


@case("whiteout.directory-and-same-name-in-one-layer-in-reverse-order")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d")
        layer.file("d/new", b"new")
        layer.whiteout("d")


@case("whiteout.file-and-same-name-in-one-layer")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("file")
        layer.file("file", b"new")
        layer.file("link", b"new")
        layer.whiteout("link")


@case("whiteout.in-a-directory-without-an-entry")
def _(image):
    # The directory must keep what the layer below says of it.
    base(image)
    with image.layer() as layer:
        layer.whiteout("d/one")
        layer.whiteout("d/sub/three")


@case("whiteout.only-of-the-nearest-name")
def _(image):
    with image.layer() as layer:
        for name in ("a", "a.b", "ab", "A"):
            layer.file(f"d/{name}", name.encode())
    with image.layer() as layer:
        layer.whiteout("d/a")


@case("whiteout.of-names-that-look-like-whiteouts")
def _(image):
    # ".wh." alone names nothing; "x.wh.y" is an ordinary name.
    with image.layer() as layer:
        layer.file("x.wh.y", b"ordinary")
        layer.file("wh.z", b"ordinary")
    with image.layer() as layer:
        layer.whiteout("x.wh.y")


@case("whiteout.of-odd-names")
def _(image):
    names = [b"\xff\xfe", b"new\nline", b"n" * 251, b" ", b"-rf"]
    with image.layer() as layer:
        for name in names + [b"stays"]:
            layer.file(b"d/" + name, b"content")
    with image.layer() as layer:
        for name in names:
            layer.whiteout(b"d/" + name)


@case("whiteout.of-every-type")
def _(image):
    with image.layer() as layer:
        layer.symlink("symlink", "x")
        layer.char_device("char", 1, 3)
        layer.block_device("block", 7, 1)
        layer.fifo("fifo")
        layer.directory("empty")
        layer.file("stays")
    with image.layer() as layer:
        for name in ("symlink", "char", "block", "fifo", "empty"):
            layer.whiteout(name)


@case("whiteout.aufs-bookkeeping-is-not-content")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory(".wh..wh.plnk")
        layer.file(".wh..wh.plnk/1.2", b"x")
        layer.file(".wh..wh.aufs", b"")
        layer.file("new", b"new")


@case("whiteout.aufs-keeps-files-with-several-names-aside")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory(".wh..wh.plnk")
        layer.file(".wh..wh.plnk/1.2", b"x")
        layer.hardlink("one", ".wh..wh.plnk/1.2")
        layer.hardlink("two", ".wh..wh.plnk/1.2")


@case("whiteout.three-layers-each-removes-of-the-other")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d/sub/deep")
        layer.file("d/sub/deep/file", b"deep")
        layer.whiteout("d/sub/three")
    with image.layer() as layer:
        layer.whiteout("d/sub/deep/file")
        layer.file("d/sub/three", b"back")
    with image.layer() as layer:
        layer.whiteout("d/sub/deep")


@case("opaque.empties-a-directory")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d", mode=0o700)
        layer.opaque("d")


@case("opaque.keeps-what-its-own-layer-has")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d")
        layer.opaque("d")
        layer.file("d/new", b"new")
        layer.file("d/one", b"one again")


@case("opaque.marker-behind-the-content")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.file("d/new", b"new")
        layer.directory("d/sub")
        layer.file("d/sub/new", b"new")
        layer.opaque("d")
        layer.directory("d")


@case("opaque.root")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.opaque("")
        layer.file("alone", b"alone")


@case("opaque.nested")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d")
        layer.directory("d/sub")
        layer.opaque("d/sub")
        layer.file("d/sub/a", b"a")
    with image.layer() as layer:
        layer.opaque("d")
        layer.directory("d")
        layer.file("d/sub/b", b"b")


@case("opaque.then-more-above")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.opaque("d")
        layer.directory("d")
        layer.file("d/a", b"a")
    with image.layer() as layer:
        layer.file("d/b", b"b")
    with image.layer() as layer:
        layer.opaque("d/sub")
        layer.file("d/sub/c", b"c")


@case("opaque.where-the-layer-below-has-a-file")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("file")
        layer.opaque("file")
        layer.file("file/in", b"in")


@case("replace.file-by-directory-and-reverse")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("file")
        layer.file("file/in", b"in")
        layer.file("d", b"now a file")
    with image.layer() as layer:
        layer.file("file", b"a file again")
        layer.directory("d")
        layer.file("d/new", b"new")


@case("replace.symlink-by-directory-and-reverse")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("link")
        layer.file("link/in", b"in")
        layer.symlink("d", "elsewhere")
    with image.layer() as layer:
        layer.symlink("link", "file")
        layer.directory("d")


@case("replace.file-by-every-other-type")
def _(image):
    with image.layer() as layer:
        for name in "abcdef":
            layer.file(name, b"content")
    with image.layer() as layer:
        layer.symlink("a", "x")
        layer.char_device("b", 1, 3)
        layer.block_device("c", 7, 1)
        layer.fifo("d")
        layer.directory("e")
        layer.file("f")


@case("replace.attributes-of-a-directory")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d", mode=0o1777, uid=70000, mtime="1700000000.000000001",
                        xattrs={"user.above": b"1"})
    with image.layer() as layer:
        layer.directory("./", mode=0o700, uid=3, xattrs={"user.root": b"1"})


@case("replace.directory-without-an-entry-keeps-its-attributes", loop=True)
def _(image):
    # As when a layer has tmp/file alone: /tmp must stay 1777.
    with image.layer() as layer:
        layer.directory("./", mode=0o711, mtime="1400000000.5")
        layer.directory("tmp", mode=0o1777, uid=1, gid=2, xattrs={"user.kept": b"1"})
        layer.directory("tmp/deep", mode=0o2750)
    with image.layer() as layer:
        layer.file("tmp/deep/file", b"content")
    with image.layer() as layer:
        layer.file("tmp/other", b"content")


def remove_whiteout_device(tree):
    # GNU tar makes the device. Runtimes that unpack onto overlayfs see a whiteout, and so do we.
    directory = os.path.join(tree, "d")
    mtime = os.lstat(directory).st_mtime_ns
    os.unlink(os.path.join(directory, "one"))
    os.utime(directory, ns=(mtime, mtime))


@case("whiteout.in-the-form-of-overlayfs", adjust=remove_whiteout_device)
def _(image):
    base(image)
    with image.layer() as layer:
        layer.directory("d")
        layer.char_device("d/one", 0, 0)


@case("whiteout.empty-layers-between")
def _(image):
    base(image)
    with image.layer():
        pass
    with image.layer() as layer:
        layer.whiteout("file")
    with image.layer():
        pass


@case("whiteout.of-a-directory-that-is-made-anew-without-an-entry")
def _(image):
    base(image)
    with image.layer() as layer:
        layer.whiteout("d")
        layer.file("d/new", b"new")
