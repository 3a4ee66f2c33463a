# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd for tests: one that belongs to a workspace, with laminad as its snapshotter."""

import contextlib
import json
import os
import subprocess

from daemon import Daemon
from harness import Failure, check, program, wait_until
from oci_layout import Image
from registry_server import registry

NAMESPACE = "test"
TIMEOUT = 300
CONFIG = """
version = 2
root = "{root}/containerd"
state = "{root}/run"
[grpc]
  address = "{root}/containerd.sock"
[proxy_plugins.lamina]
  type = "snapshot"
  address = "{root}/lamina.sock"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "lamina"
  disable_snapshot_annotations = false
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""


class Containerd:
    """containerd, whose files are below the workspace. As a context manager it is ended, with the
    shims of its containers."""

    def __init__(self, workspace):
        self.root = workspace.root
        self.address = self.root / "containerd.sock"
        self.config = workspace.path("containerd.toml")
        self.config.write_text(CONFIG.format(root=self.root), encoding="utf-8")
        self.log = workspace.path("containerd.log")
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(["containerd", "--config", self.config],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def answers():
            check(self.process.poll() is None, f"containerd ended:\n{self.log_text()}")
            return self.ctr("version", status=None).returncode == 0

        wait_until(answers, "containerd answers")
        return self

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=60)

    def log_text(self):
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.remove_containers()
        self.stop()

    def ctr(self, *arguments, namespace=NAMESPACE, status=0):
        return self._run(["ctr", "--address", str(self.address), "--namespace", namespace, *arguments],
                         status)

    def client(self, *arguments, namespace=NAMESPACE, status=0):
        """The program in tests/snapshotter/client."""
        return self._run([program("CONTAINERD_CLIENT"), str(self.address), namespace, *arguments],
                         status)

    @staticmethod
    def _run(command, status):
        command = list(map(str, command))
        try:
            result = subprocess.run(command, check=False, capture_output=True, text=True,
                                    stdin=subprocess.DEVNULL, timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"{' '.join(command)} hangs") from error
        if status is not None and result.returncode != status:
            raise Failure(f"{' '.join(command)} exited with {result.returncode}, not {status}:\n"
                          f"{result.stdout}{result.stderr}")
        return result

    def run(self, image, name, *command, options=(), status=0, namespace=NAMESPACE):
        """Runs a container to its end and gives what it printed."""
        return self.ctr("run", "--rm", *self._run_options(), *options, image, name, *command,
                        status=status, namespace=namespace).stdout

    def start_container(self, image, name, *command, namespace=NAMESPACE):
        self.ctr("run", "--detach", *self._run_options(), image, name, *command,
                 namespace=namespace)

    def _run_options(self):
        # What runc knows of containers is the workspace's: names that a killed test left are free.
        return ["--snapshotter=lamina", f"--runc-root={self.root}/runc"]

    def execute(self, name, *command, namespace=NAMESPACE, status=0):
        return self.ctr("tasks", "exec", f"--exec-id=e{os.urandom(4).hex()}", name, *command,
                        namespace=namespace, status=status).stdout

    def remove_container(self, name, namespace=NAMESPACE):
        self.ctr("tasks", "delete", "--force", name, namespace=namespace, status=None)
        self.ctr("containers", "delete", name, namespace=namespace)

    def remove_containers(self):
        for namespace in self.ctr("namespaces", "list", "-q").stdout.split():
            for name in self.ctr("containers", "list", "-q", namespace=namespace).stdout.split():
                self.remove_container(name, namespace=namespace)

    def images(self, namespace=NAMESPACE):
        return self.ctr("images", "list", "-q", namespace=namespace).stdout.split()

    def remove_image(self, image, namespace=NAMESPACE):
        """And waits for the garbage collection."""
        self.ctr("images", "remove", "--sync", image, namespace=namespace)

    def snapshots(self, namespace=NAMESPACE):
        """Of the snapshotter, by key: (parent, kind)."""
        lines = self.ctr("snapshots", "--snapshotter=lamina", "list",
                         namespace=namespace).stdout.splitlines()[1:]
        fields = [line.split() for line in lines]
        return {f[0]: (f[1] if len(f) == 3 else "", f[-1]) for f in fields}

    def content_sizes(self, namespace=NAMESPACE):
        """Sizes of what is in the content store, by digest."""
        listed = self.ctr("content", "list", "-q", namespace=namespace).stdout.split()
        blobs = self.root / "containerd/io.containerd.content.v1.content/blobs"
        return {digest: (blobs / digest.replace(":", "/")).stat().st_size for digest in listed}


class Node:
    """A registry, laminad as a snapshotter, and containerd, all of a workspace's own."""

    def __init__(self, workspace, server, daemon, containerd):
        self.workspace = workspace
        self.server = server
        self.daemon = daemon
        self.containerd = containerd

    def name(self, repository):
        """An image, as containerd's clients name it."""
        return f"{self.server.host}/{repository}:latest"

    def push(self, image, repository):
        """Writes an Image to the registry as it is."""
        layout = self.workspace.new_directory("layout")
        image.write(layout)
        subprocess.run(["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}:latest",
                        f"docker://{self.name(repository)}"], check=True, timeout=TIMEOUT)
        return self.name(repository)

    def push_converted(self, image, repository):
        layout = self.workspace.new_directory("layout")
        image.write(layout)
        self.workspace.lamina("convert", f"oci:{layout}:latest", f"docker://{self.name(repository)}")
        return self.name(repository)

    def layer_mounts(self):
        """Mount points of converted layers."""
        return [path for path in self.workspace.mounts()
                if path.startswith(f"{self.workspace.state}/snapshots/L")]


@contextlib.contextmanager
def node(workspace, **settings):
    """`settings` are laminad's, of its section [snapshotter]."""
    with registry(workspace.path("registry")) as server:
        values = {"socket": str(workspace.path("lamina.sock")),
                  "containerd": str(workspace.path("containerd.sock")),
                  "registries": [server.host], "layer-images": [f"docker://{server.host}/"],
                  "idle-seconds": 1, **settings}
        config = workspace.path("laminad.toml")
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        config.write_text("\n".join(["[snapshotter]", *lines, ""]), encoding="utf-8")
        with Daemon(workspace, f"--config={config}") as daemon, \
                Containerd(workspace) as containerd:
            yield Node(workspace, server, daemon, containerd)


def busybox_image(*layers, command=("/bin/sh",)):
    """An Image with a shell. Each of `layers` is a function that fills another layer, given its
    TarWriter."""
    image = Image()
    image.config.update({"Cmd": list(command), "Env": ["PATH=/bin"]})
    with open("/bin/busybox", "rb") as file:
        busybox = file.read()
    with image.layer() as layer:
        layer.directory("bin")
        layer.file("bin/busybox", busybox, mode=0o755)
        for name in ("sh", "cat", "echo", "sleep", "ls", "rm", "mkdir", "stat", "true", "find"):
            layer.symlink(f"bin/{name}", "busybox")
        for directory in ("proc", "sys", "dev", "etc", "run"):
            layer.directory(directory)
        layer.directory("tmp", mode=0o1777)
    for fill in layers:
        with image.layer() as layer:
            fill(layer)
    return image
