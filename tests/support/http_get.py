"""GET by the standard library's client, over a unix socket or loopback: it shares no code with the daemon's server."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    text: str
    headers: Mapping[str, str]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=WITHIN_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WITHIN_S)
        self.sock.connect(str(self._path))


def get(at: Path | int, path: str, method: str = "GET") -> Page:
    """The answer of the server at a unix socket, or at a port of 127.0.0.1. Raises `OSError`."""
    if isinstance(at, int):
        connection = http.client.HTTPConnection("127.0.0.1", at, timeout=WITHIN_S)
    else:
        connection = _UnixConnection(at)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return Page(answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()})
    finally:
        connection.close()
