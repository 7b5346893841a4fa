"""Whether a prepared claim's devices still are where its containers find them: there, on a vfio driver, in the IOMMU
group and under the cdev that its files name. A GPU may have been unplugged and plugged in again, or bound to another
driver by hand.

Must not decide who may have them: that is `exclusion.py`.
"""

from __future__ import annotations

from gpuactors.core.gpus.exclusion import with_companions
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, Entry
from gpuactors.core.values.claim import BoundFunction
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.quote import quoted_id


def is_seen(state: NodeState, entry: Entry) -> bool:
    """Each of its functions has been inspected since the look began: an older view is no fact."""
    return all(_is_seen(state, f.address, entry.since) for gpu in entry.gpus for f in gpu.functions)


def _is_seen(state: NodeState, address: PciAddress, since: int) -> bool:
    seen = state.host.seen.get(address)
    if seen is None:  # a function that is gone has none, once that was seen
        return address not in state.host.inspections.functions
    return seen.inspection > since


def drift(state: NodeState, entry: Entry) -> str:
    """The device that is not where the claim's files say, as a sentence; empty if all are."""
    return next((found for gpu in entry.gpus if (found := _drift(state, entry, gpu))), "")


def _drift(state: NodeState, entry: Entry, gpu: ClaimedGpu) -> str:
    functions = {f.address: f for f in with_companions(state, gpu.address)}
    if gpu.address not in functions:
        return f"{gpu.address} is gone from this node"
    for function in functions.values():
        if not function.vfio_bound:
            driver = f"on {quoted_id(function.driver)}" if function.driver is not None else "without a driver"
            return f"{function.address} is {driver}, and no longer on a vfio driver"
    for first in gpu.functions:
        bound = entry.bound.get(first.address)
        if (
            bound is not None
            and bound.vfio
            and (moved := _moved(bound, state.host.functions.get(first.address)))
        ):
            return moved
    return ""


def _moved(bound: BoundFunction, function: PciFunction | None) -> str:
    """Why a function's node is no longer the one that an act has found."""
    if function is None:
        return f"{bound.address} is gone from this node"
    if function.iommu_group != bound.iommu_group:
        return (
            f"{bound.address} is in IOMMU group {function.iommu_group}, and no longer in {bound.iommu_group}"
        )
    if bound.cdev is not None and f"/dev/vfio/devices/{bound.cdev}" not in function.nodes:
        return f"{bound.address} no longer has the node /dev/vfio/devices/{bound.cdev}"
    return ""
