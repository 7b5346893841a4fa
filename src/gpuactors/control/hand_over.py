"""The request of a starting daemon to its predecessor to hand over, by the control socket.

Every wait has a deadline: a daemon that hangs still has the kernel accept connections for it.
"""

from __future__ import annotations

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.control.lines import Lines, NoLineError
from gpuactors.control.messages import (
    ANSWER_MAX_BYTES,
    BEGIN,
    BUSY,
    HAND_OVER,
    UNKNOWN,
    Answer,
    Request,
    answer_of,
    is_http2,
    line_of,
)
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import UndecodableError
from gpuactors.grpc_trio import (
    ConnectError,
    Dial,
    OwnerOf,
    SocketError,
    connect_unix,
    owner_of,
)
from gpuactors.process.resource_exhaustion import shortage


class NotRunning(Struct, frozen=True):
    """No daemon runs."""


class HandedOver(Struct, frozen=True):
    """The daemon that ran has ended its streams and released the control socket."""

    pid: int


class Unanswered(Struct, frozen=True):
    """Another process has the socket and did not hand over, for this `reason`."""

    reason: str


Asked = NotRunning | HandedOver | Unanswered


async def ask_to_hand_over(
    path: str,
    *,
    within_s: float,
    dial: Dial = connect_unix,
    owner_of: OwnerOf = owner_of,
    released: trio.Event | None = None,
) -> Asked:
    """Ask the daemon that serves the control socket at `path` until it answers, for at most `within_s`.

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
                answer = await _asked(path, dial, within_s)
                if answer.error == UNKNOWN:
                    return Unanswered("it does not know how to hand over")
                if answer.error not in ("", BUSY):
                    return Unanswered(f"it answered {quoted(answer.error)}")
                if not answer.error:
                    released.set()
                    return HandedOver(answer.pid)
                reason = "it hands over to another one, or is ending"
            except NoLineError as exc:
                reason = str(exc)
                if exc.received and not exc.received.startswith(BEGIN):  # else it has just ended
                    return Unanswered(reason)
            except UndecodableError as exc:
                return Unanswered(f"it answered what is no answer of a daemon: {quoted(str(exc))}")
            except trio.BrokenResourceError:
                reason = "it closed the connection"
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


async def _asked(path: str, dial: Dial, within_s: float) -> Answer:
    """Ask once, and return the answer. Raises `SocketError`, `NoLineError`, `UndecodableError`, and what a stream
    raises."""
    try:
        async with await dial(path, deadline_s=trio.current_time() + within_s) as stream:
            await stream.send_all(line_of(Request(HAND_OVER)))
            return answer_of(await Lines(stream).next(ANSWER_MAX_BYTES))
    except NoLineError as exc:
        if not is_http2(exc.received):
            raise
    from gpuactors.control import grpc_control  # where the predecessor is of the release before

    return await grpc_control.hand_over(path, dial, within_s)
