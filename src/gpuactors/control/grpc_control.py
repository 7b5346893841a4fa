"""The control socket as releases up to 0.1 speak it: gRPC, by `protos/control.proto`.

For one release: a hand-over from a daemon of the release before and back to it, and its `inspect` and `explain`. Remove
this file with control.proto, its generated code and `messages.is_http2`. Must not be imported before a peer speaks
gRPC.
"""

from __future__ import annotations

from typing import Final, final

import trio
from grpclib import GRPCError, Status

from gpuactors.control.messages import BUSY, Answer
from gpuactors.control.pb.control import v1 as pb
from gpuactors.control.service import ControlService
from gpuactors.core.values.quote import quoted
from gpuactors.grpc_trio import Dial, Server, open_unix_channel
from gpuactors.grpc_trio.limits import GRPC_CLOSE_S

_TRY_AGAIN: Final = frozenset({Status.ABORTED, Status.UNAVAILABLE, Status.CANCELLED})
"""The daemon hands over to another successor, or has just ended: the next answer may differ."""


async def hand_over(path: str, dial: Dial, within_s: float) -> Answer:
    """Ask the daemon behind `path` to hand over, and return its answer. Raises `SocketError`."""
    try:
        async with open_unix_channel(path, connect_deadline_s=within_s, dial=dial) as channel:
            return Answer((await pb.ControlStub(channel).hand_over(pb.HandOverRequest())).pid)
    except GRPCError as exc:
        if exc.status in _TRY_AGAIN:
            return Answer(error=BUSY)
        return Answer(error=f"{exc.status.name}: {quoted(exc.message or '')}")


@final
class GrpcControl(pb.ControlBase):
    """The control service by gRPC."""

    def __init__(self, service: ControlService) -> None:
        self._service = service
        self._server = Server([self], drain_s=GRPC_CLOSE_S)

    async def serve_connection(self, stream: trio.abc.Stream, received: bytes) -> None:
        """Serve calls until the peer disconnects. `received`: the bytes that were read of the stream before."""
        await self._server.serve_connection(trio.StapledStream(stream, _Reread(stream, received)))

    async def drain(self, grace_s: float) -> None:
        """End every call; see `ControlServer.drain`."""
        await self._server.drain(grace_s)

    async def view(self, message: pb.ViewRequest) -> pb.ViewResponse:
        answer = self._service.status()
        return pb.ViewResponse(pid=answer.pid, version=answer.version, status=bytes(answer.status))

    async def hand_over(self, message: pb.HandOverRequest) -> pb.HandOverResponse:
        answer = await self._service.hand_over()
        if answer.error:
            raise GRPCError(
                Status.ABORTED, "this daemon is handing over to another successor: ask again in a moment"
            )
        return pb.HandOverResponse(pid=answer.pid)


@final
class _Reread(trio.abc.ReceiveStream):
    """A stream that first yields the bytes that were read of it before."""

    def __init__(self, stream: trio.abc.ReceiveStream, received: bytes) -> None:
        self._stream = stream
        self._received = received

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._received:
            return await self._stream.receive_some(max_bytes)
        await trio.lowlevel.checkpoint()
        size = max_bytes or len(self._received)
        received, self._received = self._received[:size], self._received[size:]
        return received

    async def aclose(self) -> None:
        await self._stream.aclose()
