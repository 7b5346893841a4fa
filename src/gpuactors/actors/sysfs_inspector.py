"""The sysfs inspector: carries out the outstanding inspections of the host, and posts the results.

An inspection may hang in the kernel for ever, so inspections run side by side, each with a deadline of its own, and a
full scan holds up no inspection of a single function."""

from __future__ import annotations

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event, FunctionInspected, HostScanned, InspectionFailed, ScanFailed
from gpuactors.core.reports.snapshot import InspectionsWanted
from gpuactors.core.values.model import PciAddress
from gpuactors.ports.node import HostError, HostReader, HostShortError


async def run(
    wanted: LatestReader[InspectionsWanted], host: HostReader, inbox: trio.MemorySendChannel[Event]
) -> None:
    """Runs for ever."""
    limiter = trio.CapacityLimiter(limits.INSPECTION_CONCURRENCY)
    scans = _Started()
    inspections: dict[PciAddress, _Started] = {}
    async with trio.open_nursery() as nursery:
        async for now in wanted:
            if now.scan is not None and scans.is_new(now.scan):
                nursery.start_soon(_scan, now.scan, now.given, host, inbox)
            for address, number in now.functions.items():
                if inspections.setdefault(address, _Started()).is_new(number):
                    nursery.start_soon(_inspect, address, number, now.given, host, inbox, limiter)
            for answered in inspections.keys() - now.functions.keys():
                del inspections[answered]


class _Started:
    """The largest number of an inspection that was started: each is done once."""

    def __init__(self) -> None:
        self._number = 0

    def is_new(self, number: int) -> bool:
        if number <= self._number:
            return False
        self._number = number
        return True


async def _scan(
    number: int, given: frozenset[PciAddress], host: HostReader, inbox: trio.MemorySendChannel[Event]
) -> None:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            functions = await host.scan(given)
    except HostError as exc:
        await inbox.send(ScanFailed(number, str(exc)))
    else:
        await inbox.send(HostScanned(number, functions))


async def _inspect(
    address: PciAddress,
    number: int,
    given: frozenset[PciAddress],
    host: HostReader,
    inbox: trio.MemorySendChannel[Event],
    limiter: trio.CapacityLimiter,
) -> None:
    try:
        async with limiter:
            with raises_only(HostError, "sysfs_inspector"):
                functions = await host.inspect(address, given)
    except HostError as exc:
        await inbox.send(InspectionFailed(number, address, str(exc), isinstance(exc, HostShortError)))
    else:
        await inbox.send(FunctionInspected(number, address, functions))
