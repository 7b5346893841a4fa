"""What is to be told as Kubernetes Events now, read off the state: each fact once, about the object that it concerns.

A reason is the machine-readable cause or state that log and CLI have, and a message holds their sentence. Nothing is
kept, and nothing is decided about when: how long a fact must stand, and how often it is told again, is
`event_series.py`'s.

Why a pod was refused is told to its pod by kubelet itself, in our words (`UnexpectedAdmissionError` after Allocate,
`FailedPrepareDynamicResources` after a prepare). Of a claim that waits kubelet says nothing, so that is told here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuactors.core import registration
from gpuactors.core.assessment.cause import MEANINGS, Cause
from gpuactors.core.dra.claim import ClaimName
from gpuactors.core.dra.table import ClaimState
from gpuactors.core.drivers import DRIVERS
from gpuactors.core.model import Role
from gpuactors.core.snapshot import report

if TYPE_CHECKING:
    from gpuactors.core.state import NodeState

CONTESTED: Final = "ResourceContested"
"""The reason of a resource that another plugin has taken."""

OF_A_DEVICE: Final = (Cause.HELD_BY_OTHER, Cause.ORPHANED, Cause.UNBINDING, Cause.GROUP_NOT_VIABLE)
"""The causes that are told about a device: somebody must act, and no pod's own events say so."""

OF_A_CLAIM: Final[Mapping[ClaimState, str]] = {
    ClaimState.WAITING: "It waits: another claim, a pod or a process has a device of it. The message names it.",
    ClaimState.BINDING: "A device of it cannot be bound to vfio-pci yet, or its compute domain is not ready.",
    ClaimState.STOPPED: "A write for it failed. Its devices stay as they are until kubelet asks again.",
}
"""The states of a claim that are told to its pods while there is a problem, and what they mean."""


@dataclass(frozen=True, slots=True)
class OurNode:
    """The event is about the node of this daemon."""


@dataclass(frozen=True, slots=True)
class PodsOf:
    """The event is about every pod that a claim is reserved for (`status.reservedFor`)."""

    claim: ClaimName


About = OurNode | PodsOf


@dataclass(frozen=True, slots=True)
class KubeEvent:
    """One fact that is to be told."""

    about: About
    reason: str
    """One word for programs, as a condition's reason."""
    message: str
    """The sentence of log and CLI, after the device, resource or claim that it is about."""


def kube_events(state: NodeState) -> tuple[KubeEvent, ...]:
    """Everything that is to be told now, each fact once. A daemon that does not serve tells nothing: another one
    does."""
    if state.daemon.stopping or state.daemon.role is not Role.SERVING:
        return ()
    return tuple(dict.fromkeys((*_of_devices(state), *_of_resources(state), *_of_claims(state))))


def _of_devices(state: NodeState) -> Iterator[KubeEvent]:
    for device in report(state):
        if device.cause in OF_A_DEVICE:
            yield KubeEvent(OurNode(), str(device.cause), f"{device.function.address}: {device.reason}")


def _of_resources(state: NodeState) -> Iterator[KubeEvent]:
    for resource, plugin in sorted(state.published.plugins.items()):
        if registration.is_contested(plugin) and plugin.problem:
            yield KubeEvent(OurNode(), CONTESTED, f"{resource}: {plugin.problem}")


def _of_claims(state: NodeState) -> Iterator[KubeEvent]:
    for driver in DRIVERS.values():
        for entry in driver.claims(state).entries.values():
            problem = entry.broken or entry.problem
            if entry.state in OF_A_CLAIM and problem:
                reason, message = f"Claim{entry.state}", f"claim {entry.name}: {problem}"
                yield KubeEvent(PodsOf(entry.name), reason, message)


def reasons() -> Iterator[tuple[str, str, str, str]]:
    """Every reason, with the kind of object that it is told about, what it means, and what to do."""
    for cause in OF_A_DEVICE:
        yield str(cause), "Node", MEANINGS[cause].means, MEANINGS[cause].remedy
    yield (
        CONTESTED,
        "Node",
        "Kubelet has another plugin's devices under a name of ours.",
        "Let one plugin offer this resource; the message says whose list kubelet has.",
    )
    for state, means in OF_A_CLAIM.items():
        yield f"Claim{state}", "Pod", means, "See the message; `gpuactors inspect` shows the claim."
