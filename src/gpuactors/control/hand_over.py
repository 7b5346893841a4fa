"""The request of a starting daemon to its predecessor: to hand over, by its control socket.

Every wait has a deadline: a daemon that hangs still has the kernel accept connections for it.
"""

from __future__ import annotations

from typing import Final

import trio
from grpclib import GRPCError, Status
from msgspec import Struct

from gpuactors import limits
from gpuactors.control.pb.control import v1 as pb
from gpuactors.core.values.quote import quoted
from gpuactors.grpc_trio import (
    ConnectError,
    Dial,
    OwnerOf,
    SocketError,
    connect_unix,
    open_unix_channel,
    owner_of,
)
from gpuactors.process.resource_exhaustion import shortage


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
    path: str,
    *,
    within_s: float,
    dial: Dial = connect_unix,
    owner_of: OwnerOf = owner_of,
    released: trio.Event | None = None,
) -> Asked:
    """Asks the daemon that serves the control socket at `path` until there is an answer, for at most `within_s`.

    `released` is set by the answer to the same request at another socket: the daemon behind both has released them, so
    this one is asked again at once.
    """
    released = trio.Event() if released is None else released
    reason = ""
    with trio.move_on_after(within_s):
        while True:
            try:
                if owner_of(path) is None:
                    return NotRunning()
                async with open_unix_channel(path, connect_deadline_s=within_s, dial=dial) as channel:
                    answer = await pb.ControlStub(channel).hand_over(pb.HandOverRequest())
                    released.set()
                    return HandedOver(answer.pid)
            except GRPCError as exc:
                reason = f"it answered {exc.status.name}: {quoted(exc.message or '')}"
                if exc.status not in _TRY_AGAIN:
                    return Unanswered(reason)
            except (ConnectError, OSError) as exc:
                reason = shortage(exc) or str(exc)
            except SocketError as exc:  # not allowed to dial it: asking again changes nothing
                return Unanswered(str(exc))
            if released.is_set():
                await trio.sleep(limits.HAND_OVER_RETRY_S)
            else:
                with trio.move_on_after(limits.HAND_OVER_RETRY_S):
                    await released.wait()
    return Unanswered(f"no answer within {within_s:g} s" + (f" ({reason})" if reason else ""))
