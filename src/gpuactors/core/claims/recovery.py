"""Claims whose checkpoint and files are both lost, by kubelet's list: it names each claim of a pod that was prepared,
with its devices.

Its first whole list after the loss is used, and no later one: a claim that is listed after that and is not here has
ended here. Each claim that is found becomes an entry, and has its devices until kubelet unprepares it, also where a
forced deletion takes its pod out of the list before that (docs/dra.md). Not one whose devices are not as a prepare
leaves them: kubelet keeps its list over a reboot, after which it has each claim prepared anew.
"""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.claims.restoration import CHECKPOINT_LOST, gpus_by_name
from gpuactors.core.claims.view import DriverView, Stepped
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, GpuReservation, gpus_of, with_entry
from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.effects import Effect, Field, Level, Log
from gpuactors.core.values.model import DeviceKey, LedgerSource, Role
from gpuactors.core.values.names import is_subdomain
from gpuactors.core.values.owner import NO_RESOURCE, Owner


def ledger_read(view: DriverView, at: float) -> Stepped:
    """Restore the claims that kubelet lists, after a read of its ledger. They are read from the API server once they
    are on disk: what they ask for is not known before."""
    claims, ledger = view.claims, view.state.kubelet.ledger
    since, is_serving = claims.lost_since, view.state.daemon.role is Role.SERVING and view.state.host.scanned
    if since is None or ledger.read <= since or not (is_serving and claims.loaded) or claims.unserved:
        return view, []
    lines: list[Effect] = []
    for name, devices in _listed(view).items():
        number, gpus = claims.last + 1, gpus_by_name(devices)
        restored = ClaimRecord(
            name,
            ClaimState.STOPPED,
            order=number,
            reservation=GpuReservation(gpus),
            intent=number,
            why=CHECKPOINT_LOST,
        )
        claims = with_entry(replace(claims, last=number, checkpoint=number), restored)
        fields: dict[str, Field] = {
            "claim": str(name),
            "uid": name.uid,
            "devices": tuple(gpu.key for gpu in gpus),
        }
        lines.append(Log(Level.WARNING, "claim.recovered", fields))
    if ledger.source is LedgerSource.LIST and at >= ledger.young.settled_at:
        claims = replace(claims, lost_since=None)
    return view.with_claims(claims), lines


def _listed(view: DriverView) -> dict[ClaimName, list[str]]:
    """Return the devices of each claim that kubelet lists and that is not here. All of a claim or none: its files
    name them all. None where another claim here has one by now, or a pod by the device plugin API: a device has one
    owner."""
    claims, acts, settings = view.claims, view.driver.acts, view.claims.settings
    assert settings is not None
    left_out = {text for e in claims.entries.values() for text in (e.name.uid, str(e.name))}
    owning = (e for e in claims.entries.values() if e.state in OWNING)
    owned = {key for e in owning for gpu in gpus_of(e).gpus for key in gpu.owned_keys}
    by_claim: dict[ClaimName, list[str]] = {}
    for address, listed in sorted(view.state.kubelet.ledger.claims.items()):
        is_free = owned.isdisjoint((address, *view.state.index.relatives(address)))
        is_free = is_free and not _is_pods(view.state, address)
        is_in_place = is_free and acts is not None and acts.in_place(view.state, address)
        for claimed in listed:
            namespace, _, name = claimed.claim.partition("/")
            if (claimed.driver, claimed.pool) != (settings.driver, settings.pool) or not claimed.uid:
                continue
            if not (is_in_place and is_subdomain(namespace) and is_subdomain(name)):
                left_out.add(claimed.uid)
            devices = by_claim.setdefault(ClaimName(namespace, name, ClaimUid(claimed.uid)), [])
            if claimed.device not in devices:  # it is listed for each pod of the claim
                devices.append(claimed.device)
    return {name: devices for name, devices in by_claim.items() if left_out.isdisjoint((name.uid, str(name)))}


def _is_pods(state: NodeState, address: DeviceKey) -> bool:
    """Return whether a pod has the device, or another function of its group, by the device plugin API, or is getting
    it. After a reboot it may be in place for the claim as well, as a pre-bound GPU is."""
    held = state.holding(address, NO_RESOURCE, lambda _, allocation: allocation.resource is None)
    return held is not None and isinstance(held.holder, Owner)
