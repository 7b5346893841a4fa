"""The releases of devices: evidence of what happened between two tenants, for `explain`.

Who had it, until when, and the methods by which the kernel could reset it then. Whether it was reset no file and no
event says (docs/dev/adr/0024), so that is never claimed. Nothing is decided by it.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from gpuactors.core.state import NodeState
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import PciFunction, Release, device_key

RELEASES: Final = 5
"""The number of releases that are kept of each device."""

RELEASED_DEVICES_MAX: Final = 512
"""The number of devices whose releases are kept; the longest unreleased is forgotten first. A device that is gone
counts: it may be enumerated again."""


def record_releases(before: NodeState, state: NodeState, at: float) -> NodeState:
    """Record each device that no pod and no claim has any more.

    One that goes from one owner to another in one read of the ledger is no release: the read may only name the same pod
    in another way, and no Allocate is granted before an owner has left.
    """
    was, now = before.index.owners, state.index.owners
    if was is now:
        return state
    releases = dict(state.kubelet.releases)
    for key in sorted(was.keys() - now.keys()):
        if all(entry.to is None for entry in was[key].entries):
            continue  # an answer that no pod has used
        function = _own_function(state.index.present.get(key))
        release = Release(
            tenant=was[key].name,
            at=at,
            presence=function.presence if function is not None else 0,
            reset_methods=function.reset_methods if function is not None else None,
        )
        releases[key] = (*releases.pop(key, ()), release)[-RELEASES:]
    if releases == state.kubelet.releases:
        return state
    kept = dict([*releases.items()][-RELEASED_DEVICES_MAX:])
    return replace(state, kubelet=replace(state.kubelet, releases=kept))


def _own_function(device: Device | None) -> PciFunction | None:
    """Return the function that the device is; None if it is none, or is not there."""
    if device is None or not device.units or device_key(device.units[0].address) != device.key:
        return None
    return device.units[0]
