# SPDX-License-Identifier: Apache-2.0
"""laminad: mounts that live on when it is killed, upgraded or restarted."""

import ctypes
import errno
import grp
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import time

from daemon import Daemon, Readers
from harness import (check, check_equal, drop_caches, expect_error, need_root, noise, program,
                     repetitions, small_image, test, wait_until)
from systemd import Systemd

MIB = 1 << 20
FILES = {f"file{i}": noise(size, i)
         for i, size in enumerate((5, 4096, 100_000, MIB + 17, 3 * MIB, 6 * MIB + 123))}
LARGE = {f"large{i}": noise(4 * MIB, 100 + i) for i in range(4)}
# Every way an image can be mounted.
MODES = (["--transport=erofs"], ["--transport=fuse"], ["--transport=erofs", "--loop"],
         ["--transport=erofs", "--writable"], ["--transport=fuse", "--writable"])


def mount_all_modes(workspace, image):
    directories = []
    for mode in MODES:
        directories.append(workspace.new_directory("mnt"))
        workspace.lamina("mount", image, directories[-1], f"--state={workspace.state}", *mode)
    return directories


def umount_all(workspace, directories):
    for directory in directories:
        workspace.lamina("umount", directory, f"--state={workspace.state}")


def expect_content(directory, files=None):
    for name, content in (files or FILES).items():
        check((directory / name).read_bytes() == content, f"{directory / name} is wrong")


@test("daemon.serves-mounts-and-ends-cleanly")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace) as daemon:
        directories = mount_all_modes(workspace, image)
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories[:2])
        # The rest is unmounted by laminad.
        daemon.stop()
    check_equal(workspace.mounts(), [], "what is still mounted")
    check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")


@test("daemon.does-not-put-its-state-into-a-directory-of-something-else")
def _(workspace):
    need_root()
    mine = workspace.new_directory("mine")
    (mine / "letter").write_text("dear", encoding="ascii")
    result = subprocess.run([program("LAMINAD"), f"--state={mine}"], check=False,
                            capture_output=True, text=True, timeout=60)
    check_equal(result.returncode, 1, "exit code")
    check("neither empty nor a state directory" in result.stderr + result.stdout, result.stderr)
    check_equal(os.listdir(mine), ["letter"], "what is there")


@test("daemon.goes-on-filling-after-it-was-killed")
def _(workspace):
    """What was asked for with a mount is in its record."""
    need_root()
    image = workspace.converted(small_image(LARGE))
    directory = workspace.new_directory("mnt")
    with Daemon(workspace) as daemon:
        workspace.lamina("mount", image, directory, f"--state={workspace.state}", "--fill",
                         "--prefetch-rate=3M")
        daemon.wait_for_successor(daemon.kill_worker())

        def stats():
            return workspace.stats(directory)[0]

        before = stats()
        check(before["frames_present"] < before["frames"], "it was through before it was killed")
        wait_until(lambda: stats()["frames_present"] == before["frames"], "the image is filled")
        expect_content(directory, LARGE)
        umount_all(workspace, [directory])


@test("daemon.ends-cleanly-with-many-mounts")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    count = repetitions(20)
    with Daemon(workspace) as daemon:
        for _ in range(count):
            workspace.lamina("mount", image, workspace.new_directory("mnt"),
                             f"--state={workspace.state}", "--no-prefetch")
        start = time.monotonic()
        daemon.stop()
        print(f"{count} mounts: ended after {time.monotonic() - start:.2f} s")
    check_equal(workspace.mounts(), [], "what is still mounted")
    check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")


@test("daemon.killed-under-readers-is-not-noticed")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    generator = random.Random(1)
    # No worker lives long enough here to count as well.
    config = workspace.path("config.toml")
    config.write_text("[take-over]\ngive-up-seconds = 3600\n", encoding="utf-8")
    with Daemon(workspace, f"--config={config}") as daemon:
        directories = mount_all_modes(workspace, image)
        with Readers(directories, FILES) as readers:
            readers.wait_for_progress(16)
            for _ in range(repetitions(8)):
                killed = daemon.kill_worker()
                daemon.wait_for_successor(killed)
                # From before it serves to when all is as usual.
                time.sleep(generator.choice((0, 0.01, 0.05, 0.2)))
            readers.wait_for_progress(16)
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories)


@test("daemon.upgraded-under-readers-is-not-noticed")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace) as daemon:
        directories = mount_all_modes(workspace, image)
        with Readers(directories, FILES) as readers:
            for _ in range(repetitions(4)):
                readers.wait_for_progress(16)
                before = daemon.worker()
                daemon.process.send_signal(signal.SIGHUP)
                daemon.wait_for_successor(before)
            readers.wait_for_progress(16)
        umount_all(workspace, directories)
        check("was killed" not in daemon.log_text(), "a worker did not end by itself")


@test("daemon.wrong-configurations-are-not-taken-over-under-readers")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    right = "[take-over]\ngive-up-seconds = 2\n"
    config = workspace.path("config.toml")
    config.write_text(right, encoding="utf-8")
    with Daemon(workspace, f"--config={config}") as daemon:
        directories = mount_all_modes(workspace, image)
        with Readers(directories, FILES) as readers:
            readers.wait_for_progress(16)
            before = daemon.worker()
            config.write_text("[take-over]\ngive-up-second = 2\n", encoding="utf-8")
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "configuration is refused" in daemon.log_text(), "it is refused")
            check(f"{config}:2: take-over.give-up-second is not a setting" in daemon.log_text(),
                  daemon.log_text())
            readers.wait_for_progress(16)
            check_equal(daemon.worker(), before, "the worker")
            config.write_text(right, encoding="utf-8")
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for_successor(before)
            readers.wait_for_progress(16)
        umount_all(workspace, directories)


@test("daemon.another-state-directory-is-not-taken-over-under-readers")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    config = workspace.path("config.toml")
    other = workspace.path("other-state")
    config.write_text(f'state = "{workspace.state}"\n', encoding="utf-8")
    with Daemon(workspace, f"--config={config}", give_state=False) as daemon:
        directories = mount_all_modes(workspace, image)
        with Readers(directories, FILES) as readers:
            readers.wait_for_progress(16)
            before = daemon.worker()
            config.write_text(f'state = "{other}"\n', encoding="utf-8")
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "configuration is refused" in daemon.log_text(), "it is refused")
            check(f"state is {other} now, and laminad runs on {workspace.state}" in daemon.log_text(),
                  daemon.log_text())
            readers.wait_for_progress(16)
            check_equal(daemon.worker(), before, "the worker")
            daemon.wait_for_successor(daemon.kill_worker())
            readers.wait_for_progress(16)
        umount_all(workspace, directories)
    check(not other.exists(), "the other state directory was made")


@test("daemon.goes-on-without-a-snapshotter-that-does-not-start")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    config = workspace.path("config.toml")
    config.write_text(f'[snapshotter]\nsocket = "{workspace.path("snapshotter.sock")}"\n',
                      encoding="utf-8")
    current = workspace.state / "snapshots" / "db" / "CURRENT"
    with Daemon(workspace, f"--config={config}") as daemon:
        directories = mount_all_modes(workspace, image)
        (directories[-1] / "written").write_bytes(b"kept")
        text = current.read_bytes()
        os.kill(daemon.process.pid, signal.SIGSTOP)  # starts no worker
        daemon.kill_worker()
        current.write_bytes(b"damage\n")
        os.kill(daemon.process.pid, signal.SIGCONT)
        check_equal(len(workspace.stats("--all")), len(directories), "number of mounts")
        check("no snapshotter until the next start: " in daemon.log_text(), daemon.log_text())
        for directory in directories:
            expect_content(directory)
        check_equal((directories[-1] / "written").read_bytes(), b"kept", "what was written")
        current.write_bytes(text)
        before = daemon.worker()
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for_successor(before)
        workspace.stats("--all")
        check_equal(daemon.log_text().count("no snapshotter"), 1, "starts without a snapshotter")
        umount_all(workspace, directories)
        # Without mounts the error is worth more than what can be served.
        current.write_bytes(b"damage\n")
        daemon.stop()
        result = subprocess.run([program("LAMINAD"), f"--state={workspace.state}",
                                 f"--config={config}"], check=False, timeout=60)
        check_equal(result.returncode, 1, "exit code of a start without mounts")


@test("daemon.listens-in-its-state-directory-if-systemd-does-elsewhere")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    elsewhere = str(workspace.path("elsewhere.sock"))

    def ask_elsewhere():
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(elsewhere)
            client.sendall(b'{"op": "report"}\n')
            return json.loads(client.makefile().readline())

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(elsewhere)
        listener.listen()
        with Daemon(workspace, listener=listener) as daemon, workspace.mounted(image) as mounted:
            for _ in range(2):
                expect_content(mounted)
                check_equal(len(workspace.stats("--all")), 1, "number of mounts")
                check_equal(len(ask_elsewhere()["ok"]), 1, "number of mounts, asked elsewhere")
                daemon.wait_for_successor(daemon.kill_worker())
    check(not (workspace.state / "control.sock").exists(), "its own socket is left")
    check(os.path.exists(elsewhere), "it has removed systemd's socket")


@test("daemon.killed-while-mounting-and-unmounting-does-both")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    generator = random.Random(2)
    # As above: in a long run no worker lives long enough to count as up.
    config = workspace.path("config.toml")
    config.write_text("[take-over]\ngive-up-seconds = 3600\n", encoding="utf-8")
    with Daemon(workspace, f"--config={config}") as daemon:
        for cycle in range(repetitions(10)):
            mode = MODES[cycle % len(MODES)]
            directory = workspace.new_directory("mnt")
            for command in (["mount", image, directory, *mode], ["umount", directory]):
                command = [program("LAMINA"), *map(str, command), f"--state={workspace.state}"]
                with subprocess.Popen(command, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE) as process:
                    time.sleep(generator.random() * 0.03)
                    daemon.kill_worker()
                    errors = process.communicate(timeout=60)[1].decode()
                check(process.returncode == 0, f"{command} failed: {errors}\n{daemon.log_text()}")
                if command[1] == "mount":
                    expect_content(directory)
            check(not os.path.ismount(directory), f"{directory} is still mounted")
    check_equal(os.listdir(workspace.state / "mounts"), [], "directories of mounts")


@test("daemon.killed-supervisor-gives-errors-and-then-a-new-start")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    for _ in range(repetitions(2)):
        daemon = Daemon(workspace).start()
        directories = mount_all_modes(workspace, image)
        worker = daemon.worker()
        daemon.process.kill()
        daemon.process.wait(timeout=60)
        wait_until(lambda: not os.path.exists(f"/proc/{worker}"), "the worker goes as well")
        for directory in directories:
            expect_error(directory / "file5", errno.EIO, errno.ENOTCONN, errno.ECONNABORTED)
        with Daemon(workspace):
            check_equal(workspace.mounts(), [], "dead mounts that are left")
            directories = mount_all_modes(workspace, image)
            for directory in directories:
                expect_content(directory)
            umount_all(workspace, directories)


@test("daemon.readers-get-errors-if-nothing-comes-back")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    config = workspace.path("config.toml")
    config.write_text("[take-over]\ngive-up-seconds = 1\n", encoding="utf-8")
    daemon = Daemon(workspace, f"--config={config}").start()
    directories = mount_all_modes(workspace, image)
    for directory in directories:
        expect_content(directory, {"file0": FILES["file0"]})
    (workspace.state / "index" / "CURRENT").write_bytes(b"damage\n")  # no worker can start now
    daemon.kill_worker()
    readers = [subprocess.Popen(["cat", directory / "file5"], stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL) for directory in directories]
    for reader in readers:
        content = reader.communicate(timeout=60)[0]
        check(reader.returncode != 0, "a reader got an end of file")
        check(FILES["file5"].startswith(content), "a reader got wrong bytes")
    check(daemon.process.wait(timeout=60) == 1, "laminad gave no error")
    check("given up" in daemon.log_text(), daemon.log_text())
    for target in reversed(workspace.mounts()):  # dead
        subprocess.run(["umount", "--lazy", target], check=True)


@test("daemon.starts-without-the-origin")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace) as daemon:
        directories = mount_all_modes(workspace, image)
        known = {"file1": FILES["file1"]}
        for directory in directories:
            expect_content(directory, known)
        os.rename(workspace.path("converted"), workspace.path("moved"))
        daemon.wait_for_successor(daemon.kill_worker())
        for directory in directories:
            drop_caches()
            expect_content(directory, known)
            expect_error(directory / "file5", errno.EIO)
        os.rename(workspace.path("moved"), workspace.path("converted"))
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories)


@test("daemon.damaged-tables-are-fetched-again-when-the-origin-is-there")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace) as daemon:
        directories = mount_all_modes(workspace, image)
        for directory in directories:
            expect_content(directory)
        os.kill(daemon.process.pid, signal.SIGSTOP)  # starts no worker
        daemon.kill_worker()
        for table in (workspace.state / "blobs").glob("*/frames"):
            table.write_bytes(b"damage")
        os.rename(workspace.path("converted"), workspace.path("moved"))
        drop_caches()
        os.kill(daemon.process.pid, signal.SIGCONT)
        check_equal(len(workspace.stats("--all")), len(directories), "number of mounts")
        for directory, mode in zip(directories, MODES):
            if "--transport=erofs" in mode:
                expect_error(directory / "file5", errno.EIO)
        readers = [subprocess.Popen(["cmp", directory / "file5", "-"], stdin=subprocess.PIPE)
                   for directory, mode in zip(directories, MODES) if "--transport=fuse" in mode]
        os.rename(workspace.path("moved"), workspace.path("converted"))
        for reader in readers:
            reader.communicate(FILES["file5"], timeout=120)
            check_equal(reader.returncode, 0, "exit code of a reader that waited")
        wait_until(lambda: daemon.log_text().count("is served again") == len(directories),
                   "all is well again")
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories)


def detach(directory):
    """umount2(2) and nothing else: umount(8) may look at the directory, and wait."""
    libc = ctypes.CDLL(None, use_errno=True)
    mnt_detach = 2
    if libc.umount2(os.fsencode(directory), mnt_detach) != 0:
        raise OSError(ctypes.get_errno(), f"umount {directory}")


@test("daemon.unmounts-while-no-worker-runs-are-noticed")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace) as daemon:
        for busy in (False, True):
            directories = mount_all_modes(workspace, image)
            files = [open(directory / "file5", "rb", buffering=0)
                     for directory in directories if busy]
            os.kill(daemon.process.pid, signal.SIGSTOP)  # starts no worker
            daemon.kill_worker()
            for directory in directories:
                detach(directory)
            os.kill(daemon.process.pid, signal.SIGCONT)
            for file in files:
                # Files that are open are served on, also by another worker.
                check(file.read() == FILES["file5"], "a file of a detached mount is wrong")
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            daemon.wait_for_successor(daemon.kill_worker())
            for file in files:
                check(os.pread(file.fileno(), 9, 0) == FILES["file5"][:9], "wrong bytes")
                file.close()
            check_equal(workspace.stats("--all"), [], "mounts that laminad knows")
            wait_until(lambda: not os.listdir(workspace.state / "mounts"), "nothing is left")


@test("daemon.cycles-leave-nothing")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))

    def held(process):
        return (len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task")))

    with Daemon(workspace) as daemon:
        keeper = workspace.new_directory("keeper")
        workspace.lamina("mount", image, keeper, f"--state={workspace.state}")
        def cycle(mode):
            with workspace.mounted(image, *mode) as mounted:
                expect_content(mounted, {"file2": FILES["file2"]})
        for mode in MODES:
            cycle(mode)
        processes = (daemon.process.pid, daemon.worker())
        before = [held(process) for process in processes]
        for count in range(repetitions(10)):
            cycle(MODES[count % len(MODES)])
        # A thread that serves FUSE keeps a pipe from its first large reply on: up to four more of
        # those are no leak, one descriptor for each cycle would be.
        wait_until(lambda: all(now <= then + 8 for process, old in zip(processes, before)
                               for now, then in zip(held(process), old)),
                   f"descriptors and threads are back to {before}")
        check_equal(daemon.worker(), processes[1], "the worker")
        check_equal(sorted(os.listdir(workspace.state / "mounts")), ["1", "image-1"],
                    "directories of mounts")
        workspace.lamina("umount", keeper, f"--state={workspace.state}")


UNPRIVILEGED = """
set -e
if ! setpriv --reuid=65534 --regid=65534 --clear-groups test -w /dev/fuse; then
  mknod "$HOME/fuse" c 10 229
  chmod 666 "$HOME/fuse"
  mount --bind "$HOME/fuse" /dev/fuse
fi
exec setpriv --reuid=65534 --regid=65534 --clear-groups bash -ec '
  cd "$HOME"
  ./laminad --state="$HOME/state" & daemon=$!
  while ! test -S state/control.sock; do sleep 0.1; done
  ./lamina mount "$1" mnt --state="$HOME/state"
  for _ in 1 2 3 4 5; do
    worker=$(cat /proc/$daemon/task/$daemon/children)
    readers=()
    for _ in 1 2 3 4; do cmp mnt/file5 file5 & readers+=($!); done
    kill -KILL $worker
    cmp mnt/file5 file5
    for reader in "${readers[@]}"; do wait $reader; done
  done
  ./lamina umount mnt --state="$HOME/state"
  kill $daemon
  wait $daemon
  test -z "$(ls mnt)"
' bash "$1"
"""


@test("daemon.serves-unprivileged-users-across-kills")
def _(workspace):
    need_root("it becomes another user")
    image = workspace.converted(small_image(FILES))
    home = workspace.new_directory("home")
    for name in ("LAMINA", "LAMINAD"):  # the build may be where other users cannot go
        shutil.copy(program(name), home / name.lower())
    (home / "file5").write_bytes(FILES["file5"])
    (home / "mnt").mkdir()
    for path in (home, home / "mnt"):
        os.chown(path, 65534, 65534)
    os.chmod(workspace.root, 0o755)
    result = subprocess.run(["unshare", "--mount", "bash", "-c", UNPRIVILEGED, "bash", image],
                            check=False, timeout=120, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env=dict(os.environ, HOME=str(home)))
    check(result.returncode == 0, result.stdout.decode(errors="replace"))


@test("daemon.restarted-by-systemd-under-readers-is-not-noticed")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Systemd(workspace, program("LAMINAD")) as systemd:
        systemd.control("start", "laminad.socket")
        directories = mount_all_modes(workspace, image)  # the first connection starts laminad
        check_equal(systemd.control("is-active", "laminad.service"), "active", "the service")
        with Readers(directories, FILES) as readers:
            for count in range(repetitions(4)):
                readers.wait_for_progress(16)
                before = systemd.main_pid()
                if count % 2 == 0:
                    systemd.control("restart", "laminad.service")
                else:
                    os.kill(before, signal.SIGKILL)  # the supervisor, and with it the worker
                    wait_until(lambda: systemd.main_pid() not in (0, before), "another one")
            readers.wait_for_progress(16)
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories)
        check_equal(systemd.control("show", "laminad.service", "--property=NFileDescriptorStore",
                                    "--value"), "1", "descriptors that systemd keeps")


@test("daemon.wrong-configurations-under-systemd-do-not-end-mounts")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    config = workspace.path("config.toml")
    config.write_text("", encoding="utf-8")

    def show(name):
        return systemd.control("show", "laminad.service", f"--property={name}", "--value")

    with Systemd(workspace, program("LAMINAD"), config) as systemd:
        systemd.control("start", "laminad.service")
        directories = mount_all_modes(workspace, image)
        with Readers(directories, FILES) as readers:
            readers.wait_for_progress(16)
            before = systemd.main_pid()
            config.write_text("stat = 7\n", encoding="utf-8")
            systemd.control("reload", "laminad.service", status=1)
            readers.wait_for_progress(16)
            check_equal(systemd.main_pid(), before, "the supervisor")
            systemd.control("restart", "laminad.service", status=1)
            wait_until(lambda: int(show("NRestarts")) > 10, "it is tried again and again")
            config.write_text("", encoding="utf-8")
            wait_until(lambda: show("ActiveState") == "active", "it is up")
            readers.wait_for_progress(16)
            systemd.control("reload", "laminad.service")
            readers.wait_for_progress(16)
        for directory in directories:
            expect_content(directory)
        umount_all(workspace, directories)


@test("daemon.metrics-logs-and-sockets-are-as-configured")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    config = workspace.path("config.toml")
    api, metrics = workspace.path("api.sock"), workspace.path("metrics.sock")
    config.write_text(f'[log]\nformat = "json"\n[api]\nsocket = "{api}"\ngroup = "daemon"\n'
                      f'[metrics]\nlisten = "unix:{metrics}"\n', encoding="utf-8")

    def value(name):
        text = subprocess.run(["curl", "-sS", "--fail", "--unix-socket", metrics,
                               "http://localhost/metrics"], check=True, capture_output=True,
                              text=True, timeout=60).stdout
        return {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines()
                if not line.startswith("#")}[f'{name}{{image="{image}"}}']

    with Daemon(workspace, f"--config={config}") as daemon:
        check_equal(stat.S_IMODE(os.stat(api).st_mode), 0o660, "mode of the API's socket")
        check_equal(os.stat(api).st_gid, grp.getgrnam("daemon").gr_gid, "its group")
        check_equal(stat.S_IMODE(os.stat(metrics).st_mode), 0o600, "mode of the metrics' socket")
        with workspace.mounted(image) as mounted:
            expect_content(mounted)
            stats = workspace.stats(mounted)[0]
            check_equal(value("lamina_read_bytes_total"), stats["read_bytes"], "bytes read")
            check_equal(value("lamina_fetched_bytes_total"), stats["fetched_bytes"], "bytes fetched")
            daemon.wait_for_successor(daemon.kill_worker())
            check_equal(value("lamina_mounts"), 1, "mounts, asked through the same socket")
            expect_content(mounted)
    for line in daemon.log_text().splitlines():
        check_equal(sorted(json.loads(line)), ["level", "message", "process", "time"], "keys")
    check(not api.exists() and not metrics.exists(), "sockets are left")


@test("daemon.wrong-configurations-are-refused-by-line")
def _(workspace):
    config = workspace.path("config.toml")
    for text, error in (('[log]\nlevle = "info"\n', ":2: log.levle is not a setting of laminad"),
                        ("state = 7\n", ":1: state is not a string"), ("[", ":1: ")):
        config.write_text(text, encoding="utf-8")
        result = subprocess.run([program("LAMINAD"), f"--config={config}"], check=False,
                                capture_output=True, text=True, timeout=60)
        check_equal(result.returncode, 1, "exit code")
        check(f"{config}{error}" in result.stderr, result.stderr)
        result = subprocess.run([program("LAMINAD"), f"--config={config}", "--check-config"],
                                check=False, capture_output=True, text=True, timeout=60)
        check_equal(result.returncode, 2, "exit code of a check")
        check(f"{config}{error}" in result.stderr, result.stderr)
    config.write_text('[log]\nlevel = "info"\n', encoding="utf-8")
    subprocess.run([program("LAMINAD"), f"--config={config}", "--check-config"], check=True, timeout=60)
    result = subprocess.run([program("LAMINAD"), "--config=/nonexistent"], check=False,
                            capture_output=True, text=True, timeout=60)
    check("/nonexistent" in result.stderr and result.returncode == 1, result.stderr)


@test("daemon.sockets-that-cannot-be-opened-are-refused")
def _(workspace):
    config = workspace.path("config.toml")
    here = workspace.root
    taken = workspace.path("taken")
    taken.write_text("kept", encoding="utf-8")
    for text, error in (
            (f'[api]\nsocket = "{here}/a"\ngroup = "nobody-has-this"\n', "there is no group nobody-has"),
            (f'[api]\nsocket = "{here}/none/a"\n', f"{here}/none: No such file or directory"),
            (f'[api]\nsocket = "{here}/{100 * "n"}"\n', "does not have 1 to 80 bytes"),
            (f'[api]\nsocket = "{taken}"\n', f"{taken}: what is there is not a socket"),
            (f'[api]\nsocket = "{here}/a"\n[metrics]\nlisten = "unix:{here}/../{here.name}/a"\n',
             "is the path of two sockets: api and metrics"),
            (f'[api]\nsocket = "{workspace.state}/control.sock"\n',
             "is the path of two sockets: control and api"),
            ('[metrics]\nlisten = "nowhere.invalid:9464"\n', "listen on nowhere.invalid:9464: "),
            ('[metrics]\nlisten = "127.0.0.1:99999"\n', ":2: metrics.listen is not unix:PATH")):
        config.write_text(text, encoding="utf-8")
        for options, code in (["--check-config"], 2), ([], 1):
            result = subprocess.run([program("LAMINAD"), f"--config={config}",
                                     f"--state={workspace.state}", *options], check=False,
                                    capture_output=True, text=True, timeout=60)
            check(result.returncode == code and error in result.stderr,
                  f"{text}{options}: {result.returncode} {result.stderr}")
    check_equal(taken.read_text(encoding="utf-8"), "kept", "what was at the socket's path")


@test("daemon.state-directory-has-one-daemon")
def _(workspace):
    need_root()
    image = workspace.converted(small_image(FILES))
    with Daemon(workspace):
        result = subprocess.run([program("LAMINAD"), f"--state={workspace.state}"], check=False,
                                capture_output=True, text=True, timeout=60)
        check("in use" in result.stderr and result.returncode == 1, result.stderr)
        workspace.lamina("serve", f"--state={workspace.state}", status=1)
        with workspace.mounted(image) as mounted:  # the socket is still the daemon's
            expect_content(mounted)
