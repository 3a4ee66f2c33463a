# SPDX-License-Identifier: Apache-2.0
"""Layers and archives that are broken, lie, or want out."""

import io
import os
import random
import subprocess
import tarfile
import zlib

from harness import (TRANSPORTS, check, check_equal, need_root, noise, repetitions, small_image,
                     test)
from oci_layout import Image, Layout, compress_gzip, compress_zstd
from refusal import check_contained, check_conversion_refused, check_refused
from tar_writer import BLOCK, TarWriter, base256, header

GIB = 1 << 30


def archive_of(build):
    out = io.BytesIO()
    writer = TarWriter(out)
    build(writer)
    if not writer.ended:
        writer.end()
    return out.getvalue()


def refused(name, pattern, compress=None, suffix=""):
    """Registers a function that fills a layer's archive; converting it must fail."""

    def register(build):
        @test(f"hostile.{name}")
        def _(workspace):
            image = Image()
            image.add(archive_of(build), suffix, compress)
            image.write(workspace.path("source"))
            check_conversion_refused(workspace, f"oci:{workspace.path('source')}", pattern)

        return build

    return register


def fill(layer):
    layer.file("text", b"some text\n" * 10_000)
    layer.file("noise", noise(100_000))


# Compressed streams that are broken. The digests fit: only the stream itself is wrong.

def flip(data, position):
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1:]


STREAMS = {
    "gzip.truncated": ("+gzip", lambda data: compress_gzip(data)[:-2000], "truncated|end"),
    "gzip.truncated-in-its-trailer": ("+gzip", lambda data: compress_gzip(data)[:-4],
                                      "truncated|end"),
    "gzip.header-alone": ("+gzip", lambda data: compress_gzip(data)[:10], "truncated|end"),
    "gzip.wrong-checksum": ("+gzip", lambda data: flip(compress_gzip(data), -6), "gzip|checksum|crc"),
    "gzip.wrong-length": ("+gzip", lambda data: flip(compress_gzip(data), -2), "gzip|length|checksum"),
    "gzip.garbage-in-the-middle": ("+gzip", lambda data: flip(compress_gzip(data), 60_000),
                                   "gzip|checksum|tar|inval"),
    "gzip.reserved-flags": ("+gzip", lambda data: flip(compress_gzip(data), 3)[:3] + b"\xe0"
                            + compress_gzip(data)[4:], "gzip|flag|header|tar|inval"),
    "zstd.truncated": ("+zstd", lambda data: compress_zstd(data)[:-2000], "truncated|end"),
    "zstd.wrong-checksum": ("+zstd", lambda data: flip(compress_zstd(data), -1), "zstd|checksum"),
    "zstd.garbage-in-the-middle": ("+zstd", lambda data: flip(compress_zstd(data), 60_000),
                                   "zstd|checksum|corrupt"),
    "zstd.window-of-2-gib": ("+zstd", lambda data: compress_zstd(data, "--ultra", "--long=31",
                                                                 "--no-content-size"),
                             "zstd|window|memory"),
    "zstd.other-bytes-behind-the-frame": ("+zstd", lambda data: compress_zstd(data) + b"garbage",
                                          "zstd|magic|frame|unknown"),
}

for stream_name, (stream_suffix, stream_compress, stream_pattern) in STREAMS.items():
    refused(f"layer.{stream_name}", f"(?i){stream_pattern}", stream_compress, stream_suffix)(fill)


@test("hostile.layer.other-bytes-than-the-diff-id-says")
def _(workspace):
    image = small_image()
    media_type, _, diff_id = image.layers[0]
    other = archive_of(lambda layer: layer.file("hello", b"something else"))
    image.layers[0] = (media_type, compress_gzip(other), diff_id)
    image.write(workspace.path("source"))
    check_conversion_refused(workspace, f"oci:{workspace.path('source')}", "diff_id|digest")


# Tar archives that are broken.

@refused("tar.not-an-archive", "tar|header|checksum")
def _(layer):
    layer.raw(noise(10_240))
    layer.ended = True


@refused("tar.truncated-in-a-file", "truncated|end")
def _(layer):
    layer.raw(header("file", b"0", size=100_000))
    layer.raw(bytes(50_000))
    layer.ended = True


@refused("tar.truncated-in-a-header", "truncated|end")
def _(layer):
    layer.file("file", b"content")
    layer.raw(header("second")[:100])
    layer.ended = True


@refused("tar.wrong-header-checksum", "checksum")
def _(layer):
    layer.file("file", b"content")
    layer.raw(header("second", fields={"chksum": b"012345\0 "}))


@refused("tar.size-not-a-number", "size|number|header")
def _(layer):
    layer.raw(header("file", fields={"size": b"12x45678901"}))


@refused("tar.size-negative", "size")
def _(layer):
    layer.raw(header("file", magic=b"ustar  \0", fields={"size": base256(-512, 12)}))


@refused("tar.size-beyond-63-bits", "size|large|long|end")
def _(layer):
    layer.raw(header("file", magic=b"ustar  \0", fields={"size": b"\x80" + b"\xff" * 11}))


@refused("tar.size-of-8-eib-without-data", "9223372036854775807 bytes")
def _(layer):
    layer.pax({"size": str((1 << 63) - 1)})
    layer.raw(header("file"))


@refused("tar.sparse-files-with-large-indexes", 'tar entry "s2".*chunk indexes')
def _(layer):
    for number in range(20):
        layer.sparse_file(f"s{number}", 8 << 40, [((4 << 40) + 4096 * number, b"hello")])


@refused("tar.entry-type-unknown", "type")
def _(layer):
    layer.raw(header("vendor", b"Q", size=3))
    layer.padded(b"abc")


@refused("tar.volume-that-continues-another", "type|volume")
def _(layer):
    layer.raw(header("file", b"M", size=3, magic=b"ustar  \0"))
    layer.padded(b"abc")


PAX_BODIES = {
    "length-zero": b"0 path=x\n",
    "length-too-long": b"999999 path=x\n",
    "length-too-short": b"5 path=x\n",
    "length-of-twenty-digits": b"99999999999999999999 path=x\n",
    "length-negative": b"-9 path=x\n",
    "no-length": b"path=x\n",
    "no-equal-sign": b"9 pathxx\n",
    "no-newline": b"10 path=xxx",
}

for pax_name, pax_body in PAX_BODIES.items():
    def write_pax(layer, body=pax_body):
        layer.raw(header("pax", b"x", size=len(body)))
        layer.padded(body)
        layer.file("file", b"x")

    refused(f"tar.pax-{pax_name}", "extended header")(write_pax)


@refused("tar.pax-size-not-a-number", "size")
def _(layer):
    layer.file("file", b"content", pax={"size": "many"})


@refused("tar.pax-mtime-not-a-number", "mtime")
def _(layer):
    layer.file("file", b"content", pax={"mtime": "yesterday"})


@refused("tar.pax-uid-beyond-32-bits", "owner")
def _(layer):
    layer.file("file", b"content", pax={"uid": str(1 << 40)})


@refused("tar.pax-header-of-4-gib", "(?i)pax|large|long")
def _(layer):
    layer.raw(header("pax", b"x", size=4 * GIB - 1))
    layer.raw(bytes(BLOCK * 2000))


@refused("tar.gnu-long-name-of-4-gib", "(?i)long|name|large")
def _(layer):
    layer.raw(header("././@LongLink", b"L", size=4 * GIB - 1, magic=b"ustar  \0"))
    layer.raw(b"n" * BLOCK * 2000)


@refused("tar.pax-header-without-an-entry", "(?i)end|pax|header|truncated")
def _(layer):
    layer.pax({"path": "x"})
    layer.ended = True


# Names and links.

@refused("tar.name-of-256-bytes", "name|long")
def _(layer):
    layer.file("n" * 256, b"content")


@refused("tar.symlink-target-of-a-page-and-more", "target|link|long")
def _(layer):
    layer.symlink("link", "t" * 70_000)


@refused("tar.symlink-without-a-target", "target|link|empty")
def _(layer):
    layer.symlink("link", "")


@refused("tar.hard-link-to-nothing", "missing")
def _(layer):
    layer.hardlink("link", "missing")


@refused("tar.hard-link-to-a-file-that-comes-later", "later")
def _(layer):
    layer.hardlink("link", "later")
    layer.file("later", b"content")


@refused("tar.hard-link-to-a-directory", "director")
def _(layer):
    layer.directory("d")
    layer.hardlink("link", "d")


@refused("tar.hard-link-to-a-file-outside", "passwd")
def _(layer):
    layer.hardlink("link", "../../../../../../../../etc/passwd")


@refused("tar.hard-link-through-a-symlink-to-outside", "passwd|hosts")
def _(layer):
    layer.symlink("out", "/etc")
    layer.hardlink("link", "out/passwd")


@refused("tar.name-with-a-nul", "(?i)nul|name|path")
def _(layer):
    layer.file("x", b"content", pax={"path": b"a\0b"})


@refused("tar.file-below-a-file", "director|parent|below")
def _(layer):
    layer.file("file", b"content")
    layer.file("file/below", b"content")


# Sparse maps.

def sparse_map(records, size=1024):
    def build(layer):
        layer.pax(records)
        layer.raw(header("GNUSparseFile.0/x", size=size))
        layer.raw(bytes(-(-size // BLOCK) * BLOCK))

    return build


SPARSE = {
    "overlapping": {"GNU.sparse.size": "4096", "GNU.sparse.numblocks": "2",
                    "GNU.sparse.name": "x", "GNU.sparse.map": "0,512,256,512"},
    "descending": {"GNU.sparse.size": "4096", "GNU.sparse.numblocks": "2",
                   "GNU.sparse.name": "x", "GNU.sparse.map": "1024,512,0,512"},
    "beyond-the-end": {"GNU.sparse.size": "1000", "GNU.sparse.numblocks": "1",
                       "GNU.sparse.name": "x", "GNU.sparse.map": "512,1024"},
    "of-more-than-there-is": {"GNU.sparse.size": "1000000", "GNU.sparse.numblocks": "1",
                              "GNU.sparse.name": "x", "GNU.sparse.map": "0,100000"},
    "overflowing": {"GNU.sparse.size": "18446744073709551615", "GNU.sparse.numblocks": "1",
                    "GNU.sparse.name": "x", "GNU.sparse.map": "18446744073709551104,1024"},
    "not-numbers": {"GNU.sparse.size": "4096", "GNU.sparse.numblocks": "1",
                    "GNU.sparse.name": "x", "GNU.sparse.map": "a,b"},
    "of-an-odd-count": {"GNU.sparse.size": "4096", "GNU.sparse.numblocks": "1",
                        "GNU.sparse.name": "x", "GNU.sparse.map": "0,512,1024"},
}

for sparse_name, sparse_records in SPARSE.items():
    refused(f"tar.sparse-map-{sparse_name}", "(?i)sparse")(sparse_map(sparse_records))


@refused("tar.sparse-map-1.0-of-a-billion-pieces", "(?i)sparse")
def _(layer):
    layer.pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x",
               "GNU.sparse.realsize": "4096"})
    body = b"1000000000\n" + b"0\n" * 1_000_000
    layer.raw(header("GNUSparseFile.0/x", size=len(body)))
    layer.padded(body)


@refused("tar.sparse-old-gnu-extensions-without-end", "(?i)sparse|end|truncated")
def _(layer):
    block = bytearray(header("file", b"S", magic=b"ustar  \0"))
    block[482] = 1
    block[483:495] = b"%011o\0" % 4096
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    layer.raw(bytes(block))
    layer.raw((b"\0" * 504 + b"\1").ljust(BLOCK, b"\0") * 1000)
    layer.ended = True


# Xattrs that no file system takes.

@refused("tar.xattr-value-over-64-kib", "xattr|user.large")
def _(layer):
    layer.file("file", xattrs={"user.large": b"v" * 70_000})


@refused("tar.xattr-name-over-255-bytes", "xattr|name")
def _(layer):
    layer.file("file", xattrs={"user." + "n" * 300: b"v"})


@refused("tar.acl-that-is-not-one", "(?i)acl")
def _(layer):
    layer.file("file", pax={"SCHILY.acl.access": "everyone may do everything"})


# What may be converted, but must stay inside and within bounds.

def contained(name):
    """Registers a function that fills a layer; see check_contained. The result is mounted as well."""

    def register(build):
        @test(f"hostile.contained.{name}")
        def _(workspace):
            need_root()
            image = Image()
            image.add(archive_of(build), "+gzip")
            image.write(workspace.path("source"))
            result = check_contained(workspace, f"oci:{workspace.path('source')}")
            check(not os.path.lexists("/tmp/lamina-escaped"), "/tmp/lamina-escaped was made")
            if result:
                workspace.lamina("verify", result)
                for transport in TRANSPORTS:
                    with workspace.mounted(result, f"--transport={transport}") as mounted:
                        names = subprocess.run(["find", mounted], check=True, capture_output=True)
                        check(b"/../" not in names.stdout and b"/..\n" not in names.stdout, f"the image shows {names.stdout!r}")

        return build

    return register


@contained("names-that-climb")
def _(layer):
    layer.file("../../../../../../../../../../tmp/lamina-escaped", b"out")
    layer.file("a/../../../../../../../../tmp/lamina-escaped", b"out")
    layer.directory("..")
    layer.symlink("../link", "x")


@contained("absolute-names")
def _(layer):
    layer.file("/tmp/lamina-escaped", b"out")


@contained("names-of-dots-alone")
def _(layer):
    for name in (".", "./", "./.", "..", "/", "//", "a/..", "a/.", "..."):
        layer.directory(name)


@contained("symlinks-that-lead-out")
def _(layer):
    layer.symlink("out", "/tmp")
    layer.file("out/lamina-escaped", b"out")
    layer.symlink("up", "../../../../../../../../tmp")
    layer.file("up/lamina-escaped", b"out")


@contained("symlinks-that-lead-to-themselves")
def _(layer):
    layer.symlink("a", "b")
    layer.symlink("b", "a")
    layer.file("a/file", b"content")


@contained("whiteouts-of-dots")
def _(layer):
    layer.file("d/file", b"content")
    for name in (".wh.", ".wh..", ".wh...", "d/.wh...", ".wh..wh."):
        layer.file(name)


@contained("files-named-as-empty-or-dot")
def _(layer):
    for name in ("", ".", "/"):
        layer.raw(header(name, b"0", size=1))
        layer.padded(b"x")


@contained("whiteout-devices-and-overlay-xattrs")
def _(layer):
    layer.char_device("d/gone", 0, 0)
    layer.directory("d", xattrs={"trusted.overlay.opaque": b"y", "trusted.overlay.redirect": b"/etc",
                                 "trusted.overlay.metacopy": b""})
    layer.file("d/file", b"x", xattrs={"trusted.overlay.redirect": b"/../../etc/passwd"})


@contained("many-pax-headers-for-one-entry")
def _(layer):
    for number in range(1000):
        layer.pax({"comment": "x" * 1000, "path": f"name{number}"})
    layer.file("file", b"x")


@contained("100000-links-to-one-file")
def _(layer):
    layer.file("file", b"x")
    for number in range(100_000):
        layer.hardlink(f"l{number}", "file")


@contained("directories-2000-deep")
def _(layer):
    layer.file("/".join(["d"] * 2000) + "/file", b"x")


@contained("file-of-8-eib-that-is-all-hole")
def _(layer):
    layer.sparse_file("file", (1 << 63) - 1, [])


# Bombs: little input, much output.

@test("hostile.bomb.gzip-of-1-gib-of-zeros")
def _(workspace):
    body = zlib.compressobj(1, zlib.DEFLATED, 31)
    parts = [body.compress(header("zeros", size=GIB))]
    piece = bytes(16 << 20)
    parts += [body.compress(piece) for _ in range(GIB // len(piece))]
    parts += [body.compress(bytes(2 * BLOCK)), body.flush()]
    bomb(workspace, b"".join(parts), "+gzip")


@test("hostile.bomb.zstd-of-1-gib-of-zeros-as-padding")
def _(workspace):
    # Behind the end of the archive: read to its end for the diff_id, but never kept.
    with subprocess.Popen(["zstd", "-q", "-c", "--long=27"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        piece = bytes(16 << 20)
        for _ in range(GIB // len(piece)):
            process.stdin.write(piece)
        data, _ = process.communicate()
    bomb(workspace, data, "+zstd")


def bomb(workspace, blob, suffix):
    """The diff_id is wrong, so that it must be refused, after all was read within bounds."""
    image = small_image()
    image.layers[0] = (f"application/vnd.oci.image.layer.v1.tar{suffix}", blob,
                       "sha256:" + "ab" * 32)
    image.write(workspace.path("source"))
    check_refused(workspace, "diff_id|digest", "convert", f"oci:{workspace.path('source')}",
                  f"oci:{workspace.path('destination')}:new")


@test("hostile.bomb.million-empty-gzip-members")
def _(workspace):
    blob = compress_gzip(b"") * 1_000_000
    bomb(workspace, blob, "+gzip")


# Archives of whole images.

def tar_of(members):
    """A tar archive; members are (name, bytes), or (name, link target as text)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname, content = tarfile.SYMTYPE, content, b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


LAYER = archive_of(lambda layer: layer.file("file", b"content"))
CONFIG = (b'{"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": '
          b'["sha256:%s"]}}')
MANIFEST = b'[{"Config": "c.json", "RepoTags": ["x:1"], "Layers": ["l/layer.tar"]}]'

DOCKER_ARCHIVES = {
    "empty": (b"", "manifest.json|archive|tar"),
    "not-a-tar": (noise(20_000), "tar|archive|header"),
    "truncated": (tar_of([("manifest.json", MANIFEST)])[:540], "truncated|end"),
    "without-manifest": (tar_of([("x", b"y")]), "manifest.json"),
    "manifest-not-json": (tar_of([("manifest.json", b"[{")]), "manifest.json"),
    "manifest-not-a-list": (tar_of([("manifest.json", b"{}")]), "manifest.json"),
    "manifest-of-no-image": (tar_of([("manifest.json", b"[]")]), "manifest.json|image"),
    "config-missing": (tar_of([("manifest.json", MANIFEST), ("l/layer.tar", LAYER)]), "c.json"),
    "config-not-json": (tar_of([("manifest.json", MANIFEST), ("c.json", b"{"),
                                ("l/layer.tar", LAYER)]), "c.json|config"),
    "layer-missing": (tar_of([("manifest.json", MANIFEST), ("c.json", CONFIG % (b"ab" * 32))]),
                      "l/layer.tar"),
    "layer-outside": (tar_of([
        ("manifest.json", MANIFEST.replace(b"l/layer.tar", b"../../../../etc/passwd")),
        ("c.json", CONFIG % (b"ab" * 32))]), "passwd"),
    "layer-a-link-to-outside": (tar_of([("manifest.json", MANIFEST), ("c.json", CONFIG % (b"ab" * 32)),
                                        ("l/layer.tar", "/etc/passwd")]), "l/layer.tar|passwd"),
    "layer-a-link-to-itself": (tar_of([("manifest.json", MANIFEST), ("c.json", CONFIG % (b"ab" * 32)),
                                       ("l/layer.tar", "../l/layer.tar")]), "l/layer.tar"),
    "layer-of-other-bytes": (tar_of([("manifest.json", MANIFEST), ("c.json", CONFIG % (b"ab" * 32)),
                                     ("l/layer.tar", LAYER)]), "diff_id|digest"),
    "manifest-of-20-mib": (tar_of([("manifest.json", b" " * (20 << 20) + MANIFEST)]),
                           "manifest.json"),
}


def add_archive_test(kind, name, data, pattern):
    @test(f"hostile.{kind}.{name}")
    def _(workspace):
        archive = workspace.path("archive.tar")
        archive.write_bytes(data)
        check_conversion_refused(workspace, f"{kind}:{archive}", f"(?i){pattern}")


for archive_name, (archive_bytes, archive_pattern) in DOCKER_ARCHIVES.items():
    add_archive_test("docker-archive", archive_name, archive_bytes, archive_pattern)

add_archive_test("oci-archive", "empty", b"", "archive|tar|index.json|oci-layout")
add_archive_test("oci-archive", "not-a-tar", noise(20_000), "tar|archive|header")
add_archive_test("oci-archive", "without-index", tar_of([("oci-layout", b"{}")]), "index.json|layout")
add_archive_test("oci-archive", "index-a-link-to-outside", tar_of([
    ("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'), ("index.json", "/etc/passwd")]), "index.json")


SOURCES = {
    "no-scheme": ("nothing", "nothing"),
    "unknown-scheme": ("ftp:host/image", "ftp"),
    "no-such-layout": ("oci:/no/such/layout:x", "/no/such/layout"),
    "no-such-archive": ("docker-archive:/no/such/file", "/no/such/file"),
    "no-such-directory": ("dir:/no/such/directory", "/no/such/directory"),
    "directory-that-is-a-file": ("dir:/etc/passwd", "/etc/passwd|director"),
    "archive-that-is-a-directory": ("docker-archive:/etc", "/etc|director"),
    "empty": ("", "source|reference|''"),
    "layout-without-a-name": ("oci:", "oci:|empty|director"),
}


def add_source_test(name, source, pattern):
    @test(f"hostile.source.{name}")
    def _(workspace):
        # What is no reference at all is wrong usage.
        is_reference = source.startswith(("oci:/", "docker-archive:", "dir:"))
        check_conversion_refused(workspace, source, f"(?i){pattern}",
                                 expected_code=1 if is_reference else 2)


for source_name, (source_reference, source_pattern) in SOURCES.items():
    add_source_test(source_name, source_reference, source_pattern)


@test("hostile.destination.cannot-be-written")
def _(workspace):
    small_image().write(workspace.path("source"))
    workspace.path("file").write_bytes(b"")
    for destination in (f"oci:{workspace.path('file')}:x", "oci:/proc/nowhere:x", "oci::x", "dir:/tmp/x",
                        f"oci:{workspace.path('missing')}/below:x"):
        result = workspace.lamina("convert", f"oci:{workspace.path('source')}", destination,
                                  status=None)
        check(result.returncode in (0, 1, 2), f"exit code {result.returncode}")
        if result.returncode:
            check(result.stderr.startswith("lamina: "), result.stderr)
    check_equal(workspace.path("file").read_bytes(), b"", "the file in the way")


@test("hostile.destination.full-disk")
def _(workspace):
    need_root("it mounts a small tmpfs")
    small_image({"large": noise(20 << 20)}).write(workspace.path("source"))
    disk = workspace.new_directory("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", disk], check=True)
    try:
        result = workspace.lamina("convert", f"oci:{workspace.path('source')}",
                                  f"oci:{disk}/out:latest", status=1)
        check("No space left" in result.stderr, result.stderr)
        check_equal(os.listdir(disk), [], "what is left on the disk")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@test("hostile.destination.killed-in-the-middle")
def _(workspace):
    small_image({f"f{i}": noise(2 << 20, i) for i in range(10)}).write(workspace.path("source"))
    small_image().write(workspace.path("good"))
    out = f"oci:{workspace.path('out')}"
    workspace.lamina("convert", f"oci:{workspace.path('good')}", f"{out}:good")
    generator = random.Random(7)
    for _ in range(repetitions(4)):
        subprocess.run(["timeout", "--signal=KILL", f"{generator.uniform(0.005, 0.25):.3f}",
                        os.environ["LAMINA"], "convert", f"oci:{workspace.path('source')}",
                        f"{out}:new"],
                       check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        workspace.lamina("verify", f"{out}:good")
    workspace.lamina("convert", f"oci:{workspace.path('source')}", f"{out}:new")
    workspace.lamina("verify", f"{out}:new")
    layout = Layout(workspace.path("out"))
    check_equal(len(layout.index()["manifests"]), 2, "images in the layout")
