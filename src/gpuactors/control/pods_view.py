"""The operator's view of pods: the GPUs that kubelet has given each, and those that one left behind.

Derived from the state, never kept; a part of `node_view.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from gpuactors.control.view import PodView
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, Pod, PodClaim

_Value = TypeVar("_Value")


def pods_view(state: NodeState) -> tuple[PodView, ...]:
    """Sorted by name."""
    given = sorted(_given(state), key=lambda found: found[1:3])
    pods = {name: pod for pod, name, _, _ in given}
    pods |= {str(orphan.pod): orphan.pod for orphan in state.kubelet.orphans.values()}
    pods |= {str(one.pod): one.pod for one in _without_gpu(state)}
    devices = _by_pod((name, device) for _, name, device, _ in given)
    claims = _by_pod((name, claim) for _, name, _, claim in given if claim)
    used = _by_pod(sorted((str(one.pod), one.claim) for one in _without_gpu(state)))
    left = _by_pod(sorted((str(orphan.pod), device) for device, orphan in state.kubelet.orphans.items()))
    return tuple(
        PodView(
            name=name if pod.name else "",
            uid=pod.uid,
            devices=tuple(dict.fromkeys(devices.get(name, ()))),
            claims=tuple(dict.fromkeys((*claims.get(name, ()), *used.get(name, ())))),
            left=tuple(left.get(name, ())),
        )
        for name, pod in sorted(pods.items())
    )


def _by_pod(pairs: Iterable[tuple[str, _Value]]) -> dict[str, list[_Value]]:
    found: dict[str, list[_Value]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def _without_gpu(state: NodeState) -> list[PodClaim]:
    """The claims whose pod no GPU shows: of our drivers, and those of which kubelet does not know the driver yet."""
    ledger = state.kubelet.ledger
    if not ledger.without_gpu:
        return []
    settings = (state.gpus.claims.settings, state.domains.claims.settings)
    drivers = {one.driver for one in settings if one is not None}
    others = {claim for driver, claim in ledger.claimed if driver not in drivers}
    return [one for one in ledger.without_gpu if one.claim not in others] if drivers else []


def _given(state: NodeState) -> Iterator[tuple[Pod, str, DeviceKey, str]]:
    """Each pod with a device: the pod and its name, the device, and the claim by which it has it, if by one."""
    for device, owner in state.index.owners.items():
        for entry in owner.entries:
            match entry.to:
                case Pod():
                    yield entry.to, str(entry.to), device, ""
                case ClaimedDevice(claim=claim, pod=Pod() as pod):
                    yield pod, str(pod), device, claim
                case _:  # kubelet does not list its pod yet
                    pass
