"""10,000 opens beside the polling daemons: none fails with EBUSY because of them.

A group opens once at a time, so whoever opens it to find out whether it is in use disturbs whoever wants it at that
moment (1 in 1,000 opens at a period of 1 ms). Counting refusals alone, a lucky daemon would pass: inotify counts every
open that worked, whoever did it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
from inotify_simple import INotify, flags

from gpuactors.core.host.usage import POLL_S
from tests.support.kubelet_grpcio import HEALTHY
from tests.vm.guest.modes import RELEASE_SEEN_WITHIN_S, RESOURCE, Watcher, both_modes, figure
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.kernels import NOT_BY_DEFAULT
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
    scenario_timeout_s=420.0,
    kernels=NOT_BY_DEFAULT,  # a figure
)

GROUP_OPENS: Final = 9600
"""2 ms each, emulated."""

DEVICE_OPENS: Final = 400
"""With container and device, as QEMU opens it: 45 ms each, so that both loops last about as long."""

CONTENDED_OPENS: Final = 300
"""Of each of two tenants at once: enough that they meet."""

CALL_PERIOD_S: Final = 0.1
"""Between two rounds of Allocate: each makes a daemon poll the GPU's group, with `proc` by reading every process."""


def run(guest: Guest) -> None:
    """Two tenants open and close at full speed, one a group, one a device; kubelet allocates both all the time."""
    group, device = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    with both_modes(guest, group, device) as watchers:
        with (
            guest.step(f"{GROUP_OPENS} opens of a group, {DEVICE_OPENS} of a device, and Allocate of both"),
            Tenant.start() as one,
            Tenant.start() as other,
        ):
            _never_disturbed(guest, watchers, (one, group), (other, device))
        with guest.step("two that open at once do hear EBUSY, and it is counted"):
            _ruler_measures(guest, group)
        for watcher in watchers:
            for function in (group, device):
                watcher.wait_health(function, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _never_disturbed(
    guest: Guest,
    watchers: Sequence[Watcher],
    one: tuple[Tenant, Function],
    other: tuple[Tenant, Function],
) -> None:
    (opener, group), (holder, device) = one, other
    with _Opened(group, device) as opened:
        started = time.monotonic()
        opener.begin_loop(group.group_node, GROUP_OPENS)
        holder.begin_device_loop(device.group_node, device.address, DEVICE_OPENS)
        calls: Counter[str] = Counter()
        while opener.loops() or holder.loops():
            for watcher in watchers:
                calls += Counter(_allocate(watcher, function) for function in (group, device))
            opened.read()
            time.sleep(CALL_PERIOD_S)
        took_s = time.monotonic() - started
        (groups, groups_busy), (devices, devices_busy) = opener.end_loop(), holder.end_loop()
        opened.read()
    figure(guest, "opens", groups + groups_busy + devices + devices_busy)
    figure(guest, "opens_took_s", round(took_s, 2))
    figure(guest, "ebusy", groups_busy + devices_busy)
    figure(guest, "opens_by_others", opened.count - groups - devices)
    figure(guest, "allocate_meanwhile", dict(calls))
    assert (groups, groups_busy) == (GROUP_OPENS, 0)
    assert (devices, devices_busy) == (DEVICE_OPENS, 0)
    assert opened.count == GROUP_OPENS + DEVICE_OPENS
    assert took_s > 2 * POLL_S, "the loops were over before polls can have met them"
    # Both answers are right, of what is open now and then; that both occur shows that the daemons did poll.
    assert min(calls["granted"], calls["refused"]) > 0, calls


@dataclass(slots=True)
class _Opened:
    """Counts opens of the functions' groups by whatever process, from `with` on; to be read before the kernel's queue
    of 16,384 events is full."""

    group: Function
    device: Function
    count: int = 0
    _inotify: INotify = field(default_factory=INotify)

    def __enter__(self) -> _Opened:
        for function in (self.group, self.device):
            # Both kinds, or the kernel would make one event of several opens in a row.
            mask = flags.OPEN | flags.CLOSE_WRITE | flags.CLOSE_NOWRITE
            self._inotify.add_watch(str(function.group_node), mask)
        return self

    def __exit__(self, *_: object) -> None:
        self._inotify.close()

    def read(self) -> None:
        events = self._inotify.read(timeout=0)
        assert not any(event.mask & flags.Q_OVERFLOW for event in events)
        self.count += sum(bool(event.mask & flags.OPEN) for event in events)


def _allocate(watcher: Watcher, function: Function) -> str:
    """How the call ended: `granted`, or `refused` because somebody has it open just now."""
    try:
        watcher.kubelet.allocate(RESOURCE, [function.address])
    except grpc.RpcError as error:
        refusal: grpc.Call = error  # type: ignore[assignment]
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
        return "refused"
    return "granted"


def _ruler_measures(guest: Guest, function: Function) -> None:
    with Tenant.start() as one, Tenant.start() as other:
        for tenant in (one, other):
            tenant.begin_loop(function.group_node, CONTENDED_OPENS)
        refused = sum(tenant.end_loop()[1] for tenant in (one, other))
    figure(guest, "ebusy_of_two_openers", refused)
    assert refused > 0
