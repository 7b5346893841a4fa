"""The operator's view of pods: the GPUs that kubelet has given each, and those that one left behind.

Derived from the state, never kept; a part of `node_view.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TypeVar

from gpuactors.control.view import PodView
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, Pod, PodClaim
from gpuactors.core.values.owner import vm_of

_Value = TypeVar("_Value")


def pods_view(state: NodeState) -> tuple[PodView, ...]:
    """Return the pods that have a GPU, left one behind, or use a claim without one, sorted by name."""
    allocations = sorted(_given(state), key=itemgetter(1, 2))
    pods = {name: pod for pod, name, _, _ in allocations}
    pods |= {str(orphan.pod): orphan.pod for orphan in state.kubelet.orphans.values()}
    without_gpu = _without_gpu(state)
    pods |= {str(use.pod): use.pod for use in without_gpu}
    devices = _by_pod((name, device) for _, name, device, _ in allocations)
    claims = _by_pod((name, claim) for _, name, _, claim in allocations if claim)
    used = _by_pod(sorted((str(use.pod), use.claim) for use in without_gpu))
    left_behind = _by_pod(
        sorted((str(orphan.pod), device) for device, orphan in state.kubelet.orphans.items())
    )
    return tuple(
        PodView(
            name=name if pod.name else "",
            uid=pod.uid,
            devices=tuple(dict.fromkeys(devices.get(name, ()))),
            claims=tuple(dict.fromkeys((*claims.get(name, ()), *used.get(name, ())))),
            left=tuple(left_behind.get(name, ())),
            vm=vm_of(pod),
        )
        for name, pod in sorted(pods.items())
    )


def _by_pod(pairs: Iterable[tuple[str, _Value]]) -> dict[str, list[_Value]]:
    values: dict[str, list[_Value]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return values


def _without_gpu(state: NodeState) -> list[PodClaim]:
    """Return the pods' claims without a GPU: of our drivers, and those whose driver kubelet does not name yet."""
    ledger = state.kubelet.ledger
    if not ledger.without_gpu:
        return []
    settings = (state.gpus.claims.settings, state.domains.claims.settings)
    drivers = {of_driver.driver for of_driver in settings if of_driver is not None}
    foreign_claims = {claim for driver, claim in ledger.claimed if driver not in drivers}
    return [use for use in ledger.without_gpu if use.claim not in foreign_claims] if drivers else []


def _given(state: NodeState) -> Iterator[tuple[Pod, str, DeviceKey, str]]:
    """Yield for each device of a pod: the pod and its name, the device, and the claim, empty if it has none."""
    for device, owner in state.index.owners.items():
        for entry in owner.entries:
            match entry.to:
                case Pod():
                    yield entry.to, str(entry.to), device, ""
                case ClaimedDevice(claim=claim, pod=Pod() as pod):
                    yield pod, str(pod), device, claim
                case _:  # kubelet does not list its pod yet
                    pass
