# SPDX-License-Identifier: Apache-2.0
"""lamina sandbox, and lamina run --backend: sandboxes that outlive the commands that use them."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time

from harness import check, check_equal, program, test, wait_until
from run_container_tests import busybox_image


class Sandbox:
    """One that was created, for the length of a with block."""

    def __init__(self, workspace, *arguments):
        self.workspace = workspace
        self.id = sandbox(workspace, "create", *arguments).stdout.strip()
        self.removed = False

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        # After a failure it may be gone.
        sandbox(self.workspace, "rm", self.id, status=None if error or self.removed else 0)

    def remove(self):
        sandbox(self.workspace, "rm", self.id)
        self.removed = True

    def exec(self, *command, options=(), **other):
        return sandbox(self.workspace, "exec", self.id, *options, "--", *command, **other)

    def output(self, script):
        return self.exec("sh", "-c", script).stdout

    def result(self, script, *options):
        """The JSON about a script's end."""
        return json.loads(self.exec("sh", "-c", script, options=("--json", *options),
                                    status=None).stdout)


def sandbox(workspace, command, *arguments, **other):
    return workspace.lamina("sandbox", command, f"--state={workspace.state}", *arguments, **other)


def listed(workspace):
    found = json.loads(sandbox(workspace, "ls", "--json").stdout)
    return {entry["id"]: (entry["backend"], entry["state"]) for entry in found}


@test("sandbox.programs-run-one-after-the-other")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        result = box.exec("sh", "-c", "echo out; echo err >&2; echo kept > /file; exit 7", status=7)
        check_equal((result.stdout, result.stderr), ("out\n", "err\n"), "output")
        check_equal(box.exec("cat", "/file").stdout, "kept\n", "a file of the program before")
        box.exec("/no/such/program", status=127)
        box.exec("/etc/passwd", status=126)
        for _ in range(2):
            sandbox(workspace, "exec", box.id, "--session=s", "--shell",
                    "mkdir -p /a; cd /a; export N=1$N")
        result = sandbox(workspace, "exec", box.id, "--session=s", "--shell", "pwd; echo $N")
        check_equal(result.stdout, "/a\n11\n", "what the session keeps")


@test("sandbox.a-signal-and-a-timeout-are-no-exit-code")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        killed = box.result("kill -TERM $$")
        check_equal((killed["ending"], killed["signal"]), ("signalled", 15), "the end by a signal")
        box.exec("sh", "-c", "kill -TERM $$", status=143)
        late = box.result("sleep 1000", "--timeout=500ms")
        check_equal(late["verdict"], "time limit", "the end by a timeout")
        exited = box.result("exit 143")
        check_equal((exited["ending"], exited["exit_code"]), ("exited", 143), "an exit code")


@test("sandbox.input-and-signals-reach-a-program")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        given = workspace.path("input")
        given.write_bytes(b"line\n" * 100_000)
        with open(given, "rb") as file:
            check(box.exec("cat", options=("-i",), stdin=file).stdout == "line\n" * 100_000,
                  "other output")
        script = "trap 'echo caught; exit 5' TERM; echo ready; while true; do sleep 0.05; done"
        process = subprocess.Popen([program("LAMINA"), "sandbox", "exec", box.id,
                                    f"--state={workspace.state}", "--shell", script],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        check_equal(process.stdout.readline(), b"ready\n", "the first line")
        process.send_signal(signal.SIGTERM)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        check_equal((out, process.returncode), (b"caught\n", 5), "output and exit code")


@test("sandbox.files-are-copied-in-and-out")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        tree = workspace.new_directory("tree")
        (tree / "sub").mkdir()
        (tree / "sub" / "file").write_bytes(b"\0\xff" * 100_000)
        (tree / "link").symlink_to("/etc/passwd")
        sandbox(workspace, "cp", tree, f"{box.id}:/copy")
        check_equal(box.output("echo more > /copy/more; cat /copy/sub/file | cat > /copy/other; "
                               "cat /copy/link").splitlines()[0],
                    "root:x:0:0:root:/root:/bin/sh", "a link inside")
        back = workspace.path("back")
        count = json.loads(sandbox(workspace, "cp", f"{box.id}:/copy", back, "--json").stdout)
        check_equal(count["bytes"], 2 * 200_000 + len("more\n"), "bytes that were copied")
        check_equal((back / "other").read_bytes(), b"\0\xff" * 100_000, "content")
        check_equal(str((back / "link").readlink()), "/etc/passwd", "the link's target")
        sandbox(workspace, "cp", f"{box.id}:/no/such/file", back, status=1)
        sandbox(workspace, "cp", tree, back, status=2)


@test("sandbox.a-paused-one-goes-on-when-it-is-resumed")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        sandbox(workspace, "pause", box.id)
        check_equal(listed(workspace), {box.id: ("container", "paused")}, "the list")
        result = box.exec("true", status=1)
        check("paused" in result.stderr, result.stderr)
        sandbox(workspace, "resume", box.id)
        check_equal(listed(workspace), {box.id: ("container", "running")}, "the list")
        box.exec("true")


@test("sandbox.snapshots-start-others")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as first:
        first.output("echo kept > /kept")
        sandbox(workspace, "snapshot", first.id, "prepared")
        first.output("echo changed > /kept")
        check_equal(json.loads(sandbox(workspace, "ls", "--snapshots", "--json").stdout),
                    ["prepared"], "the snapshots")
        with Sandbox(workspace, "--snapshot=prepared", "--backend=container") as second:
            check_equal(second.exec("cat", "/kept").stdout, "kept\n", "a file of the snapshot")
    sandbox(workspace, "rm", "--snapshot=prepared")
    sandbox(workspace, "create", "--snapshot=prepared", "--backend=container", status=1)


@test("sandbox.stats-and-removal")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        stats = json.loads(sandbox(workspace, "stats", box.id, "--json").stdout)
        check(stats["processes"] >= 1 and stats["memory_bytes"] > 0 and stats["uptime_ms"] > 0,
              f"it uses nothing: {stats}")
        box.remove()
        check_equal(listed(workspace), {}, "the list")
        box.exec("true", status=1)
        sandbox(workspace, "rm", box.id, status=1)
    workspace.check_nothing_left()


@test("sandbox.an-idle-one-does-not-wake-up")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=container") as box:
        # An orphan, which the agent has to reap without having started it.
        box.exec("sh", "-c", "(sleep 1 &) ; exit 0")
        agent = int((workspace.state / "sandboxes" / box.id / "pid").read_text())

        def children():
            return {int(child) for thread in pathlib.Path(f"/proc/{agent}/task").iterdir()
                    for child in (thread / "children").read_text().split()}

        def wakes():
            return sum(int(line.split()[1])
                       for status in pathlib.Path(f"/proc/{agent}/task").glob("*/status")
                       for line in status.read_text().splitlines()
                       if line.startswith("voluntary_ctxt_switches"))

        wait_until(lambda: not children(), "the agent has no children")
        before = wakes()
        time.sleep(3)
        check_equal(wakes(), before, "times that the agent's threads woke up")


@test("sandbox.a-service-can-make-one")
def _(workspace):
    # What systemd gives a service of Type=notify, and one with sockets.
    notify = workspace.path("notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(notify))
        environment = os.environ | {"NOTIFY_SOCKET": str(notify), "LISTEN_FDS": "2",
                                    "LISTEN_PID": "1"}
        created = sandbox(workspace, "create", busybox_image(workspace), "--backend=container",
                          env=environment, timeout=60)
    box = created.stdout.strip()
    check_equal(sandbox(workspace, "exec", box, "--", "echo", "up").stdout, "up\n", "output")
    sandbox(workspace, "rm", box)


@test("sandbox.calls-see-nothing-of-each-other")
def _(workspace):
    image = busybox_image(workspace)
    with Sandbox(workspace, image, "--backend=fncall", "--warm=1") as box:
        box.output("echo secret > /tmp/file; sleep 1000 >/dev/null 2>&1 &")
        check_equal(box.output("test -e /tmp/file && echo seen; for p in /proc/[0-9]*/cmdline; do "
                               "case $(cat $p) in sleep*) echo runs;; esac; done; true"), "",
                    "what is left of the call before")
        check_equal(box.result("echo x > /bin/new")["verdict"], "non-zero exit",
                    "the end of a call that writes to the image")
        sandbox(workspace, "pause", box.id, status=1)


@test("sandbox.files-go-with-a-call")
def _(workspace):
    with Sandbox(workspace, busybox_image(workspace), "--backend=fncall") as box:
        given, made = workspace.path("given"), workspace.path("made")
        given.write_bytes(b"\0given")
        box.exec("sh", "-c", "cat in.bin in.bin > out.bin",
                 options=(f"--in={given}=in.bin", f"--out={made}=out.bin"))
        check_equal(made.read_bytes(), b"\0given\0given", "the file that came back")


@test("sandbox.run-takes-a-backend")
def _(workspace):
    image = busybox_image(workspace)

    def run(*options, **other):
        return workspace.lamina("run", image, f"--state={workspace.state}", *options, "--", "sh",
                                "-c", "echo $(id -u); exit 3", status=3, **other)

    check_equal(run("--backend=container").stdout, "0\n", "user in a container")
    call = run("--backend=fncall")
    check(call.stdout.strip().isdigit() and call.stdout != "0\n", f"user of a call: {call.stdout}")
    chosen = run("--backend=auto")
    check_equal(chosen.stdout, "0\n", "user where state may be needed")
    check("fncall keeps no state" in chosen.stderr, f"no reason is given: {chosen.stderr}")
    chosen = run("--backend=auto", "--needs=stateless")
    check(chosen.stdout != "0\n" and "fncall" in chosen.stderr, f"not a call: {chosen}")


@test("sandbox.one-that-cannot-be-removed-is-no-harm-to-others")
def _(workspace):
    image = busybox_image(workspace)
    stuck = workspace.state / "sandboxes" / "s0123456789ab" / "other"
    stuck.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", stuck], check=True)
    result = workspace.lamina("run", "--backend=fncall", image, f"--state={workspace.state}", "echo",
                              "works")
    check_equal(result.stdout, "works\n", "output")
    check(f"remove what is left of sandbox {stuck.parent.name}" in result.stderr, result.stderr)
    check_equal(listed(workspace), {}, "the list")
    subprocess.run(["umount", stuck], check=True)
    check_equal(sandbox(workspace, "ls").stderr, "", "messages")
    check(not stuck.parent.exists(), "it is still there")


@test("sandbox.run-that-is-stopped-while-it-starts-leaves-nothing")
def _(workspace):
    image = busybox_image(workspace)
    process = subprocess.Popen([program("LAMINA"), "run", image, f"--state={workspace.state}",
                                "--backend=fncall", "--", "sleep", "1000"],
                               stdin=subprocess.DEVNULL)
    try:
        sandboxes = workspace.state / "sandboxes"
        wait_until(lambda: sandboxes.exists() and any(sandboxes.iterdir()), "there is a sandbox")
        process.send_signal(signal.SIGTERM)
        check_equal(process.wait(timeout=60), 128 + signal.SIGTERM, "exit code")
    finally:
        process.kill()
    check_equal(list(sandboxes.iterdir()), [], "what is left of sandboxes")
    workspace.check_nothing_left()
