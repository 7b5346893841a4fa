"""Kubelet's directory in memory, seen by the daemon's own watch: what it decides takes its time on the mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import trio
from trio.testing import MockClock

from gpuactors.limits import FOREIGN_SOCKETS_MAX, KUBELET_DIR_RETRY_S, ODD_SIGHT_S
from gpuactors.ports.node import Sockets
from gpuactors_simulation.kubelet.fake import open_fake_kubelet
from gpuactors_simulation.kubelet.transport import MemoryTransport
from tests.memory.faults import Fault, Faults
from tests.memory.kubelet import memory_kubelet

WITHIN_S = 60.0
"""On the mock clock."""


async def next_of(sockets: AsyncIterator[Sockets]) -> tuple[float, Sockets]:
    """The next event, and when it came, in seconds from now."""
    began = trio.current_time()
    with trio.fail_after(WITHIN_S):
        found = await anext(sockets)
    return trio.current_time() - began, found


@pytest.mark.trio
async def test_a_restarted_kubelet_is_told_of_at_once_and_its_end_before(autojump_clock: MockClock) -> None:
    transport = MemoryTransport()
    async with open_fake_kubelet(transport) as kubelet, memory_kubelet(transport).sockets() as sockets:
        assert await next_of(sockets) == (0.0, Sockets(None))
        await kubelet.start()
        took_s, first = await next_of(sockets)
        assert (took_s, first.others) == (0.0, ())
        assert first.kubelet is not None
        await kubelet.stop()
        assert await next_of(sockets) == (0.0, Sockets(None))
        await kubelet.start()
        took_s, second = await next_of(sockets)
        assert took_s == 0.0
        assert second.kubelet not in (None, first.kubelet)


@pytest.mark.trio
async def test_others_sockets_are_told_of_together_and_once_in_a_while(autojump_clock: MockClock) -> None:
    transport = MemoryTransport()
    async with memory_kubelet(transport).sockets() as sockets, AsyncExitStack() as stack:
        await next_of(sockets)
        for n in range(FOREIGN_SOCKETS_MAX + 10):
            await stack.enter_async_context(transport.listen_at(f"{n}.sock"))
        await stack.enter_async_context(transport.listen_at("gpuactors-x.sock"))
        took_s, found = await next_of(sockets)
        assert took_s == ODD_SIGHT_S
        assert len(found.others) == FOREIGN_SOCKETS_MAX
        async with transport.listen_at("a.sock"):
            pass
        assert (await next_of(sockets))[0] == ODD_SIGHT_S, "it was there for a moment"


@pytest.mark.trio
async def test_without_a_descriptor_for_a_watch_the_directory_is_read_again_and_again(
    autojump_clock: MockClock,
) -> None:
    transport, faults = MemoryTransport(), Faults()
    faults.order_for(Fault.NO_DESCRIPTORS, KUBELET_DIR_RETRY_S / 2)
    async with (
        open_fake_kubelet(transport) as kubelet,
        memory_kubelet(transport, faults).sockets() as sockets,
    ):
        assert await next_of(sockets) == (0.0, Sockets(None))
        await kubelet.start()
        took_s, found = await next_of(sockets)
        assert found.kubelet is not None
        assert took_s == KUBELET_DIR_RETRY_S
