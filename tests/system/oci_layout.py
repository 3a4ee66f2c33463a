# SPDX-License-Identifier: Apache-2.0
"""Makes OCI image layouts from hand-made layers, and reads them back."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import subprocess

from tar_writer import TarWriter

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def compress_gzip(data):
    return gzip.compress(data, compresslevel=1, mtime=0)


def compress_zstd(data, *options):
    return subprocess.run(["zstd", "-q", "-c", "-3", *options], input=data, check=True,
                          stdout=subprocess.PIPE).stdout


COMPRESSORS = {"": lambda data: data, "+gzip": compress_gzip, "+zstd": compress_zstd}


def digest_of(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Image:
    """An image in the making: add layers from the lowest up, then write()."""

    def __init__(self):
        self.layers = []  # (media type, blob, diff_id)
        self.config = {}  # of the "config" object: Env, Cmd, ...
        self.platform = {"architecture": host_architecture(), "os": "linux"}

    @contextlib.contextmanager
    def layer(self, suffix="+gzip", compress=None, end_blocks=2):
        """Gives a TarWriter; its archive becomes the next layer. The suffix is that of the media
        type, `compress` replaces the compressor that goes with it."""
        out = io.BytesIO()
        writer = TarWriter(out)
        yield writer
        if not writer.ended:
            writer.end(end_blocks)
        self.add(out.getvalue(), suffix, compress)

    def add(self, archive, suffix="+gzip", compress=None, media_type=None):
        blob = (compress or COMPRESSORS[suffix])(archive)
        self.layers.append((media_type or LAYER + suffix, blob, digest_of(archive)))

    def write(self, directory, tag="latest"):
        """Writes the layout and returns the manifest's digest. An existing layout gets one more
        image."""
        layout = Layout(directory)
        layout.create()
        layers = [{"mediaType": media_type, "digest": layout.put(blob), "size": len(blob)}
                  for media_type, blob, _ in self.layers]
        config = dict(self.platform, config=self.config,
                      rootfs={"type": "layers", "diff_ids": [layer[2] for layer in self.layers]})
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST,
                    "config": layout.put_json(config, CONFIG), "layers": layers}
        return layout.add_manifest(manifest, tag, self.platform)


class Layout:
    """An OCI image layout on disk."""

    def __init__(self, directory):
        self.directory = str(directory)

    def path(self, digest):
        return os.path.join(self.directory, "blobs", *digest.split(":"))

    def create(self):
        os.makedirs(os.path.join(self.directory, "blobs", "sha256"), exist_ok=True)
        marker = os.path.join(self.directory, "oci-layout")
        if not os.path.exists(marker):
            with open(marker, "w", encoding="utf-8") as file:
                json.dump({"imageLayoutVersion": "1.0.0"}, file)
            self.write_index({"schemaVersion": 2, "manifests": []})

    def put(self, data):
        digest = digest_of(data)
        with open(self.path(digest), "wb") as file:
            file.write(data)
        return digest

    def put_json(self, document, media_type):
        data = json.dumps(document).encode()
        return {"mediaType": media_type, "digest": self.put(data), "size": len(data)}

    def get(self, digest):
        with open(self.path(digest), "rb") as file:
            return file.read()

    def get_json(self, digest):
        return json.loads(self.get(digest))

    def index(self):
        with open(os.path.join(self.directory, "index.json"), encoding="utf-8") as file:
            return json.load(file)

    def write_index(self, index):
        with open(os.path.join(self.directory, "index.json"), "w", encoding="utf-8") as file:
            json.dump(index, file)

    def add_manifest(self, manifest, tag, platform=None):
        descriptor = self.put_json(manifest, MANIFEST)
        if platform:
            descriptor["platform"] = platform
        if tag:
            descriptor["annotations"] = {"org.opencontainers.image.ref.name": tag}
        index = self.index()
        index["manifests"].append(descriptor)
        self.write_index(index)
        return descriptor["digest"]

    def manifest(self, tag=None):
        """The manifest of a tag, or of the only image."""
        descriptors = self.index()["manifests"]
        if tag:
            key = "org.opencontainers.image.ref.name"
            descriptors = [d for d in descriptors if d.get("annotations", {}).get(key) == tag]
        if len(descriptors) != 1:
            raise ValueError(f"{self.directory}: {len(descriptors)} images match")
        return self.get_json(descriptors[0]["digest"])

    def replace_blob(self, old, data):
        """Changes the bytes behind a digest, leaving the name: what a corrupt origin does."""
        with open(self.path(old), "wb") as file:
            file.write(data)


def host_architecture():
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
