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


class ReferrersProxy(Proxy):
    """A server with the API of distribution-spec 1.1, which Debian's does not have."""

    def __init__(self, upstream):
        super().__init__(upstream, self.serve)
        self.attached = {}  # subject: descriptors
        self.pages = self.one_page

    @staticmethod
    def one_page(_, entries):
        """What is answered to a path: entries, and the Link to the next page or None."""
        return entries, None

    def serve(self, handler):
        match = re.match(r"/v2/app/referrers/(sha256:[0-9a-f]+)", handler.path)
        if match:
            entries, link = self.pages(handler.path, self.attached.get(match[1], []))
            index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
            headers = {"Link": f'<{link}>; rel="next"'} if link else {}
            handler.reply(200, json.dumps(index).encode(), Content_Type=INDEX, **headers)
            return True
        if handler.command != "PUT" or "/manifests/" not in handler.path:
            return None
        manifest = json.loads(handler.body)
        subject = manifest.get("subject", {}).get("digest")
        if not subject:
            return None
        self.attached.setdefault(subject, []).append(
            {"mediaType": manifest["mediaType"], "digest": handler.path.rsplit("/", 1)[1],
             "size": len(handler.body), "artifactType": manifest["artifactType"],
             "annotations": manifest.get("annotations", {})})
        return lambda status, headers, body: (status, headers + [("OCI-Subject", subject)], body)


@contextlib.contextmanager
def attached_image(workspace):
    """A proxy with the referrers API, whose app:latest has a converted image attached to it."""
    with plain_registry(workspace) as server, ReferrersProxy(server) as proxy:
        subprocess.run(["skopeo", "copy", "-q", "--dest-tls-verify=false",
                        source_layout(workspace), f"docker://localhost:{server.port}/app"],
                       check=True)
        workspace.lamina("convert", proxy.reference("app"), "--as-referrer")
        yield proxy


@test("registry.referrers-api")
def _(workspace):
    need_root()
    with attached_image(workspace) as proxy:
        original = proxy.reference("app")
        check_equal(len(proxy.attached), 1, "images with something attached")
        check_equal(proxy.count("PUT", "/manifests/sha256-"), 0, "tags that stand in for the API")
        check_reads(workspace, original)
        # One that is attached to another image, or to nothing, is not taken.
        (entries,) = proxy.attached.values()
        entries[:] = [dict(entries[0], digest="sha256:" + "0" * 64)]
        result = workspace.lamina("inspect", original, status=1)
        check("attached" in result.stderr, result.stderr)


@test("registry.referrers-in-pages")
def _(workspace):
    need_root()
    signature = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 5,
                 "digest": "sha256:" + "1" * 64, "artifactType": "application/x-signature"}
    with attached_image(workspace) as proxy:
        original = proxy.reference("app")

        def list_pages(link, count=3):
            def pages(path, entries):
                number = int((re.search(r"page=(\d+)", path) or [0, "0"])[1])
                if number + 1 == count:
                    return entries, None
                path = path.split("?")[0] + f"?page={number + 1}"
                return [signature], link(path)
            proxy.pages = pages
        list_pages(lambda path: path)
        check_reads(workspace, original)
        list_pages(lambda path: "?" + path.split("?")[1])
        workspace.lamina("verify", original)
        # As from a server that does not know what is in front of it. Nobody else is asked.
        with Proxy(proxy.upstream) as other:
            list_pages(lambda path: other.url + path)
            workspace.lamina("verify", original)
            check_equal(other.requests, [], "requests to another host")
        for link, error in ((lambda path: path.replace("/app/", "/secret/"), "out of the repository"),
                            (lambda path: "/v2/app/../secret/", "out of the repository"),
                            (lambda path: "ftp://h" + path, "scheme")):
            list_pages(link)
            result = workspace.lamina("verify", original, status=1)
            check(error in result.stderr, result.stderr)
        check_equal(proxy.count("GET", "/secret/"), 0, "requests for another repository")
        list_pages(lambda path: path, count=0)
        result = workspace.lamina("verify", original, status=1)
        check("more than 100 pages" in result.stderr, result.stderr)
        # A list that breaks off is not taken for a server without the API.
        list_pages(lambda path: path.replace("/referrers/", "/nothing/"))
        result = workspace.lamina("verify", original, status=1)
        check("page 2" in result.stderr and "404" in result.stderr, result.stderr)


@test("registry.tags-in-pages")
def _(workspace):
    """What is converted already is found by a tag on any page."""
    with plain_registry(workspace) as server:
        source = source_layout(workspace)
        workspace.lamina("convert", source, server.reference("app:zz"))

        def fault(handler):
            if "/tags/list" not in handler.path:
                return None
            is_first = "last=" not in handler.path
            tags = {"name": "app", "tags": ["aa"] if is_first else ["zz"]}
            headers = {"Link": '</v2/app/tags/list?last=aa&n=1>; rel="next"'} if is_first else {}
            handler.reply(200, json.dumps(tags).encode(), Content_Type="application/json",
                          **headers)
            return True
        with Proxy(server, fault) as proxy:
            again = json.loads(workspace.lamina("convert", source, proxy.reference("app:new"),
                                                "--json").stdout)
            check_equal([layer["reused"] for layer in again["layers"]], [True], "reused")


@test("registry.host-names-have-no-case")
def _(workspace):
    with filled_registry(workspace) as server:
        workspace.lamina("inspect", f"docker://LOCALHOST:{server.port}/app")


@test("registry.mirror-with-another-answer-for-a-tag")
def _(workspace):
    """A page that wants a log-in, for example: the registry is asked."""
    oci = "application/vnd.oci.image.manifest.v1+json"
    answers = [(200, b"<html>", "text/html"), (200, b"", oci), (200, b"[]", oci),
               (200, b"{}", oci), (204, b"", "text/plain"),
               (200, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}', "application/json"),
               (200, b'{"schemaVersion":1,"name":"x"}',
                "application/vnd.docker.distribution.manifest.v1+prettyjws"),
               (200, b'{"schemaVersion":2}', "application/json")]
    with filled_registry(workspace) as server:
        for status, body, media_type in answers:
            def fault(handler, answer=(status, body, media_type)):
                handler.reply(answer[0], answer[1], Content_Type=answer[2])
                return True
            with Proxy(server, fault) as mirror:
                workspace.lamina("inspect", server.reference("app"), f"--mirror={mirror.url}")
                check(mirror.count("GET", "/manifests/latest") > 0, "the mirror was not asked")
        with Proxy(server) as mirror:
            manifest_of(workspace, server.reference("app"), f"--mirror={mirror.url}")
            check_equal(mirror.count("GET", "/manifests/latest"), 1, "requests to a good mirror")
