"""The operator's view of pods: the GPUs that kubelet has given each, and those that one left behind.

Derived from the state, never kept; a part of `view.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuactors.core.state import NodeState
from gpuactors.core.values.model import ClaimedDevice, PciAddress, Pod


class PodView(Struct, frozen=True):
    """One pod of which kubelet's ledger names a GPU, or did until lately."""

    name: str
    """`default/vm-1`; empty where only the UID is known, as no kubelet runs."""
    uid: str
    """Empty where kubelet names the pod."""
    devices: tuple[str, ...]
    """The PCI addresses that kubelet has given it."""
    claims: tuple[str, ...]
    """The claims by which it has some of them."""
    left: tuple[str, ...]
    """Those that it had: it has left kubelet's ledger, and they may still be held."""

    def __str__(self) -> str:
        return self.name or f"with UID {self.uid}"


def pods_view(state: NodeState) -> tuple[PodView, ...]:
    """Sorted by name."""
    given = sorted(_given(state), key=lambda found: (str(found[0]), found[1]))
    had = sorted((str(orphan.pod), address) for address, orphan in state.kubelet.orphans.items())
    pods = {str(pod): pod for pod, _, _ in given}
    pods |= {str(orphan.pod): orphan.pod for orphan in state.kubelet.orphans.values()}
    return tuple(
        PodView(
            name=name if pod.name else "",
            uid=pod.uid,
            devices=tuple(dict.fromkeys(address for other, address, _ in given if str(other) == name)),
            claims=tuple(dict.fromkeys(claim for other, _, claim in given if claim and str(other) == name)),
            left=tuple(address for other, address in had if other == name),
        )
        for name, pod in sorted(pods.items())
    )


def _given(state: NodeState) -> Iterator[tuple[Pod, PciAddress, str]]:
    """Each pod with a device, and the claim by which it has it, if by one."""
    for address, owner in state.index.owners.items():
        for entry in owner.entries:
            match entry.to:
                case Pod():
                    yield entry.to, address, ""
                case ClaimedDevice(claim=claim, pod=Pod() as pod):
                    yield pod, address, claim
                case _:  # kubelet does not list its pod yet
                    pass
