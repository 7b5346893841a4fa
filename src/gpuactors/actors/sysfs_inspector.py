"""The sysfs inspector: carries out the outstanding inspections of the host, and posts the results.

Inspections that are outstanding at one time are carried out together, and those that are requested meanwhile follow
together: each is begun after it was requested. An inspection may hang in the kernel for ever. So one that does not
answer at once is carried out by itself, beside the others and with a deadline of its own, and a full scan holds up no
inspection of a single function. The poll that was requested beside inspections is carried out with them, so that a call
has its facts in one turn of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.concurrency.post import post
from gpuactors.core.events import Event
from gpuactors.core.events.host import (
    FunctionInspected,
    FunctionsInspected,
    HostScanned,
    InspectionFailed,
    ScanFailed,
    SomeGroupsObserved,
)
from gpuactors.core.reports.snapshot import InspectionsWanted, PollTarget
from gpuactors.core.values.model import GroupUse, PciAddress, PciFunction
from gpuactors.ports.errors import HostError, HostShortError
from gpuactors.ports.node import HostReader, Observation, UseReader

INSPECTION_BATCH: Final = 64
"""Functions that are inspected one after the other in one thread; the others follow in the next. Takes some 15 ms, for
which an Allocate may have to wait; it is more than the devices of any call."""


async def run(
    wanted: LatestReader[InspectionsWanted],
    host: HostReader,
    use: UseReader,
    inbox: trio.MemorySendChannel[Event],
) -> None:
    """Runs for ever."""
    done: dict[PciAddress, int] = {}
    """The number of the last inspection that was carried out, of the functions that are wanted."""
    slow: set[PciAddress] = set()
    """Those that are inspected by themselves."""
    scanned = polled = 0
    """The numbers of the last scan and poll that were begun."""
    scans = False
    """A scan is under way."""

    async def scan() -> None:
        nonlocal scanned, scans
        while (number := wanted.value.scan or 0) > scanned:
            scanned = number
            await post(inbox, await _scan(number, wanted.value.given, host))
        scans = False

    async def by_itself(address: PciAddress, number: int) -> None:
        event = await _inspect(address, number, wanted.value.given, host)
        done[address] = number
        slow.remove(address)
        await post(inbox, event)

    async def late(number: int, observation: Observation) -> None:
        await post(inbox, await _observed(number, observation, use))

    async with trio.open_nursery() as nursery:
        async for _ in wanted:
            if not scans and (wanted.value.scan or 0) > scanned:
                scans = True
                nursery.start_soon(scan)
            while True:
                numbers, poll = _due(wanted.value.functions, done, slow), wanted.value.poll
                beside: tuple[int, Observation] | None = None
                if poll.poll is not None and poll.poll > polled:
                    polled = poll.poll
                    if (observation := _begun(poll.targets, use)) is not None:
                        beside = polled, observation
                    else:
                        await post(inbox, SomeGroupsObserved(polled, ()))
                if not numbers:
                    if beside is not None:
                        nursery.start_soon(late, *beside)
                    break
                results = await _together(
                    tuple(numbers), wanted.value.given, host, beside[1] if beside is not None else None
                )
                for address in numbers.keys() - results.keys():
                    slow.add(address)
                    nursery.start_soon(by_itself, address, numbers[address])
                done.update((address, numbers[address]) for address in results)
                events = _events(numbers, results)
                if beside is not None and beside[1].is_over:
                    events.append(await _observed(*beside, use))
                elif beside is not None:
                    nursery.start_soon(late, *beside)
                for event in events:
                    await post(inbox, event)
            for address in done.keys() - wanted.value.functions.keys() - slow:
                del done[address]


async def _scan(number: int, given: frozenset[PciAddress], host: HostReader) -> Event:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            functions = await host.scan(given)
    except HostError as exc:
        return ScanFailed(number, str(exc))
    return HostScanned(number, functions)


def _due(
    functions: Mapping[PciAddress, int], done: Mapping[PciAddress, int], slow: set[PciAddress]
) -> dict[PciAddress, int]:
    """The numbers of the inspections to carry out next, those that wait longest first."""
    due = ((number, a) for a, number in functions.items() if number > done.get(a, 0) and a not in slow)
    return {address: number for number, address in islice(sorted(due), INSPECTION_BATCH)}


async def _together(
    addresses: tuple[PciAddress, ...],
    given: frozenset[PciAddress],
    host: HostReader,
    beside: Observation | None,
) -> Mapping[PciAddress, tuple[PciFunction, ...] | HostError]:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            return await host.inspect_all(addresses, given, beside)
    except HostError as exc:
        return dict.fromkeys(addresses, exc)


def _begun(targets: tuple[PollTarget, ...], use: UseReader) -> Observation | None:
    with suppress(HostError), raises_only(HostError, "sysfs_inspector"):
        return use.begin(targets)
    return None


async def _observed(number: int, observation: Observation, use: UseReader) -> SomeGroupsObserved:
    uses: tuple[GroupUse, ...] = ()
    with suppress(HostError), raises_only(HostError, "sysfs_inspector"):
        uses = await use.result(observation)
    return SomeGroupsObserved(number, uses)


def _events(
    numbers: Mapping[PciAddress, int], results: Mapping[PciAddress, tuple[PciFunction, ...] | HostError]
) -> list[Event]:
    events = list[Event]()
    inspected = list[FunctionInspected]()
    for address, result in results.items():
        if isinstance(result, HostError):
            events.append(_failed(numbers[address], address, result))
        else:
            inspected.append(FunctionInspected(numbers[address], address, result))
    if inspected:
        events.append(inspected[0] if len(inspected) == 1 else FunctionsInspected(tuple(inspected)))
    return events


async def _inspect(
    address: PciAddress,
    number: int,
    given: frozenset[PciAddress],
    host: HostReader,
) -> Event:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            functions = await host.inspect(address, given)
    except HostError as exc:
        return _failed(number, address, exc)
    return FunctionInspected(number, address, functions)


def _failed(number: int, address: PciAddress, error: HostError) -> InspectionFailed:
    return InspectionFailed(number, address, str(error), isinstance(error, HostShortError))
