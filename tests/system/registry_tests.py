# SPDX-License-Identifier: Apache-2.0
"""Images in registries: pushed, mounted and run from Debian's docker-registry, with TLS, passwords,
tokens, mirrors, and servers that fail or lie."""

import contextlib
import json
import os
import pathlib
import re
import stat
import subprocess

from harness import TRANSPORTS, check, check_equal, need_root, noise, small_image, test
from oci_layout import INDEX, Image, Layout, host_architecture
from registry_server import Authority, Proxy, registry, write_auth_file, write_passwords

MIB = 1 << 20
FILES = {"a": noise(3 * MIB + 5, 1), "b": noise(MIB, 2), "c": b"small\n"}
NO_ENVIRONMENT = {name: value for name, value in os.environ.items()
                  if name not in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR")}


def environment(workspace, **extra):
    """The environment without the credentials of whoever runs the tests."""
    return dict(NO_ENVIRONMENT, HOME=str(workspace.path("no-home")), **extra)


def source_layout(workspace, files=None, name="source"):
    layout = workspace.path(name)
    small_image(files or FILES).write(layout)
    return f"oci:{layout}:latest"


def read_all(directory, files=None):
    for name, content in (files or FILES).items():
        check((directory / name).read_bytes() == content, f"{name} is wrong")


def check_reads(workspace, reference, *options):
    """Mounts with a state directory that knows nothing yet, and reads everything."""
    state = workspace.new_directory("state")
    with workspace.mounted(reference, *options, state=state) as mounted:
        read_all(mounted)


def expect_read_error(workspace, reference, name, *options):
    state = workspace.new_directory("state")
    with workspace.mounted(reference, *options, state=state) as mounted:
        result = subprocess.run(["cat", mounted / name], check=False, capture_output=True,
                                timeout=120)
        check(result.returncode != 0, f"{name} can be read, but should not be")
        check(b"Input/output error" in result.stderr, f"the error is {result.stderr!r}")
    return (state / "engine.log").read_text(encoding="utf-8")


def manifest_of(workspace, reference, *options):
    return json.loads(workspace.lamina("inspect", reference, "--json", *options).stdout)


@contextlib.contextmanager
def plain_registry(workspace, name="registry"):
    with registry(workspace.path(name)) as server:
        yield server


@contextlib.contextmanager
def filled_registry(workspace):
    """A registry that has app:latest, converted from FILES."""
    with plain_registry(workspace) as server:
        workspace.lamina("convert", source_layout(workspace), server.reference("app"))
        yield server


@test("registry.tls-and-passwords")
def _(workspace):
    need_root()
    authority = Authority(workspace.root)
    passwords, auth_file = workspace.path("htpasswd"), workspace.path("auth.json")
    write_passwords(passwords, "ann", "s3cret:word")
    source = source_layout(workspace)
    with registry(workspace.path("registry"), authority, passwords) as server:
        write_auth_file(auth_file, server.host, "ann", "s3cret:word")
        image = server.reference("team/app:v1")
        trusted = f"--ca-file={authority.ca}"
        known = environment(workspace, REGISTRY_AUTH_FILE=str(auth_file))
        unknown = environment(workspace)
        workspace.lamina("convert", source, image, trusted, env=known)
        workspace.lamina("verify", image, trusted, env=known)
        workspace.lamina("verify", image, trusted, "--creds=ann:s3cret:word", env=unknown)
        for transport in TRANSPORTS:
            directory = workspace.new_directory("mnt")
            state = workspace.new_directory("state")
            workspace.lamina("mount", image, directory, trusted, f"--state={state}",
                             f"--transport={transport}", env=known)
            read_all(directory)
            workspace.lamina("umount", directory, f"--state={state}")

        result = workspace.lamina("inspect", image, trusted, status=1, env=unknown)
        check("docker login" in result.stderr, result.stderr)
        result = workspace.lamina("inspect", image, trusted, "--creds=ann:wrong", status=1,
                                  env=unknown)
        check("refuse" in result.stderr and "wrong" not in result.stderr, result.stderr)
        # Without the authority, TLS fails: http is not tried, though it is a loopback address.
        result = workspace.lamina("inspect", image, status=1, env=known)
        check("certificate" in result.stderr, result.stderr)


@test("registry.secrets-stay-in-memory")
def _(workspace):
    need_root()
    passwords = workspace.path("htpasswd")
    write_passwords(passwords, "ann", "s3cretw0rd")
    source = source_layout(workspace)
    with registry(workspace.path("registry"), password_file=passwords) as server:
        image = server.reference("app")
        creds = "--creds=ann:s3cretw0rd"
        workspace.lamina("convert", source, image, creds, env=environment(workspace))
        directory = workspace.new_directory("mnt")
        workspace.lamina("mount", image, directory, creds, f"--state={workspace.state}",
                         env=environment(workspace))
        for pid in workspace.processes():
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"serve" in command:
                check(b"s3cretw0rd" not in command, f"the command line is {command}")
        found = subprocess.run(["grep", "-rl", "s3cretw0rd", workspace.state], check=False,
                               capture_output=True)
        check_equal(found.stdout, b"", "files with the password")
        read_all(directory)
        workspace.lamina("umount", directory, f"--state={workspace.state}")


@test("registry.credential-helper")
def _(workspace):
    need_root()
    passwords = workspace.path("htpasswd")
    write_passwords(passwords, "ann", "from-helper")
    source = source_layout(workspace)
    helper = workspace.path("docker-credential-test")
    helper.write_text("""#!/bin/sh
read host
echo "$1 $host" >> "$0.log"
echo '{"ServerURL":"x","Username":"ann","Secret":"from-helper"}'
""", encoding="ascii")
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    with registry(workspace.path("registry"), password_file=passwords) as server:
        config = workspace.new_directory("docker")
        (config / "config.json").write_text(
            json.dumps({"auths": {server.host: {}}, "credsStore": "test"}), encoding="ascii")
        known = environment(workspace, DOCKER_CONFIG=str(config),
                            PATH=f"{workspace.root}:{os.environ['PATH']}")
        workspace.lamina("convert", source, server.reference("app"), env=known)
        workspace.lamina("verify", server.reference("app"), env=known)
        check(f"get {server.host}" in workspace.path("docker-credential-test.log").read_text(),
              "the helper was not asked for the registry")


@test("registry.run")
def _(workspace):
    need_root()
    image = Image()
    with image.layer() as layer:
        layer.file("bin/busybox", pathlib.Path("/bin/busybox").read_bytes(), mode=0o755)
    layout = workspace.path("source")
    image.write(layout)
    with plain_registry(workspace) as server:
        workspace.lamina("convert", f"oci:{layout}:latest", server.reference("box:1"))
        result = workspace.lamina("run", f"--state={workspace.state}", server.reference("box:1"),
                                  "/bin/busybox", "echo", "hello")
        check_equal(result.stdout, "hello\n", "output")


@test("registry.from-one-to-another")
def _(workspace):
    """Converting between registries keeps no copy, and takes what is there already."""
    need_root()
    image = Image()
    for number in range(3):
        with image.layer() as layer:
            layer.file(f"file{number}", noise(2 * MIB, number))
    layout = workspace.path("source")
    image.write(layout)
    with plain_registry(workspace, "a") as first, plain_registry(workspace, "b") as second:
        subprocess.run(["skopeo", "copy", "-q", "--dest-tls-verify=false",
                        f"oci:{layout}:latest", f"docker://localhost:{first.port}/plain"],
                       check=True)
        with Proxy(first) as watched:
            source = watched.reference("plain")
            destination = second.reference("lazy:v1")
            # A file system of a few pages as the only place to write to.
            small = workspace.new_directory("tmp")
            workspace.lamina("convert", source, destination,
                             env=environment(workspace, TMPDIR=str(small)))
            check_equal(watched.count("GET", "/blobs/") > 3, True, "layers were read")
            reads = watched.count("GET", "/blobs/")
            again = json.loads(workspace.lamina("convert", source, second.reference("lazy:v2"),
                                                "--json").stdout)
            check_equal([layer["reused"] for layer in again["layers"]], [True] * 3, "reused")
            # The configuration is read again, and no layer.
            check_equal(watched.count("GET", "/blobs/") - reads, 1, "blobs read")
        first_digest = manifest_of(workspace, destination)["manifest_digest"]
        second_digest = manifest_of(workspace, second.reference("lazy:v2"))["manifest_digest"]
        check_equal(second_digest, first_digest, "digest of the second conversion")
        local = workspace.path("local")
        workspace.lamina("convert", f"oci:{layout}:latest", f"oci:{local}:latest")
        check_equal(manifest_of(workspace, f"oci:{local}:latest")["manifest_digest"], first_digest,
                    "digest of a conversion to a layout")
        with workspace.mounted(destination) as mounted:
            for number in range(3):
                check((mounted / f"file{number}").read_bytes() == noise(2 * MIB, number), "content")


def write_platforms(layout, platforms):
    """An index of images, each with a file that names its platform."""
    place = Layout(layout)
    place.create()
    manifests = []
    for architecture in platforms:
        image = small_image({"platform": architecture.encode(), "same": noise(MIB, 9)})
        image.platform = {"architecture": architecture, "os": "linux"}
        image.write(layout, tag="tmp-" + architecture)
        manifests += [entry for entry in place.index()["manifests"]
                      if entry["annotations"]["org.opencontainers.image.ref.name"] ==
                      "tmp-" + architecture]
    for entry in manifests:
        entry.pop("annotations")
    index = place.put_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, INDEX)
    index["annotations"] = {"org.opencontainers.image.ref.name": "all"}
    place.write_index({"schemaVersion": 2, "manifests": [index]})


@test("registry.all-platforms")
def _(workspace):
    need_root()
    layout = workspace.path("source")
    write_platforms(layout, [host_architecture(), "s390x"])
    with plain_registry(workspace) as server:
        subprocess.run(["skopeo", "copy", "-q", "--all", "--dest-tls-verify=false",
                        f"oci:{layout}:all", f"docker://localhost:{server.port}/plain:all"],
                       check=True)
        source, destination = server.reference("plain:all"), server.reference("lazy:all")
        workspace.lamina("convert", source, destination, "--platform=all")
        raw = subprocess.run(["skopeo", "inspect", "--raw", "--tls-verify=false", destination],
                             check=True, capture_output=True).stdout
        platforms = [entry["platform"]["architecture"] for entry in json.loads(raw)["manifests"]]
        check_equal(sorted(platforms), sorted([host_architecture(), "s390x"]), "platforms")
        with workspace.mounted(destination) as mounted:
            check_equal((mounted / "platform").read_text(), host_architecture(), "platform")
        # The same through a layout.
        local = workspace.path("local")
        workspace.lamina("convert", source, f"oci:{local}:all", "--platform=all")
        workspace.lamina("verify", f"oci:{local}:all")
        # Each can be attached to its original.
        workspace.lamina("convert", source, "--platform=all", "--as-referrer")
        with workspace.mounted(source) as mounted:
            check_equal((mounted / "platform").read_text(), host_architecture(), "platform")


@test("registry.as-referrer")
def _(workspace):
    need_root()
    with plain_registry(workspace) as server:
        original = server.reference("app:v1")
        layout = source_layout(workspace)
        subprocess.run(["skopeo", "copy", "-q", "--dest-tls-verify=false", layout,
                        f"docker://localhost:{server.port}/app:v1"], check=True)
        before = manifest_raw(original)
        result = workspace.lamina("mount", original, workspace.new_directory("mnt"),
                                  f"--state={workspace.state}", status=1)
        check("lamina convert" in result.stderr, result.stderr)
        workspace.lamina("convert", original, "--as-referrer")
        check_equal(manifest_raw(original), before, "the original's manifest")
        check_reads(workspace, original)
        workspace.lamina("verify", original)
        # A second time replaces the first rather than adding to it.
        workspace.lamina("convert", original, "--as-referrer")
        check_reads(workspace, original)


def manifest_raw(reference):
    return subprocess.run(["skopeo", "inspect", "--raw", "--tls-verify=false", reference],
                          check=True, capture_output=True).stdout


@test("registry.referrers-api")
def _(workspace):
    """A server with the API of distribution-spec 1.1, which Debian's does not have."""
    need_root()
    attached = {}  # subject: descriptors

    def fault(handler):
        match = re.match(r"/v2/app/referrers/(sha256:[0-9a-f]+)", handler.path)
        if match:
            index = {"schemaVersion": 2, "mediaType": INDEX,
                     "manifests": attached.get(match[1], [])}
            handler.reply(200, json.dumps(index).encode(), Content_Type=INDEX)
            return True
        if handler.command != "PUT" or "/manifests/" not in handler.path:
            return None
        manifest = json.loads(handler.body)
        subject = manifest.get("subject", {}).get("digest")
        if not subject:
            return None
        attached.setdefault(subject, []).append(
            {"mediaType": manifest["mediaType"], "digest": handler.path.rsplit("/", 1)[1],
             "size": len(handler.body), "artifactType": manifest["artifactType"]})
        return lambda status, headers, body: (status, headers + [("OCI-Subject", subject)], body)
    with plain_registry(workspace) as server, Proxy(server, fault) as proxy:
        subprocess.run(["skopeo", "copy", "-q", "--dest-tls-verify=false",
                        source_layout(workspace), f"docker://localhost:{server.port}/app"],
                       check=True)
        original = proxy.reference("app")
        workspace.lamina("convert", original, "--as-referrer")
        check_equal(len(attached), 1, "images with something attached")
        check_equal(proxy.count("PUT", "/manifests/sha256-"), 0, "tags that stand in for the API")
        check_reads(workspace, original)
        # One that is attached to another image, or to nothing, is not taken.
        (entries,) = attached.values()
        entries[:] = [dict(entries[0], digest="sha256:" + "0" * 64)]
        result = workspace.lamina("inspect", original, status=1)
        check("attached" in result.stderr, result.stderr)
