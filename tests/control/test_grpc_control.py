"""The control socket between this release and the one before, which speaks gRPC: real sockets, grpcio for the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import grpc
import pytest
import trio

from gpuactors import VERSION
from gpuactors.control.hand_over import HandedOver, NotRunning, Unanswered, ask_to_hand_over
from gpuactors.control.messages import HAND_OVER
from gpuactors.control.path import socket_path
from gpuactors.control.view import DaemonStatus
from gpuactors.decoding import decode_json
from tests.control.test_socket import WITHIN_S, Side, asked
from tests.support.grpcio_proto import ProtoFile

PROTO: Final = ProtoFile("control.proto", "v1")


def call(path: str, method: str, request: str) -> Any:
    """What a daemon or a command of the release before is answered. Raises `grpc.RpcError`."""
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")]) as channel:
        return PROTO.stub(channel, "Control")[method](PROTO.message(request)(), timeout=WITHIN_S)


@final
class OldDaemon:
    """The release before; `refusals`: how often it answers a hand-over so before it does it."""

    def __init__(self, *refusals: grpc.StatusCode) -> None:
        self._refusals = list(refusals)

    def HandOver(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self._refusals:
            context.abort(self._refusals.pop(0), "not now")
        return PROTO.message("HandOverResponse")(pid=4711)


@contextmanager
def serving(path: str, daemon: OldDaemon) -> Iterator[None]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    PROTO.add_service(server, "Control", daemon)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@pytest.mark.trio
async def test_its_commands_are_told_what_the_daemon_knows(tmp_path: Path) -> None:
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with Side(tmp_path).holds():
            view = await trio.to_thread.run_sync(call, path, "View", "ViewRequest")
            assert (view.pid, view.version) == (os.getpid(), VERSION)
            (device,) = decode_json(view.status, DaemonStatus).view.devices
            assert device.address == "0000:23:00.0"


@pytest.mark.trio
async def test_its_daemon_is_handed_over_to(tmp_path: Path) -> None:
    path = socket_path(str(tmp_path))
    answers: list[int] = []

    async def ask() -> None:
        answer = await trio.to_thread.run_sync(call, path, "HandOver", "HandOverRequest")
        answers.append(answer.pid)

    with trio.fail_after(WITHIN_S):
        async with Side(tmp_path).holds() as held, trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await held.asked()
            assert (await asked(path, HAND_OVER)).error, "a successor of today is to ask again"
            with pytest.raises(grpc.RpcError) as refused:
                await trio.to_thread.run_sync(call, path, "HandOver", "HandOverRequest")
            assert refused.value.code() is grpc.StatusCode.ABORTED
            assert answers == []
            await held.give_up()
    assert answers == [os.getpid()]


@pytest.mark.trio
@pytest.mark.parametrize("refusals", [(), (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)])
async def test_its_daemon_hands_over(tmp_path: Path, refusals: tuple[grpc.StatusCode, ...]) -> None:
    path = str(tmp_path / "s")
    with trio.fail_after(WITHIN_S), serving(path, OldDaemon(*refusals)):
        assert await ask_to_hand_over(path, within_s=WITHIN_S) == HandedOver(4711)


@pytest.mark.trio
async def test_its_daemon_that_refuses_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with trio.fail_after(WITHIN_S), serving(path, OldDaemon(grpc.StatusCode.INTERNAL)):
        outcome = await ask_to_hand_over(path, within_s=WITHIN_S)
        assert outcome == Unanswered("it answered INTERNAL: not now")
    assert await ask_to_hand_over(path, within_s=WITHIN_S) == NotRunning()
