"""The running daemon's status, asked of it by a command over its control socket.

Every wait has a deadline: a daemon that hangs still has the kernel accept connections for it. `watch.py` asks for the
changes as well.
"""

from __future__ import annotations

import os
from typing import Final

from grpclib import GRPCError, Status
from msgspec import Struct

from gpuactors import limits
from gpuactors.control import unary
from gpuactors.control.about import About
from gpuactors.control.view import DaemonStatus, NodeView
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.ports.errors import ControlError


class Running(Struct, frozen=True):
    """A daemon that has answered."""

    pid: int
    """As it sees itself: in a container another one than on the host."""
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
    """The status of the daemon that serves the control socket at `path`. Blocks for so long at most.

    Raises `NoDaemonError` if there is none, `OtherVersionError` if this command cannot read its view, and
    `ControlError` if there may be one and it does not answer.
    """
    try:
        answer = unary.call(path, "/v1.Control/View", connect_s=connect_s, call_s=call_s)
        pid, version, status = view_response(answer)
    except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
        raise no_daemon(path) from None
    except PermissionError as exc:
        raise forbidden(path) from exc
    except GRPCError as exc:
        raise refused(path, "report its status", exc) from exc
    except TimeoutError as exc:
        raise too_slow(path, "report its status", call_s) from exc
    except BlockingIOError as exc:
        raise hanging(f"no process accepts connections at {path}: the queue of its listener is full") from exc
    except (unary.NoHttp2Error, OSError) as exc:
        raise hanging(str(exc)) from exc
    except ValueError as exc:
        raise ControlError(
            f"the daemon behind {path} answered what is not a valid ViewResponse: {exc}"
        ) from exc
    return running(path, pid, version, status)


def view_response(message: bytes) -> tuple[int, str, bytes]:
    """The fields of a ViewResponse (`protos/control.proto`). Raises ValueError unless it is one.

    Read here because betterproto2 takes as long to import as the rest of a command.
    """
    numbers, texts, at = {1: 0}, {2: b"", 3: b""}, 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)  # a number, or how many bytes follow
        number, wire_type = key >> 3, key & 7
        if wire_type == _BYTES and number not in numbers:
            found, at = message[at : at + value], at + value
            if at > len(message):
                raise ValueError("a field runs over the end")
            texts[number] = found
        elif wire_type == _VARINT and number not in texts:
            numbers[number] = value
        else:
            raise ValueError(f"field {number} has wire type {wire_type}")
    return numbers[1], texts[2].decode(), texts[3]


_VARINT: Final = 0
_BYTES: Final = 2
"""Wire types (protobuf.dev, Encoding)."""


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of at most 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        if at == len(message):
            raise ValueError("a number runs over the end")
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def running(path: str, pid: int, version: str, status: bytes) -> Running:
    """The daemon that has answered so at `path`. Raises `OtherVersionError` if its view cannot be decoded."""
    try:
        decoded = decode_json(status, DaemonStatus)
    except UndecodableError as exc:
        raise other_version(path, f" ({quoted(version)})" if version else "") from exc
    return Running(pid, version, decoded.about, decoded.view)


# --- why there is no answer -------------------------------------------------------------------------------


def other_version(path: str, version: str = "") -> OtherVersionError:
    return OtherVersionError(
        f"the daemon behind {path} is of another version{version} than this command: run the command of its version, "
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


def too_slow(path: str, what: str, within_s: float) -> ControlError:
    return ControlError(f"the daemon behind {path} did not {what} within {within_s:g} s; does it hang?")


def refused(path: str, what: str, error: GRPCError) -> ControlError:
    """By the status of a call; `what` the daemon did not do."""
    if error.status is Status.UNIMPLEMENTED:
        return other_version(path)
    if error.status is Status.UNAVAILABLE:
        return ControlError(f"the daemon behind {path} is ending")
    return ControlError(
        f"the daemon behind {path} refused to {what}: {error.status.name}: {quoted(error.message or '')}"
    )
