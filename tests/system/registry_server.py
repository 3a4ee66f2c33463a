# SPDX-License-Identifier: Apache-2.0
"""Registries for tests: Debian's docker-registry with TLS and passwords or tokens, and proxies in
front of it that redirect, delay, cut and lie. All on loopback, on free ports, ended by process id."""

import base64
import contextlib
import hashlib
import http.client
import http.server
import json
import re
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse

from harness import Failure, check, wait_until


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Authority:
    """A certificate authority, and a certificate for localhost that it has signed."""

    def __init__(self, directory):
        self.ca = directory / "ca.pem"
        self.certificate = directory / "server.pem"
        self.key = directory / "server.key"
        ca_key, request, names = directory / "ca.key", directory / "server.csr", directory / "san"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n", encoding="ascii")
        new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", self.ca, "-days", "2",
                "-subj", "/CN=Test authority", "-addext", "basicConstraints=critical,CA:TRUE")
        openssl("req", *new_key, "-keyout", self.key, "-out", request, "-subj", "/CN=localhost")
        openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial",
                "-out", self.certificate, "-days", "2", "-extfile", names)

    def server_context(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@contextlib.contextmanager
def process(command, port, log):
    """Runs a server until the end of the with block. It is up once its port answers."""
    with open(log, "wb") as out, subprocess.Popen(list(map(str, command)), stdout=out, stderr=out,
                                                  stdin=subprocess.DEVNULL) as server:
        try:
            def answers():
                check(server.poll() is None, f"{command[0]} ended:\n{log.read_text()}")
                with socket.socket() as client:
                    return client.connect_ex(("127.0.0.1", port)) == 0
            wait_until(answers, f"{command[0]} answers")
            yield server
        finally:
            server.kill()


class Registry:
    """docker-registry. `url` is "http://..." or "https://..."; `host` goes behind docker://."""

    def __init__(self, directory, port, tls):
        self.directory = directory
        self.port = port
        self.host = f"localhost:{port}"
        self.tls = tls

    def reference(self, name):
        return f"docker://{self.host}/{name}"

    def blob_path(self, digest):
        hexadecimal = digest.split(":")[1]
        return (self.directory / "data/docker/registry/v2/blobs/sha256" / hexadecimal[:2] /
                hexadecimal / "data")

    def log(self):
        return (self.directory / "log").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def registry(directory, tls=None, password_file=None, token=None, upload_redirects=False):
    """A docker-registry that keeps its data below `directory`. `tls` is an Authority, `token` a
    TokenServer whose tokens it wants."""
    directory.mkdir(exist_ok=True)
    port = free_port()
    config = {"version": "0.1", "log": {"level": "info"},
              "storage": {"filesystem": {"rootdirectory": str(directory / "data")},
                          "delete": {"enabled": True}},
              "http": {"addr": f"127.0.0.1:{port}", "relativeurls": True}}
    if tls:
        config["http"]["tls"] = {"certificate": str(tls.certificate), "key": str(tls.key)}
    if password_file:
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(password_file)}}
    path = directory / "config.yml"
    path.write_text(json.dumps(config), encoding="utf-8")  # YAML includes JSON
    with process(["docker-registry", "serve", path], port, directory / "log"):
        yield Registry(directory, port, tls)


def write_passwords(path, user, password):
    result = subprocess.run(["htpasswd", "-Bbn", user, password], check=True, capture_output=True)
    path.write_bytes(result.stdout)


def write_auth_file(path, host, user, password):
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}), encoding="utf-8")


class Handler(http.server.BaseHTTPRequestHandler):
    """Hands every request to the server's `answer` and keeps quiet."""

    protocol_version = "HTTP/1.1"

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.server.owner.answer(self)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class ThreadedServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass  # clients that go away are a part of the tests


class Server:
    """An HTTP server on threads, as a context manager. Subclasses answer."""

    def __init__(self, tls=None):
        self.http = ThreadedServer(("127.0.0.1", 0), Handler)
        self.http.owner = self
        self.port = self.http.server_address[1]
        self.host = f"localhost:{self.port}"
        self.scheme = "https" if tls else "http"
        self.url = f"{self.scheme}://{self.host}"
        self.requests = []  # (method, path, headers), in the order they came
        self.lock = threading.Lock()
        if tls:
            self.http.socket = tls.server_context().wrap_socket(
                self.http.socket, server_side=True, do_handshake_on_connect=False)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def reference(self, name):
        return f"docker://{self.host}/{name}"

    def note(self, handler):
        with self.lock:
            self.requests.append((handler.command, handler.path, dict(handler.headers)))

    def count(self, method, pattern):
        with self.lock:
            return sum(1 for m, path, _ in self.requests if m == method and re.search(pattern, path))

    def answer(self, handler):
        raise NotImplementedError


class Proxy(Server):
    """Passes requests on to a registry. `fault(handler, number)` may answer in its place and return
    True, or return a function that changes the registry's answer (status, headers, body)."""

    def __init__(self, upstream, fault=None, tls=None):
        super().__init__(tls)
        self.upstream = upstream
        self.fault = fault

    def answer(self, handler):
        self.note(handler)
        changed = self.fault(handler) if self.fault else None
        if changed is True:
            return
        status, headers, body = self.forward(handler)
        if changed:
            status, headers, body = changed(status, headers, body)
        self.reply(handler, status, headers, body)

    @staticmethod
    def reply(handler, status, headers, body):
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def forward(self, handler):
        if self.upstream.tls:
            context = ssl.create_default_context(cafile=self.upstream.tls.ca)
            connection = http.client.HTTPSConnection("localhost", self.upstream.port,
                                                     context=context)
        else:
            connection = http.client.HTTPConnection("localhost", self.upstream.port)
        headers = {name: value for name, value in handler.headers.items()
                   if name.lower() not in ("host", "connection", "expect")}
        with contextlib.closing(connection):
            connection.request(handler.command, handler.path, handler.body or None, headers)
            response = connection.getresponse()
            body = response.read()
            kept = [(name, value) for name, value in response.getheaders()
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server")]
            return response.status, kept, body


class Relay:
    """Passes TCP connections on to a port, until it is told to go silent on those that there are."""

    def __init__(self, upstream):
        self.upstream = upstream
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.connections = []  # (sockets, whether it is silent)
        self.thread = threading.Thread(target=self.accept, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()
        for ends, _ in self.connections:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.upstream))
                silent = threading.Event()
                self.connections.append(((client, server), silent))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self.copy, args=(source, sink, silent),
                                     daemon=True).start()

    @staticmethod
    def copy(source, sink, silent):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not silent.is_set():
                    sink.sendall(data)
            if not silent.is_set():
                sink.shutdown(socket.SHUT_WR)

    def silence(self):
        for _, silent in self.connections:
            silent.set()


class TokenServer(Server):
    """Gives tokens that are good for a number of seconds, and checks them for a TokenProxy."""

    def __init__(self, lifetime=60, told_lifetime=None, user=None, tls=None):
        super().__init__(tls)
        self.lifetime = lifetime
        self.told_lifetime = told_lifetime if told_lifetime is not None else lifetime
        self.user = user  # (name, password), or None for anybody
        self.tokens = {}  # token: (expires at, scopes)
        self.issued = 0
        self.delay = 0

    def answer(self, handler):
        self.note(handler)
        query = urllib.parse.parse_qs(urllib.parse.urlparse(handler.path).query)
        if self.user:
            expected = "Basic " + base64.b64encode(":".join(self.user).encode()).decode()
            if handler.headers.get("Authorization") != expected:
                handler.reply(401, b'{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}')
                return
        time.sleep(self.delay)
        with self.lock:
            self.issued += 1
            token = hashlib.sha256(str(self.issued).encode()).hexdigest()
            scopes = set(" ".join(query.get("scope", [])).split())
            self.tokens[token] = (time.monotonic() + self.lifetime, scopes)
        answer = json.dumps({"token": token, "expires_in": self.told_lifetime}).encode()
        handler.reply(200, answer, Content_Type="application/json")

    def is_valid(self, authorization, scope):
        """Whether a header has a token with all actions of a scope."""
        scheme, _, token = (authorization or "").partition(" ")
        with self.lock:
            expires_at, scopes = self.tokens.get(token, (0, set()))
        if scheme != "Bearer" or time.monotonic() >= expires_at:
            return False
        name, _, actions = scope.rpartition(":")
        return any(granted.rpartition(":")[0] == name and
                   set(actions.split(",")) <= set(granted.rpartition(":")[2].split(","))
                   for granted in scopes)

    def revoke_all(self):
        with self.lock:
            self.tokens.clear()


class TokenProxy(Proxy):
    """A registry that wants tokens: a proxy that checks them."""

    def __init__(self, upstream, tokens, tls=None):
        super().__init__(upstream, self.check_token, tls)
        self.tokens = tokens
        self.refused = 0

    def check_token(self, handler):
        match = re.match(r"/v2/(.*)/(manifests|blobs|tags|referrers)/", handler.path)
        actions = "pull" if handler.command in ("GET", "HEAD") else "pull,push"
        scope = f"repository:{match[1]}:{actions}" if match else ""
        if not match or self.tokens.is_valid(handler.headers.get("Authorization"), scope):
            if "Authorization" in handler.headers:
                del handler.headers["Authorization"]
            return None
        with self.lock:
            self.refused += 1
        challenge = f'Bearer realm="{self.tokens.url}/token",service="test",scope="{scope}"'
        handler.reply(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', WWW_Authenticate=challenge)
        return True


__all__ = ["Authority", "Failure", "Proxy", "Registry", "Relay", "Server", "TokenProxy", "TokenServer",
           "free_port", "registry", "write_auth_file", "write_passwords"]
