"""What must hold of the GPUs, whoever is asked: node, requests, kubelet, claims, processes.

Pure: `broken` and `unsettled` judge one `Look`, `Record` judges many, and none of them reads anything. At no time may a
device have two owners or a group be open in two, free be below 0, or more be allocated than there is capacity. All
else may need `GRACE_S` after a change: free is then what a new pod could really have, and kubelet, the API server and
the slices know the same devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, final

GRACE_S: Final = 8.0
"""For how long books may be unsettled: the node's status comes each second here, and the daemon reads who has which GPU
at least each 5 s (docs/dev/architecture.md). Not longer on a busy machine: it is what is asserted."""

API: Final = "api"
KUBELET: Final = "kubelet"
"""Components, as `down.sh` of the kit calls them."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has seen; None: it was not to be had just then (kubelet is away)."""

    at: float
    capacity: Mapping[str, int]
    """By resource, as the node's status has it."""
    allocatable: Mapping[str, int]
    requests: Mapping[str, int]
    """Of the pods on the node that have not ended."""
    allocated: Mapping[str, tuple[tuple[str, str], ...]] | None
    """PodResources List: resource → (pod, device)."""
    healthy: Mapping[str, frozenset[str]] | None
    """PodResources GetAllocatableResources: the devices of each resource that kubelet may give."""
    claimed: tuple[tuple[str, str], ...]
    """(claim, device) of the claims that a pod has reserved, admin access left out."""
    offered: frozenset[str]
    """The devices in the slices of the DRA driver that have no taint."""
    owners: Mapping[int, frozenset[str]]
    """Who has each group open: pods, and processes of none."""
    usable: Mapping[str, bool]
    """Each function of the host: it is on vfio, its group is viable and open in no process. Each GPU by its UUID: it is
    on NVIDIA's driver."""
    api_answers: bool = True
    """False: node, requests, claims and slices are those of the last look that had an API server."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """The PCI addresses of the devices that another plugin lists by IDs of its own."""

    def is_at(self, device: str) -> str:
        """The PCI address of a device, by its ID in any list."""
        return self.addresses.get(device, device)

    def of_pods(self, resource: str) -> frozenset[str]:
        """The devices of a resource that pods have."""
        return frozenset(device for _, device in (self.allocated or {}).get(resource, ()))

    def could_have(self, resource: str) -> frozenset[str]:
        """The devices of a resource that kubelet may give, and that a new pod could really use."""
        taken = {self.is_at(device) for pairs in (self.allocated or {}).values() for _, device in pairs}
        taken |= {device for _, device in self.claimed}
        healthy = (self.healthy or {}).get(resource, frozenset())
        return frozenset(d for d in healthy if self.is_at(d) not in taken and self.usable.get(d, False))


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that does not hold."""

    what: str
    """As long as it lasts, the same words."""
    seen: str = ""
    """The numbers of one look."""

    def __str__(self) -> str:
        return f"{self.what}: {self.seen}" if self.seen else self.what


# --- one look -------------------------------------------------------------------------------------------------------


def broken(look: Look) -> list[Wrong]:
    """What can never be true. What the API server said last is no evidence of kubelet's books while it is away."""
    owners: dict[str, set[str]] = {}
    for pairs in (look.allocated or {}).values():
        for pod, device in pairs:
            owners.setdefault(look.is_at(device), set()).add(f"pod {pod}")
    for claim, device in look.claimed:
        owners.setdefault(device, set()).add(f"claim {claim}")
    wrong = [Wrong(f"{device} belongs to {sorted(by)}") for device, by in owners.items() if len(by) > 1]
    wrong += [
        Wrong(f"group {group} is open in {sorted(by)}") for group, by in look.owners.items() if len(by) > 1
    ]
    if look.api_answers:
        wrong += _negative(look)
    return wrong


def _negative(look: Look) -> Iterator[Wrong]:
    for resource, allocatable in look.allocatable.items():
        if allocatable < (asked := look.requests.get(resource, 0)):
            yield Wrong(f"free {resource} is {allocatable} - {asked} < 0")
    for resource, pairs in (look.allocated or {}).items():
        if resource in look.capacity and len(pairs) > look.capacity[resource]:
            yield Wrong(
                f"{len(pairs)} of {resource} are allocated, and its capacity is {look.capacity[resource]}"
            )


def unsettled(look: Look) -> list[Wrong]:
    """What is not true yet, and must be soon; what is broken as well."""
    wrong = broken(look)
    if not look.api_answers:
        wrong.append(Wrong("the API server does not answer"))
    if look.allocated is None or look.healthy is None:
        return [*wrong, Wrong("kubelet does not answer")]
    for resource in sorted({*look.allocatable, *look.healthy, *look.allocated}):
        wrong += _of_kubelet(look, resource)
        if look.api_answers:
            wrong += _of_status(look, resource)
    if look.api_answers:
        of_pods = {look.is_at(device) for resource in look.allocated for device in look.of_pods(resource)}
        wrong += [
            Wrong(f"{device} of a pod is offered to claims") for device in sorted(of_pods & look.offered)
        ]
    return wrong


def _of_kubelet(look: Look, resource: str) -> Iterator[Wrong]:
    """Kubelet's books and the host's."""
    healthy, mine = (look.healthy or {}).get(resource, frozenset()), look.of_pods(resource)
    for device in sorted(mine - healthy):
        yield Wrong(f"{device} of a pod is not in kubelet's list")
    for device in sorted(healthy - mine - look.could_have(resource)):
        yield Wrong(f"kubelet would give {device} of {resource} to a new pod", _why_not(look, device))


def _why_not(look: Look, device: str) -> str:
    """Why a new pod could not have a device of kubelet's list."""
    others = [
        f"pod {pod} has it"
        for pairs in (look.allocated or {}).values()
        for pod, one in pairs
        if look.is_at(one) == look.is_at(device)
    ]
    others += [f"claim {claim} has it" for claim, one in look.claimed if one == look.is_at(device)]
    return ", ".join(others) or "it is not on vfio, its group is not viable, or a process has it open"


def _of_status(look: Look, resource: str) -> Iterator[Wrong]:
    """The node's status and the pods' requests, and kubelet's books."""
    healthy, mine = (look.healthy or {}).get(resource, frozenset()), look.of_pods(resource)
    allocatable, asked = look.allocatable.get(resource, 0), look.requests.get(resource, 0)
    if allocatable != len(healthy):
        yield Wrong(
            f"the node's status and kubelet count {resource} differently", f"{allocatable}, {sorted(healthy)}"
        )
    if len(mine) != asked:
        # Kubelet serves one pod after another: each that it has served is progress.
        yield Wrong(f"pods ask for {asked} {resource}, and have {sorted(mine)}")
    if len(healthy | mine) > look.capacity.get(resource, 0):
        yield Wrong(
            f"the capacity of {resource} lacks a device",
            f"{look.capacity.get(resource, 0)}, {sorted(healthy | mine)}",
        )
    # What was asked for and not given yet is not a new pod's.
    really = len(look.could_have(resource)) - max(0, asked - len(mine))
    if allocatable - asked > really:
        yield Wrong(
            f"free {resource} is more than a new pod could have", f"{allocatable} - {asked} > {really}"
        )


def without_ended(look: Look, before: Mapping[str, int]) -> Mapping[str, int]:
    """The capacity without the resources of plugins that had ended before: kubelet counts the devices of such a plugin
    for 5 minutes (endpointStopGracePeriod), Unhealthy. `before`: the capacity then."""
    return {
        resource: count
        for resource, count in look.capacity.items()
        if count != before.get(resource)
        or look.allocatable.get(resource, 0)
        or (look.healthy or {}).get(resource)
        or look.of_pods(resource)
    }


# --- many looks -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fault:
    """Something that did not hold, and for how long: each time from the first look that saw it to the last."""

    said: str
    is_broken: bool
    """It may not be so in any look."""
    longest_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Excuse:
    """A fault that is kubelet's or the scheduler's own in a scenario."""

    words: str
    """A part of its sentence."""
    most_s: float
    """All that was seen of it, together."""


@dataclass(slots=True)
class _Lasting:
    fault: Fault
    first: float
    last: float


@final
class Record:
    """For how long each thing did not hold, in the looks of one scenario."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        self._lasting: dict[str, _Lasting] = {}

    def add(self, look: Look, stopped: Collection[str] = ()) -> None:
        """The next look. `stopped`: the components that the scenario has stopped, whose silence is no fault."""
        own = {API: "the API server does not answer", KUBELET: "kubelet does not answer"}
        silent = {words for name, words in own.items() if name in stopped}
        always = {wrong.what for wrong in broken(look)}
        now = {w.what: str(w) for w in unsettled(look) if w.what not in silent}
        self._lasting = {what: one for what, one in self._lasting.items() if what in now}
        for what, said in now.items():
            fault = self._faults.setdefault(what, Fault(said, what in always))
            lasting = self._lasting.setdefault(what, _Lasting(fault, look.at, look.at))
            fault.total_s += look.at - lasting.last
            lasting.last = look.at
            fault.longest_s = max(fault.longest_s, look.at - lasting.first)

    def faults(self) -> list[Fault]:
        """What was broken in any look, and what was unsettled for longer than `GRACE_S`."""
        return [fault for fault in self._faults.values() if fault.is_broken or fault.longest_s > GRACE_S]


def unexcused(faults: Iterable[Fault], excuses: Collection[Excuse]) -> list[str]:
    """The faults that no excuse covers, or that lasted for longer than theirs allows; as sentences."""
    wrong: list[str] = []
    for fault in faults:
        mine = [excuse.most_s for excuse in excuses if excuse.words in fault.said]
        if not mine:
            wrong.append(f"{fault.said}, for {fault.longest_s:.1f} s")
        elif fault.total_s > max(mine):
            wrong.append(f"{fault.said}, for {fault.total_s:.1f} s in all, and {max(mine):g} s are excused")
    return wrong


__all__ = [
    "API",
    "GRACE_S",
    "KUBELET",
    "Excuse",
    "Fault",
    "Look",
    "Record",
    "Wrong",
    "broken",
    "unexcused",
    "unsettled",
    "without_ended",
]
