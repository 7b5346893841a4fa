"""The facts to post as Kubernetes Events now, read off the state: each fact once, about the object that it concerns.

A reason is the machine-readable cause or state that log and CLI have, and a message holds their sentence. Nothing is
kept, and no time is decided: `event_series.py` decides how long a fact must hold, and how often it is posted again.

Kubelet itself reports on the pod why it was refused, with our sentence (`UnexpectedAdmissionError` after Allocate,
`FailedPrepareDynamicResources` after a prepare). Kubelet does not say for which pod it calls Allocate, so a refusal is
posted on the Node. Kubelet reports nothing while a claim waits, so that is posted on its pods here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from gpuactors.core.deviceplugin import registration
from gpuactors.core.kinds.dead import dead
from gpuactors.core.reports.snapshot import report
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimName
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import CallKind, Role
from gpuactors.core.values.status import Reason

CONTESTED: Final = "ResourceContested"
"""The reason of a resource that another plugin has taken."""

OF_A_DEVICE: Final = (
    Cause.HELD_BY_OTHER,
    Cause.ORPHANED,
    Cause.UNBINDING,
    Cause.GROUP_NOT_VIABLE,
    Cause.DEAD,
)
"""The causes that are posted about a device: an operator must act, and no pod's events say so."""

_OUR_OWN: Final = frozenset({Cause.NOT_SERVING, Cause.INVALID_REQUEST})
"""The causes of refused calls that are never posted: kubelet asks the next daemon, or the caller was not kubelet."""

OF_A_CLAIM: Final = (ClaimState.WAITING, ClaimState.BINDING, ClaimState.DRIFTED, ClaimState.STOPPED)
"""The states of a claim whose reason is posted on its pods: kubelet's call is not answered yet, or is repeated; or a
container that restarts finds no files."""


class OurNode(Struct, frozen=True, gc=False):
    """The event is about this daemon's Node."""


class PodsOf(Struct, frozen=True, gc=False):
    """The event is about every pod that the claim is reserved for (`status.reservedFor`)."""

    claim: ClaimName


About = OurNode | PodsOf


class KubeEvent(Struct, frozen=True, gc=False, eq=False):
    """One fact to post."""

    about: About
    reason: str
    """One word for programs, like a condition's reason."""
    message: str
    """The sentence of log and CLI, after the device, resource or claim that it is about."""
    happened_at: float | None = None
    """When a momentary fact happened, in seconds of the events' clock; None for a fact that lasts. Comparison leaves it
    out."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KubeEvent) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[About, str, str]:
        return self.about, self.reason, self.message


def kube_events(state: NodeState) -> tuple[KubeEvent, ...]:
    """Return every fact to post now, once. Empty for a daemon that does not serve: the active daemon posts."""
    if state.daemon.stopping or state.daemon.role is not Role.SERVING:
        return ()
    facts = (*_of_devices(state), *_of_calls(state), *_of_resources(state), *_of_claims(state))
    return tuple(dict.fromkeys(facts))


def _of_devices(state: NodeState) -> Iterator[KubeEvent]:
    for device in report(state):
        if device.cause in OF_A_DEVICE:
            yield KubeEvent(OurNode(), str(device.cause), f"{device.key}: {device.reason}")
        elif (sign := dead(state.index.devices[device.key])) is not None:
            # Its cause is another one while a pod has it.
            yield KubeEvent(OurNode(), str(sign.cause), f"{device.key}: {sign.message}")


def _of_calls(state: NodeState) -> Iterator[KubeEvent]:
    """Yield the last Allocate of each device, if it was refused. A call has the same sentence for all of its
    devices."""
    for calls in state.calls.last.values():
        for call in calls:
            if call.kind is CallKind.ALLOCATE and call.refused and not _OUR_OWN.issuperset(call.causes):
                yield KubeEvent(OurNode(), str(call.causes[0]), f"Allocate refused: {call.refused}", call.at)


def _of_resources(state: NodeState) -> Iterator[KubeEvent]:
    for resource, plugin in sorted(state.published.plugins.items()):
        if registration.is_contested(plugin) and plugin.problem:
            yield KubeEvent(OurNode(), CONTESTED, f"{resource}: {plugin.problem}")


def _of_claims(state: NodeState) -> Iterator[KubeEvent]:
    for claims in state.all_claims:
        for entry in claims.entries.values():
            why = Reason(Cause.SET_ASIDE, entry.broken) if entry.broken else entry.why
            if entry.state in OF_A_CLAIM and why is not None:
                message = f"claim {entry.name}: {why.message}"
                yield KubeEvent(PodsOf(entry.name), str(why.cause), message)
