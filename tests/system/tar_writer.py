# SPDX-License-Identifier: Apache-2.0
"""Writes tar archives header by header, so that tests can make every oddity on purpose.

The convenient calls (file, directory, ...) use ustar fields and add PAX records for what does not fit
(long names, large owners, fractions of a second, xattrs). header() and raw() make anything else.
"""

import struct

BLOCK = 512
DEFAULT_MTIME = 1_600_000_000


def to_bytes(text):
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def octal(value, width):
    """A numeric field as POSIX has it, or nothing if the value does not fit."""
    digits = b"%0*o" % (width - 1, value) if value >= 0 else b""
    return digits + b"\0" if digits and len(digits) < width else None


def base256(value, width):
    """A numeric field in GNU's binary form: the top bit set, then a big-endian two's complement."""
    sign = b"\xff" if value < 0 else b"\x80"
    return sign + value.to_bytes(width - 1, "big", signed=True)


def checksum(header, signed=False):
    blank = header[:148] + b" " * 8 + header[156:]
    return sum(struct.unpack("512b", blank)) if signed else sum(blank)


def header(name, typeflag=b"0", *, size=0, mode=0o644, uid=0, gid=0, mtime=DEFAULT_MTIME, linkname=b"",
           magic=b"ustar\x0000", uname=b"", gname=b"", devmajor=0, devminor=0, prefix=b"",
           fields=None, signed_checksum=False):
    """One header block. `fields` overrides raw bytes: {"size": b"  17 "}."""
    values = {
        "name": to_bytes(name), "mode": octal(mode, 8), "uid": octal(uid, 8), "gid": octal(gid, 8),
        "size": octal(size, 12), "mtime": octal(mtime, 12), "chksum": b" " * 8, "typeflag": typeflag,
        "linkname": to_bytes(linkname), "magic": magic, "uname": uname, "gname": gname,
        "devmajor": octal(devmajor, 8), "devminor": octal(devminor, 8), "prefix": to_bytes(prefix),
    }
    values.update(fields or {})
    layout = [("name", 100), ("mode", 8), ("uid", 8), ("gid", 8), ("size", 12), ("mtime", 12),
              ("chksum", 8), ("typeflag", 1), ("linkname", 100), ("magic", 8), ("uname", 32),
              ("gname", 32), ("devmajor", 8), ("devminor", 8), ("prefix", 155)]
    block = b""
    for field, width in layout:
        value = values[field]
        if value is None or len(value) > width:
            raise ValueError(f"{field} does not fit: {value!r}")
        block += value.ljust(width, b"\0")
    block = block.ljust(BLOCK, b"\0")
    if "chksum" in (fields or {}):
        return block
    return block[:148] + b"%06o\0 " % (checksum(block, signed_checksum) & 0o777777) + block[156:]


def pax_record(key, value):
    """One "LENGTH KEY=VALUE\\n" record; the length counts itself."""
    rest = b" " + to_bytes(key) + b"=" + to_bytes(value) + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


class TarWriter:
    def __init__(self, out):
        self.out = out
        self.ended = False

    # Raw parts.

    def raw(self, data):
        self.out.write(data)

    def padded(self, data):
        self.raw(data)
        self.raw(b"\0" * (-len(data) % BLOCK))

    def pax(self, records, typeflag=b"x"):
        """A PAX header of its own: records is a dict or a list of pairs; typeflag g makes it global."""
        pairs = records.items() if isinstance(records, dict) else records
        body = b"".join(pax_record(key, value) for key, value in pairs)
        self.raw(header("pax_header", typeflag, size=len(body)))
        self.padded(body)

    def gnu_long(self, typeflag, text):
        """GNU's long name (L) or long link (K) for the next entry."""
        body = to_bytes(text) + b"\0"
        self.raw(header("././@LongLink", typeflag, size=len(body), magic=b"ustar  \0"))
        self.padded(body)

    def end(self, blocks=2):
        self.raw(b"\0" * (BLOCK * blocks))
        self.ended = True

    # Entries.

    def entry(self, name, typeflag, data=b"", *, linkname=b"", uid=0, gid=0, mtime=DEFAULT_MTIME,
              xattrs=None, pax=None, **fields):
        name, linkname = to_bytes(name), to_bytes(linkname)
        records = []
        if len(name) > 100:
            records.append(("path", name))
        if len(linkname) > 100:
            records.append(("linkpath", linkname))
        if octal(uid, 8) is None:
            records.append(("uid", str(uid)))
            uid = 0
        if octal(gid, 8) is None:
            records.append(("gid", str(gid)))
            gid = 0
        if isinstance(mtime, str) or mtime < 0:
            records.append(("mtime", str(mtime)))
            mtime = 0
        for key, value in (xattrs or {}).items():
            records.append((b"SCHILY.xattr." + to_bytes(key), value))
        records += list((pax or {}).items())
        if records:
            self.pax(records)
        self.raw(header(name[:100], typeflag, size=len(data), linkname=linkname[:100], uid=uid,
                        gid=gid, mtime=mtime, **fields))
        self.padded(data)

    def file(self, name, data=b"", **fields):
        self.entry(name, b"0", to_bytes(data), **fields)

    def directory(self, name, mode=0o755, **fields):
        name = to_bytes(name)
        self.entry(name if name.endswith(b"/") else name + b"/", b"5", mode=mode, **fields)

    def symlink(self, name, target, **fields):
        self.entry(name, b"2", linkname=target, mode=0o777, **fields)

    def hardlink(self, name, target, **fields):
        self.entry(name, b"1", linkname=target, **fields)

    def char_device(self, name, major, minor, **fields):
        self.entry(name, b"3", devmajor=major, devminor=minor, **fields)

    def block_device(self, name, major, minor, **fields):
        self.entry(name, b"4", devmajor=major, devminor=minor, **fields)

    def fifo(self, name, **fields):
        self.entry(name, b"6", **fields)

    def whiteout(self, name):
        """Hides `name` of the layers below."""
        directory, _, last = to_bytes(name).rpartition(b"/")
        self.file((directory + b"/" if directory else b"") + b".wh." + last)

    def opaque(self, directory):
        """Hides all that the layers below have in `directory` ("" for the root)."""
        directory = to_bytes(directory)
        self.file((directory + b"/" if directory else b"") + b".wh..wh..opq")

    def sparse_file(self, name, size, pieces, version="1.0", **fields):
        """A sparse file in GNU's PAX forms: pieces are (offset, bytes), ascending."""
        pieces = list(pieces)
        if not pieces or pieces[-1][0] + len(pieces[-1][1]) < size:
            pieces.append((size, b""))
        data = b"".join(piece for _, piece in pieces)
        numbers = [number for offset, piece in pieces for number in (offset, len(piece))]
        records = []
        if version == "0.0":
            records = [("GNU.sparse.size", str(size)), ("GNU.sparse.numblocks", str(len(pieces)))]
            for offset, piece in pieces:
                records += [("GNU.sparse.offset", str(offset)),
                            ("GNU.sparse.numbytes", str(len(piece)))]
        elif version == "0.1":
            records = [("GNU.sparse.size", str(size)), ("GNU.sparse.numblocks", str(len(pieces))),
                       ("GNU.sparse.name", name),
                       ("GNU.sparse.map", ",".join(str(number) for number in numbers))]
        else:
            records = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"),
                       ("GNU.sparse.name", name), ("GNU.sparse.realsize", str(size))]
            table = "".join(f"{number}\n" for number in [len(pieces)] + numbers).encode()
            data = table.ljust(-(-len(table) // BLOCK) * BLOCK, b"\0") + data
        self.pax(records)
        self.raw(header(b"GNUSparseFile.0/x" if version != "0.0" else name, b"0", size=len(data),
                        **fields))
        self.padded(data)

    def old_gnu_sparse_file(self, name, size, pieces, **fields):
        """A sparse file in GNU's old form: type S, four pieces in the header, more behind it."""
        pieces = list(pieces)
        if not pieces or pieces[-1][0] + len(pieces[-1][1]) < size:
            pieces.append((size, b""))
        data = b"".join(piece for _, piece in pieces)

        def number(value):
            return octal(value, 12) or base256(value, 12)

        entries = [number(offset) + number(len(piece)) for offset, piece in pieces]
        inline, rest = entries[:4], entries[4:]
        block = bytearray(header(name, b"S", size=len(data), magic=b"ustar  \0", **fields))
        # Offsets of struct oldgnu_header (GNU tar, "Basic Tar Format").
        block[386:386 + 24 * len(inline)] = b"".join(inline)
        block[482] = bool(rest)
        block[483:495] = number(size)
        block[148:156] = b"%06o\0 " % checksum(bytes(block))
        self.raw(bytes(block))
        while rest:
            some, rest = rest[:21], rest[21:]
            extension = b"".join(some).ljust(504, b"\0") + bytes([bool(rest)])
            self.raw(extension.ljust(BLOCK, b"\0"))
        self.padded(data)
