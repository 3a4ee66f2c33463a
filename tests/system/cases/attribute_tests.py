# SPDX-License-Identifier: Apache-2.0
"""Modes, owners, devices, xattrs, ACLs, names and link targets."""

import os
import struct

from image_case import case

# struct vfs_cap_data of linux/capability.h: revision 2 with the effective bit, cap_net_raw (13).
NET_RAW = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
# The same for a user namespace whose root is uid 100000 (revision 3).
NET_RAW_IN_NAMESPACE = struct.pack("<6I", 0x03000001, 1 << 13, 0, 0, 0, 100000)


def acl(*entries):
    """A POSIX ACL as getxattr gives it: version 2, then (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NO_ID = 0xFFFFFFFF
ACCESS_ACL = acl((0x01, 6, NO_ID), (0x02, 4, 1234), (0x04, 4, NO_ID), (0x08, 5, 70000),
                 (0x10, 5, NO_ID), (0x20, 0, NO_ID))
DEFAULT_ACL = acl((0x01, 7, NO_ID), (0x02, 7, 1234), (0x04, 5, NO_ID), (0x10, 7, NO_ID),
                  (0x20, 5, NO_ID))
ACLS = {"file": {"system.posix_acl_access": ACCESS_ACL},
        "directory": {"system.posix_acl_access": ACCESS_ACL, "system.posix_acl_default": DEFAULT_ACL}}


@case("attribute.modes")
def _(image):
    with image.layer() as layer:
        for mode in (0o000, 0o001, 0o400, 0o644, 0o777, 0o1777, 0o2755, 0o4755, 0o6711, 0o7777):
            layer.file(f"file{mode:04o}", b"x", mode=mode)
            layer.directory(f"directory{mode:04o}", mode=mode)
            layer.file(f"directory{mode:04o}/inside", b"x")


@case("attribute.set-id-bits-survive-a-change-of-owner")
def _(image):
    with image.layer() as layer:
        layer.file("su", b"#!", mode=0o4755, uid=1000, gid=1000)
        layer.file("sg", b"#!", mode=0o2755, uid=65537, gid=65538,
                   xattrs={"security.capability": NET_RAW})


@case("attribute.owners-beyond-16-and-21-bits")
def _(image):
    with image.layer() as layer:
        for owner in (0, 1, 65534, 65535, 65536, 2_097_151, 2_097_152, 4_294_967_294):
            layer.file(f"file{owner}", uid=owner, gid=0)
            layer.directory(f"directory{owner}", uid=0, gid=owner)
            layer.symlink(f"symlink{owner}", "x", uid=owner, gid=owner)


@case("attribute.device-nodes")
def _(image):
    with image.layer() as layer:
        for major, minor in ((0, 1), (1, 3), (5, 0), (8, 255), (8, 256), (255, 256), (259, 65536),
                             (4095, 1_048_575)):
            layer.char_device(f"char{major}-{minor}", major, minor, mode=0o620, gid=5)
            layer.block_device(f"block{major}-{minor}", major, minor)


@case("attribute.fifos")
def _(image):
    with image.layer() as layer:
        layer.fifo("fifo", mode=0o622, uid=7, gid=8, mtime="1300000000.75")


@case("attribute.file-capabilities")
def _(image):
    with image.layer() as layer:
        layer.file("ping", b"#!", mode=0o755, xattrs={"security.capability": NET_RAW})
        layer.file("in-namespace", b"#!", mode=0o755,
                   xattrs={"security.capability": NET_RAW_IN_NAMESPACE})


def set_acls(tree):
    # GNU tar drops these; containerd and Docker set every SCHILY.xattr record.
    for name, acls in ACLS.items():
        for acl_name, value in acls.items():
            os.setxattr(os.path.join(tree, name), acl_name, value)


@case("attribute.acls-as-xattrs", loop=True, adjust=set_acls)
def _(image):
    with image.layer() as layer:
        layer.file("file", b"x", mode=0o650, xattrs=ACLS["file"])
        layer.directory("directory", mode=0o650, xattrs=ACLS["directory"])
        layer.file("directory/no-acl-of-its-own", b"x")


@case("attribute.acls-as-text")
def _(image):
    access = "user::rw-,user:1234:r--,group::r--,group:70000:r-x,mask::r-x,other::---"
    default = "user::rwx,user:1234:rwx,group::r-x,mask::rwx,other::r-x"
    with image.layer() as layer:
        layer.file("file", b"x", mode=0o650, pax={"SCHILY.acl.access": access})
        layer.directory("directory", mode=0o650,
                        pax={"SCHILY.acl.access": access, "SCHILY.acl.default": default})


@case("attribute.xattrs-of-every-name-space")
def _(image):
    with image.layer() as layer:
        xattrs = {"user.a": b"1", "trusted.b": b"2", "security.c": b"3"}
        layer.file("file", b"x", xattrs=xattrs)
        layer.directory("directory", xattrs=xattrs)
        no_user = {"trusted.b": b"2", "security.c": b"3"}
        layer.symlink("symlink", "x", xattrs=no_user)
        layer.fifo("fifo", xattrs=no_user)
        layer.char_device("char", 1, 3, xattrs=no_user)


@case("attribute.xattr-values")
def _(image):
    with image.layer() as layer:
        layer.file("empty", xattrs={"user.empty": b""})
        layer.file("binary", xattrs={"user.binary": bytes(range(256)), "user.newline": b"a\nb=c\n"})
        layer.file("large", xattrs={"user.large": b"v" * 3500})
        layer.file("many", xattrs={f"user.{i:03}": b"%d" % i for i in range(100)})
        layer.file("long-name", xattrs={"user." + "n" * 250: b"x"})
        layer.file("dotted", xattrs={"user.a.b.c": b"x"})


@case("attribute.xattrs-shared-by-many-files")
def _(image):
    with image.layer() as layer:
        for i in range(300):
            layer.file(f"d/{i}", b"x", xattrs={"user.same": b"the same value in every file",
                                               "user.some": b"%d" % (i % 3), "user.own": b"%d" % i})


@case("attribute.xattrs-of-merged-directories")
def _(image):
    with image.layer() as layer:
        layer.directory("d", xattrs={"user.lower": b"1", "user.both": b"1"})
        layer.file("d/a")
    with image.layer() as layer:
        layer.directory("d", xattrs={"user.upper": b"2", "user.both": b"2"})
        layer.file("d/b")


def drop_overlay_xattrs(tree):
    # To GNU tar they are xattrs like others.
    for path, _, names in os.walk(tree):
        for name in [path] + [os.path.join(path, name) for name in names]:
            for xattr in os.listxattr(name, follow_symlinks=False):
                if ".overlay." in xattr:
                    os.removexattr(name, xattr, follow_symlinks=False)


@case("attribute.overlayfs-xattrs-of-an-archive-mean-nothing", adjust=drop_overlay_xattrs)
def _(image):
    # Whiteouts in an OCI layer are ".wh." names alone. Orders to overlayfs in it are not obeyed, nor
    # passed on to an overlay mounted on top.
    with image.layer() as layer:
        layer.file("d/below", b"x")
    with image.layer() as layer:
        layer.directory("d", xattrs={"trusted.overlay.opaque": b"y", "user.overlay.opaque": b"y",
                                     "trusted.overlay.redirect": b"/elsewhere", "user.other": b"1"})
        layer.file("d/above", b"x", xattrs={"user.overlay.metacopy": b"", "trusted.other": b"1"})
        layer.file("empty", xattrs={"user.overlay.whiteout": b""})


@case("attribute.symlink-targets")
def _(image):
    with image.layer() as layer:
        for number, target in enumerate(("x", "/", "..", "../../etc/passwd", "/absolute/path", "a//b/",
                                         b"\xff\xfe", "new\nline", "t" * 59, "t" * 60, "t" * 64,
                                         "t" * 1000, "t" * 4000, "t" * 4094)):
            layer.symlink(f"link{number}", target)


@case("attribute.names")
def _(image):
    with image.layer() as layer:
        for name in (b"a" * 255, b"\xe4\xb8\xad" * 85, b"\xff" * 255, b" ", b"...", b"-", b"\\", b"\n",
                     b"\x01\x7f", b"a\\b", b"*?[]", b"caf\xc3\xa9", b"cafe\xcc\x81", b"caf\xe9",
                     b"Case", b"case", b"~", b"\x80", b"\xc3\x28"):
            layer.file(b"files/" + name, name)
            layer.directory(b"directories/" + name)


@case("attribute.deep-paths")
def _(image):
    with image.layer() as layer:
        layer.file("/".join(["d"] * 1500) + "/file", b"deep")
        layer.file("/".join(["e" * 200] * 15) + "/file", b"deep")


@case("attribute.of-the-root")
def _(image):
    with image.layer() as layer:
        layer.directory("./", mode=0o1751, uid=11, gid=12, mtime="1300000000.000000001",
                        xattrs={"user.root": b"yes"})
        layer.file("file", b"x")


@case("attribute.inodes-of-both-sizes")
def _(image):
    # What fits EROFS' compact inode beside what does not, with equal and other times.
    with image.layer() as layer:
        for number in range(40):
            layer.file(f"plain{number}", b"x", mtime=1_600_000_000)
            layer.file(f"time{number}", b"x", mtime=1_600_000_000 + number)
            layer.file(f"owner{number}", b"x", uid=65_530 + number)
