"""A command's watch of the running daemon's status, over the control socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import trio

from gpuactors import limits
from gpuactors.control.client import (
    Running,
    ending,
    forbidden,
    hanging,
    no_answer,
    no_daemon,
    running,
    too_slow,
    understood,
)
from gpuactors.control.lines import Lines, NoLineError
from gpuactors.control.messages import ANSWER_MAX_BYTES, WATCH, Request, line_of
from gpuactors.grpc_trio import SocketError, connect_unix, owner_of


async def watch(path: str, show: Callable[[Running], None]) -> NoReturn:
    """Call `show` with the status of the daemon behind `path`, at once and after each change, for as long as it runs.

    Raises `client.NoDaemonError` if there is none, `client.OtherVersionError` if this command cannot read its view, and
    `ControlError` if it has ended or does not answer.
    """
    try:
        is_free = owner_of(path) is None
    except SocketError as exc:
        raise forbidden(path) from exc
    silence_s = limits.WATCH_BEAT_S + limits.CONTROL_CALL_S
    try:
        deadline_s = trio.current_time() + limits.CONTROL_CONNECT_S
        async with await connect_unix(path, deadline_s=deadline_s) as stream:
            await stream.send_all(line_of(Request(WATCH)))
            lines = Lines(stream)
            while True:
                with trio.fail_after(silence_s):
                    line = await lines.next(ANSWER_MAX_BYTES)
                answer = understood(path, line)
                if answer.status:
                    show(running(path, answer))
    except SocketError as exc:
        raise (no_daemon(path) if is_free else hanging(str(exc))) from exc
    except trio.BrokenResourceError as exc:
        raise ending(path) from exc
    except NoLineError as exc:
        raise no_answer(path, exc.received) from exc
    except trio.TooSlowError as exc:
        raise too_slow(path, "say anything", silence_s) from exc
