"""The decoders of a gRPC connection, from the first byte on: what a caller sends to our server, and what a server
answers to our client. The real bytes are those of one call between the two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, final

import pytest
import trio
import trio.testing
from grpclib import GRPCError

from gpuactors.control.pb.control import v1 as pb
from gpuactors.grpc_trio import Server, SocketError, open_unix_channel, server
from tests.fuzz_decoders.damage import of_bytes
from tests.fuzz_decoders.decoder import Decoder, sentence

WITHIN_S: Final = 600.0
"""On the mock clock."""


@final
class _Service(pb.ControlBase):
    async def view(self, message: pb.ViewRequest) -> pb.ViewResponse:
        return pb.ViewResponse(pid=4711, version="1", status=b"{}")

    async def hand_over(self, message: pb.HandOverRequest) -> pb.HandOverResponse:
        return pb.HandOverResponse(pid=4711)


@final
class _Heard(trio.abc.Stream):
    """A stream whose received bytes are kept."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self.heard = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        found = bytes(await self._stream.receive_some(max_bytes))
        self.heard += found
        return found

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


def of_grpc() -> tuple[Decoder, ...]:
    """Both sides of a connection."""
    asked, answered = _in_time(_one_call)
    return (
        Decoder("gRPC call", (asked,), lambda b: _in_time(lambda: _serves(b)), (), of_bytes, 2),
        Decoder("gRPC answer", (answered,), lambda b: _in_time(lambda: _asks(b)), (), of_bytes, 2),
    )


def _in_time(call: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        with trio.fail_after(WITHIN_S):
            return await call()

    return trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def _server() -> Server:
    return Server([_Service()], drain_s=1.0)


async def _one_call() -> tuple[bytes, bytes]:
    """What the server and the client have heard."""
    ours, theirs = map(_Heard, trio.testing.memory_stream_pair())

    async def dial(path: str, *, deadline_s: float) -> trio.abc.Stream:
        return ours

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_server().serve_connection, theirs)
        async with open_unix_channel("/s", connect_deadline_s=1.0, dial=dial) as channel:
            assert (await pb.ControlStub(channel).view(pb.ViewRequest())).pid == 4711
    return theirs.heard, ours.heard


async def _serves(content: bytes) -> None:
    """A client that sends this and ends."""
    ours, theirs = trio.testing.memory_stream_pair()

    def failed(text: str) -> NoReturn:
        raise AssertionError(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.log, "exception", failed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_server().serve_connection, theirs)
            with trio.move_on_after(1.0):
                await ours.send_all(content)
                while await ours.receive_some(65536):
                    pass
            await ours.aclose()


async def _asks(content: bytes) -> None:
    """A server that answers this, whatever it is asked, and ends."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def dial(path: str, *, deadline_s: float) -> trio.abc.Stream:
        return ours

    async def answers() -> None:
        with trio.move_on_after(1.0):
            await theirs.receive_some(65536)
            await theirs.send_all(content)
            await trio.sleep(0.5)
        await theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answers)
        try:
            async with open_unix_channel("/s", connect_deadline_s=1.0, dial=dial) as channel:
                with trio.move_on_after(5.0):
                    await pb.ControlStub(channel).view(pb.ViewRequest())
        except (SocketError, GRPCError) as error:
            sentence(error)
