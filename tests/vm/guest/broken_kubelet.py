"""A kubelet that is only there to fail: it serves kubelet.sock, takes one Register as far as it is told to, and then is
killed (SIGKILL, by itself), or hangs.

`BrokenKubelet` starts and awaits it; `python -m tests.vm.guest.broken_kubelet` is it. A process of its own, as what a
dead process leaves to its peers is the kernel's doing and no library's. Must not import gpuactors or gRPC.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.support.patience import patient

ACCEPTED: Final = "accepted"
"""It dies as soon as somebody is connected."""

ASKED: Final = "asked"
"""It dies when it has read the request, before it dials."""

DIALLED: Final = "dialled"
"""It dies when it has dialled the plugin's endpoint and that has answered, as kubelet does inside Register."""

HANGS: Final = "hangs"
"""It reads the request and never says a word again."""

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = b"\0\0\0\x04\0\0\0\0\0"
"""RFC 9113, 3.4: both sides begin with a SETTINGS frame, an empty one here."""

ENDPOINT: Final = re.compile(rb"gpuactors-[\w.-]+\.sock")
"""In a RegisterRequest, which is protobuf in a DATA frame, so that strings are there as they are."""

TIMEOUT_S: Final = patient(30.0)
"""For each of its steps: starting Python, and a daemon that calls at once, in an emulated and busy machine."""


@dataclass(slots=True)
class BrokenKubelet:
    """The process, seen from the scenario. Killed when its `with` ends, if it still runs."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, socket_dir: Path, ending: str) -> BrokenKubelet:
        """Start it; it takes the place of whatever kubelet.sock is in the directory."""
        return cls(
            subprocess.Popen(
                [sys.executable, "-S", "-m", "tests.vm.guest.broken_kubelet", str(socket_dir), ending],
                stdout=subprocess.PIPE,
            )
        )

    def __enter__(self) -> BrokenKubelet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(timeout=TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait_dead(self) -> None:
        """Wait until it was killed as it was told. Raises AssertionError, or subprocess.TimeoutExpired."""
        status = self.process.wait(timeout=TIMEOUT_S)
        assert status == -signal.SIGKILL, f"the broken kubelet ended with {status}"

    def wait_hanging(self) -> None:
        """Wait until it has a request that it will not answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == b"hanging\n", f"the broken kubelet said {line!r}"


def main(socket_dir: str, ending: str) -> None:
    """The process's own side."""
    path = os.path.join(socket_dir, "kubelet.sock")
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(TIMEOUT_S)
    listener.bind(path)
    listener.listen()
    peer, _ = listener.accept()
    peer.settimeout(TIMEOUT_S)
    if ending == ACCEPTED:
        os.kill(os.getpid(), signal.SIGKILL)
    peer.sendall(SETTINGS)
    endpoint = _asked_for(peer)
    if ending == DIALLED:
        plugin = socket.socket(socket.AF_UNIX)
        plugin.settimeout(TIMEOUT_S)
        plugin.connect(os.path.join(socket_dir, endpoint))
        plugin.sendall(PREFACE + SETTINGS)
        plugin.recv(1)
    if ending == HANGS:
        print("hanging", flush=True)
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)


def _asked_for(peer: socket.socket) -> str:
    """The endpoint that a Register names. Raises EOFError if the caller goes away before."""
    request = b""
    while (found := ENDPOINT.search(request)) is None:
        chunk = peer.recv(65536)
        if not chunk:
            raise EOFError(f"the caller went away after {request!r}")
        request += chunk
    return found[0].decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
