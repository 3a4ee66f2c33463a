# SPDX-License-Identifier: Apache-2.0
"""The Debian package: on a system that has only what it depends on, its programs work."""

import hashlib
import os
import pathlib
import re
import subprocess

from harness import check, check_equal, need_root, program, test
from real_image_tests import REPOSITORY

PROGRAMS = ("/usr/bin/lamina", "/usr/sbin/laminad", "/usr/bin/lamina-agent", "/usr/bin/lamina-fncall")


def build_package(workspace):
    build = pathlib.Path(program("LAMINA")).parents[2]
    directory = workspace.new_directory("package")
    run("cpack", "--config", build / "CPackConfig.cmake", "-G", "DEB", "-B", directory)
    packages = list(directory.glob("*.deb"))
    check_equal(len(packages), 1, "number of packages")
    return packages[0]


def run(*command, **options):
    result = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True,
                            stdin=subprocess.DEVNULL, **options)
    check(result.returncode == 0, f"{command[0]} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def real_packages(names):
    """The same packages, with those that have virtual ones instead of these, as debootstrap wants it."""
    providers = {}
    for line in run("dpkg-query", "--show", "--showformat=${Package}\t${Provides}\n").splitlines():
        package, _, provided = line.partition("\t")
        for virtual in provided.split(","):
            providers[virtual.split("(")[0].strip()] = package
        providers[package] = package
    return sorted({providers.get(name, name) for name in names})


def root_with(workspace, packages):
    cache = pathlib.Path(os.environ.get("LAMINA_TEST_CACHE")
                         or pathlib.Path.home() / ".cache" / "lamina")
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    archive = cache / f"debian-minbase-{name}.tar"
    run(REPOSITORY / "tools" / "debian-rootfs", archive, *packages)
    root = workspace.new_directory("root")
    run("tar", "-C", root, "--numeric-owner", "-xf", archive)
    return root


@test("package.installs-runs-and-goes")
def _(workspace):
    need_root("dpkg and chroot need root")
    package = build_package(workspace)
    depends = run("dpkg-deb", "--field", package, "Depends")
    packages = real_packages(re.split(r"[ (|]", entry.strip())[0] for entry in depends.split(","))
    check("libc6" in packages and "fuse3" in packages, f"depends on {depends}")
    root = root_with(workspace, packages)
    run("mount", "-t", "proc", "proc", root / "proc")  # the workspace unmounts it, if need be
    run("dpkg", f"--root={root}", "--install", package)
    for path in (*PROGRAMS, "/etc/lamina/config.toml", "/lib/systemd/system/laminad.service"):
        check(os.path.lexists(f"{root}{path}") or os.path.lexists(f"{root}/usr{path}"),
              f"{path} is not in the package")

    def inside(*command):
        return run("chroot", root, *command)

    check("convert" in inside("lamina", "--help"), "lamina --help says nothing of convert")
    check("config" in inside("laminad", "--help"), "laminad --help says nothing of its configuration")
    inside("mkdir", "/tree")
    (root / "tree/hello").write_text("hello\n", encoding="utf-8")
    inside("lamina", "convert", "dir:/tree", "oci:/image:latest")
    inside("lamina", "verify", "oci:/image:latest")

    # What is still mounted then goes; what others have below a mount stays theirs.
    left = root / "var/lib/lamina" / "snapshots" / "a\\b 7"
    left.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "tmpfs", left)
    (left / "tree").mkdir()
    for _ in range(2):
        run("mount", "--bind", root / "tree", left / "tree")
    run("mount", "--bind", root / "tree", left.parent)
    run("dpkg", f"--root={root}", "--purge", "lamina")
    check_equal((root / "tree/hello").read_text(encoding="utf-8"), "hello\n", "a file of somebody else")
    run("umount", root / "proc")
    for path in (*PROGRAMS, "/etc/lamina", "/var/lib/lamina"):
        check(not os.path.lexists(f"{root}{path}"), f"{path} is left")
