"""The faults that can be ordered at the daemon's ports: each is ordered by name and strikes so many times.

Values and a counter; the ports of `memory/host.py`, `memory/kubelet.py` and `memory/control.py` ask here.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Final, final

import trio

SLOW_S: Final = 0.5
"""How long a slow answer takes: far longer than a healthy one, well within its deadline."""


class Fault(StrEnum):
    """A fault that strikes at the next occasion."""

    SCAN_FAILS = "a scan fails"
    INSPECTION_FAILS = "an inspection fails"
    INSPECTION_SLOW = "an inspection or scan takes long"
    INSPECTION_HANGS = "an inspection hangs until its deadline"
    POLL_SLOW = "a poll takes long"
    POLL_BLIND = "a poll can read nothing"
    READ_FAILS = "a read of the ledger fails"
    READ_SLOW = "a read of the ledger takes long"
    READ_MALFORMED = "kubelet's answer to List makes no sense"
    BIND_FAILS = "a socket cannot be made"
    REGISTER_FAILS = "Register fails"
    REGISTER_SLOW = "Register takes long"
    NO_DESCRIPTORS = "the daemon has no descriptor left"
    DISK_FULL = "a write to the daemon's disk fails"
    WATCHER_CRASHES = "udev_watcher crashes"
    INSPECTOR_CRASHES = "sysfs_inspector crashes"
    POLLER_CRASHES = "poll crashes"
    LEDGER_CRASHES = "pod_resources crashes"
    KUBELET_WATCHER_CRASHES = "kubelet_watcher crashes"
    HAND_OVER_CRASHES = "hand_over crashes"
    PLUGIN_CRASHES = "a plugin crashes"


class PlannedCrashError(Exception):
    """An unexpected exception. Its text is in the log then, so that a planned crash can be told from a bug."""

    MARK: Final = "crashes as planned"

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.partition(' crashes')[0]} {self.MARK}")


@final
class Faults:
    """The faults that wait for their occasion."""

    def __init__(self) -> None:
        self._waiting: Counter[Fault] = Counter()
        self._until: dict[Fault, float] = {}

    def order(self, fault: Fault, times: int = 1) -> None:
        """The fault strikes at its next `times` occasions, also if it is ordered again meanwhile."""
        self._waiting[fault] = max(self._waiting[fault], times)

    def waits(self, fault: Fault) -> bool:
        """It has been ordered and has not struck as often yet."""
        return self._waiting[fault] > 0

    def strikes(self, fault: Fault) -> bool:
        """Whether it strikes now, which counts."""
        if self._waiting[fault] <= 0:
            return False
        self._waiting[fault] -= 1
        return True

    def order_for(self, fault: Fault, seconds: float) -> None:
        """The fault strikes at every occasion for so long."""
        self._until[fault] = trio.current_time() + seconds

    def lasts(self, fault: Fault) -> bool:
        """It strikes now, however often."""
        return self._until.get(fault, -1.0) > trio.current_time()

    def end(self, fault: Fault) -> None:
        """It ends now."""
        self._until.pop(fault, None)

    def left(self, *faults: Fault) -> int:
        """How often they are still to strike, together."""
        return sum(self._waiting[fault] for fault in faults)

    def crash(self, fault: Fault) -> None:
        """Raises `PlannedCrashError` if it strikes now."""
        if self.strikes(fault):
            raise PlannedCrashError(fault)
