"""The DRA API of the instance that has taken over our claims: found by its socket beside ours, and called as kubelet
does.

The successor makes its sockets after it has read the checkpoint that we wrote last. So only a socket that is newer than
ours counts, which also keeps two daemons that have both handed over from asking each other. Any version will do: it is
the interface that it has for kubelet. Must not decide anything about a claim.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar, final

from grpclib import GRPCError

from gpuactors.core.values.claim import ClaimName, Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.effects import Refusal, Refused
from gpuactors.core.values.quote import quoted
from gpuactors.grpc_trio import Dial, SocketError, open_unix_channel
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1

RELAY_CONNECT_S: Final = 1.0
"""Deadline from dialling the successor to its HTTP/2 SETTINGS, 1 s; a running daemon sends them at once."""

Answer = TypeVar("Answer")

LaterSockets = Callable[[str], Sequence[str]]
"""The paths of the API sockets of other instances that were made after the one at a path, the newest first."""

_API_SOCKET: Final = re.compile(r"dra-.+\.sock")


def later_sockets(own: str) -> Sequence[str]:
    """Implement `LaterSockets` in the directory of `own`; none where that cannot be read, or `own` is gone."""
    directory = os.path.dirname(own)
    try:
        names = [n for n in os.listdir(directory) if _API_SOCKET.fullmatch(n)]
    except OSError:
        return ()
    made_at = {path: at for n in names if (at := _made_at(path := os.path.join(directory, n))) is not None}
    own_at = made_at.get(own)
    if own_at is None:
        return ()
    return sorted((p for p, at in made_at.items() if at > own_at), key=lambda p: made_at[p], reverse=True)


def _made_at(path: str) -> int | None:
    """Return when the socket was made, in nanoseconds; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISSOCK(status.st_mode) else None


@final
class UnixSuccessor:
    """The instance with the newest API socket that answers. Implements `ports.claims.Successor`. `own`: our
    socket's path."""

    def __init__(self, own: str, later: LaterSockets, dial: Dial) -> None:
        self._own = own
        self._later = later
        self._dial = dial

    async def prepare(self, claim: ClaimName) -> Prepared | Refused | None:

        async def call(stub: v1.DraPluginStub) -> Prepared | Refused | None:
            request = v1.NodePrepareResourcesRequest(claims=[_message(claim)])
            answer = (await stub.node_prepare_resources(request)).claims.get(claim.uid)
            if answer is None:
                return None
            return _refused(answer.error) if answer.error else Prepared(tuple(map(_device, answer.devices)))

        return await self._ask(call)

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | None:

        async def call(stub: v1.DraPluginStub) -> Unprepared | Refused | None:
            request = v1.NodeUnprepareResourcesRequest(claims=[_message(claim)])
            answer = (await stub.node_unprepare_resources(request)).claims.get(claim.uid)
            if answer is None:
                return None
            return _refused(answer.error) if answer.error else Unprepared()

        return await self._ask(call)

    async def _ask(self, call: Callable[[v1.DraPluginStub], Awaitable[Answer | None]]) -> Answer | None:
        for path in self._later(self._own):
            try:
                async with open_unix_channel(
                    path, connect_deadline_s=RELAY_CONNECT_S, dial=self._dial
                ) as channel:
                    return await call(v1.DraPluginStub(channel))
            except (SocketError, GRPCError, OSError):  # it is ending, or not there yet: it is tried again
                continue
        return None


def _message(claim: ClaimName) -> v1.Claim:
    return v1.Claim(namespace=claim.namespace, name=claim.name, uid=claim.uid)


def _refused(error: str) -> Refused:
    """Return the refusal in the successor's words; it has counted the causes."""
    return Refused(Refusal.UNAVAILABLE, quoted(error), ())


def _device(device: v1.Device) -> PreparedDevice:
    return PreparedDevice(
        tuple(device.request_names),
        device.pool_name,
        device.device_name,
        tuple(device.cdi_device_ids),
        device.share_id,
    )
