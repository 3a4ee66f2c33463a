# SPDX-License-Identifier: Apache-2.0
"""Compressed layers: every legal form of gzip and zstd, plain tar, and the media types for them."""

import struct
import zlib

from harness import noise
from image_case import case
from oci_layout import compress_gzip, compress_zstd


def fill(layer):
    layer.file("text", b"a line of text\n" * 20_000)
    layer.file("noise", noise(300_000))
    layer.file("last", b"last")


def pieces(data, count):
    step = len(data) // count + 1
    return [data[i:i + step] for i in range(0, len(data), step)]


def gzip_with_header_fields(data):
    """FEXTRA, FNAME, FCOMMENT and FHCRC (RFC 1952), which most writers never use."""
    head = b"\x1f\x8b\x08" + bytes([0x04 | 0x08 | 0x10 | 0x02]) + struct.pack("<IBB", 7, 0, 3)
    head += struct.pack("<H", 6) + b"AB\x02\x00xy" + b"name.tar\0" + b"a comment\0"
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF)
    body = zlib.compressobj(6, zlib.DEFLATED, -15)
    return (head + body.compress(data) + body.flush()
            + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF))


def gzip_level(data, level):
    body = zlib.compressobj(level, zlib.DEFLATED, 31)
    return body.compress(data) + body.flush()


def gzip_flushed(data):
    """Many empty stored blocks, as writers that flush make them."""
    body = zlib.compressobj(6, zlib.DEFLATED, 31)
    parts = []
    for piece in pieces(data, 50):
        parts += [body.compress(piece), body.flush(zlib.Z_FULL_FLUSH)]
    return b"".join(parts) + body.flush()


COMPRESSED = {
    "gzip.one-member": ("+gzip", compress_gzip),
    "gzip.members": ("+gzip", lambda data: b"".join(compress_gzip(p) for p in pieces(data, 7))),
    "gzip.empty-members": ("+gzip", lambda data: compress_gzip(b"") + compress_gzip(data)
                           + compress_gzip(b"")),
    "gzip.members-of-one-byte": ("+gzip", lambda data: b"".join(
        compress_gzip(data[i:i + 1]) for i in range(600)) + compress_gzip(data[600:])),
    "gzip.optional-header-fields": ("+gzip", gzip_with_header_fields),
    "gzip.stored-blocks": ("+gzip", lambda data: gzip_level(data, 0)),
    "gzip.best": ("+gzip", lambda data: gzip_level(data, 9)),
    "gzip.flushed": ("+gzip", gzip_flushed),
    "gzip.zeros-behind-the-end": ("+gzip", lambda data: compress_gzip(data) + bytes(1000)),
    "zstd.one-frame": ("+zstd", compress_zstd),
    "zstd.frames": ("+zstd", lambda data: b"".join(compress_zstd(p) for p in pieces(data, 7))),
    "zstd.no-content-size": ("+zstd", lambda data: compress_zstd(data, "--no-content-size")),
    "zstd.frames-without-sizes-and-checksums": ("+zstd", lambda data: b"".join(
        compress_zstd(p, "--no-content-size", "--no-check") for p in pieces(data, 5))),
    "zstd.skippable-frames": ("+zstd", lambda data: struct.pack("<II", 0x184D2A50, 5) + b"hello"
                              + compress_zstd(data) + struct.pack("<II", 0x184D2A5F, 0)),
    "zstd.empty-frames": ("+zstd", lambda data: compress_zstd(b"") + compress_zstd(data)
                          + compress_zstd(b"")),
    "zstd.highest-level": ("+zstd", lambda data: compress_zstd(data, "-19")),
    "plain-tar": ("", lambda data: data),
}


def add_case(name, suffix, compress):
    @case(f"compressed.{name}")
    def _(image):
        with image.layer(suffix=suffix, compress=compress) as layer:
            fill(layer)


for compressed_name, (compressed_suffix, compressor) in COMPRESSED.items():
    add_case(compressed_name, compressed_suffix, compressor)


@case("compressed.dockers-media-types")
def _(image):
    docker = "application/vnd.docker.image.rootfs.diff.tar"
    other_media_types(image, docker, docker + ".gzip")


@case("compressed.non-distributable-media-types")
def _(image):
    layer = "application/vnd.oci.image.layer.nondistributable.v1.tar"
    other_media_types(image, layer, layer + "+gzip")


def other_media_types(image, plain, gzipped):
    for media_type, suffix in ((plain, ""), (gzipped, "+gzip")):
        with image.layer(suffix=suffix) as layer:
            layer.file("file" + suffix, b"content")
        _, blob, diff_id = image.layers.pop()
        image.layers.append((media_type, blob, diff_id))


@case("compressed.each-layer-in-another-way", loop=True)
def _(image):
    for number, (suffix, compress) in enumerate(COMPRESSED.values()):
        with image.layer(suffix=suffix, compress=compress) as layer:
            fill(layer)
            layer.file(f"layer{number}", b"%d" % number)
