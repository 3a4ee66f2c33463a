# SPDX-License-Identifier: Apache-2.0
"""Images as people have them: a Debian, a tree of a hundred thousand files, very many layers.

The Debian root file system is kept in LAMINA_TEST_CACHE (~/.cache/lamina if not set) between runs."""

import os
import pathlib
import subprocess
import sysconfig

import reference
from harness import TRANSPORTS, check, check_equal, compare, drop_caches, need_root, noise, test
from oci_layout import Image

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODES = [[f"--transport={transport}"] for transport in TRANSPORTS]
LOOP = ["--transport=erofs", "--loop"]


def debian(*packages):
    """A tar archive of a minimal Debian with further packages."""
    need_root("debootstrap needs root")
    cache = pathlib.Path(os.environ.get("LAMINA_TEST_CACHE")
                         or pathlib.Path.home() / ".cache" / "lamina")
    archive = cache / ("-".join(("debian-minbase",) + packages) + ".tar")
    subprocess.run([REPOSITORY / "tools" / "debian-rootfs", archive, *packages], check=True)
    return archive


def check_shows(workspace, image, expected, modes):
    for mode in modes:
        with workspace.mounted(image, *mode) as mounted:
            compare(expected, mounted)


def write_and_extract(workspace, image):
    source, expected = workspace.path("source"), workspace.path("expected")
    image.write(source)
    reference.extract(source, expected)
    return source, expected


def check_image(workspace, image, modes):
    need_root()
    source, expected = write_and_extract(workspace, image)
    check_shows(workspace, workspace.convert(f"oci:{source}"), expected, modes)


@test("real.debian")
def _(workspace):
    image = Image()
    image.add(debian().read_bytes(), "+zstd")
    check_image(workspace, image, [*MODES, LOOP])


@test("real.debian-changed-by-umoci-in-a-docker-archive")
def _(workspace):
    image = Image()
    image.add(debian().read_bytes(), "+gzip")
    source = workspace.path("layout")
    image.write(source)
    bundle = workspace.path("bundle")
    umoci = ["umoci", "--log=error"]
    subprocess.run([*umoci, "unpack", f"--image={source}:latest", bundle], check=True)
    rootfs = bundle / "rootfs"
    subprocess.run(["rm", "-rf", rootfs / "usr/share/doc", rootfs / "etc/passwd",
                    rootfs / "var/log"], check=True)
    (rootfs / "var/log").mkdir()
    (rootfs / "var/log/new").write_bytes(b"new")
    (rootfs / "usr/share/doc").symlink_to("elsewhere")
    os.chmod(rootfs / "usr/bin/passwd", 0o755)
    os.link(rootfs / "usr/bin/dpkg", rootfs / "usr/bin/dpkg-too")
    subprocess.run([*umoci, "repack", f"--image={source}:latest", bundle], check=True)
    expected = workspace.path("expected")
    # Status 2: see whiteout.below-what-replaced-the-directory.
    reference.extract(source, expected, "latest", tar_status=(0, 2))
    archive = workspace.path("archive.tar")
    subprocess.run(["skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{source}:latest",
                    f"docker-archive:{archive}:debian:changed"], check=True)
    converted = workspace.convert(f"docker-archive:{archive}")
    check_shows(workspace, converted, expected, MODES)


@test("real.debian-directory")
def _(workspace):
    need_root()
    root = workspace.path("root")
    root.mkdir()
    subprocess.run(["tar", "-xpf", debian(), "--numeric-owner", "--xattrs", "--xattrs-include=*",
                    "--acls", "-C", root], check=True)
    check_shows(workspace, workspace.convert(f"dir:{root}"), root, MODES[:1])


@test("real.debian-runs-and-reads-a-part-of-itself")
def _(workspace):
    image = Image()
    image.add(debian().read_bytes(), "+zstd")
    converted = workspace.converted(image)
    with workspace.mounted(converted) as mounted:
        drop_caches()
        out = subprocess.run(["chroot", mounted, "dpkg-query", "--show", "bash"], check=True,
                             capture_output=True).stdout
        check(out.startswith(b"bash\t"), f"dpkg-query says {out!r}")
        report = workspace.stats(mounted)[0]
        check(report["frames_present"] < report["frames"] / 4,
              f"{report['frames_present']} of {report['frames']} frames were fetched")
    result = workspace.lamina("run", converted, f"--state={workspace.state}", "--", "sh", "-c",
                              ". /etc/os-release && echo $ID && touch /var/tmp/x")
    check_equal(result.stdout, "debian\n", "output of a container")


@test("real.127-layers")
def _(workspace):
    # More than a page of mount options, and more layers than overlayfs would take by name.
    image = Image()
    for number in range(127):
        with image.layer(suffix=("", "+gzip", "+zstd")[number % 3]) as layer:
            layer.file(f"own/{number}", noise(3000, number))
            layer.file("common", b"%d" % number)
            layer.directory(f"d{number % 5}", mode=0o700 + number % 8)
            layer.file(f"d{number % 5}/{number}", b"x" * number)
            if number >= 10:
                layer.whiteout(f"own/{number - 10}")
            if number % 40 == 39:
                layer.opaque(f"d{number % 5}")
    check_image(workspace, image, [*MODES, LOOP])


@test("real.20-layers-of-5000-files")
def _(workspace):
    image = Image()
    for number in range(20):
        with image.layer() as layer:
            for entry in range(5000):
                layer.file(f"d{entry % 50}/layer{number}-{entry}", b"%d %d\n" % (number, entry) * 9,
                           mtime=1_500_000_000 + entry)
            layer.file("common", b"%d" % number)
            if number:
                layer.whiteout(f"d7/layer{number - 1}-7")
    check_image(workspace, image, MODES)


@test("real.python-tree-of-100000-files")
def _(workspace):
    # Copies of the library's sources, each made different, as site-packages of many services are.
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = [(path.relative_to(library), path.read_bytes()[:3000])
               for path in sorted(library.rglob("*.py"))]
    check(len(sources) > 300, f"only {len(sources)} files in {library}")
    image = Image()
    with image.layer() as layer:
        for number in range(100_500 // len(sources) + 1):
            for path, content in sources:
                layer.file(f"usr/lib/python3/copy{number}/{path}", b"# %d\n" % number + content)
    check_image(workspace, image, MODES)


@test("real.directory-of-100000-entries")
def _(workspace):
    image = Image()
    with image.layer() as layer:
        for number in range(100_000):
            if number % 10:
                layer.symlink(f"d/{number:0>40}", f"{number}")
            else:
                layer.file(f"d/{number:0>40}")
    check_image(workspace, image, MODES)
