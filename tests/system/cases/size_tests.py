# SPDX-License-Identifier: Apache-2.0
"""Sizes: every boundary less one, at and plus one; holes; files beyond 4 and 8 GiB; deduplication."""

from harness import noise
from image_case import case

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@case("size.around-blocks-and-tar-records")
def _(image):
    with image.layer() as layer:
        for boundary in (0, 512, 1024, 4 * KIB, 8 * KIB, 10 * KIB, 64 * KIB):
            for size in (boundary - 1, boundary, boundary + 1):
                if size >= 0:
                    layer.file(f"{size}", noise(size, size))


@case("size.around-frames", loop=True)
def _(image):
    with image.layer() as layer:
        for boundary in (128 * KIB, 256 * KIB, 512 * KIB):
            for size in (boundary - 4097, boundary - 1, boundary, boundary + 1, boundary + 4096):
                layer.file(f"{size}", noise(size, size))


@case("size.around-chunks")
def _(image):
    with image.layer(suffix="") as layer:
        for boundary in (MIB, 2 * MIB, 4 * MIB):
            for size in (boundary - 1, boundary, boundary + 1):
                layer.file(f"{size}", noise(size, size))


@case("size.address-space-of-exactly-2-mib")
def _(image):
    with image.layer() as layer:
        layer.file("a", noise(2 * MIB))
    with image.layer() as layer:
        layer.file("b", noise(2 * MIB - 4096, 2))
        layer.file("c", noise(4096, 3))


@case("size.empty-files-and-directories-alone")
def _(image):
    with image.layer() as layer:
        for number in range(50):
            layer.file(f"empty{number}")
            layer.directory(f"d{number}")


@case("size.thousand-small-files")
def _(image):
    with image.layer() as layer:
        for number in range(1000):
            layer.file(f"d{number % 10}/f{number}", noise(number, number))


@case("size.file-of-20-mib-that-does-not-compress")
def _(image):
    with image.layer(suffix="") as layer:
        layer.file("noise", noise(20 * MIB + 13))


@case("size.zeros-that-are-stored")
def _(image):
    with image.layer() as layer:
        layer.file("zeros", bytes(32 * MIB))
        layer.file("zeros-and-one", bytes(5 * MIB) + b"\1")


@case("size.equal-files-and-chunks")
def _(image):
    with image.layer() as layer:
        piece = noise(MIB)
        for number in range(20):
            layer.file(f"same{number}", b"the same content")
            layer.file(f"repeats{number}", piece * 3 + b"%d" % number)
    with image.layer() as layer:
        layer.file("also-in-the-layer-below", piece * 3 + b"7")
        layer.file("same-above", b"the same content")


@case("size.sparse-file-beyond-4-gib", loop=True)
def _(image):
    with image.layer() as layer:
        layer.sparse_file("file", 5 * GIB + 17, [
            (0, b"start".ljust(512, b".")), (4 * GIB - 4096, noise(8192)), (5 * GIB, b"the end".ljust(17, b"."))])


@case("size.sparse-file-beyond-8-gib")
def _(image):
    with image.layer() as layer:
        layer.sparse_file("file", 9 * GIB, [(8 * GIB + 5, noise(100_000))])
        layer.sparse_file("hole", 100 * GIB, [])


@case("size.sparse-file-with-many-pieces")
def _(image):
    with image.layer() as layer:
        layer.sparse_file("each-other-block", 4 * MIB,
                          [(i * 8192, noise(4096, i)) for i in range(512)])
        layer.sparse_file("each-100th-mib", 3 * GIB,
                          [(i * 100 * MIB, noise(4096, i)) for i in range(30)])
        layer.sparse_file("unaligned", 10 * MIB,
                          [(i * 100_003 + 1, noise(1024, i)) for i in range(100)])


@case("size.layers-without-content-between")
def _(image):
    for number in range(5):
        with image.layer() as layer:
            layer.directory(f"d{number}")
        with image.layer() as layer:
            layer.file(f"d{number}/file", noise(5000, number))
