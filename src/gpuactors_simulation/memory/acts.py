"""Writes to the fake node's sysfs without a process, on the mock clock: `acts.writes.OpenWrites`.

The act above it is the daemon's own (`acts/driver.py`). A write that hangs keeps the lock of its group after the act
was given up, or the daemon was killed, as the real writing process does; `settle` is that process coming to its end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Final, TypeVar, final

import trio

from gpuactors import limits
from gpuactors.acts.writes import UnderWay, Writes, blocked, hangs
from gpuactors.core.values.model import PciAddress
from gpuactors_simulation.host.kernel import FakeKernel, SleepsError

_PID: Final = "4711"
_STEP_S: Final = 0.05

T = TypeVar("T")


@final
class MemoryWrites:
    """The writing processes of one node: they outlive the daemon."""

    def __init__(
        self,
        kernel: FakeKernel,
        *,
        before: Callable[[str], None] = lambda write: None,
        on_write: Callable[[str, str], None] = lambda path, text: None,
    ) -> None:
        """`before` is called with each write that is about to be done, and may raise; `on_write` with the path and the
        text of one that reaches the kernel."""
        self._kernel = kernel
        self._before = before
        self._on_write = on_write
        self._acts: dict[int, _Act] = {}
        self.written: list[tuple[str, str]] = []
        """Every write that reached the kernel, in order."""

    @asynccontextmanager
    async def __call__(self, group: int) -> AsyncIterator[Writes]:
        """Implement `OpenWrites`."""
        await trio.lowlevel.checkpoint()
        self.refuse_under_way(group)
        act = self._acts[group] = _Act(self)
        try:
            yield act
        finally:
            act.is_over = True
            self.settle()

    def refuse_under_way(self, group: int) -> None:
        """Implement `OpenWrites.refuse_under_way`."""
        self.settle()
        if group in self._acts:
            raise blocked(group, _PID, self._acts[group].under_way)

    def settle(self) -> None:
        """Processes whose write has returned and whose act is over do their last duties and end."""
        for group, act in list(self._acts.items()):
            if act.is_over and not act.waits(self._kernel):
                act.end()
                del self._acts[group]

    def do(self, path: str, text: str) -> float:
        """Do the write at once; return how long it would take, in seconds. Raises `OSError`, `SleepsError`."""
        self._before(f"sysfs {path}")
        self.written.append((path.removeprefix(str(self._kernel.tree.root)), text))
        self._on_write(*self.written[-1])
        planned = self._kernel.take(path)
        self._kernel.write(path, text, planned)
        return planned.slow_s if planned is not None else 0.0

    @property
    def groups(self) -> frozenset[int]:
        """The IOMMU groups on which an act is under way."""
        return frozenset(self._acts)

    @property
    def kernel(self) -> FakeKernel:
        """The kernel that it writes to."""
        return self._kernel


@final
class _Act:
    """Implements `Writes`."""

    def __init__(self, writes: MemoryWrites) -> None:
        self._writes = writes
        self._duties: dict[str, str] = {}
        self.asleep_at: str | None = None
        """The function at which its write sleeps."""
        self.busy_until = 0.0
        """The time at which its last write returns."""
        self.is_over = False
        self.under_way: UnderWay | None = None
        """Its last write or read, which may have returned."""

    async def write(self, path: str, text: str) -> None:
        """Implement `Writes.write`."""
        await trio.lowlevel.checkpoint()
        self.under_way = UnderWay(path, text, trio.current_time())
        try:
            slow_s = self._writes.do(path, text)
        except SleepsError as error:
            await self._sleep(self.under_way, error)
        else:
            self.busy_until = trio.current_time() + slow_s
            with trio.move_on_after(limits.SYSFS_WRITE_DEADLINE_S):
                await trio.sleep(slow_s)
                return
            raise hangs(self.under_way, _PID, limits.SYSFS_WRITE_DEADLINE_S)

    async def read(self, path: str) -> str:
        """Implement `Writes.read`."""
        await trio.lowlevel.checkpoint()
        self.under_way = UnderWay(path, None, trio.current_time())
        try:
            return self._writes.kernel.read(path)
        except SleepsError as error:
            await self._sleep(self.under_way, error)
            return self._writes.kernel.read(path)

    async def at_the_end(self, path: str, text: str) -> None:
        """Implement `Writes.at_the_end`."""
        await trio.lowlevel.checkpoint()
        self._duties[path] = text

    def waits(self, kernel: FakeKernel) -> bool:
        """Its write has not returned."""
        sleeps = self.asleep_at is not None and kernel.sleeps(self.asleep_at)
        return sleeps or (trio.lowlevel.in_trio_run() and trio.current_time() < self.busy_until)

    async def _sleep(self, under_way: UnderWay, error: SleepsError) -> None:
        self.asleep_at = error.address
        for _ in range(round(limits.SYSFS_WRITE_DEADLINE_S / _STEP_S)):
            if not self._writes.kernel.sleeps(error.address):
                self.asleep_at = None
                if (late := self._writes.kernel.late_error(error.address)) is not None:
                    raise late
                return
            await trio.sleep(_STEP_S)
        raise hangs(under_way, _PID, limits.SYSFS_WRITE_DEADLINE_S)

    def end(self) -> None:
        """Make the final writes."""
        for path, text in self._duties.items():
            with suppress(OSError, SleepsError):
                self._writes.kernel.write(path, text)


@final
class MemoryPersistence:
    """nvidia-persistenced of the fake node (`acts.persistenced.Persistence`): a process that has GPUs open."""

    PID: Final = 808
    sockets: Final = ("/run/nvidia-persistenced/socket",)

    def __init__(self, kernel: FakeKernel, *, runs: bool = False, obeys: bool = True) -> None:
        self._kernel = kernel
        self.runs = runs
        self.obeys = obeys
        """It lets go when it is asked to."""
        self.asked: list[tuple[PciAddress, bool]] = []

    def take(self, *addresses: str) -> None:
        """It opens these GPUs."""
        for address in addresses:
            self._kernel.use(address, self.PID, "nvidia-persistenced")

    async def set(self, address: PciAddress, *, on: bool) -> bool:
        """Implement `Persistence.set`."""
        await trio.lowlevel.checkpoint()
        if not self.runs:
            return False
        self.asked.append((address, on))
        if on:
            self.take(address)
        elif self.obeys:
            self._kernel.close(address, self.PID)
        return True


@final
class NoLock:
    """The lock of a node on which no two writes overlap (`acts.blocking_runner.Lock`)."""

    def reading(self, *, owns: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()


async def inline(call: Callable[[], T]) -> T:
    """Call directly (`acts.blocking_runner.BlockingRunner`), for a disk that never blocks."""
    await trio.lowlevel.checkpoint()
    return call()
