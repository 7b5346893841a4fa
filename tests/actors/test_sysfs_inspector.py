"""The inspector: an inspection that hangs delays no other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.actors import sysfs_inspector
from gpuactors.actors.sysfs_inspector import INSPECTION_BATCH
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.host import (
    FunctionInspected,
    FunctionsInspected,
    GroupsObserved,
    InspectionFailed,
    SomeGroupsObserved,
)
from gpuactors.core.reports.snapshot import InspectionsWanted, PollTarget, PollWanted
from gpuactors.core.values.dead_signs import NO_ERRORS, DeadSign, KnownErrors
from gpuactors.core.values.model import GroupUse, InspectedKey, PciAddress, PciFunction, Sign
from gpuactors.host.reader import INSPECTION_CONCURRENCY
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import InspectionResults, Observation, Selectors

STUCK, FINE = PciAddress("0000:01:00.0"), PciAddress("0000:02:00.0")
TARGETS = (PollTarget(2, (FINE,), may_open=False),)
USES = (GroupUse(2, {FINE: 0}, frozenset(), None, None),)
PATIENCE_S = 10.0


class Seen:
    """Implements `ports.node.Observation`."""

    def __init__(self) -> None:
        self.is_over = False

    def run(self) -> None:
        self.is_over = True

    def ended(self) -> None:
        """Nothing waits for it."""


class Uses:
    """Implements `ports.node.UseReader`; a result that is not over waits for `go`."""

    def __init__(self) -> None:
        self.begun: list[tuple[PollTarget, ...]] = []
        """Together with inspections."""
        self.observed: list[tuple[PollTarget, ...]] = []
        self.go = trio.Event()

    async def observe(self, targets: tuple[PollTarget, ...], *, whole: bool) -> tuple[GroupUse, ...]:
        self.observed.append(targets)
        await self.go.wait()
        return USES

    def begin(self, targets: tuple[PollTarget, ...]) -> Observation:
        self.begun.append(targets)
        return Seen()

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        if not observation.is_over:
            await self.go.wait()
        return USES


class HalfStuck:
    """A reader for which one function's files hang. Implements `ports.node.HostReader`."""

    async def scan(
        self,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        raise NotImplementedError

    async def inspect(
        self,
        address: InspectedKey,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        if address == STUCK:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return ()

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        await trio.lowlevel.checkpoint()
        if beside is not None and STUCK not in addresses:
            beside.run()
        return {address: () for address in addresses if address != STUCK}


class Counting(HalfStuck):
    """One whose reads last until they are let go, and which fails at one function."""

    def __init__(self) -> None:
        self.batches: list[tuple[InspectedKey, ...]] = []
        self.go = trio.Event()

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        self.batches.append(tuple(addresses))
        await self.go.wait()
        return {address: HostError("torn") if address == STUCK else () for address in addresses}


async def test_an_inspection_that_hangs_delays_no_other(autojump_clock: MockClock) -> None:
    wanted = Latest(InspectionsWanted(None, {STUCK: 1, FINE: 2}, frozenset()))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), Uses(), post)
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            wanted.set(InspectionsWanted(None, {STUCK: 1, FINE: 3}, frozenset()))
            assert await inbox.receive() == FunctionInspected(3, FINE, ())
            nursery.cancel_scope.cancel()


class ManyStuck(HalfStuck):
    """One for which every function but one hangs, and none answers at once."""

    async def inspect(
        self,
        address: InspectedKey,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        return await super().inspect(FINE if address == FINE else STUCK, given)

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        await trio.lowlevel.checkpoint()
        return {}


async def test_however_many_hang_they_delay_no_other(autojump_clock: MockClock) -> None:
    stuck = [PciAddress(f"0000:{n:02x}:00.0") for n in range(0x10, 0x10 + INSPECTION_CONCURRENCY + 1)]
    wanted = Latest(InspectionsWanted(None, dict.fromkeys(stuck, 1), frozenset()))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), ManyStuck(), Uses(), post)
            await trio.testing.wait_all_tasks_blocked()
            wanted.set(InspectionsWanted(None, {**dict.fromkeys(stuck, 1), FINE: 2}, frozenset()))
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            nursery.cancel_scope.cancel()


async def test_what_is_asked_for_while_a_read_lasts_is_read_once_after_it(autojump_clock: MockClock) -> None:
    """Sixteen calls: the first one's function is being read when the others come."""
    others = [PciAddress(f"0000:{n:02x}:00.0") for n in range(0x10, 0x1F)]
    wanted, host = Latest(InspectionsWanted(None, {FINE: 1}, frozenset())), Counting()
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), host, Uses(), post)
            await trio.testing.wait_all_tasks_blocked()
            numbers: dict[InspectedKey, int] = {FINE: 1}
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
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), host, Uses(), post)
            assert await inbox.receive() == InspectionFailed(1, STUCK, "torn")
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            nursery.cancel_scope.cancel()


async def test_the_poll_that_a_call_waits_for_comes_with_its_inspections(autojump_clock: MockClock) -> None:
    wanted = Latest(InspectionsWanted(None, {FINE: 1}, frozenset(), PollWanted(2, TARGETS, whole=False)))
    post, inbox = trio.open_memory_channel[Event](8)
    uses = Uses()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), uses, post)
            observed = SomeGroupsObserved(2, USES)
            assert await inbox.receive() == FunctionInspected(1, FINE, ())
            assert inbox.receive_nowait() == observed, "in one turn of the registry"
            wanted.set(InspectionsWanted(None, {FINE: 3}, frozenset(), PollWanted(2, TARGETS, whole=False)))
            assert await inbox.receive() == FunctionInspected(3, FINE, ()), "each number once"
            nursery.cancel_scope.cancel()
    assert uses.begun == [TARGETS]


def polls(poll: int | None, *, whole: bool = True) -> InspectionsWanted:
    """A poll, and no inspection."""
    return InspectionsWanted(None, {}, frozenset(), PollWanted(poll, TARGETS, whole=whole))


async def test_each_poll_is_carried_out_once_and_answered_by_its_number(autojump_clock: MockClock) -> None:
    wanted, uses = Latest(polls(None)), Uses()
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), uses, post)
            await trio.testing.wait_all_tasks_blocked()
            assert uses.observed == []
            uses.go.set()
            wanted.set(polls(3))
            assert await inbox.receive() == GroupsObserved(3, USES)
            wanted.set(replace(polls(3), functions={FINE: 4}))
            assert await inbox.receive() == FunctionInspected(4, FINE, ())
            wanted.set(polls(7, whole=False))
            assert await inbox.receive() == SomeGroupsObserved(7, USES)
            wanted.set(polls(None))
            wanted.close()
    assert (uses.observed, uses.begun) == ([TARGETS, TARGETS], [])


async def test_a_poll_of_every_group_delays_no_inspection(autojump_clock: MockClock) -> None:
    """With `--holders proc` it reads all processes: a second on a large node."""
    uses = Uses()
    wanted = Latest(replace(polls(3), functions={FINE: 2}))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), uses, post)
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            wanted.set(replace(polls(3), functions={FINE: 4}))
            assert await inbox.receive() == FunctionInspected(4, FINE, ())
            uses.go.set()
            assert await inbox.receive() == GroupsObserved(3, USES)
            nursery.cancel_scope.cancel()
    assert (uses.observed, uses.begun) == ([TARGETS], [])


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), RecursionError(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_bug_costs_one_poll_which_has_seen_nothing(
    bug: Exception, whole: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise bug

    kind, uses, wanted = (
        GroupsObserved if whole else SomeGroupsObserved,
        Uses(),
        Latest(polls(4, whole=whole)),
    )
    uses.go.set()
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S), monkeypatch.context() as patch:
        patch.setattr(uses, "observe", fails)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), uses, post)
            assert await inbox.receive() == kind(4, ())
            patch.undo()
            wanted.set(polls(5, whole=whole))
            assert await inbox.receive() == kind(5, USES)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("call", ["begin", "result"])
@pytest.mark.parametrize("error", [HostError("no thread"), RuntimeError("a bug")])
async def test_a_poll_that_fails_sees_nothing(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The core requests another one."""

    def fails(*_: object) -> None:
        raise error

    uses = Uses()
    monkeypatch.setattr(uses, call, fails)
    wanted = Latest(InspectionsWanted(None, {FINE: 1}, frozenset(), PollWanted(2, TARGETS, whole=False)))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), uses, post)
            inspected, nothing = FunctionInspected(1, FINE, ()), SomeGroupsObserved(2, ())
            if call == "begin":
                assert [await inbox.receive(), await inbox.receive()] == [nothing, inspected]
            else:
                assert (await inbox.receive(), inbox.receive_nowait()) == (inspected, nothing)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("functions", [{}, {STUCK: 1, FINE: 2}])
async def test_a_poll_delays_no_inspection_nor_one_that_hangs_the_poll(
    functions: dict[InspectedKey, int], autojump_clock: MockClock
) -> None:
    poll = PollWanted(3, TARGETS, whole=False)
    wanted = Latest(InspectionsWanted(None, functions, frozenset(), poll))
    post, inbox = trio.open_memory_channel[Event](8)
    uses = Uses()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), HalfStuck(), uses, post)
            await trio.testing.wait_all_tasks_blocked()
            if functions:
                assert await inbox.receive() == FunctionInspected(2, FINE, ())
            wanted.set(InspectionsWanted(None, {**functions, FINE: 4}, frozenset(), poll))
            assert await inbox.receive() == FunctionInspected(4, FINE, ())
            uses.go.set()
            assert await inbox.receive() == SomeGroupsObserved(3, USES)
            nursery.cancel_scope.cancel()


class Told(HalfStuck):
    """One that keeps the errors that it is told of, and answers only by itself."""

    def __init__(self) -> None:
        self.errors: list[KnownErrors] = []

    async def scan(
        self,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        await trio.lowlevel.checkpoint()
        self.errors.append(errors)
        return ()

    async def inspect(
        self,
        address: InspectedKey,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        await trio.lowlevel.checkpoint()
        self.errors.append(errors)
        return ()

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        await trio.lowlevel.checkpoint()
        self.errors.append(errors)
        return {}


async def test_every_read_is_told_of_the_errors_that_are_known(autojump_clock: MockClock) -> None:
    errors = KnownErrors({FINE: DeadSign(4711, Sign.SILENT)}, {})
    host, wanted = Told(), Latest(InspectionsWanted(1, {FINE: 2}, frozenset(), errors=errors))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), host, Uses(), post)
            await inbox.receive()
            await inbox.receive()
            nursery.cancel_scope.cancel()
    assert host.errors == 3 * [errors], "scan, inspect_all and inspect"


class Broken(HalfStuck):
    """One with a bug, for a function that does not answer together with others."""

    async def inspect(
        self,
        address: InspectedKey,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        raise RuntimeError("a bug")


async def test_a_bug_at_one_that_is_inspected_by_itself_ends_that_inspection(
    autojump_clock: MockClock,
) -> None:
    wanted = Latest(InspectionsWanted(None, {STUCK: 1, FINE: 2}, frozenset()))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), Broken(), Uses(), post)
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            failed = await inbox.receive()
            assert isinstance(failed, InspectionFailed)
            assert (failed.inspection, failed.address) == (1, STUCK)
            assert "a bug" in failed.reason
            nursery.cancel_scope.cancel()


class Together(HalfStuck):
    """A reader that counts how many are inspected together."""

    def __init__(self) -> None:
        self.together: list[int] = []

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        self.together.append(len(addresses))
        return await super().inspect_all(addresses, given, beside)


async def test_no_more_functions_than_the_bound_are_inspected_in_one_thread(
    autojump_clock: MockClock,
) -> None:
    """An Allocate may have to wait for those that began before it."""
    many = 2 * INSPECTION_BATCH + 3
    wanted: dict[InspectedKey, int] = {
        PciAddress(f"0000:{n >> 8:02x}:{n & 0xFF:02x}.0"): 1 for n in range(2 << 8, (2 << 8) + many)
    }
    host, cell = Together(), Latest(InspectionsWanted(None, wanted, frozenset()))
    post, _inbox = trio.open_memory_channel[Event](many)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, cell.subscribe(), host, Uses(), post)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert host.together == [INSPECTION_BATCH, INSPECTION_BATCH, 3]


class Address(str):
    """An address that shows whether anybody still has it."""


async def test_a_function_that_is_not_wanted_any_more_is_forgotten(autojump_clock: MockClock) -> None:
    """Virtual functions come and go, under as many addresses as a bus has."""
    address = Address("0000:03:00.0")
    known, cell = weakref.ref(address), Latest(InspectionsWanted(None, {PciAddress(address): 1}, frozenset()))
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, cell.subscribe(), HalfStuck(), Uses(), post)
            del address
            while inbox.statistics().current_buffer_used == 0:
                await trio.testing.wait_all_tasks_blocked()
            inbox.receive_nowait()
            for last in (FINE, PciAddress("0000:04:00.0")):  # the loop itself has the one that it forgot last
                cell.set(InspectionsWanted(None, {last: 1}, frozenset()))
                await trio.testing.wait_all_tasks_blocked()
            gc.collect()
            assert known() is None
            nursery.cancel_scope.cancel()


async def test_the_egms_are_read_before_each_inspection(autojump_clock: MockClock) -> None:
    wanted, host, order = Latest(InspectionsWanted(None, {FINE: 1}, frozenset())), Counting(), list[int]()

    async def read_egms() -> None:
        await trio.lowlevel.checkpoint()
        order.append(len(host.batches))

    host.go.set()
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sysfs_inspector.run, wanted.subscribe(), host, Uses(), post, read_egms)
            assert await inbox.receive() == FunctionInspected(1, FINE, ())
            wanted.set(InspectionsWanted(None, {FINE: 2}, frozenset()))
            assert await inbox.receive() == FunctionInspected(2, FINE, ())
            nursery.cancel_scope.cancel()
    assert order == [0, 1]
