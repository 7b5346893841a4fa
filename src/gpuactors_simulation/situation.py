"""Facts about the node after a step of a scenario, and the form of a condition on them.

Their sources are kubelet, the API server and the node's own tree; of the daemon its words only. The conditions are in
`expectations.py` and its two siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct, field

from gpuactors.core.values.cause import Cause
from gpuactors_simulation.kubelet.device_manager import KubeletView


class GpuSeen(Struct, frozen=True):
    """A GPU on the node, by the kernel and the API server."""

    address: str
    driver: str | None
    companions: tuple[tuple[str, str | None], ...]
    """The other functions of its IOMMU group, each with its driver."""
    is_offered: bool
    """It is in a ResourceSlice."""
    is_tainted: bool


class ClaimSeen(Struct, frozen=True):
    """A claim, by the API server and kubelet; of the daemon its words only."""

    name: str
    devices: frozenset[str]
    """Its allocation: the addresses of GPUs, or the names of a compute domain's devices."""
    is_known: bool
    """Kubelet knows it: its pod is starting, runs or ends."""
    is_prepared: bool
    """For kubelet: its prepare was answered, and its unprepare was not."""
    state: str
    """In the daemon's words; empty if it does not know it."""
    problem: str


class CallSeen(Struct, frozen=True):
    """A call of kubelet's about a claim that is over."""

    call: str
    """`prepare` or `unprepare`."""
    claim: str
    began_s: float
    """Seconds since the scenario began."""
    took_s: float
    error: str
    """Empty: it was answered with success."""


class DomainsSeen(Struct, frozen=True):
    """The facts about compute domains on the node."""

    domain: str = ""
    """The one that there is, as NAMESPACE/NAME; empty if there is none."""
    labels: tuple[str | None, ...] = (None,)
    """Every value that the node's label has had since the beginning, in order: a domain's name, or None where it was
    absent; the last one is there now."""
    says: str = ""
    """The node in the domain's status: Ready, NotReady; empty if nothing."""
    offered: tuple[str, ...] = ()
    """The names of the devices in the node's ResourceSlices."""
    calls: tuple[CallSeen, ...] = ()
    """The calls in the order in which they began."""


class ClaimsSeen(Struct, frozen=True):
    """All that is seen of claims at one moment."""

    gpus: tuple[GpuSeen, ...] = ()
    claims: tuple[ClaimSeen, ...] = ()
    left: tuple[str, ...] = ()
    """The traces of claims on the node: files, entries of the checkpoint, overrides."""
    domains: DomainsSeen | None = None
    """None: it serves none."""

    def find(self, name: str) -> ClaimSeen | None:
        """Return the claim of this name that kubelet knows, else the last one."""
        of_name = [claim for claim in self.claims if claim.name == name]
        return next((claim for claim in of_name if claim.is_known), of_name[-1] if of_name else None)

    @property
    def taken(self) -> frozenset[str]:
        """The GPUs of the claims that kubelet knows: nobody else may be offered them."""
        return frozenset(device for claim in self.claims if claim.is_known for device in claim.devices)


class Situation(Struct, frozen=True):
    """Kubelet's view, and what it is compared with."""

    view: KubeletView
    truth: frozenset[str]
    """Addresses of the GPUs that should be Healthy by the node's own tree: on a vfio driver, in a viable group, and
    held by no process but that of the pod that kubelet allocated it to."""
    before: KubeletView
    """Kubelet's view at the step's beginning."""
    reasons: Mapping[str, str]
    """Why a device is Unhealthy, in the daemon's words, by device ID."""
    faults: tuple[str, ...]
    """Faults: the daemon ended by itself or logged an error, kubelet crashed, a VM met a GPU that was busy."""
    causes: Mapping[str, Cause] = field(default_factory=dict)
    """Why a device is listed as it is, by device ID."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """By the node's own tree: the PID that has a GPU's group open."""
    claims: ClaimsSeen = field(default_factory=ClaimsSeen)
    """On a node that serves claims."""


class Expectation(Protocol):
    """One thing that must hold."""

    def __str__(self) -> str:
        """Return the expectation as a sentence."""
        ...

    def unmet(self, situation: Situation) -> str | None:
        """Return the contrary fact, as a sentence; None if the expectation is met."""
        ...
