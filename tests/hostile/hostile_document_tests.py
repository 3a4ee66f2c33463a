# SPDX-License-Identifier: Apache-2.0
"""Index, manifest and configuration that are wrong: each is refused with an error that names the
field or the digest."""

import json
import os

from harness import small_image, test
from oci_layout import INDEX, Layout
from refusal import check_conversion_refused

SOME_DIGEST = "sha256:" + "ab" * 32


def refused(name, pattern):
    """Registers a function that spoils the layout of a good image; converting it must then fail."""

    def register(spoil):
        @test(f"hostile.{name}")
        def _(workspace):
            source = workspace.path("source")
            small_image().write(source)
            spoil(Layout(source))
            check_conversion_refused(workspace, f"oci:{source}:latest", pattern)

        return spoil

    return register


def write(layout, name, data):
    with open(os.path.join(layout.directory, name), "wb") as file:
        file.write(data)


def edit_index(layout, change):
    index = layout.index()
    change(index)
    layout.write_index(index)


def edit_manifest(layout, change):
    """Changes the manifest, with a digest that fits, so that nothing but its content is wrong."""
    manifest = layout.manifest()
    change(manifest)
    layout.write_index({"schemaVersion": 2, "manifests": []})
    layout.add_manifest(manifest, "latest")


def edit_config(layout, change):
    config = layout.get_json(layout.manifest()["config"]["digest"])
    config = change(config) or config
    descriptor = layout.put_json(config, "application/vnd.oci.image.config.v1+json")
    edit_manifest(layout, lambda manifest: manifest.update(config=descriptor))


# index.json

INDEXES = {
    "empty": (b"", "index.json"),
    "not-json": (b"{\"schemaVersion\": 2, ", "index.json"),
    "not-an-object": (b"[1, 2]", "index.json"),
    "without-manifests": (b"{\"schemaVersion\": 2}", "manifests"),
    "manifests-not-a-list": (b"{\"schemaVersion\": 2, \"manifests\": {}}", "manifests"),
    "manifest-not-an-object": (b"{\"schemaVersion\": 2, \"manifests\": [7]}", "manifests"),
    "nested-too-deep": (b"[" * 2_000_000, "index.json"),
    "larger-than-any-index": (b" " * (9 << 20) + b"{}", "index.json"),
    "not-utf-8": (b"{\"schemaVersion\": 2, \"manifests\": \"\xff\xfe\"}", "index.json"),
}

for index_name, (index_bytes, index_pattern) in INDEXES.items():
    refused(f"index.{index_name}", index_pattern)(
        lambda layout, data=index_bytes: write(layout, "index.json", data))


@refused("index.missing", "index.json")
def _(layout):
    os.unlink(os.path.join(layout.directory, "index.json"))


@refused("index.is-a-directory", "index.json")
def _(layout):
    os.unlink(os.path.join(layout.directory, "index.json"))
    os.mkdir(os.path.join(layout.directory, "index.json"))


@refused("index.is-a-fifo", "index.json")
def _(layout):
    os.unlink(os.path.join(layout.directory, "index.json"))
    os.mkfifo(os.path.join(layout.directory, "index.json"))


@refused("layout.without-its-marker", "oci-layout")
def _(layout):
    os.unlink(os.path.join(layout.directory, "oci-layout"))


@refused("layout.of-an-unknown-version", "oci-layout|imageLayoutVersion")
def _(layout):
    write(layout, "oci-layout", b'{"imageLayoutVersion": "9.0.0"}')


@refused("index.that-contains-itself", "nest|index|digest")
def _(layout):
    # No index can name its own digest, but a chain can be long.
    descriptor = layout.index()["manifests"][0]
    for _ in range(200):
        descriptor = layout.put_json({"schemaVersion": 2, "mediaType": INDEX,
                                      "manifests": [descriptor]}, INDEX)
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    layout.write_index({"schemaVersion": 2, "manifests": [descriptor]})


# Descriptors: the same faults in the index, for the configuration and for a layer.

DESCRIPTOR_FAULTS = {
    "without-digest": (lambda d: d.pop("digest"), "digest"),
    "digest-not-a-string": (lambda d: d.update(digest=7), "digest"),
    "digest-of-another-algorithm": (lambda d: d.update(digest="md5:" + "ab" * 16), "digest"),
    "digest-that-leaves-the-layout": (
        lambda d: d.update(digest="sha256:../../../../../../../../../../etc/passwd"), "digest"),
    "digest-with-nul": (lambda d: d.update(digest=d["digest"][:-1] + "\0"), "digest"),
    "digest-in-capitals": (lambda d: d.update(digest="sha256:" + "AB" * 32), "digest"),
    "digest-of-nothing-here": (lambda d: d.update(digest=SOME_DIGEST), "ab" * 32),
    "without-size": (lambda d: d.pop("size"), "size"),
    "size-negative": (lambda d: d.update(size=-1), "size"),
    "size-a-string": (lambda d: d.update(size="10"), "size"),
    "size-a-fraction": (lambda d: d.update(size=10.5), "size"),
    "size-beyond-64-bits": (lambda d: d.update(size=1 << 64), "size"),
    "size-too-small": (lambda d: d.update(size=d["size"] - 1), "size|bytes"),
    "size-too-large": (lambda d: d.update(size=d["size"] + 1), "size|bytes"),
    "size-huge": (lambda d: d.update(size=(1 << 63) - 1), "size|bytes|large"),
    "without-media-type": (lambda d: d.pop("mediaType"), "mediaType"),
    "media-type-unknown": (lambda d: d.update(mediaType="text/html"), "text/html"),
}


def add_descriptor_test(place, fault, edit, choose):
    change, pattern = DESCRIPTOR_FAULTS[fault]

    @refused(f"{place}.{fault}", pattern)
    def _(layout):
        edit(layout, lambda document: change(choose(document)))


for fault_name in DESCRIPTOR_FAULTS:
    if fault_name != "media-type-unknown":
        add_descriptor_test("index", fault_name, edit_index, lambda index: index["manifests"][0])
    add_descriptor_test("layer", fault_name, edit_manifest, lambda manifest: manifest["layers"][0])
    if fault_name not in ("without-media-type", "media-type-unknown"):
        add_descriptor_test("config", fault_name, edit_manifest, lambda manifest: manifest["config"])


@refused("index.of-other-things-than-images", "no image")
def _(layout):
    # An index may have entries of other kinds, which are skipped (image-spec, image-index.md).
    edit_index(layout, lambda index: index["manifests"][0].update(mediaType="text/html"))


# Manifests.

MANIFESTS = {
    "not-json": (b"{", "manifest"),
    "not-an-object": (b"\"text\"", "manifest"),
    "without-config": (json.dumps({"schemaVersion": 2, "layers": []}).encode(), "config"),
    "without-layers": (json.dumps({"schemaVersion": 2, "config": {
        "mediaType": "x", "digest": SOME_DIGEST, "size": 2}}).encode(), "layers"),
    "of-schema-1": (json.dumps({"schemaVersion": 1, "name": "x", "fsLayers": []}).encode(),
                    "schemaVersion|config"),
}

for manifest_name, (manifest_bytes, manifest_pattern) in MANIFESTS.items():
    def replace_manifest(layout, data=manifest_bytes):
        digest = layout.put(data)
        edit_index(layout, lambda index: index["manifests"][0].update(digest=digest, size=len(data)))

    refused(f"manifest.{manifest_name}", manifest_pattern)(replace_manifest)


@refused("manifest.with-other-bytes-than-its-digest-says", "digest|sha256")
def _(layout):
    digest = layout.index()["manifests"][0]["digest"]
    layout.replace_blob(digest, layout.get(digest).replace(b"schemaVersion\": 2", b"schemaVersion\": 3"))


@refused("manifest.layers-not-a-list", "layers")
def _(layout):
    edit_manifest(layout, lambda manifest: manifest.update(layers={"0": 1}))


@refused("manifest.more-layers-than-diff-ids", "diff_ids|layers")
def _(layout):
    edit_manifest(layout, lambda manifest: manifest["layers"].append(manifest["layers"][0]))


@refused("manifest.fewer-layers-than-diff-ids", "diff_ids|layers")
def _(layout):
    edit_manifest(layout, lambda manifest: manifest["layers"].clear())


# Configurations.

CONFIGS = {
    "not-an-object": (lambda config: [1], "config"),
    "without-rootfs": (lambda config: config.pop("rootfs") and None, "rootfs"),
    "rootfs-not-an-object": (lambda config: config.update(rootfs=1), "rootfs"),
    "diff-ids-not-a-list": (lambda config: config["rootfs"].update(diff_ids="x"), "diff_ids"),
    "diff-id-not-a-digest": (lambda config: config["rootfs"].update(diff_ids=["sha256:zz"]), "diff_ids"),
    "diff-id-of-other-bytes": (lambda config: config["rootfs"].update(diff_ids=[SOME_DIGEST]),
                               "diff_id|digest"),
    "os-not-a-string": (lambda config: config.update(os=7), "os"),
    "environment-not-strings": (lambda config: config["config"].update(Env=[1, 2]), "Env"),
    "entrypoint-not-a-list": (lambda config: config["config"].update(Entrypoint={"a": 1}),
                              "Entrypoint"),
    "user-not-a-string": (lambda config: config["config"].update(User=["x"]), "User"),
}

for config_name, (config_change, config_pattern) in CONFIGS.items():
    refused(f"config.{config_name}", config_pattern)(
        lambda layout, change=config_change: edit_config(layout, change))


@refused("config.with-other-bytes-than-its-digest-says", "digest|sha256")
def _(layout):
    digest = layout.manifest()["config"]["digest"]
    layout.replace_blob(digest, layout.get(digest)[:-1] + b" ")


@refused("blob.is-a-fifo", "regular|file")
def _(layout):
    path = layout.path(layout.manifest()["layers"][0]["digest"])
    os.unlink(path)
    os.mkfifo(path)


@refused("blob.is-a-directory", "director|regular|file")
def _(layout):
    path = layout.path(layout.manifest()["layers"][0]["digest"])
    os.unlink(path)
    os.mkdir(path)


@refused("layer.with-other-bytes-than-its-digest-says", "digest|sha256")
def _(layout):
    digest = layout.manifest()["layers"][0]["digest"]
    data = bytearray(layout.get(digest))
    data[4] ^= 1  # a time stamp in gzip's header: the content stays the same

    layout.replace_blob(digest, bytes(data))
