"""Connections in memory behave as unix sockets do, and can be cut at any byte."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gpuactors_simulation.kubelet.transport import MemoryTransport
from gpuactors_simulation.memory.stream import Connection


def connection() -> Connection:
    return Connection("x.sock", frozenset({"kubelet", "daemon"}))


async def test_bytes_arrive_in_order_and_what_is_left_after_the_end() -> None:
    it = connection()
    await it.dialler.send_all(b"abc")
    await it.dialler.send_all(b"def")
    assert await it.listener.receive_some(4) == b"abcd"
    await it.listener.send_all(b"back")
    await it.dialler.aclose()
    assert await it.listener.receive_some() == b"ef"
    assert await it.listener.receive_some() == b""
    with pytest.raises(trio.BrokenResourceError):
        await it.listener.send_all(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await it.dialler.receive_some()
    with pytest.raises(trio.ClosedResourceError):
        await it.dialler.send_all(b"x")


async def test_a_reader_that_waits_is_woken_by_bytes_and_by_the_end() -> None:
    it = connection()
    got: list[bytes] = []

    async def read() -> None:
        got.extend([await it.listener.receive_some(), await it.listener.receive_some()])

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await it.dialler.send_all(b"x")
            await trio.testing.wait_all_tasks_blocked()
            it.cut()
    assert got == [b"x", b""]


@pytest.mark.parametrize("after_bytes", [1, 3, 4, 5, 7])
async def test_it_can_be_cut_at_any_byte(after_bytes: int) -> None:
    it = connection()
    it.cut(after_bytes)
    sent = b"abcdefg"
    with pytest.raises(trio.BrokenResourceError):  # noqa: PT012 - where it breaks is what is asked
        await it.dialler.send_all(sent[:4])
        await it.dialler.send_all(sent[4:])
        await it.dialler.send_all(b"more")
    assert await it.listener.receive_some() == sent[:after_bytes]
    assert await it.listener.receive_some() == b""


async def test_what_passes_can_be_read() -> None:
    seen: list[tuple[str, bytes]] = []
    it = Connection("x.sock", frozenset(), lambda label, data: seen.append((label, data)))
    await it.dialler.send_all(b"there")
    await it.listener.send_all(b"back")
    assert seen == [("x.sock >", b"there"), ("x.sock <", b"back")]


async def test_a_killed_process_takes_all_its_connections_and_sockets_along() -> None:
    transport = MemoryTransport()
    async with transport.listen_at("a.sock", "daemon 1"), transport.listen_at("b.sock", "daemon 2") as b:
        to_a = await transport.try_dial("a.sock", "kubelet")
        to_b = await transport.try_dial("b.sock", "kubelet")
        from_a = await transport.try_dial("b.sock", "daemon 1")
        assert to_a is not None
        assert to_b is not None
        assert from_a is not None
        transport.kill("daemon 1")
        assert await to_a.receive_some() == b""
        assert await from_a.receive_some() == b""
        assert transport.listener_at("a.sock") is None
        assert transport.listener_at("b.sock") == "daemon 2"
        assert await transport.try_dial("a.sock", "kubelet") is None
        accepted = await b.accept()
        await to_b.send_all(b"lives")
        assert await accepted.receive_some() == b"lives"


async def test_only_the_next_connection_is_doomed() -> None:
    transport = MemoryTransport()
    async with transport.listen_at("a.sock") as listener:
        transport.cut_next("a.sock", 2)
        for expected in (b"ab", b"abc"):
            stream = await transport.try_dial("a.sock", "kubelet")
            assert stream is not None
            await stream.send_all(b"abc")
            assert await (await listener.accept()).receive_some() == expected
