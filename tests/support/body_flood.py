"""Clients of the HTTP endpoints that send an endless body: `python -m tests.support.body_flood HOST:PORT CLIENTS`.

One whose connection is closed comes back at once. They are threads of a process of their own.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Final

_HEAD: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
_PIECE: Final = bytes(65536)


def send(server: str, clients: int) -> None:
    """Sends to HOST:PORT until the process is killed, and says so when all have begun."""
    begun = threading.Barrier(clients + 1)
    for _ in range(clients):
        threading.Thread(target=_client, args=(server, begun), daemon=True).start()
    begun.wait()
    print("all send", flush=True)
    threading.Event().wait()


def _client(server: str, begun: threading.Barrier) -> None:
    is_first = True
    host, _, port = server.rpartition(":")
    while True:
        with socket.socket() as connection:
            try:
                connection.connect((host, int(port)))
                connection.sendall(_HEAD)
                if is_first:
                    is_first = False
                    begun.wait()
                while True:
                    connection.sendall(_PIECE)
            except OSError:
                continue  # it was closed, as it should be


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]))
