"""A replay over time: lanes for each device, each resource, compute domains and the daemon itself.

Must not know how they are drawn: that is `page.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, assert_never

from gpuactors.core.deviceplugin.registration import is_registered
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, gpus_of
from gpuactors.core.values.cause import MAY_LAST, Cause
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.model import DeviceKey, ResourceName, Role
from gpuactors.replay.counts import counts_of
from gpuactors_simulation.replay_page.domain_lanes import DomainLanes, claim_words
from gpuactors_simulation.replay_page.lane import Lane

UNHEALTHY: Final = "unhealthy"
"""The kind of a device that a cause of its files or of its list makes Unhealthy, whatever its owner."""

SET_UP: Final = "set-up"
"""The kind of a device that is Unhealthy as its operator has set it up: nothing is wrong with it."""

CLAIMED: Final = "claimed"
"""The kind of a device that a claim has."""

OFFERED: Final = "offered"
"""The kind of a device that is offered to claims only: it is on no vfio driver."""

KINDS: Final[Mapping[Cause, str]] = {
    Cause.FREE: "free",
    Cause.ALLOCATED: "allocated",
    Cause.JUST_ALLOCATED: "allocated",
    Cause.CLAIMED_ELSEWHERE: CLAIMED,
    Cause.GROUP_IN_USE: "group-in-use",
    Cause.CARD_IN_USE: "card-in-use",
    Cause.ORPHANED: "orphaned",
    Cause.HELD_BY_OTHER: "external",
    Cause.HOLDER_UNKNOWN: "unknown",
}
"""The kind of a device's band, by the causes of ownership."""


def kind_by(cause: Cause) -> str:
    """Return the kind of a listed device's band."""
    return KINDS.get(cause, SET_UP if cause in MAY_LAST else UNHEALTHY)


@dataclass
class Lanes:
    """All lanes, fed with the node's state as it changes."""

    daemons: list[Lane] = field(default_factory=list)
    """A process that began before another one ended has a lane of its own."""
    kubelet: Lane = field(default_factory=lambda: Lane("kubelet", "kubelet.sock"))
    resources: dict[ResourceName, Lane] = field(default_factory=dict)
    devices: dict[DeviceKey, Lane] = field(default_factory=dict)
    resource_of: dict[DeviceKey, ResourceName] = field(default_factory=dict)
    cause_of: dict[DeviceKey, Cause] = field(default_factory=dict)
    """The last cause that a device was listed by."""
    of_domains: DomainLanes = field(default_factory=DomainLanes)
    _daemon: Lane | None = None
    _seen: NodeState | None = None

    def begins(self, at: float) -> None:
        """Another process begins."""
        free = (lane for lane in self.daemons if not lane.bands or lane.bands[-1].ended <= at)
        self._daemon = next(free, None)
        if self._daemon is None:
            self._daemon = Lane("gpuactors", "a process of the daemon")
            self.daemons.append(self._daemon)

    def sees(self, state: NodeState, at: float) -> None:
        """The state from `at` on."""
        before, self._seen = self._seen, state
        if before is not None and _same(before, state):
            return
        if self._daemon is not None:
            self._daemon.is_now(at, *_daemon(state))
        if state.daemon.role is not Role.SERVING:
            self.kubelet.ends(at)  # two processes may watch the same kubelet
        elif state.kubelet.socket is not None:
            self.kubelet.is_now(at, "up", "kubelet.sock is there")
        else:
            self.kubelet.is_now(at, "down", state.kubelet.missing or "not checked yet")
        self._resources(state, at)
        self._devices(state, at)
        self.of_domains.sees(state, at)

    def ends(self, at: float) -> None:
        """The process ended, or its next steps are not known."""
        self._seen = None
        for lane in self.all():
            lane.ends(at)

    def all(self) -> Iterator[Lane]:
        """Yield every lane."""
        yield from self.daemons
        yield self.kubelet
        yield from self.resources.values()
        yield from self.devices.values()
        yield from self.of_domains.all()

    def _resources(self, state: NodeState, at: float) -> None:
        counts = counts_of(state) if state.daemon.role is Role.SERVING else {}
        for resource, of_it in counts.items():
            lane = self.resources.setdefault(resource, Lane(resource, "resource"))
            plugin = state.published.plugins.get(resource)
            registered = plugin is not None and is_registered(plugin)
            kind = "negative" if of_it.free < 0 else "registered" if registered else "unregistered"
            registration = (
                "registered with kubelet" if registered else (plugin and plugin.problem) or "not registered"
            )
            lane.is_now(at, kind, f"free {of_it.free} of {of_it.capacity}\n{of_it}\n{registration}")
        for resource, lane in self.resources.items():
            if resource not in counts:
                lane.ends(at)

    def _devices(self, state: NodeState, at: float) -> None:
        now = (
            {a: (r, kind, text) for a, r, kind, text in statuses(state)}
            if state.daemon.role is Role.SERVING
            else {}
        )
        for address, (resource, kind, text) in now.items():
            self.devices.setdefault(address, Lane(address)).is_now(at, kind, text)
            self.resource_of[address] = resource
        for device_list in state.published.device_lists.values():
            self.cause_of |= {device.key: device.cause for device in device_list}
        for address, lane in self.devices.items():
            if address not in now:
                lane.ends(at)


def statuses(state: NodeState) -> Iterator[tuple[DeviceKey, ResourceName, str, str]]:
    """Yield each device that is there or listed, or that a claim has, with its resource, the kind of its band, and the
    reason."""
    listed = {
        a.key: (resource, a)
        for resource, device_list in state.published.device_lists.items()
        for a in device_list
    }
    devices, claims, offered = state.index.devices, _claims(state), _offered(state)
    for address, device in devices.items():
        _, advertised = listed.get(address, (None, None))
        claim = claim_words(claims[address]) if address in claims else ""
        if advertised is not None:
            text = "\n".join(filter(None, (advertised.reason, claim)))
            yield address, device.resource, kind_by(advertised.cause), text
        elif claim:
            yield address, device.resource, CLAIMED, claim
        elif address in offered:
            text = f"offered to claims, on {device.driver or 'no driver'}"
            yield address, device.resource, OFFERED, text
        elif not device.has_backing:
            yield address, device.resource, "not-offered", kind_of(device).not_backed(device).message
    for address, (resource, advertised) in listed.items():
        if address not in devices:
            yield address, resource, kind_by(advertised.cause), advertised.reason


def _claims(state: NodeState) -> dict[DeviceKey, ClaimRecord]:
    """Return the claim that has a device for itself."""
    owning = (entry for entry in state.gpus.claims.entries.values() if entry.state in OWNING)
    return {gpu.key: entry for entry in owning for gpu in gpus_of(entry).gpus}


def _offered(state: NodeState) -> frozenset[DeviceKey]:
    """Return the devices that may be given to a claim now."""
    return frozenset(key for key, device in state.offered.devices.items() if device.blocked is None)


def _daemon(state: NodeState) -> tuple[str, str]:
    if state.daemon.stopping:
        return "stopping", "stopping"
    match state.daemon.role:
        case Role.TAKING_OVER:
            return "taking-over", "getting ready, or asking the daemon that runs already to hand over"
        case Role.SERVING:
            return "serving", "serving kubelet"
        case Role.HANDED_OVER:
            return "handed-over", "a successor serves; this process waits to be ended"
        case _:
            assert_never(state.daemon.role)


def _same(before: NodeState, state: NodeState) -> bool:
    """Nothing changed that a lane shows; by identity, because this is checked at every step.

    The core makes new device lists whenever an ownership may have changed.
    """
    return (
        before.published.device_lists is state.published.device_lists
        and before.host.functions is state.host.functions
        and before.gpus.claims.entries is state.gpus.claims.entries
        and before.offered.offer is state.offered.offer
        and before.domains is state.domains
        and before.published.plugins == state.published.plugins  # a tick makes new ones, most of them equal
        and before.kubelet.ledger.entries is state.kubelet.ledger.entries
        and before.kubelet.pending_allocations.keys() == state.kubelet.pending_allocations.keys()
        and before.daemon.role is state.daemon.role
        and before.kubelet.socket == state.kubelet.socket
        and before.kubelet.missing == state.kubelet.missing
        and before.daemon.stopping == state.daemon.stopping
    )
