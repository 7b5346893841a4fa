"""A connected unix socket: trio's own checks of a stream, and the write that does not wait."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from gpuactors.grpc_trio.unix import UnixStream


def pair() -> tuple[UnixStream, UnixStream]:
    ours, theirs = socket.socketpair()
    return UnixStream(ours), UnixStream(theirs)


async def connected() -> tuple[UnixStream, UnixStream]:
    return pair()


async def clogged() -> tuple[UnixStream, UnixStream]:
    """Each end waits until the other reads."""
    ours, theirs = pair()
    fill(ours)
    fill(theirs)
    return ours, theirs


def fill(stream: UnixStream) -> int:
    """Writes until no byte more is taken; how many were."""
    taken = 0
    while sent := stream.send_now(b"x" * 65536):
        taken += sent
    return taken


@pytest.mark.trio
async def test_it_is_a_stream_as_trio_describes_one() -> None:
    await trio.testing.check_two_way_stream(connected, clogged)


@pytest.mark.trio
async def test_what_is_written_at_once_arrives_without_a_checkpoint_here() -> None:
    ours, theirs = pair()
    async with ours, theirs:
        with trio.testing.assert_no_checkpoints():
            assert ours.send_now(b"abc") == 3
        assert await theirs.receive_some() == b"abc"


@pytest.mark.trio
async def test_what_the_peer_has_no_room_for_is_left_to_send_all() -> None:
    ours, theirs = pair()
    async with ours, theirs:
        taken = fill(ours)
        assert ours.send_now(b"y") == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, b"y")
            received = bytearray()
            with trio.fail_after(10):
                while len(received) <= taken:
                    received += await theirs.receive_some()
    assert received == b"x" * taken + b"y"


@pytest.mark.trio
async def test_a_write_to_a_peer_that_has_gone_is_an_error_of_the_stream() -> None:
    ours, theirs = pair()
    async with ours:
        await theirs.aclose()
        with pytest.raises(trio.BrokenResourceError):
            ours.send_now(b"a")
