"""The files of a claim of GPUs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from gpuactors.core.claims.files import PlacedFile
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.gpus import config, placement
from gpuactors.core.kinds.container import with_nodes
from gpuactors.core.kinds.sets import egm_nodes
from gpuactors.core.kinds.table import key_of, kind_named, kind_of
from gpuactors.core.partitions.outputs import claim_owner, unready
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, ClaimRecord, gpus_of
from gpuactors.core.values.claim import BoundFunction, Claim, DeviceEdits
from gpuactors.core.values.model import DeviceKey, function_address
from gpuactors.core.values.status import Conflict
from gpuactors.core.values.vfio import VfioConfig


@final
class GpuFiles:
    """The CDI and metadata files of claims of GPUs. Kubelet makes their directories, and no container writes there."""

    def may_write(self, state: NodeState, entry: ClaimRecord) -> bool:
        return placement.may_write(state, entry) and self.unmet(state, entry) is None

    def unmet(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        """A virtual machine that starts before its partition of the NVLink fabric is active cannot use it."""
        return unready(state, claim_owner(entry.name.uid))

    def devices(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> tuple[DeviceEdits, ...]:
        configs, edits = config.chosen(claim), list[DeviceEdits]()
        given: list[DeviceKey] = []
        gpus = {gpu.key: gpu for gpu in gpus_of(entry).gpus}
        for result in claim.results or ():
            chosen = VfioConfig() if isinstance(configs, ConfigFault) else configs[result.request]
            gpu = gpus.get(key_of(result.device) or DeviceKey(""))
            # A result with admin access gets no node: an open would make the group busy for its owner.
            is_own = gpu is not None and not result.admin_access
            device = state.index.present.get(gpu.key) if gpu is not None and is_own else None
            bound = _bound(entry, gpu) if gpu is not None and is_own else ()
            kind = kind_of(device) if device is not None else kind_named(result.device)
            edits.append(kind.edits(result, device, bound, chosen))
            if device is not None and bound:
                given.append(device.key)
        return _with_egms(state, edits, given)

    def directories(self, state: NodeState, entry: ClaimRecord) -> tuple[str, ...]:
        return ()

    def placed(self, state: NodeState, entry: ClaimRecord) -> tuple[PlacedFile, ...]:
        return ()


def _with_egms(
    state: NodeState, edits: Sequence[DeviceEdits], given: Collection[DeviceKey]
) -> tuple[DeviceEdits, ...]:
    """Return the edits with the node of each EGM of which the claim has every GPU, in those of its first GPU: KubeVirt
    has a request for each GPU and all of them in one container, so the requests do not tell the containers apart."""
    added = {s.devices[0]: s.node for s in state.known_sets.sets if egm_nodes(given, (s,))}
    return tuple(
        with_nodes(one, (added[key],))
        if (key := key_of(one.result.device)) in added and key in given
        else one
        for one in edits
    )


def _bound(entry: ClaimRecord, gpu: ClaimedGpu) -> tuple[BoundFunction, ...]:
    """Return what acts have bound for a device: the device itself first, then its companions on vfio."""
    own = function_address(gpu.key)
    order = sorted(gpu.functions, key=lambda f: (f.address != own, f.address))
    bound = (gpus_of(entry).bound.get(f.address) for f in order)
    return tuple(b for b in bound if b is not None and (b.vfio or b.address == own))
