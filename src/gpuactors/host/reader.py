"""Runs the synchronous sysfs reader for the actors: in threads with deadlines.

Must not decide anything: the readers of sysfs select functions, the core decides their meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, final

import trio

from gpuactors import limits
from gpuactors.concurrency.patience import Patience
from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.mediated import HostPart
from gpuactors.core.values.model import InspectedKey
from gpuactors.host.mdev import PartsReader
from gpuactors.host.threads import Running, start_thread
from gpuactors.ports.errors import HostError

if TYPE_CHECKING:
    import outcome

    from gpuactors.ports.node import InspectionResults, Observation, Selectors

SCAN_FUNCTION_S: Final = 1.0
"""The time at one function after which a scan is made anew without it, in seconds (at most twice as long): until the
first scan no GPU is served. A read takes microseconds; the rest is for a node that is starved of processor time."""

SCANS_HANGING_MAX: Final = 64
"""Limit on the scans whose threads hang, each at another function: beyond it the host itself does not answer."""

INSPECTION_STALL_S: Final = 0.1
"""The time at one function after which the others are inspected without it, in seconds (at most twice as long). A
function takes 0.2 ms; on a node that is starved of processor time each is only inspected by itself."""

INSPECTION_CONCURRENCY: Final = 16
"""The number of inspections of one function each that run side by side; the others wait in a queue, in order. One that
hangs leaves it after INSPECTION_STALL_S: 256 of them hold up the last one by 1.6 s. 16 = GPUs of the largest node."""


@final
class ThreadedReader:
    """`ports.node.HostReader` on a real host, where a read of sysfs may hang.

    Functions that are inspected at one time have one thread, as the hop to a thread and back takes longer than an
    inspection. Where it hangs at one, it is given up, and those after that one are inspected by themselves.

    An inspection that hangs is given up at its deadline; its thread cannot be ended and stays until the kernel answers.
    Two rules limit the effect. One that does not answer within the stall gives its slot to the next in the queue, so
    that those that hang hold up no other. And there is never more than one thread per address, so that repeated
    inspections of a hanging function do not pile up threads: a new inspection first waits for the old thread to end.
    The deadline is that of the read: neither the queue before it nor a loop that is late counts.

    A scan that hangs at one function is made anew without that one, which is at fault then; so are later scans, as long
    as its thread hangs there. So scans have one hanging thread per function at most, and one at what is no function's.
    """

    def __init__(
        self,
        sysfs: PartsReader,
        *,
        inspection_deadline_s: float = limits.INSPECTION_DEADLINE_S,
        scan_deadline_s: float = limits.SCAN_DEADLINE_S,
        scan_function_s: float = SCAN_FUNCTION_S,
        inspection_stall_s: float = INSPECTION_STALL_S,
    ) -> None:
        self._sysfs = sysfs
        self._scan_function_s = scan_function_s
        self._inspection_stall_s = inspection_stall_s
        self._scans: list[_Scan] = []
        """The scans whose threads run: the present one, and those that hang."""
        self._inspection_deadline_s = inspection_deadline_s
        self._scan_deadline_s = scan_deadline_s
        self._slots = trio.CapacityLimiter(INSPECTION_CONCURRENCY)
        self._threads: dict[InspectedKey, trio.Event] = {}
        """The end of the thread that inspects each function."""

    async def scan(
        self,
        allocated: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        sysfs = self._sysfs.choosing(selectors, errors)
        with trio.move_on_after(self._scan_deadline_s):
            while True:
                scan = await self._begin_scan(sysfs, allocated)
                if await self._has_ended(scan):
                    return scan.results[0].unwrap()
        raise HostError(
            f"the scan of the PCI bus did not end within {self._scan_deadline_s:g} s: a read of sysfs hangs; look for "
            "hung tasks in the kernel's log; the scan is tried again"
        )

    async def inspect(
        self,
        address: InspectedKey,
        allocated: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        sysfs = self._sysfs.choosing(selectors, errors)
        patience = Patience(self._inspection_deadline_s)
        reading = await self._begin_inspection(sysfs, address, allocated, patience)
        if reading is not None and await reading.ends_within(self._inspection_deadline_s, patience):
            return reading.result()
        raise HostError(
            f"the inspection of {address} did not end within {self._inspection_deadline_s:g} s: a read of its sysfs "
            "directory hangs, as it does while an unbind waits until a virtual machine closes the device; stop that VM"
        )

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        allocated: Collection[InspectedKey] = (),
        poll: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        sysfs = self._sysfs.choosing(selectors, errors)
        batch = _Batch([address for address in addresses if address not in self._threads], poll)
        if not batch.addresses:
            return {}
        self._threads.update(dict.fromkeys(batch.addresses, batch.over))

        def end(_: outcome.Outcome[None]) -> None:
            self._release(batch, batch.addresses)
            batch.over.set()
            if poll is not None:
                poll.ended()

        try:
            start_thread(lambda: batch.run(sysfs, allocated), end, name="inspect")
        except HostError as short:
            self._release(batch, batch.addresses)
            return dict.fromkeys(batch.addresses, short)
        try:
            while not batch.over.is_set():
                read = len(batch.results)
                with trio.move_on_after(self._inspection_stall_s):
                    await batch.over.wait()
                if len(batch.results) == read:
                    break
        finally:
            batch.given_up = True
            if not batch.over.is_set():  # it may be at a function, and does not begin with another one
                self._release(batch, [a for a in batch.addresses if a != batch.at])
        return dict(batch.results)

    def _release(self, batch: _Batch, addresses: Collection[InspectedKey]) -> None:
        """Forget that the batch's thread inspects these functions."""
        for address in addresses:
            if self._threads.get(address) is batch.over:
                del self._threads[address]

    async def _begin_scan(self, sysfs: PartsReader, allocated: Collection[InspectedKey]) -> _Scan:
        """Start a scan that skips the functions at which earlier scans hang. Raises `HostError`."""
        while (lost := next((s for s in self._scans if s.at is None), None)) is not None:
            await lost.over.wait()
        if len(self._scans) >= SCANS_HANGING_MAX:
            raise HostError(
                f"the PCI bus is not scanned: {len(self._scans)} functions do not answer; look for hung tasks in the "
                "kernel's log; the scan is tried again"
            )
        scan = _Scan(frozenset(earlier.at for earlier in self._scans if earlier.at is not None))

        def end(result: outcome.Outcome[tuple[HostPart, ...]]) -> None:
            scan.results.append(result)
            self._scans.remove(scan)
            scan.over.set()

        start_thread(lambda: scan.run(sysfs, allocated), end, name="scan")
        self._scans.append(scan)
        return scan

    async def _has_ended(self, scan: _Scan) -> bool:
        """Wait for its end; return False if it hangs at a function. It is given up then, and when the wait is
        cancelled."""
        try:
            while not scan.over.is_set():
                read = scan.read
                with trio.move_on_after(self._scan_function_s):
                    await scan.over.wait()
                if scan.read == read and scan.at is not None and not scan.over.is_set():
                    return False
            return True
        finally:
            scan.given_up = True

    async def _begin_inspection(
        self,
        sysfs: PartsReader,
        address: InspectedKey,
        allocated: Collection[InspectedKey],
        patience: Patience,
    ) -> Running[tuple[HostPart, ...]] | None:
        """Start an inspection in its turn, and wait for it while it has a slot. Return None if an earlier one hangs
        there."""
        while True:
            while (earlier := self._threads.get(address)) is not None:
                if not await patience.ends(earlier):
                    return None
            async with self._slots:
                if address in self._threads:
                    continue
                reading = self._in_thread(sysfs, address, allocated)
                with trio.move_on_after(self._inspection_stall_s):
                    await reading.over.wait()
                return reading

    def _in_thread(
        self, sysfs: PartsReader, address: InspectedKey, allocated: Collection[InspectedKey]
    ) -> Running[tuple[HostPart, ...]]:
        over = self._threads[address] = trio.Event()

        def ended() -> None:
            del self._threads[address]
            over.set()

        return Running(lambda: sysfs.inspect(address, allocated), name=f"inspect {address}", ended=ended)


@final
class _Batch:
    """Inspections one after the other in one thread, and the poll after them. The waiting task may give it up."""

    def __init__(self, addresses: list[InspectedKey], poll: Observation | None) -> None:
        self.addresses = addresses
        self._poll = poll
        self.at: InspectedKey | None = None
        """The function that is being inspected, or whose turn is next."""
        self.results: dict[InspectedKey, tuple[HostPart, ...] | HostError] = {}
        self.given_up = False
        self.over = trio.Event()

    def run(self, sysfs: PartsReader, allocated: Collection[InspectedKey]) -> None:
        """Inspect the functions, in the thread. An unexpected error ends the batch: the later inspection of that
        function alone reports it."""
        look = sysfs.look()
        for address in self.addresses:
            self.at = address  # first: who gives up reads it afterwards
            if self.given_up:
                return
            try:
                self.results[address] = sysfs.inspect(address, allocated, look)
            except HostError as exc:
                self.results[address] = exc
            except Exception:
                return
        self.at = None
        if self._poll is not None and not self.given_up:
            self._poll.run()


class _GivenUpError(Exception):
    """Nobody waits for this scan any more."""


@final
class _Scan:
    """One scan in its thread."""

    def __init__(self, unanswered: frozenset[str]) -> None:
        self.unanswered = unanswered
        self.at: str | None = None
        """The function that is being read; None before the first one, and after the last."""
        self.read = 0
        """The number of functions that it has begun to read."""
        self.given_up = False
        self.results: list[outcome.Outcome[tuple[HostPart, ...]]] = []
        self.over = trio.Event()

    def run(self, sysfs: PartsReader, allocated: Collection[InspectedKey]) -> tuple[HostPart, ...]:
        """Scan, in the thread. Raises as `PartsReader.scan`."""
        try:
            return sysfs.scan(allocated, unanswered=self.unanswered, reads=self._reads)
        finally:
            self.at = None

    def _reads(self, name: str) -> None:
        if self.given_up:
            raise _GivenUpError
        self.at = name
        self.read += 1
