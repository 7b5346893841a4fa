"""One kubelet stand-in and what its device lists say, device by device: what the scenarios with a single daemon share.

Device lists are given here as PCI address → health, whatever the resource: an address is listed once. Must not import
gpuactors, and must not start the daemon: a scenario may have several, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.kubelet_grpcio import KubeletStandIn
from tests.support.kubelet_seen import Frame, Snapshot
from tests.support.patience import patient
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.runner import Guest

RUN: Final = Path("/run")
"""Below it each kubelet has a directory by its name: unix sockets want the guest's own file system and short paths."""

KUBELET: Final = "kubelet"
"""Its name where there is only one."""

KUBELET_DIR: Final = RUN / KUBELET

SLACK_S: Final = patient(6.0)
"""On top of every bound of the daemon's own: its turns, kubelet's and the kernel's, in an emulated and busy machine.
Seen: tenths of a second on two quiet cores, 3 s where a load of 12 waits for them. On a quiet machine less than any
period of the daemon's that could find the same by itself (10 s); how long things took is among the figures."""

NAMED_WITHIN_S: Final = 11.0 + SLACK_S
"""A pod has a GPU, and its name is known: only List has it, at most every 10 s (`limits.LIST_NAMES_S`), and one that
must wait for an Allocate comes a second later (`LIST_HELD_S`)."""


def arguments(*selectors: str, kubelet: str = KUBELET) -> tuple[str, ...]:
    """The daemon's: uevents from the kernel, and the next periodic scan an hour away, so that nothing that kubelet
    sees after the start is owed to a scan. `kubelet` is the name of its kubelet, see `Node.with_kubelet`."""
    selected = [word for selector in selectors for word in ("--select", selector)]
    return (
        "--kubelet-dir", str(RUN / kubelet), "--uevents", "kernel", "--resync-interval-s", "3600", *selected,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A kubelet and the guest that it runs in."""

    guest: Guest
    kubelet: KubeletStandIn
    name: str = KUBELET

    @classmethod
    @contextmanager
    def with_kubelet(cls, guest: Guest, name: str = KUBELET) -> Iterator[Node]:
        """A running kubelet; at the end it must never have panicked, and what it saw is in `<name>.log` among the
        artifacts."""
        with KubeletStandIn(RUN / name) as kubelet:
            node = cls(guest, kubelet, name)
            try:
                yield node
                assert not kubelet.panics, kubelet.panics
            finally:
                node._save()

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource that ever registered."""
        return tuple(sorted({registration.resource for registration in self.kubelet.registrations}))

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Every frame of every resource, by arrival."""
        every = [frame for resource in self.resources for frame in self.kubelet.frames(resource)]
        return tuple(sorted(every, key=lambda frame: frame.at_ns))

    def figure(self, name: str, value: object) -> None:
        """Keep it in `result.json`, and show it."""
        self.guest.figures[name] = value
        print(f"    {name}: {value}", flush=True)

    def wait(self, wanted: Mapping[str, str], within_s: float) -> None:
        """Wait until kubelet's device lists hold exactly these devices with their health. Raises TimeoutError."""
        self.kubelet.wait_for(
            lambda lists: by_address(lists) == wanted, within_s, f"lists with {dict(wanted)}"
        )

    def timed(self, name: str, act: Callable[[], None], wanted: Mapping[str, str], within_s: float) -> float:
        """Do `act`; kubelet's device lists must be as `wanted` within the bound, counted from the beginning of `act`.

        Returns the milliseconds up to the frame's arrival, and keeps them as the figure `name`.
        """
        started_ns = time.monotonic_ns()
        act()
        self.wait(wanted, within_s)
        # Also where the act alone took so long: what kubelet has late is late, whoever is to blame.
        took_s = (self.frames[-1].at_ns - started_ns) / 1e9
        assert 0 < took_s <= within_s, f"{name}: {took_s:.3f} s, at most {within_s:g} s are promised"
        took_ms = round(took_s * 1000, 1)
        self.figure(name, took_ms)
        return took_ms

    def check_always(self, wanted: Mapping[str, str], since_ns: int) -> None:
        """These devices were in every frame since that moment, with this health, and are so in the device lists."""
        assert wanted.items() <= by_address(self.kubelet.snapshot()).items(), self.kubelet.snapshot()
        for frame in self.frames:
            said = {device.id: device.health for device in frame.devices}
            # A resource's frame says nothing of another resource's devices.
            known = {address for earlier in self.kubelet.frames(frame.resource) for address in earlier.ids}
            expected = {address: health for address, health in wanted.items() if address in known}
            assert frame.at_ns < since_ns or expected.items() <= said.items(), frame

    def _save(self) -> None:
        ends = [end for resource in self.resources for end in self.kubelet.stream_ends(resource)]
        text = "".join(f"{item}\n" for item in (*self.kubelet.registrations, *self.frames, *ends))
        (self.guest.artifacts / f"{self.name}.log").write_text(text, encoding="utf-8")


def by_address(lists: Snapshot) -> dict[str, str]:
    """The device lists without their resources."""
    return {address: health for devices in lists.values() for address, health in devices.items()}


def last_reason(daemon: DaemonProcess, address: str) -> str:
    """Why a device is what kubelet was told last, as the daemon's log has it."""
    said = [line for line in daemon.said("device.changed") if line["device"] == address]
    return str(said[-1]["reason"]) if said else ""
