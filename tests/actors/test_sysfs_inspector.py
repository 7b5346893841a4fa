"""The inspector: an inspection that hangs delays no other."""

from __future__ import annotations

from collections.abc import Collection

import trio
from trio.testing import MockClock

from gpuactors.actors import sysfs_inspector
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.host import FunctionInspected
from gpuactors.core.reports.snapshot import InspectionsWanted
from gpuactors.core.values.model import PciAddress, PciFunction

STUCK, FINE = PciAddress("0000:01:00.0"), PciAddress("0000:02:00.0")
PATIENCE_S = 10.0


class HalfStuck:
    """A reader for which one function's files hang. Implements `ports.node.HostReader`."""

    async def scan(self, given: Collection[PciAddress] = ()) -> tuple[PciFunction, ...]:
        raise NotImplementedError

    async def inspect(
        self, address: PciAddress, given: Collection[PciAddress] = ()
    ) -> tuple[PciFunction, ...]:
        if address == STUCK:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return ()


async def test_an_inspection_that_hangs_delays_no_other(autojump_clock: MockClock) -> None:
    wanted = Latest(InspectionsWanted(None, {STUCK: 1, FINE: 2}, frozenset()))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), post)
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            wanted.set(InspectionsWanted(None, {STUCK: 1, FINE: 3}, frozenset()))
            assert await inbox.receive() == FunctionInspected(3, FINE, ())
            nursery.cancel_scope.cancel()
