# SPDX-License-Identifier: Apache-2.0
"""lamina run: a container by crun on a lazily read image."""

import json
import os
import shutil
import signal
import subprocess

from harness import check, check_equal, need_root, program, repetitions, test, wait_until
from oci_layout import Image

PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1235:app:/home/app:/bin/sh\n"
GROUP = "root:x:0:\napp:x:1235:\nextra:x:1300:app\n"


def busybox_image(workspace, destination="converted", **config):
    """A converted image with busybox as its shell."""
    need_root("containers with mounts of their own need root")
    if not shutil.which("crun"):
        check(False, "crun is missing")
    with open("/bin/busybox", "rb") as file:
        busybox = file.read()
    image = Image()
    image.config.update(config)
    with image.layer(suffix="") as layer:
        layer.file("bin/busybox", busybox, mode=0o755)
        for name in ("sh", "cat", "id", "env", "pwd", "echo", "mknod", "sleep", "kill", "true", "["):
            layer.symlink(f"bin/{name}", "busybox")
        layer.file("bin/no-shebang", "echo hello\n", mode=0o755)
        layer.file("bin/no-interpreter", "#!/no/such/shell\n", mode=0o755)
        layer.file("etc/passwd", PASSWD)
        layer.file("etc/group", GROUP)
        for directory in ("proc", "sys", "dev", "tmp", "run", "home/app", "work dir"):
            layer.directory(directory, mode=0o1777 if directory == "tmp" else 0o755)
    return workspace.converted(image, destination)


def run(workspace, image, *command, status=0, options=(), **other):
    return workspace.lamina("run", image, f"--state={workspace.state}", *options, "--", *command,
                            status=status, **other)


@test("run.gives-the-output-and-nothing-else")
def _(workspace):
    image = busybox_image(workspace)
    result = run(workspace, image, "echo", "hello", "two words", "--flag")
    check_equal(result.stdout, "hello two words --flag\n", "standard output")
    check_equal(result.stderr, "", "standard error")


@test("run.arguments-reach-the-container-as-they-are")
def _(workspace):
    image = busybox_image(workspace)
    script = 'for a in "$@"; do echo "<$a>"; done'
    arguments = ["[a,b]", "[ -f /x ]", "[]", "{}", "", "%%", "--", "--json", "-x", "a b", "x=[1]"]
    for separator in ((), ("--",)):
        result = workspace.lamina("run", image, f"--state={workspace.state}", *separator, "sh", "-c",
                                  script, "name", *arguments)
        check_equal(result.stdout.splitlines(), [f"<{a}>" for a in arguments], "the arguments")
    workspace.lamina("run", f"--state={workspace.state}", "--", image, "sh", "-c",
                     "[ -f /etc/passwd ]")


@test("run.gives-the-exit-code")
def _(workspace):
    image = busybox_image(workspace)
    for code in (0, 1, 2, 7, 125, 255):
        run(workspace, image, "sh", "-c", f"exit {code}", status=code)


@test("run.death-by-a-signal-is-128-and-its-number")
def _(workspace):
    image = busybox_image(workspace)
    run(workspace, image, "sh", "-c", "sh -c 'kill -KILL $$'; exit $?", status=137)


@test("run.commands-that-cannot-run-have-the-codes-of-a-shell")
def _(workspace):
    image = busybox_image(workspace)
    for command, status in (("/no/such/program", 127), ("nothing-of-that-name", 127),
                            ("/etc/passwd", 126), ("/etc", 126), ("no-shebang", 126),
                            ("no-interpreter", 127), ("", 127)):
        result = run(workspace, image, command, status=status)
        check_equal(result.stderr.count("\n"), 1, f"lines of {result.stderr!r}")
    check("/no/such/program" in run(workspace, image, "/no/such/program", status=127).stderr,
          "the error does not name it")


@test("run.environment-comes-from-the-image")
def _(workspace):
    image = busybox_image(workspace, Env=["PATH=/bin", "WITH=a=b c", "EMPTY="])
    lines = run(workspace, image, "env").stdout.splitlines()
    for line in ("PATH=/bin", "WITH=a=b c", "EMPTY="):
        check(line in lines, f"{line} is not in {lines}")
    check(not any(line.startswith("LAMINA") for line in lines), "the caller's environment leaks")


@test("run.path-has-a-default")
def _(workspace):
    image = busybox_image(workspace)
    check_equal(run(workspace, image, "sh", "-c", "true && echo found").stdout, "found\n", "output")


@test("run.working-directory-comes-from-the-image")
def _(workspace):
    check_equal(run(workspace, busybox_image(workspace, WorkingDir="/work dir"), "pwd").stdout,
                "/work dir\n", "working directory")


@test("run.working-directory-is-made-if-it-is-missing")
def _(workspace):
    check_equal(run(workspace, busybox_image(workspace, WorkingDir="/not/there"), "pwd").stdout,
                "/not/there\n", "working directory")


@test("run.user-comes-from-the-image")
def _(workspace):
    for number, (user, expected) in enumerate((("", "0 0"), ("app", "1234 1235"), ("7:8", "7 8"),
                                               ("1234", "1234 1235"), ("app:root", "1234 0"))):
        image = busybox_image(workspace, f"user{number}", User=user)
        result = run(workspace, image, "sh", "-c", "echo $(id -u) $(id -g)")
        check_equal(result.stdout, expected + "\n", f"ids of user {user!r}")


@test("run.user-that-is-not-there")
def _(workspace):
    result = run(workspace, busybox_image(workspace, User="ghost"), "true", status=None)
    check(result.returncode != 0, "an unknown user was accepted")
    check("ghost" in result.stderr, f"the error does not name the user: {result.stderr}")


@test("run.user-with-the-id-of-nobody-at-all-is-not-root")
def _(workspace):
    result = run(workspace, busybox_image(workspace, User="4294967295"), "id", status=1)
    check("4294967295" in result.stderr and not result.stdout, f"it ran: {result}")


@test("run.bytes-that-json-cannot-carry-are-refused")
def _(workspace):
    image = busybox_image(workspace)
    result = run(workspace, image, "echo", b"caf\xe9", status=1)
    check("not UTF-8" in result.stderr, result.stderr)


@test("run.entrypoint-and-command")
def _(workspace):
    image = busybox_image(workspace, Entrypoint=["echo", "entry"], Cmd=["default"])
    check_equal(workspace.lamina("run", image, f"--state={workspace.state}").stdout,
                "entry default\n", "what the image says")
    check_equal(run(workspace, image, "given").stdout, "entry given\n", "with another command")


@test("run.nothing-to-run")
def _(workspace):
    image = busybox_image(workspace)
    result = workspace.lamina("run", image, f"--state={workspace.state}", status=None)
    check(result.returncode != 0, "it ran nothing successfully")
    check(result.stderr.startswith("lamina: "), result.stderr)


@test("run.input-reaches-the-container")
def _(workspace):
    image = busybox_image(workspace)
    given = workspace.path("input")
    given.write_bytes(b"line\n" * 100_000)
    with open(given, "rb") as file:
        check(run(workspace, image, "cat", stdin=file).stdout == "line\n" * 100_000, "other output")


@test("run.changes-are-forgotten-unless-kept")
def _(workspace):
    image = busybox_image(workspace)
    run(workspace, image, "sh", "-c", "echo x > /new && echo y > /etc/passwd")
    run(workspace, image, "sh", "-c", "test ! -e /new")
    kept = workspace.new_directory("kept")
    for _ in range(2):
        run(workspace, image, "sh", "-c", "echo x >> /new", options=(f"--writable-dir={kept}",))
    result = run(workspace, image, "cat", "/new", options=(f"--writable-dir={kept}",))
    check_equal(result.stdout, "x\nx\n", "the kept file")


@test("run.signals-reach-the-container")
def _(workspace):
    image = busybox_image(workspace)
    script = "trap 'echo caught; exit 5' TERM; echo ready; while true; do sleep 0.05; done"
    process = subprocess.Popen([program("LAMINA"), "run", image, f"--state={workspace.state}", "--",
                                "sh", "-c", script], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    check_equal(process.stdout.readline(), b"ready\n", "the first line")
    process.send_signal(signal.SIGTERM)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    check_equal((out, process.returncode), (b"caught\n", 5), f"output and exit code ({err!r})")


@test("run.killed-container-process-leaves-nothing")
def _(workspace):
    image = busybox_image(workspace)
    process = subprocess.Popen([program("LAMINA"), "run", image, f"--state={workspace.state}", "--",
                                "sh", "-c", "echo ready; kill -KILL $$; sleep 1; exit 3"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    # The first process of a container cannot kill itself (pid_namespaces(7)); it ends on its own.
    out, _ = process.communicate(timeout=60)
    check_equal((out, process.returncode), (b"ready\n", 3), "output and exit code")


def start(workspace, image, script, **options):
    """A container that runs a shell script and has said "ready"."""
    process = subprocess.Popen([program("LAMINA"), "run", image, f"--state={workspace.state}", "--",
                                "sh", "-c", script], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, **options)
    check_equal(process.stdout.readline(), b"ready\n", "the first line")
    return process


@test("run.all-signals-reach-the-container")
def _(workspace):
    image = busybox_image(workspace)
    script = "trap 'exit 5' USR1; echo ready; while true; do sleep 0.05; done"
    with start(workspace, image, script) as process:
        process.send_signal(signal.SIGUSR1)
        check_equal(process.wait(60), 5, "exit code")


@test("run.ends-also-where-the-ends-of-children-are-ignored")
def _(workspace):
    result = workspace.lamina("run", busybox_image(workspace), f"--state={workspace.state}", "--",
                              "sh", "-c", "echo up; exit 3", status=3, timeout=120,
                              preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    check_equal(result.stdout, "up\n", "output")


@test("run.second-stop-signal-kills")
def _(workspace):
    image = busybox_image(workspace)
    script = "trap 'echo caught' TERM; echo ready; while true; do sleep 0.05; done"
    with start(workspace, image, script) as process:
        process.send_signal(signal.SIGTERM)
        check_equal(process.stdout.readline(), b"caught\n", "the second line")
        process.send_signal(signal.SIGTERM)
        check_equal(process.wait(60), 137, "exit code")
    workspace.check_nothing_left()


@test("run.container-of-a-killed-crun-is-ended")
def _(workspace):
    image = busybox_image(workspace)
    before = set(leftovers())
    with start(workspace, image, "echo ready; sleep 1000") as process:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], check=True,
                                  capture_output=True, text=True).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        check_equal(process.wait(60), 137, "exit code")
    check_equal(set(leftovers()) - before, set(), "what is left in /run")
    workspace.check_nothing_left()


@test("run.next-run-cleans-up-after-a-killed-one")
def _(workspace):
    image = busybox_image(workspace)
    before = set(leftovers())
    process = start(workspace, image, "echo ready; while test ! -e /end; do sleep 0.05; done")
    (bundle,) = set(leftovers()) - before
    process.kill()
    process.wait()
    # The container goes on, so nothing of it may be touched.
    run(workspace, image, "true")
    rootfs = f"/run/{bundle}/rootfs"
    check(os.path.ismount(rootfs), "a container in use lost its root")
    with open(f"{rootfs}/end", "w", encoding="ascii"):
        pass
    process.stdout.read()  # to the end of the container
    wait_until(lambda: subprocess.run(["pgrep", "-f", f"crun.*{bundle}"], check=False,
                                      stdout=subprocess.DEVNULL).returncode != 0, "crun ends")
    run(workspace, image, "true")
    check_equal(set(leftovers()) - before, set(), "what is left in /run")
    workspace.check_nothing_left()


@test("run.proc-and-devices-are-there")
def _(workspace):
    image = busybox_image(workspace)
    result = run(workspace, image, "sh", "-c",
                 "test -r /proc/self/status && echo x > /dev/null && test -c /dev/urandom && echo ok")
    check_equal(result.stdout, "ok\n", "output")


@test("run.says-what-it-cost")
def _(workspace):
    image = busybox_image(workspace)
    result = run(workspace, image, "echo", "out", options=("--json",))
    check_equal(result.stdout, "out\n", "standard output")
    summary = json.loads(result.stderr)
    check_equal(summary["exit_code"], 0, "exit code")
    check(summary["mount_ms"] > 0 and summary["run_ms"] > 0, f"times are missing: {summary}")
    check(summary["mount"]["fetched_bytes"] > 0, f"nothing was fetched: {summary}")


@test("run.many-times-leaves-nothing")
def _(workspace):
    image = busybox_image(workspace)
    for _ in range(repetitions(4)):
        run(workspace, image, "true")
        workspace.check_nothing_left()
    wait_until(lambda: not leftovers(), "no bundle is left in /run")


def leftovers():
    return [name for name in os.listdir("/run") if name.startswith("lamina-run-")]


@test("run.a-container-cannot-reach-the-devices-of-the-host")
def _(workspace):
    image = busybox_image(workspace)
    # Its root may make nodes, but not open them; the usual ones work.
    disk = os.stat("/").st_dev
    script = (f"mknod /disk b {os.major(disk)} {os.minor(disk)} && ! cat /disk >/dev/null && "
              "cat /dev/null && echo kept")
    check_equal(run(workspace, image, "sh", "-c", script).stdout, "kept\n", "output")


@test("run.a-container-has-a-system-call-filter")
def _(workspace):
    image = busybox_image(workspace)
    status = run(workspace, image, "cat", "/proc/self/status").stdout
    check("Seccomp:\t2\n" in status, status)
