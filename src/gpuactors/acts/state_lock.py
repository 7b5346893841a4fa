"""The lock file `state.lock` of a DRA driver: which daemon of this node owns the claims' state on disk.

During an update two daemons are there. What the older one has begun to write may come to its end after its successor
has read: its thread may be late, its disk slow, its process stopped by a signal. So each write and each read is made
under the lock (flock(2)), and a daemon that reads in order to serve writes its own mark into the file. A write finds
its daemon's mark there, or is not made. A write before that read has ended when the read begins, and one after it is
refused.

The lock is held for one write and never while something else is waited for. Must be used in a thread: it blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from gpuactors import limits
from gpuactors.ports.errors import StateFileError
from gpuactors.process.resource_exhaustion import shortage

FILE_NAME: Final = "state.lock"

_MARK_BYTES: Final = 8
_LINE_BYTES_MAX: Final = 64
_STEP_S: Final = 0.02


class ReadOnlyError(StateFileError):
    """The file system is read-only, so nobody has the lock: no daemon writes there."""


@final
class StateLock:
    """The lock as one daemon uses it. `directory` is the driver's below kubelet's `plugins`."""

    def __init__(self, directory: str, *, wait_s: float = limits.STATE_LOCK_WAIT_S) -> None:
        self._path = os.path.join(directory, FILE_NAME)
        self._mark = secrets.token_hex(_MARK_BYTES)
        self._wait_s = wait_s

    @contextmanager
    def reading(self, *, owns: bool) -> Iterator[None]:
        """Hold the lock for a read: no daemon writes meanwhile. `owns`: from now on only this one may write. If the
        file cannot be made, nobody can write, and no lock is needed. Raises `StateFileError`, also for want of
        descriptors."""
        try:
            descriptor = self._open()
        except OSError as error:
            if shortage(error) is not None:  # of this process: another one may write
                raise self._unusable("open", error) from None
            yield
            return
        try:
            self._lock(descriptor)
            if owns:
                self._put(descriptor, self._mark)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock for a write: no other daemon reads or writes meanwhile. Raises `StateFileError`, also if
        another one owns the state; and `ReadOnlyError`."""
        try:
            descriptor = self._open()
        except OSError as error:
            kind = ReadOnlyError if error.errno == errno.EROFS else StateFileError
            raise kind(
                f"cannot open the lock file {self._path} ({error.strerror}), so nothing is written: check the disk and "
                "the permissions; it is tried again"
            ) from None
        try:
            self._lock(descriptor)
            if taken := self._taken(descriptor):
                raise StateFileError(taken)
            self._put(descriptor, self._mark)
            yield
        finally:
            os.close(descriptor)

    def taken(self) -> str:
        """Return why this daemon may no longer write, as a sentence; empty if it may. Does not wait for the lock."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(self._unusable("read", error))
        try:
            return self._taken(descriptor)
        except StateFileError as error:
            return str(error)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _lock(self, descriptor: int) -> None:
        end = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    _, pid = self._line(descriptor)
                    raise StateFileError(
                        f"{self._path} has been locked for {self._wait_s:g} s by process {pid or '(unknown)'}, another "
                        "gpuactors that writes the state of the claims: does its disk answer? It is tried again"
                    ) from None
                time.sleep(_STEP_S)
            except OSError as error:
                raise self._unusable("lock", error) from None
            else:
                return

    def _put(self, descriptor: int, mark: str) -> None:
        """Write the owner's mark, of constant length and in place: a full disk does not prevent it."""
        try:
            os.pwrite(descriptor, f"{mark} {os.getpid():>10}\n".encode(), 0)
        except OSError as error:
            raise self._unusable("write", error) from None

    def _unusable(self, what: str, error: OSError) -> StateFileError:
        return StateFileError(
            f"cannot {what} {self._path} ({error.strerror}): check the disk; it is tried again"
        )

    def _line(self, descriptor: int) -> tuple[str, str]:
        """Return the owner's mark, and the process that had the lock last; empty where there are none. Raises
        `StateFileError`."""
        try:
            words = os.pread(descriptor, _LINE_BYTES_MAX, 0).decode(errors="replace").split()
        except OSError as error:
            raise self._unusable("read", error) from None
        return (words[0], words[1]) if len(words) == 2 else ("", "")

    def _taken(self, descriptor: int) -> str:
        """Implement `taken`. Raises `StateFileError`."""
        mark, pid = self._line(descriptor)
        if mark in ("", self._mark):
            return ""
        return (
            f"another gpuactors (process {pid or '(unknown)'}) has taken over the claims of this driver, by "
            f"{self._path}: nothing was written. If there is none, start this one again"
        )
