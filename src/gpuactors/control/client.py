"""Requests to the running daemon over its control socket: its status, and the hand-over.

Every wait has a deadline: a daemon that hangs still has the kernel accept connections for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import trio
from grpclib import GRPCError, Status
from msgspec import Struct

from gpuactors import limits
from gpuactors.control.about import About
from gpuactors.control.pb.control import v1 as pb
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.grpc_trio import (
    ConnectError,
    Dial,
    OwnerOf,
    SocketError,
    connect_unix,
    open_unix_channel,
    owner_of,
)
from gpuactors.ports.errors import ControlError
from gpuactors.process.resource_exhaustion import shortage

if TYPE_CHECKING:
    from gpuactors.control.view import NodeView


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


_WATCH: Final = "/v1.Control/WatchView"


async def read_status(path: str) -> Running:
    """The status of the daemon that serves the control socket at `path`.

    Raises `NoDaemonError` if there is none, `OtherVersionError` if this command cannot read its view, and
    `ControlError` if there may be one and it does not answer.
    """
    with _explained(path, "report its status", limits.CONTROL_CALL_S):
        with trio.fail_after(limits.CONTROL_CONNECT_S + limits.CONTROL_CALL_S):
            async with open_unix_channel(path, connect_deadline_s=limits.CONTROL_CONNECT_S) as channel:
                return running(path, await pb.ControlStub(channel).view(pb.ViewRequest()))


async def watch(path: str, show: Callable[[Running], None]) -> NoReturn:
    """Calls `show` with the status of that daemon, at once and after each change, for as long as it runs.

    Raises `NoDaemonError` if there is none, `OtherVersionError` if this command cannot read its view, and
    `ControlError` if it has ended or does not answer.
    """
    silence_s = limits.WATCH_BEAT_S + limits.CONTROL_CALL_S
    with _explained(path, "say anything", silence_s):
        async with (
            open_unix_channel(path, connect_deadline_s=limits.CONTROL_CONNECT_S) as channel,
            channel.server_stream(_WATCH, pb.ViewRequest(), pb.ViewResponse) as answers,
        ):
            while True:
                with trio.fail_after(silence_s):
                    answer = await anext(answers, None)
                if answer is None:
                    raise ControlError(f"the daemon behind {path} is ending")
                if answer.status:
                    show(running(path, answer))


def running(path: str, answer: pb.ViewResponse) -> Running:
    """The daemon that has answered so at `path`. Raises `OtherVersionError` if its view cannot be decoded."""
    from gpuactors.control.view import DaemonStatus  # a daemon asks for no view

    try:
        status = decode_json(answer.status, DaemonStatus)
    except UndecodableError as exc:
        raise _other_version(path, f" ({quoted(answer.version)})" if answer.version else "") from exc
    return Running(answer.pid, answer.version, status.about, status.view)


def _other_version(path: str, version: str = "") -> OtherVersionError:
    return OtherVersionError(
        f"the daemon behind {path} is of another version{version} than this command: run the command of its version, "
        "in its own pod or image"
    )


@contextmanager
def _explained(path: str, what: str, within_s: float) -> Iterator[None]:
    """The failures of a request as `ControlError`; `what` the daemon did not do, and within how many seconds."""
    try:
        is_free = owner_of(path) is None
    except SocketError as exc:
        raise ControlError(
            f"user {os.geteuid()} may not connect to {path}, a running daemon's control socket: run this as the "
            "daemon's user, usually root"
        ) from exc
    try:
        yield
    except SocketError as exc:
        if is_free:
            raise NoDaemonError(f"no daemon runs (no process listens at {path})") from exc
        raise ControlError(f"a daemon has the socket and does not answer; does it hang? {exc}") from exc
    except GRPCError as exc:
        if exc.status is Status.UNIMPLEMENTED:
            raise _other_version(path) from exc
        if exc.status is Status.UNAVAILABLE:
            raise ControlError(f"the daemon behind {path} is ending") from exc
        raise ControlError(
            f"the daemon behind {path} refused to {what}: {exc.status.name}: {quoted(exc.message or '')}"
        ) from exc
    except trio.TooSlowError as exc:
        raise ControlError(
            f"the daemon behind {path} did not {what} within {within_s:g} s; does it hang?"
        ) from exc


class NotRunning(Struct, frozen=True):
    """No daemon runs."""


class HandedOver(Struct, frozen=True):
    """The daemon that ran has ended its streams and released the control socket."""

    pid: int


class Unanswered(Struct, frozen=True):
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
            except (ConnectError, OSError) as exc:
                reason = shortage(exc) or str(exc)
            except SocketError as exc:  # not allowed to dial it: asking again changes nothing
                return Unanswered(str(exc))
            await trio.sleep(limits.HAND_OVER_RETRY_S)
    return Unanswered(f"no answer within {within_s:g} s" + (f" ({reason})" if reason else ""))
