# SPDX-License-Identifier: Apache-2.0
"""Converted images whose bytes were changed after the fact: every change is found by `lamina verify`,
and no reader gets a wrong byte."""

import errno
import os
import random
import re
import subprocess

from harness import (TRANSPORTS, check, check_equal, need_root, noise, repetitions, small_image, test,
                     wait_until)
from oci_layout import Image, Layout, digest_of
from refusal import check_refused

FILES = {f"f{i:02}": noise(100_000 + i, i) for i in range(20)}
TABLE_OFFSET = "containerd.io/snapshot/lamina.section-table.offset"
TABLE_DIGEST = "containerd.io/snapshot/lamina.section-table.digest"


def converted(workspace):
    """An image of two layers, its layout and the descriptor of its lower, larger layer."""
    image = Image()
    with image.layer() as layer:
        for name, content in FILES.items():
            layer.file(name, content, xattrs={"user.x": b"y"})
    with image.layer() as layer:
        layer.file("above", b"above")
    reference = workspace.converted(image)
    layout = Layout(workspace.path("converted"))
    return reference, layout, layout.manifest("latest")["layers"][0]


def flip(data, offset, bit):
    return data[:offset] + bytes([data[offset] ^ (1 << bit)]) + data[offset + 1:]


def mount(workspace, reference, transport):
    directory = workspace.new_directory("mnt")
    result = workspace.lamina("mount", reference, directory, f"--state={workspace.state}",
                              f"--transport={transport}", status=None)
    check(result.returncode in (0, 1), f"exit code {result.returncode}: {result.stderr}")
    return directory if result.returncode == 0 else None


def umount(workspace, directory):
    workspace.lamina("umount", directory, f"--state={workspace.state}")
    subprocess.run(["rm", "-rf", "--one-file-system", workspace.state], check=True)


def interesting_offsets(size, table):
    """The start and end of the object and of its parts, and some in between."""
    generator = random.Random(size)
    offsets = {0, 1, table - 1, table, table + 1, size - 1, size - 8}
    offsets |= {generator.randrange(table, size) for _ in range(repetitions(15))}
    offsets |= {generator.randrange(size) for _ in range(repetitions(25))}
    return sorted(offsets)


@test("hostile.image.every-flipped-bit-is-found-by-verify")
def _(workspace):
    reference, layout, layer = converted(workspace)
    content = layout.get(layer["digest"])
    table = int(layer["annotations"][TABLE_OFFSET])
    for number, offset in enumerate(interesting_offsets(len(content), table)):
        layout.replace_blob(layer["digest"], flip(content, offset, number % 8))
        result = workspace.lamina("verify", reference, status=None)
        check(result.returncode == 1, f"a flipped bit at {offset} of {len(content)} is not found")
        check(re.fullmatch("lamina: verify .*\n", result.stderr), f"at {offset}: {result.stderr!r}")
    layout.replace_blob(layer["digest"], content)
    workspace.lamina("verify", reference)


@test("hostile.image.every-flipped-bit-is-found-by-readers")
def _(workspace):
    need_root()
    reference, layout, layer = converted(workspace)
    content = layout.get(layer["digest"])
    table = int(layer["annotations"][TABLE_OFFSET])
    generator = random.Random(1)
    frames = sorted(generator.sample(range(table * 9 // 10), repetitions(8)))
    tables = sorted(generator.sample(range(table * 9 // 10, len(content)), repetitions(8)))
    for transport in TRANSPORTS:
        for offset in frames + tables:
            layout.replace_blob(layer["digest"], flip(content, offset, offset % 8))
            directory = mount(workspace, reference, transport)
            if directory is None:
                continue
            failed = 0
            for name, expected in FILES.items():
                try:
                    check((directory / name).read_bytes() == expected,
                          f"wrong bytes in {name} for a flipped bit at {offset}")
                except OSError as error:
                    check_equal(error.errno, errno.EIO, "errno")
                    failed += 1
            # The chunk table is not needed for reading.
            check(failed < len(FILES), f"one flipped bit at {offset} broke every file")
            if offset in frames:
                check(failed > 0, f"the flipped bit at {offset} was in no frame")
            umount(workspace, directory)


@test("hostile.image.truncated-or-longer-blob")
def _(workspace):
    need_root()
    reference, layout, layer = converted(workspace)
    content = layout.get(layer["digest"])
    for other in (b"", content[:100], content[:-1], content[:len(content) // 2], content + b"\0"):
        layout.replace_blob(layer["digest"], other)
        check_refused(workspace, "sha256:|bytes|size", "verify", reference)
        for transport in TRANSPORTS:
            directory = workspace.new_directory("mnt")
            result = workspace.lamina("mount", reference, directory, f"--state={workspace.state}",
                                      f"--transport={transport}", status=1)
            check(result.stderr.count("\n") == 1, result.stderr)


@test("hostile.image.missing-blob")
def _(workspace):
    need_root()
    reference, layout, layer = converted(workspace)
    os.unlink(layout.path(layer["digest"]))
    check_refused(workspace, layer["digest"][7:], "verify", reference)
    check_refused(workspace, layer["digest"][7:], "inspect", reference)
    result = workspace.lamina("mount", reference, workspace.new_directory("mnt"),
                              f"--state={workspace.state}", status=1)
    check(layer["digest"][7:] in result.stderr, result.stderr)


@test("hostile.image.changed-manifest-or-configuration")
def _(workspace):
    reference, layout, _ = converted(workspace)
    manifest = layout.index()["manifests"][0]["digest"]
    for digest in (manifest, layout.manifest("latest")["config"]["digest"]):
        content = layout.get(digest)
        layout.replace_blob(digest, content.replace(b"linux", b"Linux").replace(b"sha256", b"sha257"))
        check_refused(workspace, "digest|sha256", "verify", reference)
        layout.replace_blob(digest, content)


def rewrite(layout, change):
    """Changes the manifest with digests that fit: an image made to deceive, not a damaged one."""
    manifest = layout.manifest("latest")
    change(manifest)
    layout.write_index({"schemaVersion": 2, "manifests": []})
    layout.add_manifest(manifest, "latest")


ANNOTATIONS = {
    "offset-missing": (lambda a: a.pop(TABLE_OFFSET), "offset"),
    "offset-not-a-number": (lambda a: a.update({TABLE_OFFSET: "x"}), "offset"),
    "offset-negative": (lambda a: a.update({TABLE_OFFSET: "-1"}), "offset"),
    "offset-beyond-64-bits": (lambda a: a.update({TABLE_OFFSET: "99999999999999999999"}), "offset"),
    "offset-beyond-the-end": (lambda a: a.update({TABLE_OFFSET: "9999999999"}), "offset|table|section"),
    "offset-zero": (lambda a: a.update({TABLE_OFFSET: "0"}), "digest|table|section"),
    "digest-missing": (lambda a: a.pop(TABLE_DIGEST), "digest"),
    "digest-not-one": (lambda a: a.update({TABLE_DIGEST: "sha256:00"}), "digest"),
    "digest-of-other-bytes": (lambda a: a.update({TABLE_DIGEST: "sha256:" + "ab" * 32}),
                              "digest|table|section"),
}


def add_annotation_test(name, change, pattern):
    @test(f"hostile.image.annotation-{name}")
    def _(workspace):
        reference, layout, _ = converted(workspace)
        rewrite(layout, lambda manifest: change(manifest["layers"][0]["annotations"]))
        for command in ("verify", "inspect"):
            check_refused(workspace, pattern, command, reference)
        if os.geteuid() == 0:
            result = workspace.lamina("mount", reference, workspace.new_directory("mnt"),
                                      f"--state={workspace.state}", status=1)
            check(re.search(pattern, result.stderr), result.stderr)


for annotation_name, (annotation_change, annotation_pattern) in ANNOTATIONS.items():
    add_annotation_test(annotation_name, annotation_change, annotation_pattern)


@test("hostile.image.section-table-made-to-deceive")
def _(workspace):
    # Every digest above the changed table fits, so only the checks of its content stand.
    need_root()
    reference, layout, layer = converted(workspace)
    content = layout.get(layer["digest"])
    offset = int(layer["annotations"][TABLE_OFFSET])
    generator = random.Random(5)
    for number in range(repetitions(40)):
        table = bytearray(content[offset:])
        for _ in range(1 + number % 3):
            position = generator.randrange(len(table))
            table[position] = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
        deceive(layout, content[:offset] + bytes(table), offset)
        survives(workspace, reference)


def deceive(layout, blob, offset):
    digest = layout.put(blob)

    def change(manifest):
        layer = manifest["layers"][0]
        layer.update(digest=digest, size=len(blob))
        layer["annotations"].update({TABLE_OFFSET: str(offset),
                                     TABLE_DIGEST: digest_of(blob[offset:])})

    rewrite(layout, change)


def survives(workspace, reference):
    """verify, inspect and mount give a result or one line of error, never a crash or a hang."""
    for command in ("verify", "inspect"):
        result = workspace.lamina(command, reference, status=None, timeout=60)
        check(result.returncode in (0, 1), f"{command} exited with {result.returncode}")
        check(result.returncode == 0 or re.fullmatch("lamina: .*\n", result.stderr), result.stderr)
    directory = mount(workspace, reference, "fuse")
    if directory:
        subprocess.run(["find", directory, "-type", "f", "-exec", "cat", "{}", "+"], check=False,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
        umount(workspace, directory)
    wait_until(lambda: not workspace.processes(), "the server ends")
    subprocess.run(["rm", "-rf", "--one-file-system", workspace.state], check=True)


@test("hostile.image.layer-of-another-image-under-its-name")
def _(workspace):
    reference, layout, layer = converted(workspace)
    workspace.converted(small_image(), "other")
    stranger = Layout(workspace.path("other"))
    blob = stranger.get(stranger.manifest("latest")["layers"][0]["digest"])
    layout.replace_blob(layer["digest"], blob.ljust(layer["size"], b"\0")[:layer["size"]])
    check_refused(workspace, "digest|sha256", "verify", reference)


@test("hostile.image.more-layers-than-the-configuration-has")
def _(workspace):
    need_root()
    reference, layout, layer = converted(workspace)
    rewrite(layout, lambda manifest: manifest["layers"].extend([layer] * 300))
    result = workspace.lamina("mount", reference, workspace.new_directory("mnt"),
                              f"--state={workspace.state}", status=1)
    check_equal(result.stderr.count("\n"), 1, "lines of the error")
