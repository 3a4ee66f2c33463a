# SPDX-License-Identifier: Apache-2.0
"""A real systemd for tests: a user manager in a mount name space of this process."""

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess

from harness import Skip, check, wait_until

SYSTEMD = "/lib/systemd/systemd"
CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x4000 | (1 << 18)
UNITS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "laminad" / "systemd"


def leave_mount_name_space():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "make mounts private")


class Systemd:
    """Runs laminad's own unit files, with this build's program, the workspace's directories and perhaps a
    configuration. The calling process gets a mount name space, with a /run of its own, in which all of it
    happens."""

    def __init__(self, workspace, program, config=None):
        if not os.access(SYSTEMD, os.X_OK):
            raise Skip("systemd is not installed")
        leave_mount_name_space()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        os.makedirs("/run/systemd/system")  # how sd_booted(3) knows
        self.workspace = workspace
        self.runtime = pathlib.Path("/run/lamina-test")
        self.units = workspace.new_directory("config") / "systemd" / "user"
        self.units.mkdir(parents=True)
        self.environment = dict(os.environ, XDG_RUNTIME_DIR=str(self.runtime),
                                XDG_CONFIG_HOME=str(self.units.parents[1]))
        self.runtime.mkdir(mode=0o700)
        service = (UNITS / "laminad.service").read_text(encoding="utf-8")
        options = f"--state={workspace.state}" + (f" --config={config}" if config else "")
        service = service.replace("/usr/sbin/laminad --config /etc/lamina/config.toml",
                                  f"{program} {options}")
        # A user manager may not do these, and has other directories for the state.
        service = "\n".join(line for line in service.splitlines()
                            if not line.startswith(("OOMScoreAdjust=", "StateDirectory")))
        socket = (UNITS / "laminad.socket").read_text(encoding="utf-8")
        socket = socket.replace("/var/lib/lamina", str(workspace.state))
        (self.units / "laminad.service").write_text(service, encoding="utf-8")
        (self.units / "laminad.socket").write_text(socket, encoding="utf-8")
        self.process = None

    def __enter__(self):
        with open(self.workspace.path("systemd.log"), "wb") as log:
            self.process = subprocess.Popen([SYSTEMD, "--user", "--log-target=console"],
                                            env=self.environment, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log)
        wait_until(lambda: (self.runtime / "systemd" / "private").exists(), "systemd runs")
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.control("stop", "laminad.socket", "laminad.service")
        self.process.terminate()
        self.process.wait(timeout=60)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def control(self, *arguments, status=0):
        result = subprocess.run(["systemctl", "--user", *arguments], env=self.environment,
                                check=False, capture_output=True, text=True, timeout=120)
        log = self.workspace.path("systemd.log").read_text(errors="replace")
        check(result.returncode == status, f"systemctl {arguments}: {result.stderr}\n{log}")
        return result.stdout.strip()

    def main_pid(self):
        return int(self.control("show", "laminad.service", "--property=MainPID", "--value"))
