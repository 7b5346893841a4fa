"""The kernel's uevents as they come out of netlink, heard with nothing but a socket.

Independent of the daemon's own watcher on purpose: this is the ruler, not the thing measured. Must not interpret
beyond splitting `KEY=VALUE`.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

NETLINK_KOBJECT_UEVENT: Final = 15
"""linux/netlink.h"""

KERNEL_GROUP: Final = 1
"""Multicast group of the kernel itself; group 2 is udevd's, which does not run in the guest."""

DATAGRAM_MAX_BYTES: Final = 8192
"""A uevent is at most UEVENT_BUFFER_SIZE = 2048 bytes plus its header (linux/kobject.h)."""


@dataclass(frozen=True, slots=True)
class Uevent:
    """One message of the kernel. `at_s` is time.monotonic() when it was read."""

    at_s: float
    action: str
    devpath: str
    properties: Mapping[str, str]

    @property
    def subsystem(self) -> str:
        """SUBSYSTEM, always there."""
        return self.properties["SUBSYSTEM"]

    @property
    def key(self) -> tuple[str, str]:
        """(action, subsystem): what an order of events is told by."""
        return (self.action, self.subsystem)

    def __str__(self) -> str:
        extra = " ".join(
            f"{name}={value}"
            for name, value in self.properties.items()
            if name not in {"ACTION", "DEVPATH", "SUBSYSTEM", "SEQNUM", "MODALIAS"}
        )
        return f"{self.action} {self.subsystem} {self.devpath} {extra}"


@dataclass(slots=True)
class UeventListener:
    """A subscription, from its making to `close`. `heard` holds everything read so far, in order."""

    heard: list[Uevent] = field(default_factory=list)
    _socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT)
        self._socket.bind((0, KERNEL_GROUP))

    def __enter__(self) -> UeventListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def next(self, *, timeout_s: float) -> Uevent | None:
        """The next event, or None after `timeout_s` without one."""
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return None
        data = self._socket.recv(DATAGRAM_MAX_BYTES)
        header, *pairs = data.rstrip(b"\0").decode().split("\0")
        action, devpath = header.split("@", 1)
        properties = dict(pair.split("=", 1) for pair in pairs)
        event = Uevent(time.monotonic(), action, devpath, MappingProxyType(properties))
        self.heard.append(event)
        return event

    def until(self, wanted: Callable[[Uevent], bool], *, timeout_s: float) -> list[Uevent]:
        """Everything from now up to and with the first event that is `wanted`. Returns at once when it is read.

        Raises TimeoutError that lists what was heard instead.
        """
        deadline = time.monotonic() + timeout_s
        events: list[Uevent] = []
        while (event := self.next(timeout_s=deadline - time.monotonic())) is not None:
            events.append(event)
            if wanted(event):
                return events
        heard = "\n".join(f"  {event}" for event in events) or "  nothing"
        raise TimeoutError(f"the awaited uevent did not come within {timeout_s:g} s; heard:\n{heard}")

    def silence(self, *, for_s: float) -> list[Uevent]:
        """What is heard during `for_s` seconds; empty is what the name hopes for."""
        deadline = time.monotonic() + for_s
        events: list[Uevent] = []
        while (event := self.next(timeout_s=deadline - time.monotonic())) is not None:
            events.append(event)
        return events


@dataclass(frozen=True, slots=True)
class Queue:
    """Of a process's socket in the kernel's group, as the kernel accounts for it."""

    waiting_bytes: int
    """Not read yet, with the kernel's own overhead."""
    dropped: int
    """Messages that found no room, in the socket's whole life."""

    @classmethod
    def of(cls, pid: int) -> Queue:
        """The first one of a process that is in no PID namespace of its own: its port is the process id
        (netlink_autobind). Raises LookupError if there is none."""
        for line in Path(f"/proc/{pid}/net/netlink").read_text(encoding="ascii").splitlines()[1:]:
            _, protocol, port, groups, waiting, _, _, _, dropped, *_ = line.split()
            if (
                int(protocol) == NETLINK_KOBJECT_UEVENT
                and int(port) == pid
                and int(groups, 16) & KERNEL_GROUP
            ):
                return cls(int(waiting), int(dropped))
        raise LookupError(f"process {pid} has no socket for the kernel's uevents")


WATCHED: Final = frozenset({"pci", "vfio", "vfio-dev"})
"""The subsystems that the daemon listens to; a port's slot or an IRQ may speak in between."""


def assert_order(events: Sequence[Uevent], *wanted: str) -> None:
    """Check what the watched subsystems said, e.g. `"add vfio", "add vfio-dev", "bind pci"`."""
    found = [f"{event.action} {event.subsystem}" for event in events if event.subsystem in WATCHED]
    if found != list(wanted):
        heard = "\n".join(f"  {event}" for event in events)
        raise AssertionError(f"expected the uevents {list(wanted)}, heard:\n{heard}")
