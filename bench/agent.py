# SPDX-License-Identifier: Apache-2.0
"""Asks a sandbox's agent as the launcher does (backends/agent/PROTOCOL.md), without a process for it."""

import os
import pathlib
import socket
import struct

EXEC, INFO, STDOUT, STDERR, ENDED, ERROR, INFO_REPLY = 1, 7, 33, 34, 35, 36, 38
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Agent:
    def __init__(self, directory: pathlib.Path):
        # Names of sockets are short (unix(7)), those of directories need not be.
        self._directory = os.open(directory, os.O_PATH)

    def close(self) -> None:
        os.close(self._directory)

    def exec(self, *command: str) -> bytes:
        """Runs a program that must succeed, and returns what it printed."""
        words = number(len(command)) + b"".join(map(text, command))
        # User, group, groups; session, standard input; four limits; no files in, none out.
        rest = number(0) * 3 + text("") + number(0) + number(0) * 4 + number(0) * 2
        printed = []
        with self._asked(EXEC, words + number(1) + text(PATH) + text("/") + rest) as stream:
            while True:
                kind, content = read_frame(stream)
                if kind in (STDOUT, STDERR):
                    printed.append(content)
                elif kind == ENDED:
                    ending, code = struct.unpack_from("<QQ", content)
                    if (ending, code) != (0, 0):
                        raise RuntimeError(f"{command} ended with {ending}, {code}: {printed}")
                    return b"".join(printed)
                elif kind == ERROR:
                    raise RuntimeError(f"{command}: {content!r}")

    def info(self) -> None:
        """The least that can be asked."""
        with self._asked(INFO, b"") as stream:
            kind, content = read_frame(stream)
            if kind != INFO_REPLY:
                raise RuntimeError(f"frame {kind}: {content!r}")

    def _asked(self, kind: int, content: bytes) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(f"/proc/self/fd/{self._directory}/agent.sock")
        stream.sendall(struct.pack("<IB", len(content), kind) + content)
        return stream


def number(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    data = os.fsencode(value)
    return number(len(data)) + data


def read_frame(stream: socket.socket) -> tuple[int, bytes]:
    size, kind = struct.unpack("<IB", read_exactly(stream, 5))
    return kind, read_exactly(stream, size)


def read_exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = stream.recv(size - len(data))
        if not piece:
            raise RuntimeError("the agent is gone")
        data += piece
    return data
