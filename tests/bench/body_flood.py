"""How long kubelet waits for Allocate while clients of the HTTP endpoints send a body without an end.

`python -m tests.bench.body_flood`: one node, and none, 1 and 30 such clients in turn. A client whose connection is
closed comes back at once. They are threads of a process of their own.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.bench.figures import Figure, distribution, run
from tests.bench.node import Node

CLIENTS: Final = (0, 1, 30)
GPUS: Final = 8
_HEAD: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
_PIECE: Final = bytes(65536)


def measure(directory: Path, calls: int) -> Iterator[Figure]:
    """`calls` calls of Allocate beside each number of clients. Raises `DidNotWork`."""
    with Node(directory, gpus=GPUS) as node:
        node.start_daemon()
        node.settle()
        for clients in CLIENTS:
            samples = []
            words = [
                sys.executable,
                "-m",
                "tests.bench.body_flood",
                "--send",
                str(node.http),
                "--clients",
                str(clients),
            ]
            with subprocess.Popen(words, stdout=subprocess.PIPE) as sending:
                try:
                    assert sending.stdout is not None
                    sending.stdout.readline()  # all of them have sent something
                    for i in range(calls):
                        began_ns = time.perf_counter_ns()
                        node.kubelet.allocate(node.resource, [node.gpus[i % GPUS]])
                        samples.append((time.perf_counter_ns() - began_ns) / 1e6)
                finally:
                    sending.kill()
            beside = f"beside {clients} clients that send without an end"
            yield distribution(f"flood.allocate.{clients}_clients", f"Allocate {beside}", "ms", samples)


def send(server: str, clients: int) -> None:
    """Sends to a socket's path, or HOST:PORT, until the process is killed, and says so when all have begun."""
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
        with socket.socket(socket.AF_INET if host else socket.AF_UNIX) as connection:
            try:
                connection.connect((host, int(port)) if host else server)
                connection.sendall(_HEAD)
                if is_first:
                    is_first = False
                    begun.wait()
                while True:
                    connection.sendall(_PIECE)
            except OSError:
                continue  # it was closed, as it should be


def main() -> int:
    """The exit code: 0, or 1 if something did not work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.body_flood", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--calls", type=int, default=500, help="beside each number of clients (default: 500)")
    parser.add_argument("--send", metavar="SERVER", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send(options.send, options.clients)
    return run(lambda directory: measure(directory, options.calls))


if __name__ == "__main__":
    sys.exit(main())
