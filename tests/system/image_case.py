# SPDX-License-Identifier: Apache-2.0
"""Cases: images made for one kind of trouble each. Every case is converted, verified, mounted through
each transport and compared with what the referee (reference.py) makes of the same layers."""

import hashlib
import subprocess

import reference
from harness import TRANSPORTS, check, check_equal, compare, need_root, test
from oci_layout import Image, Layout

BUILDERS = {}


def case(name, *, loop=False, tar_status=(0,), adjust=None):
    """Registers a function that fills an Image as the test case.NAME.

    loop: also mounts through loop devices. tar_status: what GNU tar may exit with. adjust: changes the
    referee's tree where GNU tar does not do what OCI asks; each use says why.
    """

    def register(build):
        BUILDERS[name] = build

        @test(f"case.{name}")
        def _(workspace):
            need_root()
            source = workspace.path("source")
            write(name, source)
            expected = workspace.path("expected")
            reference.extract(source, expected, tar_status=tar_status)
            if adjust:
                adjust(expected)
            image = workspace.convert(f"oci:{source}")
            modes = [(f"--transport={transport}",) for transport in TRANSPORTS]
            if loop:
                modes.append(("--transport=erofs", "--loop"))
            for mode in modes:
                with workspace.mounted(image, *mode) as mounted:
                    compare(expected, mounted)
            check_metadata(workspace)

        return build

    return register


def blob_key(layer):
    """The name of a layer's directory in the state directory (LayerDescriptor::Key)."""
    table = layer["annotations"]["containerd.io/snapshot/lamina.section-table.digest"]
    digests = [digest.removeprefix("sha256:") for digest in (layer["digest"], table)]
    return hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def check_metadata(workspace):
    """The merged metadata, which the state directory keeps, must please erofs-utils as well."""
    layers = Layout(workspace.path("converted")).manifest("latest")["layers"]
    devices = [f"--device={workspace.state}/blobs/{blob_key(layer)}/data" for layer in layers]
    kept = list(workspace.state.glob("images/*/metadata"))
    check_equal(len(kept), 1, "number of metadata files")
    # It descends by recursion, with large buffers on the stack.
    command = ["prlimit", "--stack=unlimited", "fsck.erofs", *devices, kept[0]]
    result = subprocess.run(command, check=False, capture_output=True)
    check(result.returncode == 0,
          f"fsck.erofs: {result.returncode}: {result.stderr.decode(errors='replace')}")


def write(name, layout):
    """Writes the image of a case."""
    image = Image()
    BUILDERS[name](image)
    image.write(layout)
