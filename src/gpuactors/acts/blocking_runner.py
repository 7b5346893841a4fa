"""The checkpoint and the claims' files for the actors: what blocks runs in a thread, in order, with a deadline.

Must not decide anything: the core says what is to be on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol, TypeVar, final

from gpuactors import limits
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.state_lock import ReadOnlyError
from gpuactors.core.claims.checkpoint import Checkpoint, Restored
from gpuactors.core.claims.files import ClaimContents, FoundFiles
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.domain import DomainUid
from gpuactors.host.threads import OneByOne, in_thread
from gpuactors.ports.errors import HostShortError, StateFileError

FILES_QUEUE_MAX: Final = 256
"""Limit on the writes that wait for one thread: more than FILES_AT_ONCE, so that a full queue is a fault and not a
crowd."""

T = TypeVar("T")


class BlockingRunner(Protocol):
    """Runs a blocking call somewhere."""

    async def __call__(self, call: Callable[[], T]) -> T:
        """Return or raise what `call` does."""


@final
class OneThread:
    """Runs calls in threads, never two at once: a write that was given up may still come to its end, and must not do so
    after a later one. The deadline is that of one call, from the moment its thread begins. The queue before it is
    served in order, and waited in for as long as calls come to their end."""

    def __init__(self, what: str, *, deadline_s: float = limits.FILES_DEADLINE_S) -> None:
        self._what = what
        self.deadline_s = deadline_s
        self._thread = OneByOne(what)
        self._waiting = 0

    async def __call__(self, call: Callable[[], T]) -> T:
        """Implement `BlockingRunner`. Raises `StateFileError` after the deadline: a call that has begun goes on then,
        and one that waits behind it is not made."""
        if self._waiting >= FILES_QUEUE_MAX:
            raise StateFileError(
                f"{self._what}: {self._waiting} writes wait for the disk already, so none is added; it is tried again"
            )
        self._waiting += 1
        try:
            if not await self._thread.comes(self.deadline_s):
                raise self._late(" an earlier write")
        finally:
            self._waiting -= 1
        try:
            running = self._thread.begin(call)
            if await running.ends_within(self.deadline_s):
                return running.result()
        except HostShortError as error:
            raise StateFileError(str(error)) from None
        raise self._late("")

    def _late(self, whom: str) -> StateFileError:
        return StateFileError(
            f"{self._what}: the disk has not answered{whom} within {self.deadline_s:g} s; check it; it is tried again"
        )


async def in_a_thread(call: Callable[[], T]) -> T:
    """Run calls that may block, each in a thread of its own (`BlockingRunner`)."""
    return await in_thread(call, name="act")


class Lock(Protocol):
    """The interface of `StateLock`."""

    def reading(self, *, owns: bool) -> AbstractContextManager[None]: ...

    def writing(self) -> AbstractContextManager[None]: ...


def _under(lock: AbstractContextManager[None], call: Callable[[], T]) -> Callable[[], T]:
    """Return `call` under the lock, which is taken where the call is made."""

    def locked() -> T:
        with lock:
            return call()

    return locked


@final
class StoredCheckpoint:
    """Implements `ports.claims.CheckpointStore`."""

    def __init__(self, file: CheckpointFile, run_blocking: BlockingRunner, lock: Lock) -> None:
        self._file = file
        self._run_blocking = run_blocking
        self._lock = lock

    async def read(self, *, owns: bool = True) -> Restored:
        read = partial(self._file.read, touches=owns)
        return await self._run_blocking(_under(self._lock.reading(owns=owns), read))

    async def write(self, checkpoint: Checkpoint) -> None:
        await self._run_blocking(_under(self._lock.writing(), partial(self._file.write, checkpoint)))


@final
class StoredFiles:
    """Implements `ports.claims.ClaimFileStore`."""

    def __init__(self, files: ClaimFiles, run_blocking: BlockingRunner, lock: Lock) -> None:
        self._files = files
        self._run_blocking = run_blocking
        self._lock = lock

    async def found(self, *, owns: bool = True) -> Mapping[ClaimUid, FoundFiles]:

        def found() -> Mapping[ClaimUid, FoundFiles]:
            if owns:
                self._files.sweep()
            return self._files.found()

        return await self._run_blocking(_under(self._lock.reading(owns=owns), found))

    async def write(self, contents: ClaimContents) -> None:
        await self._run_blocking(partial(self._write, contents))

    def _write(self, contents: ClaimContents) -> None:
        """Write the files; on a read-only disk only check them. Kubelet prepares a claim again for each of its pods,
        and when it restarts: correct files need no write then, and no lock."""
        try:
            with self._lock.writing():
                self._files.write(contents)
        except ReadOnlyError:
            if not self._files.are_written(contents):
                raise

    async def remove(self, uid: ClaimUid, directories: Iterable[str] = ()) -> None:
        await self._run_blocking(_under(self._lock.writing(), partial(self._files.remove, uid, directories)))

    async def clear_mounted(self, kept: Collection[DomainUid] | None) -> tuple[str, ...]:
        return await self._run_blocking(
            _under(self._lock.writing(), partial(self._files.clear_mounted, kept))
        )
