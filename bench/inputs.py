# SPDX-License-Identifier: Apache-2.0
"""What is measured: made once, kept in a cache directory, each piece complete or absent.

  tree/           root/   Debian with Python and NumPy
                  big/    files of 64 MiB with the bytes of root/'s files
                  small/  10,000 files of up to 16 KiB, 2,000 of them with an attribute
  tree.oci/       tree/ as an OCI image of one gzip layer
  big.tar.zst     tree/big, at the level that lamina uses by default
  service.oci/    1 GB: Debian with what a data service needs, one gzip layer
  many.oci/       100,000 files in 20 layers, each of which changes some of the layer below
  startup-*.oci/  the images of the startup benchmark (images.py); startup-base/ is their lower layer
  density-*/      images of the density benchmark (image-N.oci/): busybox and random files, two thirds of
                  them in a layer that all share (base/), the others in one of their own (top-N/)
"""

import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import stat
import subprocess
import tarfile

import images
from node import unmount_below

BIG_FILES = 4
BIG_FILE_BYTES = 64 << 20
SMALL_FILES = 10_000
SMALL_FILES_WITH_ATTRIBUTE = 2_000
SMALL_DIRECTORY_FILES = 100
TREE_PACKAGES = ["python3", "python3-numpy", "ca-certificates"]
SERVICE_PACKAGES = ["ca-certificates", "g++", "git", "openjdk-17-jre-headless", "postgresql",
                    "python3-matplotlib", "python3-pandas", "python3-scipy", "python3-sklearn"]
MANY_LAYERS = 20
MANY_LAYER_FILES = 5_000
MANY_DIRECTORY_FILES = 50
MIB = 1 << 20
DENSITY_FILE_BYTES = 10 * MIB
BUSYBOX = pathlib.Path("/bin/busybox")  # static
DEFAULT_LEVEL = 3
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Inputs:
    def __init__(self, cache: pathlib.Path):
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def _made(self, name: str, make) -> pathlib.Path:
        """The path of a piece; `make` writes it if it is not there."""
        path = self.cache / name
        if not path.exists():
            print(f"making {path}", flush=True)
            temporary = self.cache / (name + ".tmp")
            remove_tree(temporary)
            make(temporary)
            temporary.rename(path)
        return path

    def tree(self) -> pathlib.Path:
        return self._made("tree", make_tree)

    def tree_image(self) -> pathlib.Path:
        tree = self.tree()
        return self._made("tree.oci", lambda path: make_tree_image(tree, path))

    def big_archive(self) -> pathlib.Path:
        big = self.tree() / "big"
        return self._made("big.tar.zst", lambda path: make_archive(big, path))

    def service_image(self) -> pathlib.Path:
        return self._made("service.oci", make_service_image)

    def many_image(self) -> pathlib.Path:
        return self._made("many.oci", make_many_image)

    def startup_image(self, image: images.BenchImage) -> pathlib.Path:
        base = self._made("startup-base", lambda path: make_debian(path, images.BASE_PACKAGES))
        return self._made(f"startup-{image.name}.oci",
                          lambda path: make_startup_image(image, base, path))

    def density_images(self, count: int, mebibytes: int) -> pathlib.Path:
        return self._made(f"density-{count}x{mebibytes}",
                          lambda path: make_density_images(path, count, mebibytes))


def remove_tree(path: pathlib.Path) -> None:
    """Also one in which debootstrap was killed, with /proc of this machine mounted in it."""
    unmount_below(path)
    if path.exists():
        subprocess.run(["rm", "-rf", "--one-file-system", path], check=True)


def make_tree(path: pathlib.Path) -> None:
    path.mkdir()
    root = path / "root"
    make_debian(root, TREE_PACKAGES)

    (path / "big").mkdir()
    content = io.BufferedReader(ContentOfTree(root), 1 << 20)
    for number in range(BIG_FILES):
        with open(path / "big" / str(number), "wb") as file:
            for _ in range(BIG_FILE_BYTES >> 20):
                file.write(content.read(1 << 20))

    chance = random.Random(1)
    for number in range(SMALL_FILES):
        file = path / "small" / str(number // SMALL_DIRECTORY_FILES) / str(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.read(chance.randint(1, 16 << 10)))
        if number < SMALL_FILES_WITH_ATTRIBUTE:
            os.setxattr(file, "user.bench", b"value %d" % number)


class ContentOfTree(io.RawIOBase):
    """The bytes of a tree's files one after the other, without end."""

    def __init__(self, root: pathlib.Path):
        super().__init__()
        self._paths = sorted(path for path in root.rglob("*")
                             if path.is_file() and not path.is_symlink())
        self._next = 0
        self._file = open(os.devnull, "rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while (got := self._file.readinto(buffer)) == 0:
            self._file.close()
            self._file = open(self._paths[self._next % len(self._paths)], "rb")
            self._next += 1
        return got


def make_archive(directory: pathlib.Path, path: pathlib.Path) -> None:
    with open(path, "wb") as output:
        tar = subprocess.Popen(["tar", "-C", directory, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["zstd", "-q", f"-{DEFAULT_LEVEL}", "-c"], stdin=tar.stdout, stdout=output,
                       check=True)
        if tar.wait() != 0:
            raise RuntimeError(f"tar of {directory} failed")


def make_tree_image(tree: pathlib.Path, path: pathlib.Path) -> None:
    layout = LayoutWriter(path)
    layer = path / "layer.tar"
    subprocess.run(["tar", "-C", tree, "--format=pax", "--xattrs", "--xattrs-include=*",
                    "--sort=name", "-cf", layer, "."], check=True)
    diff_id = sha256(layer)
    subprocess.run(["gzip", "-n", layer], check=True)
    layout.add_layer(pathlib.Path(f"{layer}.gz"), "tar+gzip", diff_id)
    layout.finish()


def make_debian(root: pathlib.Path, packages: list[str]) -> None:
    root.parent.mkdir(exist_ok=True)
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", "bookworm", root],
        check=True, stdout=subprocess.DEVNULL)
    for unneeded in ("var/cache/apt", "var/lib/apt/lists", "dev"):
        shutil.rmtree(root / unneeded)
        (root / unneeded).mkdir()


def make_service_image(path: pathlib.Path) -> None:
    tree = path / "tree"
    make_debian(tree, SERVICE_PACKAGES)
    make_tree_image(tree, path)
    remove_tree(tree)


def make_startup_image(image: images.BenchImage, base: pathlib.Path, path: pathlib.Path) -> None:
    """An OCI layout of two layers: the base system, which all images share, and what the image adds."""
    tree = path / "tree"
    make_debian(tree, images.BASE_PACKAGES + image.packages)
    if image.model_bytes > 0:
        write_model(tree / images.MODEL, image.model_bytes)
    layout = LayoutWriter(path)
    layer = path / "layer.tar"
    write_layer(layout, layer, base, ["."])
    write_layer(layout, layer, tree, changed(base, tree))
    layout.finish(image.command)
    remove_tree(tree)


def write_model(path: pathlib.Path, size: int) -> None:
    path.parent.mkdir(parents=True)
    chance = random.Random(3)
    with open(path, "wb") as file:
        for _ in range(size >> 20):
            file.write(chance.randbytes(1 << 20))


def write_tar(layer: pathlib.Path, tree: pathlib.Path, names: list[str]) -> None:
    deterministic = ["--sort=name", "--mtime=@1700000000", "--clamp-mtime"]
    subprocess.run(["tar", "-C", tree, "--format=pax", "--numeric-owner", *deterministic,
                    *(["--no-recursion"] if names != ["."] else []),
                    "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime",
                    "--null", "--files-from=-", "-cf", layer],
                   input=b"\0".join(map(os.fsencode, names)), check=True)


def write_layer(layout: "LayoutWriter", layer: pathlib.Path, tree: pathlib.Path,
                names: list[str]) -> None:
    write_tar(layer, tree, names)
    diff_id = sha256(layer)
    subprocess.run(["gzip", "--no-name", "-6", layer], check=True)
    layout.add_layer(pathlib.Path(f"{layer}.gz"), "tar+gzip", diff_id)


def changed(base: pathlib.Path, tree: pathlib.Path) -> list[str]:
    """Paths of what is not the same in the base, which lacks nothing that was removed since."""
    found = []
    for directory, names, files in os.walk(tree):
        for name in [*names, *files]:
            path = pathlib.Path(directory, name)
            relative = path.relative_to(tree)
            if not is_same(base / relative, path):
                found.append(str(relative))
    return sorted(found)


def is_same(base: pathlib.Path, path: pathlib.Path) -> bool:
    try:
        old = base.lstat()
    except FileNotFoundError:
        return False
    new = path.lstat()
    if (old.st_mode, old.st_uid, old.st_gid) != (new.st_mode, new.st_uid, new.st_gid):
        return False
    if stat.S_ISDIR(new.st_mode):
        return True
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(base) == os.readlink(path)
    return old.st_size == new.st_size and base.read_bytes() == path.read_bytes()


def make_density_images(path: pathlib.Path, count: int, mebibytes: int) -> None:
    chance = random.Random(4)
    files = mebibytes * MIB // DENSITY_FILE_BYTES
    base = path / "base"
    make_busybox_tree(base)
    write_random_files(base / "data", "shared", files * 2 // 3, chance)
    for number in range(count):
        top = path / f"top-{number}"
        write_random_files(top / "data", "own", files - files * 2 // 3, chance)
        layout = LayoutWriter(path / f"image-{number}.oci")
        for tree in (base, top):
            layer = path / "layer.tar"
            write_tar(layer, tree, ["."])
            layout.add_layer(layer, "tar", sha256(layer))
        layout.finish()


def make_busybox_tree(path: pathlib.Path) -> None:
    """The least that every backend can start."""
    for name in ("bin", "data", "dev", "etc", "proc", "sys", "tmp"):
        (path / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, path / "bin/busybox")
    for name in ("cat", "dd", "sh", "sleep", "true"):
        (path / "bin" / name).symlink_to("busybox")


def write_random_files(directory: pathlib.Path, name: str, count: int,
                       chance: random.Random) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (directory / f"{name}-{number}").write_bytes(chance.randbytes(DENSITY_FILE_BYTES))


def make_many_image(path: pathlib.Path) -> None:
    layout = LayoutWriter(path)
    chance = random.Random(2)
    words = chance.randbytes(1 << 20)
    for number in range(MANY_LAYERS):
        layer = path / "layer.tar"
        with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as archive:
            write_many_layer(archive, number, chance, words)
        layout.add_layer(layer, "tar", sha256(layer))
    layout.finish()


def write_many_layer(archive: tarfile.TarFile, layer: int, chance: random.Random,
                     words: bytes) -> None:
    def add(name: str, kind: bytes, size: int = 0) -> None:
        entry = tarfile.TarInfo(name)
        entry.type = kind
        entry.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        entry.mtime = 1_700_000_000 + layer
        entry.size = size
        start = chance.randrange(len(words) - size)
        archive.addfile(entry, io.BytesIO(words[start:start + size]))

    def file_name(of_layer: int, number: int) -> str:
        return f"usr/lib/package{of_layer}/{number // MANY_DIRECTORY_FILES}/file{number}.dat"

    for directory in ("usr", "usr/lib", f"usr/lib/package{layer}"):
        add(directory, tarfile.DIRTYPE)
    for number in range(MANY_LAYER_FILES):
        if number % MANY_DIRECTORY_FILES == 0:
            add(os.path.dirname(file_name(layer, number)), tarfile.DIRTYPE)
        add(file_name(layer, number), tarfile.REGTYPE, chance.randint(100, 4000))
    add(f"usr/lib/temporary{layer}", tarfile.REGTYPE, 100)
    if layer > 0:
        add(f"usr/lib/.wh.temporary{layer - 1}", tarfile.REGTYPE)
        for number in range(0, MANY_LAYER_FILES, 100):
            add(file_name(layer - 1, number), tarfile.REGTYPE, chance.randint(100, 4000))


def sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class LayoutWriter:
    """An OCI image layout with one image, tagged "latest"."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._blobs = path / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)
        self._layers: list[dict] = []
        self._diff_ids: list[str] = []

    def add_layer(self, file: pathlib.Path, kind: str, diff_id: str) -> None:
        """Moves the file into the layout."""
        digest = sha256(file)
        size = file.stat().st_size
        file.rename(self._blobs / digest)
        self._layers.append({"mediaType": f"application/vnd.oci.image.layer.v1.{kind}",
                             "digest": f"sha256:{digest}", "size": size})
        self._diff_ids.append(f"sha256:{diff_id}")

    def finish(self, command: list[str] | None = None) -> None:
        settings = {"Env": [f"PATH={DEFAULT_PATH}"], "Cmd": command} if command else {}
        config = self._add_json("application/vnd.oci.image.config.v1+json", {
            "architecture": "amd64", "os": "linux", "config": settings,
            "rootfs": {"type": "layers", "diff_ids": self._diff_ids}})
        manifest = self._add_json("application/vnd.oci.image.manifest.v1+json", {
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": self._layers})
        manifest["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
        (self._path / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
        (self._path / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))

    def _add_json(self, media_type: str, value: dict) -> dict:
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}
