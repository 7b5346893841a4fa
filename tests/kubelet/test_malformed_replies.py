"""Replies that are no message, over real sockets from grpcio: one failed call, as a sentence, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from gpuactors.control.hand_over import Unanswered, ask_to_hand_over
from gpuactors.core.values.model import ResourceName
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import LedgerQuestion
from tests.support.patience import patient

WITHIN_S = patient(10.0)

CUT_SHORT = b"\x0a\x7f"
LISTED = (
    CUT_SHORT,
    b"\x0a\x02\x0a\x7f",  # the pod's name is cut short
    b"\x0a\x02\x1a\x7f",  # its container
    b"\x0a\x04\x1a\x02\x12\x7f",  # the container's devices
    b"\x0a\x06\x1a\x04\x12\x02\x08\x05",  # a number as the resource's name
    b"\x0a\x07\x1a\x05\x12\x03\x12\x01\xff",  # a device ID that is no text
)


@contextmanager
def answering(socket: Path, body: bytes) -> Iterator[None]:
    """Somebody answers every unary call at `socket` with these bytes."""

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: body)

    socket.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handlers()])
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(grace=None).wait()


@pytest.mark.parametrize("body", LISTED)
@pytest.mark.trio
async def test_a_malformed_ledger_is_a_failed_read(tmp_path: Path, body: bytes) -> None:
    socket = tmp_path / "pod-resources/kubelet.sock"
    ledger = KubeletLedger(str(tmp_path), str(tmp_path / "device-plugins"))
    with trio.fail_after(WITHIN_S):
        with (
            answering(socket, body),
            pytest.raises(KubeletError, match="not a valid ListPodResourcesResponse"),
        ):
            await ledger.read(LedgerQuestion(lists=True))
        with answering(socket, b"\x0a\x04\x0a\x02vm"):
            assert (await ledger.read(LedgerQuestion(lists=True))).listed == ()


@pytest.mark.trio
async def test_a_malformed_answer_to_register_is_a_failed_registration(tmp_path: Path) -> None:
    kubelet = UnixKubelet(str(tmp_path / "device-plugins"))
    with (
        trio.fail_after(WITHIN_S),
        answering(tmp_path / "device-plugins/kubelet.sock", CUT_SHORT),
        pytest.raises(KubeletError, match="not a valid Empty"),
    ):
        await kubelet.register(ResourceName("nvidia.com/X"), "x.sock", pre_start=True)


@pytest.mark.trio
async def test_a_malformed_answer_to_a_hand_over_is_none(tmp_path: Path) -> None:
    socket = tmp_path / "gpuactors.sock"
    with trio.fail_after(WITHIN_S), answering(socket, b"\x0a\x00"):
        asked = await ask_to_hand_over(str(socket), within_s=WITHIN_S)
    assert isinstance(asked, Unanswered)
    assert "not a valid HandOverResponse" in asked.reason
