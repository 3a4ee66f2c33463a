# SPDX-License-Identifier: Apache-2.0
"""Registries that want tokens, redirect, are slow, fail, cut and lie: right bytes or a clear error."""

import contextlib
import itertools
import json
import re
import subprocess
import threading
import time

from harness import (check, check_equal, need_root, noise, small_image, test,
                     wait_until)
from registry_server import (Authority, Proxy, Relay, Server, TokenProxy, TokenServer, free_port,
                             process)
from registry_tests import (FILES, check_reads, environment, expect_read_error, filled_registry,
                            plain_registry, read_all, source_layout)

MIB = 1 << 20
BLOB = r"/v2/app/blobs/"
LARGE = {"large": noise(20 * MIB, 5)}


def is_range(handler):
    return handler.command == "GET" and re.match(BLOB, handler.path) and "Range" in handler.headers


def wanted(handler):
    """First and last byte of the range that is asked for."""
    return tuple(map(int, re.match(r"bytes=(\d+)-(\d+)$", handler.headers["Range"]).groups()))


def changed_ranges(change):
    """A fault that changes the answers to range requests."""
    return lambda handler: (lambda *answer: change(handler, *answer)) if is_range(handler) else None


def without(headers, *names):
    return [(name, value) for name, value in headers if name.lower() not in names]


class FirstOf:
    """True once in `every` calls for each different key, beginning with the first."""

    def __init__(self, every):
        self.every = every
        self.seen = {}
        self.lock = threading.Lock()

    def __call__(self, key):
        with self.lock:
            self.seen[key] = self.seen.get(key, -1) + 1
            return self.seen[key] % self.every == 0


@test("registry.token-expires-while-reading")
def _(workspace):
    need_root()
    with plain_registry(workspace) as server, TokenServer(lifetime=1, told_lifetime=600) as tokens:
        with TokenProxy(server, tokens) as guarded:
            image = guarded.reference("app")
            workspace.lamina("convert", source_layout(workspace), image)
            with workspace.mounted(image) as mounted:
                for name, content in FILES.items():
                    check((mounted / name).read_bytes() == content, name)
                    time.sleep(1.2)  # the server has forgotten the token, without a word
            check(guarded.refused > 1, "no token was ever refused")


@test("registry.token-is-renewed-before-it-expires")
def _(workspace):
    need_root()
    with plain_registry(workspace) as server, TokenServer(lifetime=4) as tokens:
        with TokenProxy(server, tokens) as guarded:
            image = guarded.reference("app")
            workspace.lamina("convert", source_layout(workspace), image)
            with workspace.mounted(image) as mounted:
                refused = guarded.refused
                for _ in range(8):
                    subprocess.run(["cat", mounted / "c"], check=True, capture_output=True)
                    with open(mounted / "a", "rb") as file:
                        file.seek(_ * 256 * 1024)
                        file.read(4096)
                    time.sleep(1)
                check_equal(guarded.refused, refused, "requests with a token that had expired")


@test("registry.one-token-for-many-readers")
def _(workspace):
    need_root()
    with plain_registry(workspace) as server, TokenServer() as tokens:
        with TokenProxy(server, tokens) as guarded:
            image = guarded.reference("app")
            workspace.lamina("convert", source_layout(workspace), image)
            with workspace.mounted(image) as mounted:
                issued = tokens.issued
                tokens.revoke_all()
                tokens.delay = 0.5
                readers = [subprocess.Popen(["dd", f"if={mounted}/a", "of=/dev/null", "bs=4096",
                                             "count=1", f"skip={64 * number}", "status=none"])
                           for number in range(12)]
                for reader in readers:
                    check_equal(reader.wait(), 0, "exit code of a reader")
                check_equal(tokens.issued - issued, 1, "tokens that were got")


@test("registry.token-server-with-passwords")
def _(workspace):
    need_root()
    user = ("ann", "pw")
    with plain_registry(workspace) as server, TokenServer(user=user) as tokens:
        with TokenProxy(server, tokens) as guarded:
            image = guarded.reference("app")
            workspace.lamina("convert", source_layout(workspace), image, "--creds=ann:pw",
                             env=environment(workspace))
            result = workspace.lamina("verify", image, status=1, env=environment(workspace))
            check("who are you" in result.stderr and "get a token" in result.stderr, result.stderr)


@test("registry.redirect-does-not-carry-the-credential")
def _(workspace):
    need_root()

    class Store(Server):
        """Serves blobs to whom the registry sends here, as an object store does."""

        def answer(self, handler):
            self.note(handler)
            Proxy.reply(handler, *Proxy.forward(self, handler))

    with filled_registry(workspace) as server, Store() as store, TokenServer() as tokens:
        store.upstream = server
        with TokenProxy(server, tokens) as guarded:
            check_token = guarded.fault

            def fault(handler):
                refused = check_token(handler)
                if refused or handler.command != "GET" or not re.match(BLOB, handler.path):
                    return refused
                location = f"http://127.0.0.1:{store.port}{handler.path}"
                handler.reply(307, Location=location)
                return True

            guarded.fault = fault
            check_reads(workspace, guarded.reference("app"))
            check(store.count("GET", BLOB) > 0, "nothing was redirected")
            check(not any("Authorization" in headers for _, _, headers in store.requests),
                  "the other host saw a credential")


@test("registry.redirect-does-not-carry-the-refresh-token")
def _(workspace):
    bodies = []

    class Elsewhere(Server):
        def answer(self, handler):
            bodies.append(handler.body)
            handler.reply(200, b'{"token": "x"}')

    class Redirecting(Server):
        def answer(self, handler):
            self.note(handler)
            handler.reply(307, Location=f"{elsewhere.url}/token")

    with plain_registry(workspace) as server, Elsewhere() as elsewhere, Redirecting() as tokens:
        def fault(handler):
            challenge = f'Bearer realm="{tokens.url}/token",service="test",scope="x"'
            handler.reply(401, WWW_Authenticate=challenge)
            return True
        with Proxy(server, fault) as guarded:
            auth_file = workspace.path("auth.json")
            auth_file.write_text(json.dumps(
                {"auths": {guarded.host: {"identitytoken": "refresh-me"}}}), encoding="utf-8")
            result = workspace.lamina("inspect", guarded.reference("app"), status=1,
                                      env=environment(workspace,
                                                      REGISTRY_AUTH_FILE=str(auth_file)))
            check("307" in result.stderr, result.stderr)
            check(tokens.count("POST", "/token") > 0, "the token server was not asked")
            check_equal(bodies, [], "what the other host got")


@test("registry.credentials-without-a-host-are-for-one-registry")
def _(workspace):
    need_root()

    class Recorder(Server):
        def answer(self, handler):
            self.note(handler)
            handler.reply(401, WWW_Authenticate='Basic realm="x"')

    creds = ("--creds=ann:pw", f"--state={workspace.state}")
    with filled_registry(workspace) as server, Recorder() as evil:
        app, other = server.reference("app"), evil.reference("x")
        one, two = workspace.path("list"), workspace.new_directory("mnt")
        one.write_text(f"{app}\n{other}\n", encoding="utf-8")
        for arguments in (("mount", app, two, "--layer", other), ("prefetch", app, other),
                          ("prefetch", "--from-file", one), ("run", "--layer", other, app)):
            result = workspace.lamina(*arguments[:1], *creds, *arguments[1:], status=None)
            check(result.returncode != 0 and "--creds needs HOST=" in result.stderr, result.stderr)
        check_equal(evil.requests, [], "requests to the other registry")


@test("registry.redirect-loop-is-an-error")
def _(workspace):
    need_root()
    with filled_registry(workspace) as server:
        with Proxy(server) as proxy:
            def fault(handler):
                if not is_range(handler):
                    return None
                handler.reply(307, Location=handler.path)
                return True
            proxy.fault = fault
            result = workspace.lamina("verify", proxy.reference("app"), status=1)
            check("redirects" in result.stderr, result.stderr)


@test("registry.busy-server-is-asked-again")
def _(workspace):
    """429 and 5xx, each first time that something is asked for."""
    need_root()
    with filled_registry(workspace) as server:
        for status in (429, 500, 502, 503, 504):
            first = FirstOf(every=2)

            def fault(handler, status=status, first=first):
                if not first((handler.path, handler.headers.get("Range"))):
                    return None
                handler.reply(status)
                return True
            with Proxy(server, fault) as proxy:
                check_reads(workspace, proxy.reference("app"))


@test("registry.retry-after-is-honoured")
def _(workspace):
    need_root()
    with filled_registry(workspace) as server:
        busy_until = [None]
        early = []

        def fault(handler):
            if not re.match(r"/v2/app/manifests/", handler.path):
                return None
            now = time.monotonic()
            if busy_until[0] is None:
                busy_until[0] = now + 2
                handler.reply(429, Retry_After="2")
                return True
            if now < busy_until[0] - 0.05:
                early.append(now)
            return None
        with Proxy(server, fault) as proxy:
            workspace.lamina("inspect", proxy.reference("app"))
            check_equal(early, [], "requests that came too early")

        # One who asks for more than anyone would wait is not waited for.
        def closed(handler):
            handler.reply(503, Retry_After="86400")
            return True
        with Proxy(server, closed) as proxy:
            result = workspace.lamina("inspect", proxy.reference("app"), status=1, timeout=20)
            check("503" in result.stderr, result.stderr)


@test("registry.busy-server-gets-no-second-request")
def _(workspace):
    """Nothing is asked for in the pause that a server has asked for, and content comes after it."""
    need_root()
    busy_until = [None]
    early = []
    asked = threading.Event()

    def fault(handler):
        if not asked.is_set() or not is_range(handler):
            return None
        now = time.monotonic()
        if busy_until[0] is None:
            busy_until[0] = now + 4
            handler.reply(429, Retry_After="4")
            return True
        if now < busy_until[0] - 0.05:
            early.append(now - busy_until[0])
        return None
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        with workspace.mounted(proxy.reference("app"), "--no-prefetch") as mounted:
            asked.set()
            first = subprocess.Popen(["cat", mounted / "b"], stdout=subprocess.DEVNULL)
            wait_until(lambda: busy_until[0] is not None, "the server was asked")
            time.sleep(0.2)
            check((mounted / "a").read_bytes() == FILES["a"], "a is wrong")
            check_equal(first.wait(), 0, "exit code of the first reader")
            check_equal(early, [], "requests that came too early")


@test("registry.pause-that-is-too-long-is-an-error-at-once")
def _(workspace):
    need_root()
    closed = threading.Event()

    def fault(handler):
        if not closed.is_set() or not is_range(handler):
            return None
        handler.reply(503, Retry_After="40")
        return True
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        with workspace.mounted(proxy.reference("app"), "--no-prefetch") as mounted:
            closed.set()
            for _ in range(3):
                start = time.monotonic()
                result = subprocess.run(["cat", mounted / "b"], check=False, capture_output=True,
                                        timeout=60)
                check(b"Input/output error" in result.stderr, f"the error is {result.stderr!r}")
                check(time.monotonic() - start < 5, "the error came late")
                asked = proxy.count("GET", BLOB)
            result = subprocess.run(["cat", mounted / "a"], check=False, capture_output=True,
                                    timeout=60)
            check(result.returncode != 0, "a was read from a server that is closed")
            check_equal(proxy.count("GET", BLOB), asked, "requests to a server that is closed")
        log = (workspace.state / "engine.log").read_text(encoding="utf-8")
        check("asked for a pause" in log, log)


@test("registry.whole-object-instead-of-a-range")
def _(workspace):
    need_root()

    def fault(handler):
        if is_range(handler):
            del handler.headers["Range"]
        return None
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        check_reads(workspace, proxy.reference("app"))
        workspace.lamina("verify", proxy.reference("app"))


@test("registry.ranges-without-headers")
def _(workspace):
    need_root()
    fault = changed_ranges(
        lambda _, status, headers, body: (status, without(
            headers, "content-range", "docker-content-digest", "etag", "accept-ranges",
            "content-type", "cache-control"), body))
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        check_reads(workspace, proxy.reference("app"))


@test("registry.ranges-in-pieces")
def _(workspace):
    """A server may send less than it was asked for, if it says so."""
    need_root()

    def change(handler, status, headers, body):
        if len(body) <= 70_000:
            return status, headers, body
        first, _ = wanted(handler)
        total = dict(headers)["Content-Range"].split("/")[1]
        body = body[:70_000]
        headers = without(headers, "content-range", "content-length") + [
            ("Content-Range", f"bytes {first}-{first + len(body) - 1}/{total}"),
            ("Content-Length", str(len(body)))]
        return status, headers, body
    with filled_registry(workspace) as server, Proxy(server, changed_ranges(change)) as proxy:
        check_reads(workspace, proxy.reference("app"))


@test("registry.cut-connections")
def _(workspace):
    """Every first answer ends in the middle: what has come is kept, the rest is asked for."""
    need_root()
    first = FirstOf(every=2)

    def fault(handler):
        if not is_range(handler) or not first((handler.path, wanted(handler)[1])):
            return None

        def cut(status, headers, body):
            handler.close_connection = True
            return status, headers, body[:len(body) // 2]
        return cut
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        check_reads(workspace, proxy.reference("app"))
        check(resumed(proxy) > 1, "nothing was taken up where it had stopped")


def resumed(proxy):
    """The most places at which one range was begun: more than one if it was taken up again."""
    starts = {}
    for _, path, headers in proxy.requests:
        if match := re.match(r"bytes=(\d+)-(\d+)", headers.get("Range", "")):
            starts.setdefault((path, match[2]), set()).add(int(match[1]))
    return max(map(len, starts.values()), default=0)


@test("registry.prefetch-goes-on-after-cut-connections")
def _(workspace):
    """Each long answer ends early, and tokens run out meanwhile: what has come is kept."""
    need_root()
    turn = itertools.count()
    with plain_registry(workspace) as server, TokenServer() as tokens:
        workspace.lamina("convert", source_layout(workspace, LARGE), server.reference("app"))

        def cut(handler, status, headers, body):
            if len(body) < 2 * MIB:
                return status, headers, body
            handler.close_connection = True
            if next(turn) % 3 == 0:
                tokens.revoke_all()
            return status, headers, body[:1_500_000]
        with TokenProxy(server, tokens) as proxy, Proxy(server, changed_ranges(cut)) as mirror:
            check_token = proxy.fault
            proxy.fault = lambda handler: check_token(handler) or changed_ranges(cut)(handler)
            for used, *arguments in ((proxy,), (mirror, f"--mirror={mirror.url}")):
                state = workspace.new_directory("state")
                workspace.lamina("prefetch", f"--state={state}", *arguments, "--",
                                 proxy.reference("app"))
                check(resumed(used) > 3, "requests were not taken up where they had stopped")
                check_local(workspace, server, state)
            check(proxy.refused > 2, "no token was refused in between")


@test("registry.prefetch-leaves-a-mirror-that-ends-in-the-middle")
def _(workspace):
    need_root()
    served = []
    with plain_registry(workspace) as server:
        workspace.lamina("convert", source_layout(workspace, LARGE), server.reference("app"))

        def fault(handler):
            if not is_range(handler):
                return None
            if len(served) > 1:
                handler.reply(503)
                return True

            def cut(status, headers, body):
                if len(body) >= 2 * MIB:
                    served.append(len(body))
                    handler.close_connection = True
                    body = body[:1_500_000]
                return status, headers, body
            return cut
        with Proxy(server) as registry_itself, Proxy(server, fault) as mirror:
            state = workspace.new_directory("state")
            workspace.lamina("prefetch", f"--state={state}", f"--mirror={mirror.url}", "--",
                             registry_itself.reference("app"))
            check(served, "the mirror was not asked")
            check(registry_itself.count("GET", BLOB) > 0, "the registry itself was not asked")
            check_local(workspace, server, state)


def check_local(workspace, server, state):
    """All of the image is on the node, and right."""
    with Proxy(server) as proxy, workspace.mounted(proxy.reference("app"), "--no-prefetch",
                                                   state=state) as mounted:
        read_all(mounted, LARGE)
        ranges = [path for method, path, headers in proxy.requests if "Range" in headers]
        check_equal(ranges, [], "requests for content")


def expect_clear_error(workspace, proxy, *texts):
    """Reading fails with EIO, and the log says why; with the fault gone it works."""
    log = expect_read_error(workspace, proxy.reference("app"), "a")
    check(any(text in log for text in texts), f"the log has none of {texts}:\n{log}")


def only_frames(server, change):
    """A fault in what is read after the mount, which needs the end of the object alone."""
    layer = max((server.directory / "data").rglob("data"), key=lambda path: path.stat().st_size)
    size = layer.stat().st_size

    def fault(handler):
        if not is_range(handler) or wanted(handler)[0] > size - 200_000:
            return None
        return lambda *answer: change(handler, *answer)
    return fault


@test("registry.wrong-ranges")
def _(workspace):
    need_root()

    def shifted(handler, status, headers, body):
        first, last = wanted(handler)
        return status, without(headers, "content-range") + [
            ("Content-Range", f"bytes {first + 1}-{last + 1}/99999999")], body

    def garbage(_, status, headers, body):
        return status, without(headers, "content-range") + [("Content-Range", "bytes */x")], body

    def other_size(handler, status, headers, body):
        first, last = wanted(handler)
        return status, without(headers, "content-range") + [
            ("Content-Range", f"bytes {first}-{last}/{last + 1000}")], body

    with filled_registry(workspace) as server:
        for change, text in ((shifted, "the server sent"), (garbage, "the server sent"),
                             (other_size, "instead of")):
            with Proxy(server, only_frames(server, change)) as proxy:
                expect_clear_error(workspace, proxy, text)


@test("registry.wrong-bytes")
def _(workspace):
    need_root()

    def change(_, status, headers, body):
        return status, headers, bytes(len(body))
    with filled_registry(workspace) as server:
        with Proxy(server, only_frames(server, change)) as proxy:
            expect_clear_error(workspace, proxy, "digest mismatch", "digest")


@test("registry.truncated-for-good")
def _(workspace):
    need_root()

    def change(handler, status, headers, body):
        handler.close_connection = True
        return status, headers, body[:1000]
    with filled_registry(workspace) as server:
        with Proxy(server, only_frames(server, change)) as proxy:
            expect_clear_error(workspace, proxy, "transfer closed", "bytes remaining", "ends after")


@test("registry.wrong-manifest")
def _(workspace):
    need_root()

    def fault(handler):
        if not re.match(r"/v2/app/manifests/sha256:", handler.path):
            return None
        return lambda status, headers, body: (status, headers, body.replace(b"linux", b"xinul")
                                              if b"linux" in body else b"{}" + body[2:])
    with filled_registry(workspace) as server:
        result = workspace.lamina("inspect", server.reference("app"), "--json")
        digest = re.search(r'"manifest_digest": *"(sha256:[0-9a-f]+)"', result.stdout)[1]
        with Proxy(server, fault) as proxy:
            result = workspace.lamina("inspect", f"docker://{proxy.host}/app@{digest}", status=1)
            check("digest mismatch" in result.stderr, result.stderr)


@test("registry.recovers-after-an-outage")
def _(workspace):
    need_root()
    out = threading.Event()

    def fault(handler):
        if not out.is_set():
            return None
        handler.close_connection = True
        return True
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        with workspace.mounted(proxy.reference("app")) as mounted:
            out.set()
            result = subprocess.run(["cat", mounted / "a"], check=False, capture_output=True,
                                    timeout=120)
            check(result.returncode != 0, "read without a server")
            out.clear()
            read_all(mounted)


@test("registry.mirrors-in-order")
def _(workspace):
    need_root()
    with filled_registry(workspace) as server, Proxy(server) as registry_itself:
        image = registry_itself.reference("app")

        def missing(handler):
            handler.reply(404)
            return True

        def broken(handler):
            handler.reply(500)
            return True
        with Proxy(server, missing) as without_it, Proxy(server, broken) as failing, \
                Proxy(server) as good:
            nobody = f"--mirror=http://127.0.0.1:{free_port()}"
            mirrors = [nobody] + [f"--mirror={proxy.url}" for proxy in (without_it, failing, good)]
            check_reads(workspace, image, *mirrors)
            check(without_it.count("GET", "/") > 0 and failing.count("GET", "/") > 0,
                  "mirrors were not asked")
            check(good.count("GET", BLOB) > 0, "the good mirror was not asked for blobs")
            check_equal(registry_itself.count("GET", BLOB), 0,
                        "blobs asked for at the registry itself")
            check(good.count("GET", rf"ns=localhost%3A{registry_itself.port}") > 0,
                  "the mirror was not told the registry")
        # With all of them gone, the registry serves.
        check_reads(workspace, image, *mirrors)
        # A mirror for another registry is not asked.
        with Proxy(server) as other:
            check_reads(workspace, image, f"--mirror=other.example={other.url}")
            check_equal(other.requests, [], "requests to the mirror of another registry")


@test("registry.lying-mirror-is-passed-over")
def _(workspace):
    """Wrong bytes from a mirror are read again where they are right."""
    need_root()

    def lie(_, status, headers, body):
        return status, headers, bytes(len(body))
    with filled_registry(workspace) as server, Proxy(server) as registry_itself:
        image = registry_itself.reference("app")
        for fault in (changed_ranges(lie), only_frames(server, lie)):
            with Proxy(server, fault) as mirror:
                check_reads(workspace, image, f"--mirror={mirror.url}")
                check(mirror.count("GET", BLOB) > 0, "the mirror was not asked")


@test("registry.mirror-never-sees-the-credential")
def _(workspace):
    need_root()
    with plain_registry(workspace) as server, TokenServer(user=("ann", "pw")) as tokens:
        with TokenProxy(server, tokens) as guarded, TokenProxy(server, tokens) as mirror:
            image = guarded.reference("app")
            creds = "--creds=ann:pw"
            workspace.lamina("convert", source_layout(workspace), image, creds)
            check_reads(workspace, image, creds, f"--mirror={mirror.url}")
            check(mirror.requests and not any("Authorization" in headers
                                              for _, _, headers in mirror.requests),
                  "the mirror saw a credential")


@test("registry.late-answer-gets-a-second-request")
def _(workspace):
    need_root()
    stuck = threading.Event()
    release = threading.Event()
    held = []

    def fault(handler):
        if is_range(handler) and stuck.is_set():
            stuck.clear()
            held.append(handler.headers["Range"])
            release.wait(60)
        return None
    with filled_registry(workspace) as server, Proxy(server, fault) as proxy:
        try:
            with workspace.mounted(proxy.reference("app")) as mounted:
                (mounted / "c").read_bytes()
                stuck.set()
                start = time.monotonic()
                check((mounted / "b").read_bytes() == FILES["b"], "b is wrong")
                check(held, "nothing was held up")
                check(time.monotonic() - start < 30, "it waited for the one that was stuck")
        finally:
            release.set()


@test("registry.hanging-registry-holds-up-no-other-image")
def _(workspace):
    """More readers of an image that does not answer than there are threads."""
    need_root()
    stuck = threading.Event()
    release = threading.Event()

    def fault(handler):
        if is_range(handler) and stuck.is_set():
            release.wait(120)
        return None
    with plain_registry(workspace) as server:
        workspace.lamina("convert", source_layout(workspace, LARGE), server.reference("app"))
        other = workspace.converted(small_image(FILES), "other")
        with Proxy(server, fault) as proxy:
            readers = []
            try:
                with workspace.mounted(proxy.reference("app"), "--no-prefetch") as mounted, \
                        workspace.mounted(other, "--no-prefetch") as alive:
                    stuck.set()
                    readers = [subprocess.Popen(
                        ["dd", f"if={mounted}/large", "of=/dev/null", "bs=4096", "count=1",
                         f"skip={number * 30}", "status=none"]) for number in range(160)]
                    time.sleep(3)
                    start = time.monotonic()
                    read_all(alive)
                    check(time.monotonic() - start < 15, "it waited for the other image")
                    check(all(reader.poll() is None for reader in readers), "nothing hangs")
                    release.set()
                    for reader in readers:
                        check_equal(reader.wait(), 0, "exit code of a reader")
            finally:
                release.set()


def check_upload(workspace, server, proxy):
    workspace.lamina("convert", source_layout(workspace, LARGE), proxy.reference("app"))
    state = workspace.new_directory("state")
    with workspace.mounted(server.reference("app"), state=state) as mounted:
        read_all(mounted, LARGE)


@test("registry.upload-is-taken-up-where-it-stopped")
def _(workspace):
    need_root()
    sizes = []

    def fault(handler):
        if handler.command != "PATCH":
            return None
        sizes.append(len(handler.body))
        if len(sizes) != 2:
            return None
        handler.reply(502)  # the registry never gets the second chunk
        return True
    with plain_registry(workspace) as server, Proxy(server, fault) as proxy:
        check_upload(workspace, server, proxy)
        check(proxy.count("GET", "/blobs/uploads/") > 0, "the server was not asked what it has")
        check_equal(sizes[1], sizes[2], "size of the chunk that was sent again")
        check_equal(proxy.count("POST", "/blobs/uploads/"), 2, "uploads (layer, configuration)")


@test("registry.lost-upload-is-made-again")
def _(workspace):
    need_root()
    patches = []

    def fault(handler):
        if handler.command != "PATCH":
            return None
        patches.append(handler.path)
        if len(patches) != 2:
            return None
        # The registry gets half of the chunk, and the client no answer: docker-registry goes on only
        # where its own last answer was.
        handler.body = handler.body[:len(handler.body) // 2]
        del handler.headers["Content-Length"]
        del handler.headers["Content-Range"]
        return lambda *_: (502, [("Content-Length", "0")], b"")
    with plain_registry(workspace) as server, Proxy(server, fault) as proxy:
        check_upload(workspace, server, proxy)
        check_equal(proxy.count("POST", "/blobs/uploads/"), 3, "uploads (layer twice)")


@test("registry.plain-http-needs-leave")
def _(workspace):
    result = workspace.lamina("inspect", "docker://registry.invalid:1/app", status=1)
    check("https://" in result.stderr or "resolve" in result.stderr, result.stderr)
    result = workspace.lamina("inspect", "docker://registry.invalid:1/app", "--plain-http",
                              status=1)
    check("http://" in result.stderr or "resolve" in result.stderr, result.stderr)


NGINX = """
daemon off; master_process off; user root; pid {root}/nginx.pid; error_log {root}/nginx.err;
events {{ worker_connections 512; }}
http {{
  log_format line '$server_protocol $connection $request_method $uri $status';
  access_log {root}/nginx.log line;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy;
  fastcgi_temp_path {root}/fastcgi; uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  client_max_body_size 0;
  limit_req_zone $server_name zone=all:1m rate=40r/s;
  server {{
    listen 127.0.0.1:{port} ssl http2;
    ssl_certificate {authority.certificate}; ssl_certificate_key {authority.key};
    location / {{
      proxy_pass http://127.0.0.1:{upstream}; proxy_http_version 1.1;
      proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Proto https;
    }}
    location ~ ^/v2/[^/]+/blobs/sha256 {{
      limit_req zone=all burst=4 nodelay; limit_req_status 429;
      proxy_pass http://127.0.0.1:{upstream}; proxy_http_version 1.1;
      proxy_set_header Host $http_host;
    }}
  }}
}}
"""


@contextlib.contextmanager
def nginx_before(workspace, server, authority):
    """Serves a registry by HTTP/2; gives the port."""
    port = free_port()
    config = workspace.path("nginx.conf")
    config.write_text(NGINX.format(root=workspace.root, port=port, authority=authority,
                                   upstream=server.port), encoding="ascii")
    with process(["nginx", "-c", config], port, workspace.path("nginx.out")):
        yield port


@test("registry.http2-and-rate-limit-behind-nginx")
def _(workspace):
    """One connection for all, and more requests than the server allows are asked again."""
    need_root()
    authority = Authority(workspace.root)
    with filled_registry(workspace) as server:
        with nginx_before(workspace, server, authority) as port:
            image = f"docker://localhost:{port}/app"
            check_reads(workspace, image, f"--ca-file={authority.ca}")
            workspace.lamina("convert", source_layout(workspace, LARGE, name="large"),
                             f"docker://localhost:{port}/pushed", f"--ca-file={authority.ca}")
            workspace.lamina("verify", f"docker://localhost:{port}/pushed",
                             f"--ca-file={authority.ca}")
            time.sleep(0.2)
            lines = [line.split() for line in
                     workspace.path("nginx.log").read_text(encoding="ascii").splitlines()]
    # Streams have HTTP/1.1 connections of their own (chunkstore/http/client.h).
    check("HTTP/2.0" in {line[0] for line in lines}, "nothing came by HTTP/2")
    reads = [line for line in lines if line[2] == "GET" and "/app/blobs/" in line[3]]
    check(len({line[1] for line in reads}) <= 6, "connections are not kept")


@test("registry.silent-connection-is-not-used-again")
def _(workspace):
    """A connection with many streams over which nothing comes any more, and that stays open."""
    need_root()
    authority = Authority(workspace.root)
    with filled_registry(workspace) as server:
        with nginx_before(workspace, server, authority) as port, Relay(port) as relay:
            image = f"docker://localhost:{relay.port}/app"
            with workspace.mounted(image, f"--ca-file={authority.ca}",
                                   "--no-prefetch") as mounted:
                (mounted / "c").read_bytes()
                relay.silence()
                start = time.monotonic()
                read_all(mounted)
                # One request may find out that it has come to nothing.
                check(time.monotonic() - start < 60, "reads waited for a dead connection")
