# SPDX-License-Identifier: Apache-2.0
"""Tar: every form a header may have, odd names and ends, and archives that real programs write."""

import os
import pathlib
import subprocess
import sys
import tempfile

from harness import noise
from image_case import case
from tar_writer import BLOCK, base256, header


def data_of(size):
    return noise(size).ljust(-(-size // BLOCK) * BLOCK, b"\0")


@case("tar.pax-long-path")
def _(image):
    with image.layer() as layer:
        for length in (99, 100, 101, 154, 155, 156, 255):
            layer.file(f"{'d' * (length - 1)}/{'f' * length}", b"%d" % length)
        layer.file("/".join(["part"] * 400), b"many parts")


@case("tar.pax-length-that-counts-its-own-digits")
def _(image):
    # Records of 98 to 101 and 998 to 1001 bytes: where the length field grows by a digit.
    with image.layer() as layer:
        for length in list(range(80, 100)) + list(range(240, 256)):
            layer.file("n" * length, b"content", pax={"path": "n" * length})
        for length in range(980, 1000):
            layer.file(f"x{length}", pax={"SCHILY.xattr.user.x": b"v" * length})


@case("tar.pax-values-with-newlines-and-equal-signs")
def _(image):
    with image.layer() as layer:
        layer.file("short", b"content", pax={"path": "a=b\n17 path=c\n"})
        layer.symlink("link", "short", pax={"linkpath": "x\ny=z"})


@case("tar.pax-overrides-every-field")
def _(image):
    with image.layer() as layer:
        body = noise(700)
        layer.pax({"path": "real", "size": "700", "uid": "4000000000", "gid": "3000000",
                   "mtime": "1234567890.123456789", "uname": "nobody", "gname": "nogroup",
                   "atime": "1.5", "ctime": "2.5", "comment": "ignored", "VENDOR.key": "ignored"})
        layer.raw(header("wrong", b"0", size=0, uid=1, gid=2, mtime=3))
        layer.padded(body)


@case("tar.pax-last-of-equal-records-counts")
def _(image):
    with image.layer() as layer:
        layer.pax([("path", "first"), ("path", "second"), ("mtime", "1"), ("mtime", "2.5")])
        layer.raw(header("wrong", b"0"))


@case("tar.pax-global-header")
def _(image):
    # As git archive writes it, then one that sets fields for what follows until the next.
    with image.layer() as layer:
        layer.pax({"comment": "0123456789abcdef"}, typeflag=b"g")
        layer.file("a", b"a")
        layer.pax({"mtime": "1111111111.25"}, typeflag=b"g")
        layer.file("b", b"b")
        layer.file("c", b"c", mtime="1222222222.75")


@case("tar.pax-names-that-are-not-utf-8")
def _(image):
    with image.layer() as layer:
        layer.file("a", b"a", pax={"hdrcharset": "BINARY", "path": b"\xff\xfe" * 60})
        layer.file("b", b"b", pax={"path": b"\xc3\x28"})
        layer.symlink("c", "x", pax={"linkpath": b"\xe9\xe8"})
        layer.file("utf-8-\u00e9\u4e2d\U0001f600", b"d")


@case("tar.times")
def _(image):
    with image.layer() as layer:
        for number, time in enumerate(("0", "0.000000001", "1.999999999", "-1", "-1.5", "-0.000000001",
                                       "-2147483648", "2147483647.5", "2147483648", "4294967296.25",
                                       "15032385535", "1500000000.1234567891", "1500000000.5000")):
            layer.file(f"file{number}", mtime=time)
            layer.directory(f"directory{number}", mtime=time)
            layer.symlink(f"symlink{number}", "x", mtime=time)


@case("tar.gnu-long-name-and-link")
def _(image):
    with image.layer() as layer:
        long = "/".join(["g" * 120] * 6)
        layer.gnu_long(b"L", long)
        layer.raw(header(long[:100], b"0", size=5, magic=b"ustar  \0"))
        layer.padded(b"hello")
        layer.gnu_long(b"K", long)
        layer.raw(header("hard", b"1", linkname=long[:100], magic=b"ustar  \0"))
        layer.gnu_long(b"K", "t" * 3000)
        layer.gnu_long(b"L", "s" * 200)
        layer.raw(header("s" * 100, b"2", linkname="t" * 100, magic=b"ustar  \0"))
        layer.gnu_long(b"L", "dir" * 50 + "/")
        layer.raw(header(("dir" * 50)[:100], b"5", magic=b"ustar  \0"))


@case("tar.ustar-prefix")
def _(image):
    with image.layer() as layer:
        layer.raw(header("f" * 100, b"0", size=3, prefix="p" * 60 + "/" + "q" * 94))
        layer.padded(b"abc")
        layer.raw(header("short", b"0", prefix="d"))


@case("tar.version-7-headers")
def _(image):
    # No magic; a name that ends in "/" is a directory whatever the type says.
    with image.layer() as layer:
        layer.raw(header("d/", b"\0", mode=0o755, magic=b""))
        layer.raw(header("d/file", b"\0", size=4, magic=b""))
        layer.padded(b"data")
        layer.raw(header("d/link", b"1", linkname="d/file", magic=b""))
        layer.raw(header("d/symlink", b"2", linkname="file", magic=b""))


@case("tar.base-256-numbers")
def _(image):
    gnu = b"ustar  \0"
    with image.layer() as layer:
        layer.raw(header("size", b"0", magic=gnu, fields={"size": base256(700, 12)}))
        layer.raw(data_of(700))
        layer.raw(header("owner", b"0", magic=gnu, fields={"uid": base256(3_000_000_000, 8),
                                                            "gid": base256(2_097_152, 8)}))
        layer.raw(header("before-the-epoch", b"0", magic=gnu, fields={"mtime": base256(-1000, 12)}))
        layer.raw(header("after-2242", b"0", magic=gnu, fields={"mtime": base256(1 << 33, 12)}))


@case("tar.numbers-in-other-spellings")
def _(image):
    with image.layer() as layer:
        layer.raw(header("spaces", b"0", fields={"size": b"        12 \0", "mode": b"   644 \0",
                                                  "uid": b"    17 ", "mtime": b"12345670000 "}))
        layer.padded(b"0123456789")
        layer.raw(header("no-terminator", b"0", fields={"size": b"000000000003", "uid": b"00000021"}))
        layer.padded(b"abc")
        layer.raw(header("empty-fields", b"0", fields={"devmajor": b"", "devminor": b"", "gid": b""}))


@case("tar.signed-checksum")
def _(image):
    # Some old writers summed signed characters.
    with image.layer() as layer:
        layer.raw(header(b"caf\xe9\xff\xff", b"0", size=2, signed_checksum=True))
        layer.padded(b"ok")


@case("tar.types-that-count-as-files")
def _(image):
    with image.layer() as layer:
        for name, typeflag in (("zero", b"\0"), ("contiguous", b"7")):
            layer.raw(header(name, typeflag, size=3))
            layer.padded(b"abc")


@case("tar.spellings-of-names")
def _(image):
    with image.layer() as layer:
        layer.directory("./", mode=0o711, mtime="1300000000.5")
        layer.directory("./dot", mode=0o700)
        layer.file("./dot/file", b"1")
        layer.file("/absolute/file", b"2")
        layer.file("a//b///c", b"3")
        layer.file("x/./y/./z", b"4")
        layer.raw(header("no-slash", b"5", mode=0o701))
        layer.raw(header("slashes///", b"5", mode=0o702))


@case("tar.missing-parents")
def _(image):
    with image.layer() as layer:
        layer.file("a/b/c/file", b"content")
        layer.symlink("d/e/link", "x")
        layer.fifo("f/fifo")


@case("tar.parents-after-their-children")
def _(image):
    with image.layer() as layer:
        layer.file("a/b/file", b"content")
        layer.directory("a/b", mode=0o700, mtime="1300000000.25", xattrs={"user.late": b"1"})
        layer.directory("a", mode=0o711, uid=9)
        layer.directory("./", mode=0o755, gid=4)


@case("tar.same-path-twice")
def _(image):
    with image.layer() as layer:
        layer.file("file", noise(9000))
        layer.file("file", b"second", mode=0o600)
        layer.file("becomes-link", b"file")
        layer.symlink("becomes-link", "target")
        layer.symlink("becomes-file", "target")
        layer.file("becomes-file", b"file")
        layer.directory("d", mode=0o700, xattrs={"user.one": b"1"})
        layer.file("d/kept", b"kept")
        layer.directory("d", mode=0o755, mtime="1300000000.125", xattrs={"user.one": b"2"})
        layer.fifo("becomes-directory")
        layer.directory("becomes-directory")
        layer.directory("empty")
        layer.file("empty", b"now a file")


@case("tar.entries-below-a-symlink-of-the-same-layer")
def _(image):
    with image.layer() as layer:
        layer.directory("usr/lib")
        layer.symlink("lib", "usr/lib")
        layer.file("lib/file", b"through the link")


@case("tar.end-with-one-block-of-zeros")
def _(image):
    with image.layer(end_blocks=1) as layer:
        layer.file("file", b"content")


@case("tar.end-without-zeros")
def _(image):
    with image.layer(end_blocks=0) as layer:
        layer.file("file", noise(512))


@case("tar.end-padded-to-a-record")
def _(image):
    with image.layer(end_blocks=20) as layer:
        layer.file("file", b"content")


@case("tar.garbage-behind-the-end")
def _(image):
    with image.layer() as layer:
        layer.file("file", b"content")
        layer.end()
        layer.raw(noise(5000))


@case("tar.zeros-alone")
def _(image):
    with image.layer():
        pass


@case("tar.no-bytes-at-all")
def _(image):
    with image.layer(end_blocks=0):
        pass
    with image.layer(end_blocks=0, suffix=""):
        pass


@case("tar.sparse-pax-0.0")
def _(image):
    sparse(image, "0.0")


@case("tar.sparse-pax-0.1")
def _(image):
    sparse(image, "0.1")


@case("tar.sparse-pax-1.0")
def _(image):
    sparse(image, "1.0")


@case("tar.sparse-old-gnu")
def _(image):
    sparse(image, "old")


def sparse(image, version):
    with image.layer() as layer:
        def add(name, size, pieces):
            if version == "old":
                layer.old_gnu_sparse_file(name, size, pieces)
            else:
                layer.sparse_file(name, size, pieces, version=version)

        add("hole-at-start", 1 << 20, [((1 << 20) - 4096, noise(4096))])
        add("hole-at-end", 1 << 20, [(0, noise(4096))])
        add("hole-in-the-middle", 3 << 20, [(0, noise(8192)), (2 << 20, noise(1 << 20, 2))])
        add("all-hole", 5_000_000, [])
        # Lengths are whole tar blocks but for the last piece; offsets can be anything.
        add("odd-pieces", 1_000_003, [(3, noise(512)), (70_001, noise(1024)), (999_999, b"tail")])
        add("many-pieces", 64 * 8192, [(i * 8192, noise(4096, i)) for i in range(64)])
        add("no-hole", 10_000, [(0, noise(10_000))])
        layer.file("after", b"the next entry is found")


def directory_for_tools(path):
    root = pathlib.Path(path)
    (root / "d").mkdir()
    (root / "d" / "file").write_bytes(noise(100_000))
    (root / ("long" * 50)).mkdir()
    (root / ("long" * 50) / ("name" * 40)).write_bytes(b"long")
    (root / "link").symlink_to("d/file")
    (root / "t").write_bytes(b"t")
    os.link(root / "d" / "file", root / "hard")
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 20)
        file.seek(600_000)
        file.write(b"data")
    os.setxattr(root / "t", "user.x", b"value")
    os.utime(root / "t", ns=(1, 1_234_567_890_123_456_789))


def made_by(name, *command):
    @case(f"tar.made-by-{name}")
    def _(image):
        with tempfile.TemporaryDirectory() as directory:
            directory_for_tools(directory)
            archive = subprocess.run([*command, "."], cwd=directory, check=True,
                                     stdout=subprocess.PIPE).stdout
        image.add(archive)


made_by("gnu-tar", "tar", "--format=gnu", "--sparse", "-cf", "-")
made_by("gnu-tar-pax", "tar", "--format=posix", "--sparse", "--xattrs", "-cf", "-")
made_by("gnu-tar-oldgnu", "tar", "--format=oldgnu", "-cf", "-")
made_by("gnu-tar-ustar", "tar", "--format=ustar", "-cf", "-", "--exclude=./longlong*")
made_by("gnu-tar-v7", "tar", "--format=v7", "-cf", "-", "--exclude=./longlong*")
made_by("python", sys.executable, "-c",
        "import sys, tarfile; tarfile.open(fileobj=sys.stdout.buffer, mode='w|').add(sys.argv[1])")


@case("tar.records-of-64-kib")
def _(image):
    with image.layer() as layer:
        # A PAX header of many records and one long one, as attributes of big directories give.
        layer.pax([(f"VENDOR.{i}", "x" * 100) for i in range(500)] + [("path", "file")])
        layer.raw(header("wrong", b"0", size=2))
        layer.padded(b"ok")
