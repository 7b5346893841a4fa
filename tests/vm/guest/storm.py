"""Uevents by the thousand that nothing has caused: whoever may write to a `uevent` file has the kernel tell them
(kobject_synth_uevent, Documentation/ABI/testing/sysfs-uevent), and needs no driver for it.

Must not know who listens. What such an event says may be a lie: `remove` of a device that is there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ACTIONS: Final = ("change", "remove", "add", "unbind", "bind")

UUID: Final = "c95fbe5a-5b1f-4b52-9c17-6d0f1a3cbd2e"
"""The kernel wants one before any variable of ours, and tells it as SYNTH_UUID."""

THREADS: Final = 4

SEQUENCE: Final = Path("/sys/kernel/uevent_seqnum")
"""How many uevents there were since the boot, of whatever cause."""


@dataclass(slots=True)
class Storm:
    """One storm: from `blow` on, `THREADS` threads write to the files in turn, as fast as the kernel takes it."""

    files: Sequence[Path]
    _threads: list[threading.Thread] = field(default_factory=list)
    _sent: list[int] = field(default_factory=list)
    _began: float = 0.0

    def blow(self, events: int) -> None:
        """Begin, and return at once."""
        self._sent = [0] * THREADS
        self._threads = [
            threading.Thread(target=self._write, args=(number, events // THREADS), daemon=True)
            for number in range(THREADS)
        ]
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def sent(self) -> int:
        """How many events the kernel has taken so far."""
        return sum(self._sent)

    def is_over(self) -> bool:
        """Everything is sent."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, *, timeout_s: float) -> float:
        """Wait for the end; the seconds since `blow`. Raises TimeoutError."""
        for thread in self._threads:
            thread.join(max(0.0, self._began + timeout_s - time.monotonic()))
        if not self.is_over():
            raise TimeoutError(f"the storm is not over after {timeout_s:g} s: {self._sent} sent")
        return time.monotonic() - self._began

    def _write(self, number: int, events: int) -> None:
        """Each thread begins at another file, so that neighbours in the queue are of different devices."""
        descriptors = [os.open(file, os.O_WRONLY | os.O_CLOEXEC) for file in self.files]
        turn = number * len(descriptors) // THREADS
        try:
            while self._sent[number] < events:
                text = f"{ACTIONS[turn % len(ACTIONS)]} {UUID} TURN={turn}"
                with suppress(OSError):  # a device that is just being taken away: ENODEV
                    os.write(descriptors[turn % len(descriptors)], text.encode())
                    self._sent[number] += 1
                turn += 1
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def uevents_so_far() -> int:
    """Of the whole machine, since its boot."""
    return int(SEQUENCE.read_text(encoding="ascii"))
