# SPDX-License-Identifier: Apache-2.0
"""Profiles and prefetching: what is recorded, what it is used for, and images fetched in advance."""

import json
import os
import signal
import subprocess
import time

from daemon import Daemon
from harness import (check, check_equal, drop_caches, need_root, noise, program, repetitions,
                     small_image, test, wait_until)
from oci_layout import Image
from registry_server import Proxy
from registry_tests import ReferrersProxy, plain_registry
from run_container_tests import busybox_image

MIB = 1 << 20
CREATED = "org.opencontainers.image.created"


def files_image(workspace, count=24, size=MIB, destination="converted"):
    """Files of noise, which are four frames for each MiB."""
    return workspace.converted(
        small_image({f"f{i:02}": noise(size, i) for i in range(count)}), destination)


def touched(profile):
    return [(blob, frame) for blob, frame, _ in profile["touches"]]


def prefetch(workspace, *arguments, status=0, state=None):
    return json.loads(workspace.lamina("prefetch", f"--state={state or workspace.state}", "--json",
                                       *arguments, status=status).stdout)


@test("profile.the-same-command-twice-gives-the-same-frames")
def _(workspace):
    image = busybox_image(workspace)
    profiles = []
    for number in range(2):
        state = workspace.path(f"state{number}")
        output = workspace.path(f"profile{number}")
        result = workspace.lamina("profile", "record", image, f"--state={state}", "-o", output,
                                  "--", "cat", "/etc/passwd")
        check(result.stdout.startswith("root:"), f"the command's output is {result.stdout!r}")
        profiles.append(json.loads(output.read_text()))
    check(profiles[0]["touches"], "nothing was recorded")
    check_equal(sorted(touched(profiles[0])), sorted(touched(profiles[1])), "what was touched")
    times = [microseconds for _, _, microseconds in profiles[0]["touches"]]
    check_equal(times, sorted(times), "times")


@test("profile.record-gives-the-exit-code-of-the-command")
def _(workspace):
    image = busybox_image(workspace)
    output = workspace.path("profile")
    workspace.lamina("profile", "record", image, f"--state={workspace.state}", "-o", output, "--",
                     "sh", "-c", "exit 7", status=7)
    check(json.loads(output.read_text())["touches"], "nothing was recorded")


@test("profile.a-command-may-end-before-the-time-given")
def _(workspace):
    image = busybox_image(workspace)
    output = workspace.path("profile")
    for _ in range(repetitions(5)):
        workspace.lamina("profile", "record", image, f"--state={workspace.state}", "-o", output,
                         "--for=3600", "--", "true", timeout=60)
    check(json.loads(output.read_text())["touches"], "nothing was recorded")


@test("profile.frames-that-are-on-the-node-are-recorded-too")
def _(workspace):
    need_root()
    image = files_image(workspace, 2)
    with workspace.mounted(image) as directory:
        (directory / "f00").read_bytes()
        (directory / "f01").read_bytes()
    with workspace.mounted(image) as directory:
        workspace.lamina("profile", "start", directory)
        (directory / "f01").read_bytes()
        profile = json.loads(workspace.lamina("profile", "stop", directory).stdout)
        check_equal(workspace.stats(directory)[0]["fetched_bytes"], 0, "bytes fetched again")
    check_equal(len(profile["touches"]), 4, "frames touched")


@test("profile.live-mount-is-recorded-until-a-signal")
def _(workspace):
    need_root()
    image = files_image(workspace, 2)
    for transport in ("erofs", "fuse"):
        output = workspace.path(f"profile-{transport}")
        state = workspace.path(f"state-{transport}")
        with workspace.mounted(image, f"--transport={transport}", state=state) as directory:
            (directory / "f00").read_bytes()
            recorder = subprocess.Popen([program("LAMINA"), "profile", "record", "--mount",
                                         directory, f"--state={state}", "-o", output])
            wait_until(lambda: stats_of(workspace, directory)["recording"],
                       "the recording has begun")
            (directory / "f01").read_bytes()
            recorder.send_signal(signal.SIGINT)
            check_equal(recorder.wait(60), 0, "exit code of the recorder")
        check_equal(len(json.loads(output.read_text())["touches"]), 4, "frames touched")


@test("profile.is-written-where-it-was-said-and-not-lost")
def _(workspace):
    need_root()
    image = files_image(workspace, 1)
    fifo, link, file = workspace.path("fifo"), workspace.path("link"), workspace.path("file")
    os.mkfifo(fifo)
    link.symlink_to(file)
    with workspace.mounted(image) as directory:
        for output in fifo, link:
            workspace.lamina("profile", "start", directory)
            (directory / "f00").read_bytes()
            result = workspace.lamina("profile", "stop", directory, "-o", workspace.path("none/file"),
                                      status=1)
            check("the recording goes on" in result.stderr, result.stderr)
            reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            workspace.lamina("profile", "stop", directory, "-o", output)
            text = os.read(reader, MIB) if output == fifo else file.read_bytes()
            os.close(reader)
            check("touches" in json.loads(text), f"{output} has {text}")
        check(fifo.is_fifo() and link.is_symlink(), "what was there was replaced")
    nothing = workspace.new_directory()
    for command in "start", "stop":
        result = workspace.lamina("profile", command, nothing, f"--state={workspace.path('none')}",
                                  status=1)
        check(f"no image is mounted at {nothing}" in result.stderr, result.stderr)


@test("profile.recording-ends-after-the-time-given")
def _(workspace):
    need_root()
    image = files_image(workspace, 2)
    with workspace.mounted(image) as directory:
        (directory / "f00").read_bytes()
        profile = json.loads(workspace.lamina("profile", "record", "--mount", directory,
                                              "--for", "0.2").stdout)
        check_equal(profile["touches"], [], "what was touched")
        check("no profile" in workspace.lamina("profile", "stop", directory, status=1).stderr,
              "it still records")


@test("prefetch.fetches-the-image-without-a-mount-and-without-an-engine")
def _(workspace):
    need_root()
    image = files_image(workspace)
    report, = prefetch(workspace, image)
    check_equal(report["frames"], 96, "frames")
    check_equal(report["bytes"], report["bytes_missing"], "bytes fetched")
    check(report["requests"] <= report["bytes"] / (4 * MIB), f"{report['requests']} requests")
    again, = prefetch(workspace, image)
    check_equal((again["bytes"], again["requests"]), (0, 0), "what was fetched again")
    with workspace.mounted(image) as directory:
        for i in range(24):
            check((directory / f"f{i:02}").read_bytes() == noise(MIB, i), f"f{i:02} is wrong")
        check_equal(workspace.stats(directory)[0]["origin_requests"], 0, "requests of readers")


@test("prefetch.works-with-an-engine-that-runs")
def _(workspace):
    need_root()
    image = files_image(workspace, 4)
    other = workspace.converted(small_image({"x": noise(MIB, 99)}), "other")
    with workspace.mounted(image) as directory:
        reports = prefetch(workspace, other, image)
        check_equal([report["frames"] for report in reports], [4, 16], "frames")
        (directory / "f00").read_bytes()
        check_equal(workspace.stats(directory)[0]["fetched_frames"], 0, "frames fetched by readers")


@test("prefetch.daemon-that-is-killed-meanwhile-fetches-it-all-the-same")
def _(workspace):
    need_root()
    image = files_image(workspace, 8)
    other = workspace.converted(small_image({"x": noise(4 * MIB, 99)}), "other")
    command = [program("LAMINA"), "prefetch", f"--state={workspace.state}", "--json"]
    with Daemon(workspace) as daemon:
        client = subprocess.Popen([*command, "--prefetch-rate=2M", image], stdout=subprocess.PIPE,
                                  text=True)
        wait_until(lambda: list(workspace.state.glob("blobs/*")), "the prefetch has begun")
        client.send_signal(signal.SIGSTOP)
        daemon.wait_for_successor(daemon.kill_worker())
        # It must not take this one's report for its own.
        with subprocess.Popen([*command, "--prefetch-rate=1M", other], stdout=subprocess.DEVNULL) as second:
            time.sleep(0.5)
            client.send_signal(signal.SIGCONT)
            report, = json.loads(client.communicate(timeout=120)[0])
            check_equal(client.returncode, 0, "exit code")
            check_equal(second.wait(120), 0, "exit code of the other one")
        check_equal(report["image"], image, "image of the report")
        check("error" not in report, f"the error is {report}")
        again, = prefetch(workspace, image)
        check_equal((again["bytes_missing"], again["requests"]), (0, 0), "what was not fetched")


@test("prefetch.one-image-that-fails-does-not-stop-the-others")
def _(workspace):
    need_root()
    image = files_image(workspace, 2)
    listed = workspace.path("list")
    listed.write_text(f"# images\n\n  {image}\noci:{workspace.path('nowhere')}:x\n")
    result = workspace.lamina("prefetch", f"--state={workspace.state}", "--from-file", listed,
                              "--json", status=1)
    good, bad = json.loads(result.stdout)
    check_equal(good["frames"], 8, "frames of the good one")
    check("nowhere" in bad["error"], f"the error is {bad['error']}")
    result = workspace.lamina("prefetch", f"--state={workspace.state}", "--from-file", listed,
                              status=1)
    check("nowhere" in result.stderr, f"the error is {result.stderr}")
    check_equal(len(result.stdout.splitlines()), 1, "lines of output")


@test("prefetch.list-may-begin-with-a-byte-order-mark")
def _(workspace):
    need_root()
    listed = workspace.path("list")
    listed.write_text(files_image(workspace, 1) + "\n", encoding="utf-8-sig")
    report, = prefetch(workspace, "--from-file", listed)
    check_equal(report["frames"], 4, "frames")


@test("prefetch.obeys-a-rate-limit")
def _(workspace):
    need_root()
    image = files_image(workspace, 3)
    report, = prefetch(workspace, image, "--prefetch-rate=2M")
    # The first request is not held back; each of those that follow waits for the one before it.
    check(report["seconds"] > 0.9, f"3 MiB at 2 MiB/s took {report['seconds']} s")


@test("prefetch.fill-fetches-everything-and-stops-at-unmount")
def _(workspace):
    need_root()
    image = files_image(workspace)
    with workspace.mounted(image, "--fill") as directory:
        wait_until(lambda: workspace.stats(directory)[0]["frames_present"] == 96, "it is all there")
    slow = workspace.path("slow")
    with workspace.mounted(image, "--fill", "--prefetch-rate=1M", state=slow) as directory:
        wait_until(lambda: any(slow.glob("blobs/*/present")), "the blob is attached")
    workspace.check_nothing_left()  # the engine has ended: nothing goes on
    with workspace.mounted(image, "--no-prefetch", state=slow) as directory:
        check(stats_of(workspace, directory)["frames_present"] < 96, "it was fetched to the end after the unmount")
        check_equal((directory / "f23").read_bytes(), noise(MIB, 23), "content")


@test("prefetch.full-read-of-an-image-is-streamed")
def _(workspace):
    need_root()
    image = files_image(workspace, 48)
    with workspace.mounted(image) as directory:
        drop_caches()
        subprocess.run(["tar", "-C", directory, "-cf", "/dev/null", "."], check=True)
        subprocess.run(f"cat {directory}/* > /dev/null", shell=True, check=True)
        stats, = workspace.stats(directory)
        check_equal(stats["frames_present"], 192, "frames on the node")


def record(workspace, image, *names, output="profile.json", state="recorder"):
    """A profile of reading these files, made with a state directory of its own."""
    path = workspace.path(output)
    with workspace.mounted(image, "--no-prefetch", state=workspace.path(state)) as directory:
        workspace.lamina("profile", "start", directory)
        for name in names:
            (directory / name).read_bytes()
        workspace.lamina("profile", "stop", directory, "-o", path)
    return path


def stats_of(workspace, directory):
    """As workspace.stats, for a mount of any state directory."""
    return json.loads(workspace.lamina("stats", directory, "--json").stdout)[0]


def prefetched(workspace, directory, frames):
    """Stats of a mount once so many frames came in advance."""
    wait_until(lambda: stats_of(workspace, directory)["prefetched_frames"] >= frames,
               f"{frames} frames are prefetched")
    return stats_of(workspace, directory)


def scattered(count=24):
    return [f"f{i:02}" for i in range(0, count, 3)]


@test("profile.start-follows-the-profile-that-is-attached")
def _(workspace):
    need_root()
    image = files_image(workspace)
    profile = record(workspace, image, *reversed(scattered()))
    workspace.lamina("profile", "attach", image, profile)
    listed, = json.loads(workspace.lamina("profile", "ls", image, "--json").stdout)
    check_equal(listed["frames"], 32, "frames of the attached profile")
    shown = json.loads(workspace.lamina("profile", "show", image, "--json").stdout)
    check_equal(shown, json.loads(profile.read_text()), "the profile")
    with workspace.mounted(image) as directory:
        prefetched(workspace, directory, 32)
        for name in scattered():
            check_equal((directory / name).read_bytes(), noise(MIB, int(name[1:])), name)
        stats, = workspace.stats(directory)
        check_equal((stats["origin_requests"], stats["frames_present"]), (0, 32),
                    "requests of readers, and frames on the node")
    # An image that is found without a tag still is.
    with workspace.mounted(image.rsplit(":", 1)[0], state=workspace.path("other")) as directory:
        prefetched(workspace, directory, 32)


@test("profile.pack-makes-a-start-one-sequential-read")
def _(workspace):
    need_root()
    image = files_image(workspace)
    profile = record(workspace, image, *scattered())
    workspace.lamina("profile", "attach", image, profile)
    workspace.lamina("profile", "attach", image, profile, "--pack")
    listed = json.loads(workspace.lamina("profile", "ls", image, "--json").stdout)
    check_equal(len(listed), 1, "profiles, of which the new one replaces the old one")
    workspace.lamina("verify", image)
    with workspace.mounted(image) as directory:
        stats = prefetched(workspace, directory, 32)
        check(stats["prefetch_requests"] <= 32 // 16, f"{stats['prefetch_requests']} requests")
        for name in scattered():
            check_equal((directory / name).read_bytes(), noise(MIB, int(name[1:])), name)
        check_equal(workspace.stats(directory)[0]["origin_requests"], 0, "requests of readers")
    report, = prefetch(workspace, image, "--profile-only", state=workspace.path("other"))
    check_equal(report["frames"], 32, "frames of --profile-only")
    check(report["requests"] <= 32 // 16, f"{report['requests']} requests")


@test("profile.pack-that-lies-or-is-gone-does-no-harm")
def _(workspace):
    need_root()
    image = files_image(workspace, 12)
    profile = record(workspace, image, "f01", "f05")
    workspace.lamina("profile", "attach", image, profile, "--pack")
    listed, = json.loads(workspace.lamina("profile", "ls", image, "--json").stdout)
    pack = workspace.path("converted") / "blobs" / listed["pack_digest"].replace(":", "/")
    content = bytearray(pack.read_bytes())
    content[3 * MIB // 2] ^= 1
    for number, change in enumerate((lambda: pack.write_bytes(content),
                                     lambda: pack.write_bytes(content[:-1]), pack.unlink)):
        change()
        with workspace.mounted(image, state=workspace.path(f"state{number}")) as directory:
            wait_until(lambda: stats_of(workspace, directory)["frames_present"] == 8,
                       "all is there")
            for name in ("f01", "f05", "f06"):
                check_equal((directory / name).read_bytes(), noise(MIB, int(name[1:])), name)
            check_equal(stats_of(workspace, directory)["failed_requests"], 0, "reads that failed")


@test("profile.hostile-profiles-are-refused-or-of-no-effect")
def _(workspace):
    need_root()
    image = files_image(workspace, 2)
    good = json.loads(record(workspace, image, "f00").read_text())
    cases = {
        "frame 4000": dict(good, touches=[[0, 4000, 0]]),
        "no layer": dict(good, blobs=[{"digest": "sha256:" + 64 * "0"}]),
        "version 7": dict(good, version=7),
        "blob 1 of 1": dict(good, touches=[[1, 0, 0]]),
    }
    for error, profile in cases.items():
        path = workspace.path("bad.json")
        path.write_text(json.dumps(profile))
        result = workspace.lamina("profile", "attach", image, path, status=1)
        check(error in result.stderr, f"{error!r} is not in {result.stderr!r}")
    check_equal(json.loads(workspace.lamina("profile", "ls", image, "--json").stdout), [],
                "what is attached")
    # One that somebody else put there.
    path = workspace.path("good.json")
    path.write_text(json.dumps(good))
    workspace.lamina("profile", "attach", image, path)
    listed, = json.loads(workspace.lamina("profile", "ls", image, "--json").stdout)
    stored = workspace.path("converted") / "blobs" / listed["profile_digest"].replace(":", "/")
    for content in (b"", b"{}", 100 * b"[", stored.read_bytes()[:-1]):
        stored.write_bytes(content)
        with workspace.mounted(image) as directory:
            check_equal((directory / "f00").read_bytes(), noise(MIB, 0), "content")
    report, = prefetch(workspace, image, "--profile-only", status=1)
    check("profile" in report["error"], report["error"])
    prefetch(workspace, image)


@test("profile.newest-is-used-in-whatever-order-a-registry-lists-them")
def _(workspace):
    need_root()
    image = files_image(workspace, 2)
    profiles = [record(workspace, image, name, output=f"{name}.json") for name in ("f00", "f01")]
    with plain_registry(workspace) as server, ReferrersProxy(server) as proxy:
        stored = proxy.reference("app")
        workspace.lamina("convert", f"oci:{workspace.path('converted-source')}", stored)
        for profile in profiles:
            workspace.lamina("profile", "attach", stored, profile)
        (entries,) = proxy.attached.values()

        def used():
            return json.loads(workspace.lamina("profile", "show", stored, "--json").stdout)

        def listed():
            result = workspace.lamina("profile", "ls", stored, "--json")
            return [entry["manifest_digest"] for entry in json.loads(result.stdout)], result.stderr
        first, second = entries
        # Half an hour later, for who has another time of the day.
        first["annotations"] = {CREATED: "2026-01-01T12:00:00Z"}
        second["annotations"] = {CREATED: "2026-01-01T10:30:00.5-02:00"}
        for order in ([first, second], [second, first]):
            entries[:] = order
            requests = len(proxy.requests)
            check_equal(used(), json.loads(profiles[1].read_text()), "the profile that is used")
            reads = [path for _, path, _ in proxy.requests[requests:] if first["digest"] in path]
            check_equal(reads, [], "requests for one that is not used")
            check_equal(listed()[0], [first["digest"], second["digest"]], "what is listed")
        # Nothing but the order tells, and what does not say comes first.
        for entry in (first, second):
            entry["annotations"] = {}
        check_equal(used(), json.loads(profiles[0].read_text()), "the last profile in the list")
        second["annotations"] = {CREATED: "2026-01-01T12:00:00Z"}
        check_equal(used(), json.loads(profiles[1].read_text()), "the profile with a time")
        # One that cannot be read does not hide the others.
        missing = dict(first, digest="sha256:" + "0" * 64)
        entries[:] = [missing, second]
        digests, errors = listed()
        check_equal(digests, [second["digest"]], "what is listed")
        check(missing["digest"] in errors, errors)


@test("profile.prefetch-of-profiles-only-needs-one")
def _(workspace):
    need_root()
    report, = prefetch(workspace, files_image(workspace, 1), "--profile-only", status=1)
    check("no profile is attached" in report["error"], report["error"])


@test("profile.convert-lays-hot-frames-out-first")
def _(workspace):
    need_root()
    source = workspace.path("source")
    small_image({f"f{i:02}": noise(MIB, i) for i in range(24)}).write(source)
    image = workspace.convert(f"oci:{source}", "plain")
    profile = record(workspace, image, *reversed(scattered()))
    hot = workspace.convert(f"oci:{source}", "hot", f"--profile={profile}")
    again = workspace.convert(f"oci:{source}", "again", f"--profile={profile}", "--jobs=1")
    level = workspace.convert(f"oci:{source}", "level", f"--profile={profile}", "--level=3")
    digests = [json.loads(workspace.lamina("inspect", i, "--json").stdout)["manifest_digest"]
               for i in (hot, again, image, level)]
    check_equal(digests[0], digests[1], "manifest digest with another number of threads")
    check_equal(len(set(digests)), 3, "different results")
    with workspace.mounted(hot, "--no-prefetch") as directory:
        for i in range(24):
            check((directory / f"f{i:02}").read_bytes() == noise(MIB, i), f"f{i:02} is wrong")
    # A start needs no profile: the layers say what is hot.
    with workspace.mounted(hot, state=workspace.path("laid-out")) as directory:
        stats = prefetched(workspace, directory, 32)
        check(stats["prefetch_requests"] <= 32 // 16, f"{stats['prefetch_requests']} requests")
        for name in scattered():
            check_equal((directory / name).read_bytes(), noise(MIB, int(name[1:])), name)
        check_equal(stats_of(workspace, directory)["origin_requests"], 0, "requests of readers")
    report, = prefetch(workspace, hot, "--profile-only", state=workspace.path("job"))
    check_equal(report["frames"], 32, "frames of prefetch --profile-only")
    # What was hot is in front now.
    touches = touched(json.loads(record(workspace, hot, *reversed(scattered()), output="hot.json",
                                        state="hot-recorder").read_text()))
    check_equal(sorted(touches), [(0, frame) for frame in range(32)], "frames that are touched")
    workspace.lamina("profile", "attach", hot, workspace.path("hot.json"))
    with workspace.mounted(hot, state=workspace.path("start")) as directory:
        stats = prefetched(workspace, directory, 32)
        check(stats["prefetch_requests"] <= 32 // 16, f"{stats['prefetch_requests']} requests")
    result = workspace.lamina("convert", f"oci:{source}", f"oci:{workspace.path('no')}:x",
                              f"--profile={workspace.path('hot.json')}", status=1)
    check("names nothing of this image" in result.stderr, result.stderr)
    check(not workspace.path("no").exists(), "a failed conversion left something")


@test("profile.start-without-a-profile-follows-the-entrypoint")
def _(workspace):
    need_root()
    image = Image()
    image.config.update(Entrypoint=["main"], Env=["PATH=/app"])
    with image.layer() as layer:
        for i in range(8):
            layer.file(f"data{i}", noise(MIB, i))
        layer.file("app/main", b"#!/app/tool\n" + noise(MIB, 20), mode=0o755)
        layer.file("app/tool", noise(2 * MIB, 21), mode=0o755)
    reference = workspace.converted(image)
    with workspace.mounted(reference) as directory:
        stats = prefetched(workspace, directory, 12)
        check(stats["frames_present"] <= 16, f"{stats['frames_present']} frames were fetched")
        check_equal((directory / "app/tool").read_bytes(), noise(2 * MIB, 21), "content")
        check_equal(workspace.stats(directory)[0]["fetched_frames"], 0, "frames fetched by readers")


@test("prefetch.readers-do-not-wait-for-it")
def _(workspace):
    need_root()
    image = files_image(workspace, 64)
    with workspace.mounted(image, "--fill") as directory:
        # Backwards: far from where the filling is.
        slowest = 0
        for i in range(63, 40, -1):
            start = time.monotonic()
            with open(directory / f"f{i:02}", "rb") as file:
                check_equal(file.read(4096), noise(MIB, i)[:4096], "content")
            slowest = max(slowest, time.monotonic() - start)
        print(f"slowest read during the prefetch: {1000 * slowest:.1f} ms")
        stats, = workspace.stats(directory)
        check_equal(stats["failed_requests"], 0, "reads that failed")


@test("prefetch.image-is-in-the-list-of-the-cache")
def _(workspace):
    need_root()
    image = files_image(workspace, 4)
    prefetch(workspace, image)
    listed = json.loads(workspace.lamina("cache", "ls", f"--state={workspace.state}",
                                         "--json").stdout)
    entry, = listed["images"]
    check_equal(entry["present_bytes"], entry["content_bytes"], "bytes on the node")


@test("prefetch.image-that-does-not-fit-the-cache-fails-and-says-so")
def _(workspace):
    need_root()
    image = files_image(workspace, 24)
    report, = prefetch(workspace, image, "--cache-size=8M", status=1)
    check("cache" in report["error"], report["error"])
    with workspace.mounted(image, "--cache-size=8M", "--fill") as directory:
        for i in range(24):
            check((directory / f"f{i:02}").read_bytes() == noise(MIB, i), f"f{i:02} is wrong")


@test("profile.is-followed-without-a-cache")
def _(workspace):
    need_root()
    image = files_image(workspace, 12)
    profile = record(workspace, image, "f01", "f05")
    workspace.lamina("profile", "attach", image, profile, "--pack")
    with workspace.mounted(image, "--cache=none") as directory:
        prefetched(workspace, directory, 8)
        for name in ("f05", "f01", "f06"):
            check_equal((directory / name).read_bytes(), noise(MIB, int(name[1:])), name)


@test("profile.in-a-registry-is-found-and-followed")
def _(workspace):
    need_root()
    source = workspace.path("source")
    small_image({f"f{i:02}": noise(MIB, i) for i in range(24)}).write(source)
    with plain_registry(workspace) as server, Proxy(server) as proxy:
        workspace.lamina("convert", f"oci:{source}", server.reference("app"))
        image = proxy.reference("app")
        profile = record(workspace, image, *scattered())
        for options in ((), ("--pack",)):
            workspace.lamina("profile", "attach", server.reference("app"), profile, *options)
            listed = json.loads(workspace.lamina("profile", "ls", image, "--json").stdout)
            check_equal(listed[-1]["frames"], 32, "frames of the attached profile")
        pack = listed[-1]["pack_digest"]
        with workspace.mounted(image) as directory:
            prefetched(workspace, directory, 32)
            for name in scattered():
                check_equal((directory / name).read_bytes(), noise(MIB, int(name[1:])), name)
            check_equal(workspace.stats(directory)[0]["origin_requests"], 0, "requests of readers")
        requests = proxy.count("GET", f"/blobs/{pack}")
        check(1 <= requests <= 32 // 16 + 1, f"{requests} requests for 8 MiB of a pack")
        report, = prefetch(workspace, image, state=workspace.path("other"))
        check_equal(report["frames"], 96, "frames of the image")


@test("profile.pack-saves-what-lies-between-its-frames")
def _(workspace):
    need_root()
    source = workspace.path("source")
    small_image({f"f{i:02}": noise(MIB // 4, i) for i in range(24)}).write(source)
    with plain_registry(workspace) as server:
        image = server.reference("app")
        workspace.lamina("convert", f"oci:{source}", image)
        profile = record(workspace, image, *(f"f{i:02}" for i in range(0, 24, 2)))
        for options, frames in (((), 23), (("--pack",), 12)):
            workspace.lamina("profile", "attach", image, profile, *options)
            report, = prefetch(workspace, image, "--profile-only",
                               state=workspace.path(f"state{frames}"))
            check_equal(report["frames"], frames, f"frames fetched with a profile {options}")
