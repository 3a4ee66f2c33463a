# SPDX-License-Identifier: Apache-2.0
"""An image in the registry of a benchmark, in the ways in which a node can start it."""

import json
import pathlib

from node import Node, output, run
from wire import Wire

ORIGINAL = ""
LAZY = "-lazy"
PROFILED = "-profiled"
PACKED = "-packed"
LAID_OUT = "-laid-out"


def publish(node: Node, wire: Wire, layout: pathlib.Path, repository: str,
            program: list[str]) -> int:
    """As it is, converted, converted with a profile of the program, without and with a pack, and laid
    out by it; each in a repository of its own, REPOSITORY + suffix, as a profile belongs to a digest in a
    repository. Returns the bytes of the frames that the program touches, as they are in the blobs."""
    def at_registry(suffix: str) -> str:
        return f"docker://{wire.registry}/{repository}{suffix}:latest"

    run("skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}:latest",
        at_registry(ORIGINAL))
    run(node.lamina, "convert", "--plain-http", at_registry(ORIGINAL), at_registry(LAZY))
    for suffix in (PROFILED, PACKED):
        run("skopeo", "copy", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false",
            at_registry(LAZY), at_registry(suffix))
    profile = node.work / "profile.json"
    profile.unlink(missing_ok=True)
    run(node.lamina, "profile", "record", "--plain-http", f"--output={profile}",
        f"--state={node.directory('record')}", at_registry(LAZY), "--", *program)
    run(node.lamina, "convert", "--plain-http", f"--profile={profile}", at_registry(ORIGINAL),
        at_registry(LAID_OUT))
    attach = [node.lamina, "profile", "attach", "--plain-http"]
    run(*attach, at_registry(PROFILED), profile)
    return json.loads(output(*attach, "--pack", "--json", at_registry(PACKED), profile))["pack_bytes"]
