"""Bytes on their way out of a unix socket: in order, whoever writes them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from gpuactors.grpc_trio.transport import Transport
from gpuactors.grpc_trio.unix import UnixStream
from tests.grpc_trio.support import bounded


@asynccontextmanager
async def pumped(peer: socket.socket, ours: socket.socket) -> AsyncIterator[Transport]:
    stream = UnixStream(ours)
    transport = Transport(stream, on_pause=lambda: None, on_resume=lambda: None)
    with peer:
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(transport.pump)
            with bounded() as bound:
                yield transport
            nursery.cancel_scope.cancel()
    assert not bound.cancelled_caught, "the test hung"


@pytest.mark.trio
async def test_what_is_written_now_has_left_when_the_call_returns() -> None:
    peer, ours = socket.socketpair()
    async with pumped(peer, ours) as transport:
        with trio.testing.assert_no_checkpoints():
            transport.write_now(b"now")
        assert peer.recv(100) == b"now"
        assert transport.unsent_bytes == 0


@pytest.mark.trio
async def test_it_does_not_overtake_what_waits() -> None:
    peer, ours = socket.socketpair()
    async with pumped(peer, ours) as transport:
        transport.write(b"first")
        transport.write_now(b"second")
        await trio.testing.wait_all_tasks_blocked()
        assert peer.recv(100) == b"firstsecond"


@pytest.mark.trio
async def test_what_the_socket_does_not_take_is_sent_later() -> None:
    peer, ours = socket.socketpair()
    sent = bytes(range(256)) * 8192
    async with pumped(peer, ours) as transport:
        transport.write_now(sent)
        assert 0 < transport.unsent_bytes < len(sent)
        transport.write_now(b"end")
        received = bytearray()
        peer.setblocking(False)
        while len(received) < len(sent) + 3:
            await trio.lowlevel.wait_readable(peer)
            received += peer.recv(1 << 20)
    assert received == sent + b"end"


@pytest.mark.trio
async def test_a_peer_that_has_gone_is_found_by_the_pump() -> None:
    peer, ours = socket.socketpair()
    async with pumped(peer, ours) as transport:
        peer.close()
        transport.write_now(b"lost")
        await trio.testing.wait_all_tasks_blocked()
        assert transport.is_closing()
        transport.write_now(b"after the end")
        assert transport.unsent_bytes == 0
