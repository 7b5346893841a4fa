"""What the tests of the gRPC adaptor share: a device plugin to serve, and a peer that speaks raw HTTP/2.

Fakes, no mocks. The peer uses h2 directly, none of our own code, so it can break every rule.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.events
import trio
import trio.testing

from gpuactors.grpc_trio import Channel, Server, TrioService, open_channel
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    Device,
    DevicePluginBase,
    DevicePluginOptions,
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
)
from tests.support.patience import patient

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
OPTIONS = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"

TEST_DEADLINE_S = patient(10)
DRAIN_S = 0.2


class Plugin(TrioService, DevicePluginBase):
    """Allocate answers with what it was asked for. What the other calls do is up to the test."""

    def __init__(self) -> None:
        self.allocate_hook: Callable[[AllocateRequest], Awaitable[None]] | None = None
        self.preferred_hook: Callable[[], Awaitable[None]] | None = None
        self.frames = [ListAndWatchResponse(devices=[Device(id="0000:01:00.0", health="Healthy")])]
        self.endless = True
        self.streams_open = 0
        self.streams_closed = trio.Event()
        self.frames_sent = 0

    async def get_device_plugin_options(self, message: Empty) -> DevicePluginOptions:
        return DevicePluginOptions(pre_start_required=True)

    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        if self.allocate_hook is not None:
            await self.allocate_hook(message)
        return AllocateResponse(
            container_responses=[
                ContainerAllocateResponse(envs={"IDS": ",".join(request.devices_ids)})
                for request in message.container_requests
            ]
        )

    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        if self.preferred_hook is not None:
            await self.preferred_hook()
        return PreferredAllocationResponse()

    async def list_and_watch(self, message: Empty) -> AsyncIterator[ListAndWatchResponse]:
        self.streams_open += 1
        try:
            for frame in self.frames:
                yield frame
                self.frames_sent += 1
            if self.endless:
                await trio.sleep_forever()
        finally:
            self.streams_open -= 1
            self.streams_closed.set()


def bounded() -> trio.CancelScope:
    """No wait of a test is endless: a bound in real time, or, on a mock clock, one beyond every deadline tested."""
    mocked = isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
    return trio.CancelScope(deadline=trio.current_time() + (1e6 if mocked else TEST_DEADLINE_S))


def allocate_request(*ids: str) -> AllocateRequest:
    return AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=list(ids))])


async def assert_alive(server: Server) -> None:
    """A fresh, well-behaved client is served."""
    with trio.fail_after(TEST_DEADLINE_S):
        async with connected(server) as channel:
            answer = await DevicePluginStub(channel).allocate(allocate_request("alive"))
        assert answer.container_responses[0].envs == {"IDS": "alive"}


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Channel]:
    """Our own client on `server`, over memory streams."""
    ours, theirs = trio.testing.memory_stream_pair()
    with bounded() as bound:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_connection, theirs)
            async with open_channel(ours) as channel:
                yield channel
            nursery.cancel_scope.cancel()
    assert not bound.cancelled_caught, "the test hung"


class RawPeer:
    """A client made of h2 and a stream. Nothing is sent or acknowledged unless the test says so."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.data = bytearray()
        self.goaway: int | None = None

    async def handshake(self) -> None:
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def call(
        self,
        path: str = ALLOCATE,
        body: bytes = b"\0\0\0\0\0",
        *,
        headers: Iterable[tuple[str, str]] = (),
        replace: dict[str, str] | None = None,
        end: bool = True,
    ) -> int:
        """Send a call; `replace` changes or (with "") removes default headers. Returns the stream's number."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        } | (replace or {})
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, [*((k, v) for k, v in fields.items() if v), *headers])
        self.h2.send_data(stream_id, body, end_stream=end)
        await self.flush()
        return stream_id

    async def events(self) -> list[h2.events.Event] | None:
        """What one read brings; None when the server has closed the connection."""
        data = await self.stream.receive_some(65536)
        if not data:
            return None
        events = self.h2.receive_data(bytes(data))
        for event in events:
            if isinstance(event, h2.events.ConnectionTerminated):
                self.goaway = int(event.error_code or 0)
        return events

    async def outcome(self, stream_id: int) -> dict[str, str]:
        """The call's headers and trailers in one; DATA is collected in `self.data`, and not acknowledged.

        {"reset": code} if the server resets the stream before its trailers, {"closed": ""} if it disconnects.
        """
        found: dict[str, str] = {}
        with trio.fail_after(TEST_DEADLINE_S):
            while True:
                events = await self.events()
                if events is None:
                    return {"closed": ""}
                for event in events:
                    match event:
                        case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                            if event.stream_id == stream_id:
                                found |= {str(k): str(v) for k, v in event.headers or ()}
                                if "grpc-status" in found:
                                    return found
                        case h2.events.DataReceived():
                            self.data += event.data or b""
                        case h2.events.StreamReset(stream_id=number, error_code=code):
                            if number == stream_id:
                                return {"reset": str(int(code or 0))}
                        case h2.events.ConnectionTerminated():
                            return {"closed": str(event.error_code)}
                        case _:
                            pass

    async def read_to_end(self) -> bytes:
        """Everything the server sends until it closes the connection."""
        received = bytearray()
        with trio.fail_after(TEST_DEADLINE_S):
            try:
                while data := await self.stream.receive_some(65536):
                    received += data
            except trio.BrokenResourceError:
                pass
        return bytes(received)


@asynccontextmanager
async def raw_peer(server: Server, *, handshake: bool = True) -> AsyncIterator[RawPeer]:
    """A raw peer on `server`, over memory streams; disconnected at the end of the block."""
    ours, theirs = trio.testing.memory_stream_pair()
    served = trio.Event()

    async def serve() -> None:
        await server.serve_connection(theirs)
        served.set()

    with bounded() as bound:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            peer = RawPeer(ours)
            if handshake:
                await peer.handshake()
            yield peer
            await ours.aclose()
            await served.wait()
    assert not bound.cancelled_caught, "the test hung"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame, right or wrong (RFC 9113 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


@dataclass(frozen=True, slots=True)
class IndependentStubs:
    """grpcio's generated modules: `messages` (deviceplugin_pb2) and `calls` (deviceplugin_pb2_grpc)."""

    messages: Any
    calls: Any
