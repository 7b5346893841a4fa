"""The sysfs inspector: carries out the outstanding inspections of the host, and posts the results.

An inspection may hang in the kernel for ever, so inspections run side by side, each with a deadline of its own, and a
full scan holds up no inspection of a single function."""

from __future__ import annotations

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.host import FunctionInspected, HostScanned, InspectionFailed, ScanFailed
from gpuactors.core.reports.snapshot import InspectionsWanted
from gpuactors.core.values.model import PciAddress
from gpuactors.ports.node import HostError, HostReader, HostShortError


async def run(
    wanted: LatestReader[InspectionsWanted], host: HostReader, inbox: trio.MemorySendChannel[Event]
) -> None:
    """Runs for ever."""
    limiter = trio.CapacityLimiter(limits.INSPECTION_CONCURRENCY)

    async def scan(_: None, number: int) -> Event:
        return await _scan(number, wanted.value.given, host)

    async def inspect(address: PciAddress, number: int) -> Event:
        return await _inspect(address, number, wanted.value.given, host, limiter)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(each_once, wanted.subscribe(), lambda now: only(now.scan), scan, inbox)
        nursery.start_soon(each_once, wanted.subscribe(), lambda now: now.functions, inspect, inbox)


async def _scan(number: int, given: frozenset[PciAddress], host: HostReader) -> Event:
    try:
        with raises_only(HostError, "sysfs_inspector"):
            functions = await host.scan(given)
    except HostError as exc:
        return ScanFailed(number, str(exc))
    return HostScanned(number, functions)


async def _inspect(
    address: PciAddress,
    number: int,
    given: frozenset[PciAddress],
    host: HostReader,
    limiter: trio.CapacityLimiter,
) -> Event:
    try:
        async with limiter:
            with raises_only(HostError, "sysfs_inspector"):
                functions = await host.inspect(address, given)
    except HostError as exc:
        return InspectionFailed(number, address, str(exc), isinstance(exc, HostShortError))
    return FunctionInspected(number, address, functions)
