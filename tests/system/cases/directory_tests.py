# SPDX-License-Identifier: Apache-2.0
"""Big directories and big trees of directories."""

from image_case import case


@case("directory.20000-entries")
def _(image):
    with image.layer() as layer:
        for number in range(20_000):
            layer.file(f"d/entry-{number:06}")


@case("directory.2000-names-of-255-bytes")
def _(image):
    with image.layer() as layer:
        for number in range(2000):
            layer.symlink(f"d/{number:0255}", "x")


@case("directory.names-of-every-length")
def _(image):
    with image.layer() as layer:
        for length in range(1, 256):
            layer.file(f"d/{'n' * length}")
            layer.directory(f"e/{'m' * length}")


@case("directory.names-of-bytes-beyond-ascii-in-order")
def _(image):
    # Byte order and the order of signed characters or of Unicode are not the same.
    with image.layer() as layer:
        for byte in range(1, 256):
            if byte not in (0x2F, 0x2E):
                layer.file(b"d/" + bytes([byte]), bytes([byte]))
                layer.file(b"d/a" + bytes([byte, 0x61]), bytes([byte]))


@case("directory.blocks-filled-to-the-last-byte")
def _(image):
    # An entry takes 12 bytes and its name; "." and ".." are entries too.
    room = 4096 - 18 * 12 - len("...")
    with image.layer() as layer:
        for extra in range(-3, 4):
            names = [f"{number:02}".ljust(242, "x") for number in range(15)]
            names.append("16".ljust(room - 15 * 242 + extra, "y"))
            for name in names:
                layer.file(f"d{extra + 3}/{name}")


@case("directory.1000-empty-directories")
def _(image):
    with image.layer() as layer:
        for number in range(1000):
            layer.directory(f"{number // 100}/{number}")


@case("directory.merged-from-ten-layers", loop=True)
def _(image):
    for number in range(10):
        with image.layer() as layer:
            for entry in range(number, 1000, number + 1):
                layer.file(f"d/{entry}", b"%d" % number)
            layer.whiteout(f"d/{number * 17}")
