"""Requests to the running daemon over its control socket: its status, and the hand-over.

Every wait has a deadline: a daemon that hangs still has the kernel accept connections for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import trio
from grpclib import GRPCError, Status

from gpuactors import limits
from gpuactors.control.messages import about_of, node_view
from gpuactors.control.pb.control import v1 as pb
from gpuactors.control.view import About, NodeView
from gpuactors.core.quote import quoted
from gpuactors.grpc_trio import (
    ConnectError,
    Dial,
    OwnerOf,
    SocketError,
    connect_unix,
    open_unix_channel,
    owner_of,
)
from gpuactors.ports import ControlError


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that has answered."""

    pid: int
    """As it sees itself: in a container another one than on the host."""
    version: str
    about: About
    view: NodeView


class NoDaemonError(ControlError):
    """No process serves the control socket: no daemon runs with this state directory."""


async def read_status(path: str) -> Running:
    """The status of the daemon that serves the control socket at `path`.

    Raises `NoDaemonError` if there is none, and `ControlError` if there may be one and it does not answer.
    """
    try:
        is_free = owner_of(path) is None
    except SocketError as exc:
        raise ControlError(
            f"user {os.geteuid()} may not connect to {path}, a running daemon's control socket: run this as the "
            "daemon's user, usually root"
        ) from exc
    try:
        with trio.fail_after(limits.CONTROL_CONNECT_S + limits.CONTROL_CALL_S):
            async with open_unix_channel(path, connect_deadline_s=limits.CONTROL_CONNECT_S) as channel:
                answer = await pb.ControlStub(channel).status(pb.StatusRequest())
    except SocketError as exc:
        if is_free:
            raise NoDaemonError(f"no daemon runs (no process listens at {path})") from exc
        raise ControlError(f"a daemon has the socket and does not answer; does it hang? {exc}") from exc
    except GRPCError as exc:
        raise ControlError(
            f"the daemon behind {path} refused to report its status: {exc.status.name}: {quoted(exc.message or '')}"
        ) from exc
    except trio.TooSlowError as exc:
        raise ControlError(
            f"the daemon behind {path} did not report its status within {limits.CONTROL_CALL_S:g} s; does it hang?"
        ) from exc
    return Running(answer.pid, answer.version, about_of(answer), node_view(answer))


@dataclass(frozen=True, slots=True)
class NotRunning:
    """No daemon runs."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The daemon that ran has ended its streams and released the control socket."""

    pid: int


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Another process has the socket and did not hand over; `reason` is the failure."""

    reason: str


Asked = NotRunning | HandedOver | Unanswered

_TRY_AGAIN: Final = frozenset({Status.ABORTED, Status.UNAVAILABLE, Status.CANCELLED})
"""It hands over to another successor, or it has just ended: a moment later the answer is another one."""


async def ask_to_hand_over(
    path: str, *, within_s: float, dial: Dial = connect_unix, owner_of: OwnerOf = owner_of
) -> Asked:
    """Asks the daemon that serves the control socket at `path` until there is an answer, for at most `within_s`."""
    reason = ""
    with trio.move_on_after(within_s):
        while True:
            try:
                if owner_of(path) is None:
                    return NotRunning()
                async with open_unix_channel(path, connect_deadline_s=within_s, dial=dial) as channel:
                    answer = await pb.ControlStub(channel).hand_over(pb.HandOverRequest())
                    return HandedOver(answer.pid)
            except GRPCError as exc:
                reason = f"it answered {exc.status.name}: {quoted(exc.message or '')}"
                if exc.status not in _TRY_AGAIN:
                    return Unanswered(reason)
            except ConnectError as exc:
                reason = str(exc)
            except SocketError as exc:  # not allowed to dial it: asking again changes nothing
                return Unanswered(str(exc))
            await trio.sleep(limits.HAND_OVER_RETRY_S)
    return Unanswered(f"no answer within {within_s:g} s" + (f" ({reason})" if reason else ""))
