"""What the kernel's accounts say of a process: memory, context switches, processor time. Reads /proc, nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """KiB, from /proc/PID/status and smaps_rollup (man 5 proc)."""

    rss_kib: int
    """Resident now: shared pages of the interpreter and of libraries counted whole."""
    peak_kib: int
    """The largest `rss_kib` so far (VmHWM)."""
    pss_kib: int
    """Resident now, each shared page divided by those who share it."""
    private_kib: int
    """Resident now and nobody else's: what would be free if the process ended."""
    threads: int


@dataclass(frozen=True, slots=True)
class Activity:
    """Counters since the process began."""

    switches: Mapping[str, int]
    """Context switches, voluntary and not, by thread (`TID name`). A thread that wakes has at least one."""
    cpu_ticks: int
    """User and system time of all threads, those that ended included; `os.sysconf("SC_CLK_TCK")` per second."""

    def since(self, earlier: Activity) -> Activity:
        """What happened between two readings; threads that did nothing are left out.

        Of a thread that ended meanwhile nothing is known but that it woke to end: it counts as one.
        """
        switches = {
            thread: now - earlier.switches.get(thread, 0)
            for thread, now in self.switches.items()
            if now > earlier.switches.get(thread, 0)
        }
        ended = {f"{thread} (ended)": 1 for thread in earlier.switches.keys() - self.switches.keys()}
        return Activity({**switches, **ended}, self.cpu_ticks - earlier.cpu_ticks)


def memory(pid: int) -> Memory:
    """Raises `FileNotFoundError` if the process is gone."""
    status = _fields(Path(f"/proc/{pid}/status"))
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return Memory(
        rss_kib=status["VmRSS"],
        peak_kib=status["VmHWM"],
        pss_kib=rollup["Pss"],
        private_kib=rollup["Private_Clean"] + rollup["Private_Dirty"],
        threads=status["Threads"],
    )


def activity(pid: int) -> Activity:
    """Raises `FileNotFoundError` if the process is gone."""
    switches: dict[str, int] = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while the others were read
            status = _fields(Path(f"/proc/{pid}/task/{task}/status"))
            name = Path(f"/proc/{pid}/task/{task}/comm").read_text(encoding="utf-8", errors="replace").strip()
            switches[f"{task} {name}"] = (
                status["voluntary_ctxt_switches"] + status["nonvoluntary_ctxt_switches"]
            )
    # The name of a program may hold anything, parentheses and blanks included; the fields begin after the last one.
    fields = (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    )
    return Activity(switches, int(fields[11]) + int(fields[12]))


def processor_ns(pid: int) -> int:
    """User and system time of all threads, those that ended included, to the nanosecond: the process's own clock
    (include/linux/posix-timers_types.h, make_process_cpuclock with CPUCLOCK_SCHED). Raises `OSError` if it is gone."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of `Key:  123 kB` lines; other lines are left out."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            found[key] = int(value[0])
    return found
