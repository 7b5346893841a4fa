"""A command's side of the control socket: it asks the running daemon for its status.

Every wait has a deadline: a daemon that hangs still has the kernel accept connections for it. `watch.py` asks for the
changes as well.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from msgspec import Struct

from gpuactors import limits
from gpuactors.control.about import About
from gpuactors.control.messages import (
    ANSWER_MAX_BYTES,
    BEGIN,
    END,
    STATUS,
    UNKNOWN,
    Answer,
    Request,
    answer_of,
    is_http2,
    line_of,
)
from gpuactors.control.view import DaemonStatus, NodeView
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.ports.errors import ControlError

_READ_BYTES: Final = 65_536

_DIAL_RETRY_S: Final = 0.01
"""From one dial of a listener whose queue is full to the next."""


class Running(Struct, frozen=True):
    """A daemon that has answered."""

    pid: int
    """The daemon's PID in its own PID namespace: in a container not the host's."""
    version: str
    about: About
    view: NodeView


class NoDaemonError(ControlError):
    """No process serves the control socket: no daemon runs with this state directory."""


class OtherVersionError(ControlError):
    """The daemon is of another version than this command, which cannot read its view."""


def read_status(
    path: str, connect_s: float = limits.CONTROL_CONNECT_S, call_s: float = limits.CONTROL_CALL_S
) -> Running:
    """Return the status of the daemon that serves the control socket at `path`. Blocks at most `connect_s` and
    `call_s`.

    Raises `NoDaemonError` if there is none, `OtherVersionError` if this command cannot read its view, and
    `ControlError` if there may be one and it does not answer.
    """
    try:
        with _connected(path, time.monotonic() + connect_s) as connection:
            line = _asked(path, connection, time.monotonic() + call_s)
    except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
        raise no_daemon(path) from None
    except PermissionError as exc:
        raise forbidden(path) from exc
    except TimeoutError as exc:
        raise too_slow(path, "report its status", call_s) from exc
    except BlockingIOError as exc:
        raise hanging(f"no process accepts connections at {path}: the queue of its listener is full") from exc
    except ConnectionError as exc:
        raise ending(path) from exc
    except OSError as exc:
        raise hanging(str(exc)) from exc
    return running(path, understood(path, line))


def _connected(path: str, until: float) -> socket.socket:
    """Return a connection to `path`. Raises OSError; BlockingIOError if the listener's queue is still full at
    `until`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(path)
            except BlockingIOError:  # on AF_UNIX: the queue is full, and no connection is under way
                if time.monotonic() > until:
                    raise
                time.sleep(_DIAL_RETRY_S)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def _asked(path: str, connection: socket.socket, until: float) -> bytes:
    """Ask for the status and return the line of the answer. Raises OSError, TimeoutError after `until`,
    ControlError."""
    received = bytearray()
    connection.settimeout(max(until - time.monotonic(), 0.001))
    connection.sendall(line_of(Request(STATUS)))
    while END not in received[-_READ_BYTES:]:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        chunk = connection.recv(_READ_BYTES)
        received += chunk
        if not chunk or not received.startswith(BEGIN) or len(received) > ANSWER_MAX_BYTES:
            raise no_answer(path, bytes(received[:_READ_BYTES]))
    return bytes(received)


def understood(path: str, line: bytes) -> Answer:
    """Return the answer in a line of the daemon behind `path`. Raises ControlError if it is an error or no answer."""
    try:
        answer = answer_of(line)
    except UndecodableError as exc:
        raise ControlError(
            f"the process behind {path} answered what is no answer of a daemon: {quoted(str(exc))}"
        ) from exc
    if answer.error == UNKNOWN:
        raise other_version(path, answer.version)
    if answer.error:
        raise ControlError(f"the daemon behind {path} refused: {quoted(answer.error)}")
    return answer


def running(path: str, answer: Answer) -> Running:
    """Return the daemon that sent this answer at `path`. Raises `OtherVersionError` if its view cannot be decoded."""
    try:
        decoded = decode_json(answer.status, DaemonStatus)
    except UndecodableError as exc:
        raise other_version(path, answer.version) from exc
    return Running(answer.pid, answer.version, decoded.about, decoded.view)


# --- why there is no answer -------------------------------------------------------------------------------


def other_version(path: str, version: str = "") -> OtherVersionError:
    named = f" ({quoted(version)})" if version else ""
    return OtherVersionError(
        f"the daemon behind {path} is of another version{named} than this command: run the command of its version, "
        "in its own pod or image"
    )


def no_daemon(path: str) -> NoDaemonError:
    return NoDaemonError(f"no daemon runs (no process listens at {path})")


def forbidden(path: str) -> ControlError:
    return ControlError(
        f"user {os.geteuid()} may not connect to {path}, a running daemon's control socket: run this as the "
        "daemon's user, usually root"
    )


def hanging(why: str) -> ControlError:
    return ControlError(f"a daemon has the socket and does not answer; does it hang? {why}")


def too_slow(path: str, action: str, within_s: float) -> ControlError:
    return ControlError(f"the daemon behind {path} did not {action} within {within_s:g} s; does it hang?")


def ending(path: str) -> ControlError:
    return ControlError(f"the daemon behind {path} is ending")


def no_answer(path: str, received: bytes) -> ControlError:
    """Return the error for a peer that sent `received` instead of a line."""
    if is_http2(received):
        return other_version(path)
    if not received:
        return ending(path)
    return ControlError(f"the process behind {path} answered what is no answer of a daemon")
