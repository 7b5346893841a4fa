"""The sysfs inspector: carries out the outstanding inspections and polls of the host, and posts the results.

Inspections that are outstanding at one time are carried out together, and those that are requested meanwhile follow
together: each is begun after it was requested. An inspection may hang in the kernel for ever. So one that does not
answer at once is carried out by itself, beside the others and with a deadline of its own, and a full scan holds up no
inspection of a single function. Polls of the groups' use are carried out here as well: one that a call waits for comes
with its inspections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.concurrency.post import post
from gpuactors.core.events import Event
from gpuactors.core.events.host import (
    FunctionInspected,
    FunctionsInspected,
    GroupsObserved,
    HostScanned,
    InspectionFailed,
    ScanFailed,
    SomeGroupsObserved,
)
from gpuactors.core.reports.snapshot import InspectionsWanted, PollWanted
from gpuactors.core.values.mediated import HostPart, functions_of, mediated_of
from gpuactors.core.values.model import GroupUse, InspectedKey
from gpuactors.ports.errors import HostError, HostShortError
from gpuactors.ports.node import HostReader, InspectionResults, Observation, UseReader

INSPECTION_BATCH: Final = 64
"""Limit on the functions that are inspected one after the other in one thread; the others follow in the next. Takes
some 15 ms, for which an Allocate may have to wait; it is more than the devices of any call."""

Observe = Callable[[], Awaitable[tuple[GroupUse, ...]]]


async def run(
    wanted: LatestReader[InspectionsWanted],
    host: HostReader,
    use: UseReader,
    inbox: trio.MemorySendChannel[Event],
    read_egms: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint_if_cancelled,
) -> None:
    """Run until the cell is closed. `read_egms` is called before each inspection, and posts what has changed."""
    done: dict[InspectedKey, int] = {}
    """The number of the last inspection that was carried out, of the functions that are wanted."""
    slow: set[InspectedKey] = set()
    """The functions that are inspected by themselves."""
    scanned = 0
    """The number of the last scan that was begun."""
    scans = False
    """True while a scan is under way."""

    async def scan() -> None:
        nonlocal scanned, scans
        while (number := wanted.value.scan or 0) > scanned:
            scanned = number
            await post(inbox, await _scan(number, wanted.value, host))
        scans = False

    async def by_itself(address: InspectedKey, number: int) -> None:
        event = await _inspect(address, number, wanted.value, host)
        done[address] = number
        slow.remove(address)
        await post(inbox, event)

    async with trio.open_nursery() as nursery:
        polls = _Polls(use, inbox, nursery)
        async for _ in wanted:
            if not scans and (wanted.value.scan or 0) > scanned:
                scans = True
                nursery.start_soon(scan)
            while True:
                numbers = _due(wanted.value.functions, done, slow)
                together = await polls.begin(wanted.value.poll, with_inspections=bool(numbers))
                if not numbers:
                    break
                await read_egms()
                results = await _together(tuple(numbers), wanted.value, host, together)
                for address in numbers.keys() - results.keys():
                    slow.add(address)
                    nursery.start_soon(by_itself, address, numbers[address])
                done.update((address, numbers[address]) for address in results)
                for event in [*_events(numbers, results), *await polls.carried_out(together)]:
                    await post(inbox, event)
            for address in done.keys() - wanted.value.functions.keys() - slow:
                del done[address]


@final
class _Polls:
    """The polls of the groups' use, each carried out once.

    One of some groups, which a call waits for, is carried out in the thread of the inspections that are due with it, so
    that the call has its facts in one turn of the registry. Any other one has a thread of its own, as has one that
    inspections hold up. The core requests no other one before the result.
    """

    def __init__(self, use: UseReader, inbox: trio.MemorySendChannel[Event], nursery: trio.Nursery) -> None:
        self._use = use
        self._inbox = inbox
        self._nursery = nursery
        self._last = PollWanted(0, ())
        """The last begun poll."""

    async def begin(self, wanted: PollWanted, *, with_inspections: bool) -> Observation | None:
        """Begin the poll if it is a new one. Returns what is to be carried out together with the inspections."""
        if wanted.poll is None or wanted.poll == self._last.poll:
            return None
        self._last = wanted
        if wanted.whole or not with_inspections:
            self._nursery.start_soon(
                self._post, wanted, partial(self._use.observe, wanted.targets, whole=wanted.whole)
            )
            return None
        with suppress(HostError), raises_only(HostError, "sysfs_inspector"):
            return self._use.begin(wanted.targets)
        await post(self._inbox, SomeGroupsObserved(wanted.poll, ()))
        return None

    async def carried_out(self, together: Observation | None) -> list[Event]:
        """Return the result of the poll after the inspections; nothing if these have held it up: its result follows."""
        if together is None:
            return []
        result = partial(self._use.result, together)
        if together.is_over:
            return [await _observed(self._last, result)]
        self._nursery.start_soon(self._post, self._last, result)
        return []

    async def _post(self, wanted: PollWanted, observe: Observe) -> None:
        await post(self._inbox, await _observed(wanted, observe))


async def _observed(wanted: PollWanted, observe: Observe) -> GroupsObserved | SomeGroupsObserved:
    """Make the event of a poll. A failed poll has seen nothing: the core requests another one."""
    assert wanted.poll is not None
    uses: tuple[GroupUse, ...] = ()
    with suppress(HostError), raises_only(HostError, "sysfs_inspector"):
        uses = await observe()
    return (GroupsObserved if wanted.whole else SomeGroupsObserved)(wanted.poll, uses)


async def _scan(number: int, wanted: InspectionsWanted, host: HostReader) -> Event:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            parts = await host.scan(wanted.given, wanted.selectors, wanted.errors)
    except HostError as exc:
        return ScanFailed(number, str(exc))
    return HostScanned(number, functions_of(parts), mediated_of(parts))


def _due(
    functions: Mapping[InspectedKey, int], done: Mapping[InspectedKey, int], slow: set[InspectedKey]
) -> dict[InspectedKey, int]:
    """Return the numbers of the inspections to carry out next, the longest waiting first."""
    waiting = ((number, a) for a, number in functions.items() if number > done.get(a, 0) and a not in slow)
    return {address: number for number, address in islice(sorted(waiting), INSPECTION_BATCH)}


async def _together(
    addresses: tuple[InspectedKey, ...],
    wanted: InspectionsWanted,
    host: HostReader,
    poll: Observation | None,
) -> InspectionResults:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            return await host.inspect_all(addresses, wanted.given, poll, wanted.selectors, wanted.errors)
    except HostError as exc:
        return dict.fromkeys(addresses, exc)


def _events(numbers: Mapping[InspectedKey, int], results: InspectionResults) -> list[Event]:
    events = list[Event]()
    inspected = list[FunctionInspected]()
    for address, result in results.items():
        if isinstance(result, HostError):
            events.append(_failed(numbers[address], address, result))
        else:
            inspected.append(_inspected(numbers[address], address, result))
    if inspected:
        events.append(inspected[0] if len(inspected) == 1 else FunctionsInspected(tuple(inspected)))
    return events


async def _inspect(
    address: InspectedKey,
    number: int,
    wanted: InspectionsWanted,
    host: HostReader,
) -> Event:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            parts = await host.inspect(address, wanted.given, wanted.selectors, wanted.errors)
    except HostError as exc:
        return _failed(number, address, exc)
    return _inspected(number, address, parts)


def _inspected(number: int, address: InspectedKey, parts: tuple[HostPart, ...]) -> FunctionInspected:
    return FunctionInspected(number, address, functions_of(parts), mediated_of(parts))


def _failed(number: int, address: InspectedKey, error: HostError) -> InspectionFailed:
    return InspectionFailed(number, address, str(error), isinstance(error, HostShortError))
