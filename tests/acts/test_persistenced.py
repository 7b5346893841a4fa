"""nvidia-persistenced is asked in its own protocol."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gpuactors.acts.persistenced import Persistenced, PersistenceError
from gpuactors.core.values.model import PciAddress
from gpuactors.host.root import HostRoot
from tests.support.patience import patient

PATIENCE_S = patient(10.0)
GPU = PciAddress("0001:23:1f.7")

Answer = Callable[[bytes], bytes]


def record(body: bytes) -> bytes:
    return struct.pack(">I", 0x80000000 | len(body)) + body


def accepted(status: int) -> Answer:
    """The reply of a server of ONC RPC: xid, REPLY, accepted, no verifier, SUCCESS, the result."""
    return lambda call: record(call[:4] + struct.pack(">IIIIIi", 1, 0, 0, 0, 0, status))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: a socket's path has 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="p") as directory:
        yield Path(directory)


@asynccontextmanager
async def persistenced(root: Path, answer: Answer, driver_root: str = "") -> AsyncIterator[list[bytes]]:
    """A server on its socket; the calls, without their record's head."""
    calls: list[bytes] = []
    path = root / driver_root / "run/nvidia-persistenced/socket"

    async def serve(stream: trio.SocketStream) -> None:
        head = await stream.receive_some(4)
        (length,) = struct.unpack(">I", head)
        calls.append(await stream.receive_some(length & 0x7FFFFFFF))
        await stream.send_all(answer(calls[-1]))

    path.parent.mkdir(parents=True)
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listening.bind(str(path))
    listening.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listening)])
        yield calls
        nursery.cancel_scope.cancel()


def ours(root: Path, deadline_s: float = PATIENCE_S) -> Persistenced:
    return Persistenced(HostRoot(str(root)), "/run/nvidia/driver", deadline_s=deadline_s)


async def test_a_gpu_is_named_by_domain_bus_slot_and_function(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE_S):
        async with persistenced(tmp_path, accepted(0)) as calls:
            assert await ours(tmp_path).set(GPU, on=False)
            assert await ours(tmp_path).set(GPU, on=True)
    fields = [struct.unpack(">15I", call) for call in calls]
    # xid, CALL, RPC version 2, program, version, procedure; no credentials, no verifier
    assert fields[0][1:10] == (0, 2, 35006, 1, 1, 0, 0, 0, 0)
    assert [f[10:] for f in fields] == [(1, 0x23, 0x1F, 7, 0), (1, 0x23, 0x1F, 7, 1)]


async def test_without_its_socket_there_is_nobody_to_ask(tmp_path: Path) -> None:
    assert not await ours(tmp_path).set(GPU, on=False)


async def test_that_of_a_driver_in_a_container_is_asked_at_the_drivers_root(tmp_path: Path) -> None:
    """The GPU Operator's driver: no socket at the host's own place, or a dead one."""
    with trio.fail_after(PATIENCE_S):
        async with persistenced(tmp_path, accepted(0), "run/nvidia/driver") as calls:
            one = ours(tmp_path)
            assert await one.set(GPU, on=False)
            dead = tmp_path / "run/nvidia-persistenced/socket"
            dead.parent.mkdir()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ended:
                ended.bind(str(dead))
            assert await one.set(GPU, on=False)
            assert await one.set(GPU, on=True)
    assert [call[-1] for call in calls] == [0, 0, 1]


async def test_of_two_each_is_asked_to_let_go_and_the_one_that_did_gets_the_gpu_back(tmp_path: Path) -> None:
    one = ours(tmp_path)
    with trio.fail_after(PATIENCE_S):
        async with (
            persistenced(tmp_path, accepted(2)) as without_it,
            persistenced(tmp_path, accepted(0), "run/nvidia/driver") as having_it,
        ):
            assert await one.set(GPU, on=False)
            assert await one.set(GPU, on=True)
    assert ([call[-1] for call in without_it], [call[-1] for call in having_it]) == ([0], [0, 1])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (accepted(7), "only root may ask"),
        (accepted(2), "does not know the GPU"),
        (accepted(99), "status 99"),
        (lambda call: record(call[:4] + struct.pack(">II", 1, 1)), "no sense"),
        (lambda call: record(struct.pack(">6I", 0, 1, 0, 0, 0, 0)), "refused the call"),
        (lambda call: record(call[:4] + struct.pack(">5I", 1, 0, 0, 0, 1)), "refused the call"),
        (lambda call: record(call[:4] + struct.pack(">5I", 1, 0, 0, 4096, 0)), "no sense"),
        (lambda call: b"\x80", "no sense"),
        (lambda call: b"", "no sense"),
    ],
)
async def test_a_refusal_or_nonsense_is_a_sentence(tmp_path: Path, answer: Answer, words: str) -> None:
    with trio.fail_after(PATIENCE_S):
        async with persistenced(tmp_path, answer):
            with pytest.raises(PersistenceError, match=words):
                await ours(tmp_path).set(GPU, on=False)


async def test_one_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run/nvidia-persistenced/socket"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(path))
        silent.listen()
        with trio.fail_after(PATIENCE_S), pytest.raises(PersistenceError, match="has not answered within"):
            await ours(tmp_path, deadline_s=0.05).set(GPU, on=False)
        path.unlink()
        path.touch()
        with pytest.raises(PersistenceError, match="cannot be reached"):
            await ours(tmp_path).set(GPU, on=False)
