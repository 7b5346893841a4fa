"""The running daemon's status and each change of it, for as long as a command wants to hear of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import trio
from grpclib import GRPCError

from gpuactors import limits
from gpuactors.control.client import Running, forbidden, hanging, no_daemon, refused, running, too_slow
from gpuactors.control.pb.control import v1 as pb
from gpuactors.grpc_trio import SocketError, open_unix_channel, owner_of
from gpuactors.ports.errors import ControlError

_WATCH: Final = "/v1.Control/WatchView"


async def watch(path: str, show: Callable[[Running], None]) -> NoReturn:
    """Calls `show` with the status of that daemon, at once and after each change, for as long as it runs.

    Raises `client.NoDaemonError` if there is none, `client.OtherVersionError` if this command cannot read its view, and
    `ControlError` if it has ended or does not answer.
    """
    try:
        is_free = owner_of(path) is None
    except SocketError as exc:
        raise forbidden(path) from exc
    silence_s = limits.WATCH_BEAT_S + limits.CONTROL_CALL_S
    try:
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
                    show(running(path, answer.pid, answer.version, answer.status))
    except SocketError as exc:
        raise (no_daemon(path) if is_free else hanging(str(exc))) from exc
    except GRPCError as exc:
        raise refused(path, "say anything", exc) from exc
    except trio.TooSlowError as exc:
        raise too_slow(path, "say anything", silence_s) from exc
