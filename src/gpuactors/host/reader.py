"""Runs the synchronous sysfs reader for the actors: in threads with deadlines, or inline for the simulation.

Must not decide anything: the sysfs reader selects functions, the core decides their meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar, final

import trio

from gpuactors import limits
from gpuactors.core.model import PciAddress, PciFunction
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.threads import in_thread
from gpuactors.ports import HostError

T = TypeVar("T")


@final
class ThreadedReader:
    """`ports.HostReader` on a real host, where a read of sysfs may hang.

    An inspection that hangs is given up at its deadline; its thread cannot be ended and stays until the kernel answers.
    Two rules limit the effect: a slot is held by the task that waits for an inspection, not by the thread, so that
    given-up inspections use up no slots; and there is never more than one thread per address (one for scans), so that
    repeated inspections of a hanging function do not pile up threads: a new inspection first waits for the old thread
    to end."""

    def __init__(
        self,
        sysfs: SysfsReader,
        *,
        inspection_deadline_s: float = limits.INSPECTION_DEADLINE_S,
        scan_deadline_s: float = limits.SCAN_DEADLINE_S,
    ) -> None:
        self._sysfs = sysfs
        self._inspection_deadline_s = inspection_deadline_s
        self._scan_deadline_s = scan_deadline_s
        self._slots = trio.CapacityLimiter(limits.INSPECTION_CONCURRENCY)
        self._threads: dict[PciAddress | None, trio.Event] = {}
        """Ends of the threads that run, by address; None is the scan."""

    async def scan(self, given: Collection[PciAddress] = ()) -> tuple[PciFunction, ...]:
        """As `ports.HostReader.scan`."""
        with trio.move_on_after(self._scan_deadline_s):
            return await self._in_thread(None, lambda: self._sysfs.scan(given))
        raise HostError(
            f"the scan of the PCI bus did not end within {self._scan_deadline_s:g} s: a read of sysfs hangs; look for "
            "hung tasks in the kernel's log; the scan is tried again"
        )

    async def inspect(
        self, address: PciAddress, given: Collection[PciAddress] = ()
    ) -> tuple[PciFunction, ...]:
        """As `ports.HostReader.inspect`."""
        with trio.move_on_after(self._inspection_deadline_s):
            async with self._slots:
                return await self._in_thread(address, lambda: self._sysfs.inspect(address, given))
        raise HostError(
            f"the inspection of {address} did not end within {self._inspection_deadline_s:g} s: a read of its sysfs "
            "directory hangs, as it does while an unbind waits until a virtual machine closes the device; stop that VM"
        )

    async def _in_thread(self, key: PciAddress | None, read: Callable[[], T]) -> T:
        """Runs `read` in a thread. When cancelled it stops waiting; the thread ends when it can."""
        while (earlier := self._threads.get(key)) is not None:
            await earlier.wait()
        over = self._threads[key] = trio.Event()

        def ended() -> None:
            del self._threads[key]
            over.set()

        return await in_thread(read, name=f"inspect {key}" if key else "scan", ended=ended)


@final
class InlineReader:
    """`ports.HostReader` without threads, for a tree of ordinary files on the mock clock: a read there never hangs."""

    def __init__(self, sysfs: SysfsReader) -> None:
        self._sysfs = sysfs

    async def scan(self, given: Collection[PciAddress] = ()) -> tuple[PciFunction, ...]:
        """As `ports.HostReader.scan`."""
        await trio.lowlevel.checkpoint()
        return self._sysfs.scan(given)

    async def inspect(
        self, address: PciAddress, given: Collection[PciAddress] = ()
    ) -> tuple[PciFunction, ...]:
        """As `ports.HostReader.inspect`."""
        await trio.lowlevel.checkpoint()
        return self._sysfs.inspect(address, given)
