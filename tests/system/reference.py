# SPDX-License-Identifier: Apache-2.0
"""The referee: extracts an OCI image with GNU tar, independently of Lamina.

Each layer is extracted by GNU tar into a directory of its own, whatever it contains. The result is then
laid over what the lower layers gave: whiteouts first, then by renames, which keep inodes, hard links
and attributes as tar made them. Directories get the attributes that their last tar entry gave them;
directories without an entry keep those of the layers below, or are 0755, owned by root, with mtime 0.

    reference.py LAYOUT[:TAG] DIRECTORY
"""

import os
import re
import stat
import subprocess
import sys

from oci_layout import Layout

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
DECOMPRESSORS = {b"\x1f\x8b": ["gzip", "-dc"], b"\x28\xb5": ["zstd", "-dcq", "--long=31"],
                 b"\x50\x2a": ["zstd", "-dcq", "--long=31"]}  # the last: a skippable frame first
DEEPEST = 5000  # levels of directories
VERBOSE_LINE = re.compile(rb"(.)\S{9,10} +\S+ +\S+ +\S+ +\S+ (.*)")


def extract(layout, destination, tag=None, tar_status=(0,)):
    """Extracts an image into `destination`, which is made. `tar_status`: what GNU tar may exit with."""
    sys.setrecursionlimit(4 * DEEPEST)
    layout = Layout(layout)
    destination = os.fsencode(destination)
    os.mkdir(destination, 0o755)
    os.utime(destination, ns=(0, 0))
    scratch = destination + b".layer"
    archive = destination + b".tar"
    for descriptor in layout.manifest(tag)["layers"]:
        decompress(layout.path(descriptor["digest"]), archive)
        if os.path.getsize(archive) == 0:
            continue  # GNU tar takes no empty file for an archive; as a layer it is one without entries
        os.mkdir(scratch, 0o755)
        run_tar(["--extract", "--preserve-permissions", "--same-owner", "--delay-directory-restore",
                 "--xattrs", "--xattrs-include=*", "--acls", "--directory", scratch], archive,
                tar_status)
        Overlay(explicit_directories(archive, tar_status)).apply(scratch, destination)
        remove(scratch)
        os.unlink(archive)


def decompress(blob, archive):
    with open(blob, "rb", buffering=0) as source, open(archive, "wb") as into:
        command = DECOMPRESSORS.get(source.read(2), ["cat"])
        source.seek(0)
        # gzip's status 2 is a warning: bytes behind the last member.
        status = subprocess.run(command, stdin=source, stdout=into, stderr=subprocess.DEVNULL,
                                check=False).returncode
    if status not in ((0, 2) if command[0] == "gzip" else (0,)):
        raise RuntimeError(f"{' '.join(command)} exited with {status}")


def run_tar(arguments, archive, allowed):
    result = subprocess.run(["tar", "--numeric-owner", *arguments, "--file", archive], check=False,
                            env=dict(os.environ, LC_ALL="C", TZ="UTC"), capture_output=True)
    if result.returncode not in allowed:
        raise RuntimeError(f"tar exited with {result.returncode}: {result.stderr.decode()}")
    return result.stdout


def explicit_directories(archive, tar_status):
    """Paths of the directories that have an entry of their own; b"" is the root."""
    listing = run_tar(["--list", "--verbose", "--quoting-style=escape"], archive, tar_status)
    paths = set()
    for line in listing.splitlines():
        match = VERBOSE_LINE.fullmatch(line)
        if match and match[1] == b"d":
            name = match[2].decode("unicode_escape").encode("latin-1")
            paths.add(b"/".join(part for part in name.split(b"/") if part not in (b"", b".")))
    return paths


def remove(path):
    """Removes a file or a tree, if there is one. rm(1) has no limit on depth, as shutil.rmtree has."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        subprocess.run(["rm", "-rf", "--", path], check=True)


class Attributes:
    """What is kept of a directory while its content changes."""

    def __init__(self, path=None):
        self.mode, self.owner, self.mtime, self.xattrs = 0o755, (0, 0), 0, {}
        if path:
            status = os.lstat(path)
            self.mode = stat.S_IMODE(status.st_mode)
            self.owner = (status.st_uid, status.st_gid)
            self.mtime = status.st_mtime_ns
            self.xattrs = {name: os.getxattr(path, name) for name in os.listxattr(path)}

    def set(self, path):
        os.chown(path, *self.owner)
        for name in os.listxattr(path):
            if name not in self.xattrs:
                os.removexattr(path, name)
        os.chmod(path, self.mode)
        for name, value in self.xattrs.items():
            os.setxattr(path, name, value)
        os.utime(path, ns=(self.mtime, self.mtime))


class Overlay:
    """Lays one extracted layer over the layers below."""

    def __init__(self, explicit):
        self.explicit = explicit

    def apply(self, layer, below, relative=b"", is_new=False):
        if relative in self.explicit:
            attributes = Attributes(layer)
        else:
            attributes = Attributes(None if is_new else below)
        names = sorted(os.listdir(layer))
        for hidden in os.listdir(below) if OPAQUE in names else []:
            remove(os.path.join(below, hidden))
        for name in names:
            # ".wh..wh." begins the names that AUFS kept for itself: never content.
            if name.startswith(WHITEOUT) and not name.startswith(WHITEOUT * 2):
                remove(os.path.join(below, name[len(WHITEOUT):]))
        for name in names:
            if not name.startswith(WHITEOUT):
                self.add(os.path.join(layer, name), os.path.join(below, name),
                         os.path.join(relative, name))
        attributes.set(below)

    def add(self, upper, lower, relative):
        if not stat.S_ISDIR(os.lstat(upper).st_mode):
            remove(lower)
            os.rename(upper, lower)
            return
        is_new = not os.path.lexists(lower) or not stat.S_ISDIR(os.lstat(lower).st_mode)
        if is_new:
            remove(lower)
            os.mkdir(lower)
        self.apply(upper, lower, relative, is_new)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: reference.py LAYOUT[:TAG] DIRECTORY")
    layout, _, tag = sys.argv[1].partition(":")
    extract(layout, sys.argv[2], tag or None)


if __name__ == "__main__":
    main()
