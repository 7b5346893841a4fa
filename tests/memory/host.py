"""The host's side of the daemon without a socket, a thread or a clock of its own: uevents, inspections and polls.

The files are those of a `HostTree`, read by the daemon's own readers; only what carries the facts differs, and fails
when a fault is ordered (`faults.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import final

import trio
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.mediated import HostPart
from gpuactors.core.values.model import GroupUse, InspectedKey
from gpuactors.host.uevents import hint_of, parse_datagram
from gpuactors.ports.errors import HostError, HostShortError, UeventsOverflowError
from gpuactors.ports.node import Hint, InspectionResults, Observation, Selectors, UeventSource
from gpuactors_simulation.host.uevents import Uevent
from tests.memory.faults import SLOW_S, Fault, Faults
from tests.support.inline_host import InlineReader, InlineUse


@final
class MemoryUevents:
    """One daemon's uevent socket. Implements `ports.node.UeventSource`; `open` is a `ports.node.OpenUevents`."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._waiting: list[bytes] = []
        self._overflowed = False
        self._arrived = trio.Event()

    def send(self, uevents: Sequence[Uevent]) -> None:
        """The kernel sends."""
        self.send_raw(*(uevent.encode() for uevent in uevents))

    def send_raw(self, *datagrams: bytes) -> None:
        """These bytes arrive."""
        self._waiting.extend(datagrams)
        self.wake()

    def overflow(self) -> None:
        """The socket's buffer overflows: what waits in it is lost, and the reader gets one ENOBUFS."""
        self._waiting.clear()
        self._overflowed = True
        self.wake()

    def wake(self) -> None:
        """The reader wakes up, and crashes if that was ordered."""
        self._arrived.set()
        self._arrived = trio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UeventSource]:
        """Open the socket; what was sent while it was closed is lost."""
        self._waiting.clear()
        self._overflowed = False
        yield self

    async def receive(self) -> Sequence[Hint]:
        """Implement `ports.node.UeventSource.receive`."""
        await trio.lowlevel.checkpoint()
        while not (self._waiting or self._overflowed or self._faults.waits(Fault.WATCHER_CRASHES)):
            await self._arrived.wait()
        self._faults.crash(Fault.WATCHER_CRASHES)
        if self._overflowed:
            self._overflowed = False
            raise UeventsOverflowError("ENOBUFS")
        datagrams, self._waiting = self._waiting, []
        parsed = (parse_datagram(datagram) for datagram in datagrams)
        return [hint for properties in parsed if properties and (hint := hint_of(properties))]


@final
class FaultyReader:
    """A host reader that fails when a fault is ordered. Implements `ports.node.HostReader`.

    `root` is removed from the text of faults, so that a run is the same wherever its tree lies.
    """

    def __init__(self, reader: InlineReader, faults: Faults, root: str) -> None:
        self._reader = reader
        self._faults = faults
        self._root = root
        self._hanging: set[InspectedKey] = set()
        """Those that did not answer together with others."""

    async def scan(
        self,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        """Implement `ports.node.HostReader.scan`."""
        self._faults.crash(Fault.INSPECTOR_CRASHES)
        self._need_descriptor()
        if self._faults.strikes(Fault.SCAN_FAILS):
            raise HostError("the scan fails as planned")
        return await self._take_time(await self._reader.scan(given, selectors, errors))

    async def inspect(
        self,
        address: InspectedKey,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        """Implement `ports.node.HostReader.inspect`."""
        self._faults.crash(Fault.INSPECTOR_CRASHES)
        self._need_descriptor()
        if address in self._hanging:
            self._hanging.remove(address)
            await trio.sleep(limits.INSPECTION_DEADLINE_S)
            raise HostError(f"the inspection of {address} did not end in time")
        return await self._take_time(await self._reader.inspect(address, given, selectors, errors))

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        """Implement `ports.node.HostReader.inspect_all`."""
        self._faults.crash(Fault.INSPECTOR_CRASHES)
        self._need_descriptor()
        found: dict[InspectedKey, tuple[HostPart, ...] | HostError] = {}
        for address, result in (
            await self._reader.inspect_all(addresses, given, beside, selectors, errors)
        ).items():
            if self._faults.strikes(Fault.INSPECTION_FAILS):
                found[address] = HostError("the inspection fails as planned")
            elif self._faults.strikes(Fault.INSPECTION_HANGS):
                self._hanging.add(address)
            else:
                found[address] = result if isinstance(result, HostError) else await self._take_time(result)
        return found

    def _need_descriptor(self) -> None:
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise HostShortError(f"the PCI bus could not be read: {os.strerror(errno.EMFILE)}")

    async def _take_time(self, found: tuple[HostPart, ...]) -> tuple[HostPart, ...]:
        """A slow one has read at once and returns later: the worst case, as the result is outdated then."""
        if self._faults.strikes(Fault.INSPECTION_SLOW):
            await trio.sleep(SLOW_S)
        return tuple(
            f if f.fault is None else replace(f, fault=f.fault.replace(self._root, "")) for f in found
        )


@final
class FaultyUse:
    """A reader of the groups' use that fails when a fault is ordered. Implements `ports.node.UseReader`."""

    def __init__(self, use: InlineUse, faults: Faults) -> None:
        self._use = use
        self._faults = faults

    async def observe(self, targets: tuple[PollTarget, ...], *, whole: bool) -> tuple[GroupUse, ...]:
        """Implement `ports.node.UseReader.observe`."""
        self._faults.crash(Fault.POLLER_CRASHES)
        return await self._faulty(await self._use.observe(targets, whole=whole))

    def begin(self, targets: tuple[PollTarget, ...]) -> Observation:
        """Implement `ports.node.UseReader.begin`."""
        return self._use.begin(targets)

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        """Implement `ports.node.UseReader.result`."""
        return await self._faulty(await self._use.result(observation))

    async def _faulty(self, uses: tuple[GroupUse, ...]) -> tuple[GroupUse, ...]:
        if self._faults.strikes(Fault.POLL_SLOW):
            await trio.sleep(SLOW_S)
        blind = self._faults.lasts(Fault.NO_DESCRIPTORS) or self._faults.strikes(Fault.POLL_BLIND)
        return () if blind else uses
