# SPDX-License-Identifier: Apache-2.0
"""A registry at the end of a network that can be made slow, and what goes over that network.

  node  --- veth, shaped towards the node --->  meter (this file as a program)  --->  docker-registry

Both servers run in a network namespace of their own. The meter passes HTTP/1.1 requests on, after a
delay for each if so asked, and counts requests and bytes of answers.

Relay is for clients that speak http to this machine's own addresses only, and for rates that are more
than the meter can do: nginx on a loopback address, which passes on to the registry, or to the meter while
requests are to be delayed.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

from node import output

NAMESPACE = "lamina-bench"
NODE_ADDRESS = "10.231.7.1"
REGISTRY_ADDRESS = "10.231.7.2"
REGISTRY_PORT = 5000
METER_PORT = 5001
BURST = "256kb"
MOST_QUEUED = "100ms"
RELAY = "127.0.0.1:5002"
RELAY_CONFIG = """
daemon off;
worker_processes 1;
pid {directory}/relay.pid;
error_log {directory}/servers.log;
events {{ worker_connections 1024; }}
http {{
  log_format line "$request_method";
  access_log {directory}/relay.log line;
  client_body_temp_path {directory}/relay-body;
  proxy_temp_path {directory}/relay-proxy;
  fastcgi_temp_path {directory}/relay-fastcgi;
  uwsgi_temp_path {directory}/relay-uwsgi;
  scgi_temp_path {directory}/relay-scgi;
  upstream registry {{ server {upstream}; keepalive 64; }}
  server {{
    listen {address};
    location / {{
      proxy_pass http://registry;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_max_temp_file_size 0;
    }}
  }}
}}
"""


class Wire:
    """Use in a with statement. `registry` and `metered` are HOST:PORT; pushes go to the former."""

    registry = f"{REGISTRY_ADDRESS}:{REGISTRY_PORT}"
    metered = f"{REGISTRY_ADDRESS}:{METER_PORT}"

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Wire":
        with contextlib.ExitStack() as cleanup:
            subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)
            output("ip", "netns", "add", NAMESPACE)
            cleanup.callback(output, "ip", "netns", "del", NAMESPACE)
            output("ip", "link", "add", "lamina-bench0", "type", "veth", "peer", "name",
                "lamina-bench1", "netns", NAMESPACE)
            output("ip", "addr", "add", f"{NODE_ADDRESS}/30", "dev", "lamina-bench0")
            output("ip", "link", "set", "lamina-bench0", "up")
            self._inside("ip", "addr", "add", f"{REGISTRY_ADDRESS}/30", "dev", "lamina-bench1")
            self._inside("ip", "link", "set", "lamina-bench1", "up")
            self._inside("ip", "link", "set", "lo", "up")
            configuration = self._directory / "registry.yml"
            configuration.write_text(json.dumps({
                "version": 0.1,
                "log": {"level": "error", "accesslog": {"disabled": True}},
                "storage": {"filesystem": {"rootdirectory": str(self._directory / "registry")}},
                "http": {"addr": f"{REGISTRY_ADDRESS}:{REGISTRY_PORT}"}}))
            self._serve(cleanup, "docker-registry", "serve", configuration)
            wait_for(self.registry)
            self._delay = self._directory / "delay"
            self._counts = self._directory / "counts"
            self._delay.write_text("0")
            self._serve(cleanup, sys.executable, __file__, self._delay, self._counts)
            wait_for(self.metered)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._cleanup.close()

    @contextlib.contextmanager
    def shaped(self, rate: str | None = None, delay_milliseconds: int = 0):
        """Limits what the registry sends, e.g. to "200mbit", and makes each request wait."""
        self._delay.write_text(str(delay_milliseconds / 1000))
        if rate is not None:
            self._inside("tc", "qdisc", "add", "dev", "lamina-bench1", "root", "tbf", "rate", rate,
                         "burst", BURST, "latency", MOST_QUEUED)
        try:
            yield
        finally:
            self._delay.write_text("0")
            if rate is not None:
                self._inside("tc", "qdisc", "del", "dev", "lamina-bench1", "root")

    def counts(self) -> dict[str, int]:
        """Requests, how many of them for a range, and bytes of answers that went through the meter."""
        return json.loads(self._counts.read_text())

    def _inside(self, *command) -> None:
        output("ip", "netns", "exec", NAMESPACE, *command)

    def _serve(self, cleanup: contextlib.ExitStack, *command) -> None:
        log = cleanup.enter_context(open(self._directory / "servers.log", "ab"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", NAMESPACE, *map(str, command)], stdout=log, stderr=log)
        cleanup.callback(process.wait)
        cleanup.callback(process.terminate)


class Relay:
    """Use in a with statement, while a Wire is there. `address` is HOST:PORT."""

    address = RELAY

    def __init__(self, directory: pathlib.Path, upstream: str):
        self._directory = directory
        self._upstream = upstream
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Relay":
        config = self._directory / "relay.conf"
        config.write_text(RELAY_CONFIG.format(directory=self._directory, upstream=self._upstream,
                                              address=self.address))
        self._process = subprocess.Popen(["nginx", "-e", self._directory / "servers.log", "-c", config])
        try:
            wait_for(self.address)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait()

    def counts(self) -> dict[str, int]:
        """Requests so far, and bytes that came over the wire for them, with all headers."""
        received = pathlib.Path("/sys/class/net/lamina-bench0/statistics/rx_bytes")
        with open(self._directory / "relay.log", "rb") as log:
            return {"requests": sum(1 for _ in log), "bytes": int(received.read_text())}


def wait_for(address: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/v2/", timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Meter:
    def __init__(self, delay: pathlib.Path, counts: pathlib.Path):
        self._delay = delay
        self._counts = counts
        self._requests = 0
        self._ranges = 0
        self._bytes = 0
        self._write()

    def _write(self) -> None:
        temporary = self._counts.with_suffix(".tmp")
        temporary.write_text(json.dumps({"requests": self._requests, "ranges": self._ranges,
                                         "bytes": self._bytes}))
        temporary.rename(self._counts)

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connection, REGISTRY_ADDRESS, METER_PORT)
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader,
                          writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(REGISTRY_ADDRESS, REGISTRY_PORT)
        answers = asyncio.create_task(self._pass_answers(upstream[0], writer))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                # Only GET and HEAD come here: a head is all of a request.
                head = await reader.readuntil(b"\r\n\r\n")
                self._requests += 1
                self._ranges += b"\r\nrange:" in head.lower()
                if (seconds := float(self._delay.read_text())) > 0:
                    await asyncio.sleep(seconds)
                upstream[1].write(head)
                await upstream[1].drain()
        upstream[1].close()
        await answers

    async def _pass_answers(self, reader: asyncio.StreamReader,
                            writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                self._bytes += len(data)
                self._write()
                writer.write(data)
                await writer.drain()
        writer.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(Meter(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])).serve())
