"""The values of the fake kubelet's DRA manager: claims, drivers and what can be seen of them.

Frozen, and without any rule: the rules are in `manager.py` and `drivers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct, field


class ClaimError(Exception):
    """A pod's claims are not prepared, or not unprepared; the text is kubelet's own."""


class ApiAwayError(Exception):
    """The API server does not answer."""


# --- what kubelet is given --------------------------------------------------------------------------------------


class ClaimObject(Struct, frozen=True):
    """A ResourceClaim in the API server, as far as kubelet reads it."""

    namespace: str
    name: str
    uid: str
    drivers: tuple[str, ...] = ()
    """Of its allocated devices; none: it is not allocated."""


class Release(Struct, frozen=True):
    """The differences between kubelets."""

    versions: tuple[str, ...] = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
    """Those of the DRA API that it knows."""
    health: tuple[str, ...] = ()
    """Those of the health stream."""
    health_unlisted: bool = False
    """The stream is opened to every plugin, listed or not (kubernetes issue 141855)."""
    unpatched: bool = False
    """Without the patches of July 2026: the devices of a repeated answer are appended (kubernetes pull request 140274);
    a deleted pod unprepares claims that it never got to use, under the pod that has them (140212); and a pod may join a
    claim that is just being unprepared (140527)."""
    passes_over: bool = False
    """After a claim that is prepared already the pod's other ones are passed over (before pull request 135919)."""
    get_tells_ended: bool = False
    """PodResources.Get answers for pods that have ended as well, not for active ones only."""


KUBELET_1_34: Final = Release(unpatched=True, passes_over=True, get_tells_ended=True)
"""Also 1.35 before its patches, without ResourceHealthStatus."""

KUBELET_1_36: Final = Release(health=("v1alpha1.DRAResourceHealth",), health_unlisted=True, unpatched=True)
"""1.36.2, with its default gates."""

KUBELET_1_37: Final = Release(health=("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"))


def _no_nodes(cdi_ids: Sequence[str]) -> Sequence[str]:
    return ()


def _no_wipe(driver: str | None) -> None:
    return None


class Surroundings(Struct, frozen=True):
    """The surroundings of kubelet's DRA manager: the API server and the container runtime."""

    claim: Callable[[str, str], ClaimObject | None]
    """The ResourceClaim of a namespace and name; None if there is none. Raises `ApiAwayError`."""
    wipe: Callable[[str | None], None] = _no_wipe
    """Deletes this node's ResourceSlices of one driver, or all of them. Raises `ApiAwayError`."""
    nodes: Callable[[Sequence[str]], Sequence[str]] = _no_nodes
    """The device nodes that the container runtime finds for CDI ids. Raises `LookupError` for one without a file."""
    release: Release = KUBELET_1_37


# --- claims -----------------------------------------------------------------------------------------------------


class ClaimDevice(Struct, frozen=True):
    """One device of a plugin's answer."""

    driver: str
    pool: str
    device: str
    requests: tuple[str, ...] = ()
    cdi_ids: tuple[str, ...] = ()
    share_id: str | None = None


class ClaimInfo(Struct, frozen=True):
    """Kubelet's record of a claim (cm/dra/claiminfo.go); `prepared` and `unpreparing` are not on disk."""

    namespace: str
    name: str
    uid: str
    drivers: tuple[str, ...]
    pods: tuple[str, ...] = ()
    """The UIDs of the pods that use it."""
    devices: tuple[ClaimDevice, ...] = ()
    prepared: bool = False
    unpreparing: bool = False
    """Its last pod has ended."""

    @property
    def key(self) -> tuple[str, str]:
        """Kubelet keeps one claim of a name."""
        return self.namespace, self.name

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Answer(Struct, frozen=True):
    """A plugin's answer for one claim."""

    devices: tuple[ClaimDevice, ...] = ()
    error: str = ""


# --- what can be seen -------------------------------------------------------------------------------------------


class DraCall(Struct, frozen=True):
    """One call to a plugin that is over."""

    call: str
    """`prepare` or `unprepare`."""
    driver: str
    endpoint: str
    claims: tuple[str, ...]
    """Their UIDs."""
    began_at: float
    ended_at: float
    error: str = ""
    """Of the call, or the first of its claims."""


class Instance(Struct, frozen=True):
    """A plugin that is registered."""

    driver: str
    endpoint: str
    version: str
    connected: bool


class HealthRow(Struct, frozen=True):
    """The last row of a health stream for a device."""

    health: int
    """As HealthStatus: 0 unknown, 1 healthy, 2 unhealthy."""
    message: str
    timeout_s: float
    at: float
    """When the message came."""


class DraView(Struct, frozen=True):
    """The state of the DRA manager at one moment."""

    claims: tuple[ClaimInfo, ...] = ()
    instances: tuple[Instance, ...] = ()
    """In the order of their registration."""
    health: Mapping[tuple[str, str, str], HealthRow] = field(default_factory=dict)
    """(driver, pool, device) → its health."""
    calls: int = 0
    """Calls that are over, ever."""
