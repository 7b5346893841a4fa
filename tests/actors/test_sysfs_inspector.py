"""The inspector: an inspection that hangs delays no other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import trio
import trio.testing
from trio.testing import MockClock

from gpuactors.actors import sysfs_inspector
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.host import FunctionInspected, FunctionsInspected, InspectionFailed
from gpuactors.core.reports.snapshot import InspectionsWanted
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.ports.errors import HostError

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

    async def inspect_all(
        self, addresses: Sequence[PciAddress], given: Collection[PciAddress] = ()
    ) -> Mapping[PciAddress, tuple[PciFunction, ...] | HostError]:
        await trio.lowlevel.checkpoint()
        return {address: () for address in addresses if address != STUCK}


class Counting(HalfStuck):
    """One whose reads last until they are let go, and which fails at one function."""

    def __init__(self) -> None:
        self.batches: list[tuple[PciAddress, ...]] = []
        self.go = trio.Event()

    async def inspect_all(
        self, addresses: Sequence[PciAddress], given: Collection[PciAddress] = ()
    ) -> Mapping[PciAddress, tuple[PciFunction, ...] | HostError]:
        self.batches.append(tuple(addresses))
        await self.go.wait()
        return {address: HostError("torn") if address == STUCK else () for address in addresses}


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


async def test_what_is_asked_for_while_a_read_lasts_is_read_once_after_it(autojump_clock: MockClock) -> None:
    """Sixteen calls: the first one's function is being read when the others come."""
    others = [PciAddress(f"0000:{n:02x}:00.0") for n in range(0x10, 0x1F)]
    wanted, host = Latest(InspectionsWanted(None, {FINE: 1}, frozenset())), Counting()
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), host, post)
            await trio.testing.wait_all_tasks_blocked()
            numbers = {FINE: 1}
            for number, address in enumerate(others, 2):
                numbers = {**numbers, address: number}
                wanted.set(InspectionsWanted(None, numbers, frozenset()))
                await trio.testing.wait_all_tasks_blocked()
            host.go.set()
            assert await inbox.receive() == FunctionInspected(1, FINE, ())
            assert await inbox.receive() == FunctionsInspected(
                tuple(FunctionInspected(n, a, ()) for n, a in enumerate(others, 2))
            )
            nursery.cancel_scope.cancel()
    assert host.batches == [(FINE,), tuple(others)]


async def test_a_failure_of_one_is_that_ones_only(autojump_clock: MockClock) -> None:
    wanted, host = Latest(InspectionsWanted(None, {STUCK: 1, FINE: 2}, frozenset())), Counting()
    post, inbox = trio.open_memory_channel[Event](8)
    host.go.set()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), host, post)
            assert await inbox.receive() == InspectionFailed(1, STUCK, "torn")
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            nursery.cancel_scope.cancel()


class Broken(HalfStuck):
    """One with a bug, for a function that does not answer together with others."""

    async def inspect(
        self, address: PciAddress, given: Collection[PciAddress] = ()
    ) -> tuple[PciFunction, ...]:
        raise RuntimeError("a bug")


async def test_a_bug_at_one_that_is_inspected_by_itself_ends_that_inspection(
    autojump_clock: MockClock,
) -> None:
    wanted = Latest(InspectionsWanted(None, {STUCK: 1, FINE: 2}, frozenset()))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), Broken(), post)
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            failed = await inbox.receive()
            assert isinstance(failed, InspectionFailed)
            assert (failed.inspection, failed.address) == (1, STUCK)
            assert "a bug" in failed.reason
            nursery.cancel_scope.cancel()
