"""The operator's view of a node: every device with the one reason, its holders, and its history.

Derived from the state, never kept. Made by the daemon for its control socket, and by a command that reads the node
itself. Must not decide anything again: health and reason are the advertised ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from gpuactors.control.claims_view import ago, claims_view, device_of_claims_view
from gpuactors.control.domains_view import domains_view
from gpuactors.control.pods_view import pods_view
from gpuactors.control.view import (
    NOT_LISTED,
    CardView,
    Change,
    DeviceView,
    EgmView,
    LastCallView,
    Member,
    NodeView,
    PartitionView,
    ReleaseView,
    ResourceView,
)
from gpuactors.core.assessment.blockers import is_unbinding
from gpuactors.core.host.usage import last_poll, use_of
from gpuactors.core.kinds.dead import dead
from gpuactors.core.kinds.presence import gone
from gpuactors.core.kinds.sets import SetSource
from gpuactors.core.ledger.ledger import allocated_ids
from gpuactors.core.reports.readiness import OFFERS_NOTHING, offers_anything
from gpuactors.core.reports.snapshot import DeviceReport, registered, report
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device, ids_of
from gpuactors.core.values.model import (
    AdvertisedDevice,
    DeviceKey,
    Health,
    Holder,
    PciFunction,
    Seen,
    Transition,
    device_key,
    function_address,
)
from gpuactors.core.values.owner import Owner
from gpuactors.core.values.partition import PartitionId
from gpuactors.core.values.status import Reason

AGELESS: Final = -math.inf
"""The time of a view without ages: every age is 0 or None, so two views of the same facts are equal."""

_SHARED_NODES: Final = ("/dev/vfio/vfio", "/dev/iommu")
"""The device nodes that all devices share."""


def view_of(state: NodeState, at: float) -> NodeView:
    """Return the view at `at`, in seconds of the clock of the state's events."""
    return NodeView(
        role=str(state.daemon.role),
        resources=_resources(state),
        devices=_devices(state, at),
        kubelet_problem="" if state.kubelet.socket is not None else state.kubelet.missing,
        ledger_problem=state.kubelet.ledger.problem
        or ("" if state.kubelet.ledger.read else "it has not been read yet"),
        uevents_problem=state.host.uevents and f"not received: {state.host.uevents}; only scans find changes",
        claims=claims_view(state, at),
        domains=domains_view(state, at),
        ledger_age_s=ago(state.kubelet.ledger.read_at, at) if state.kubelet.ledger.read else None,
        offers_problem="" if offers_anything(state) else OFFERS_NOTHING,
        pods=pods_view(state),
        config_problem=state.daemon.config_unused and f"not in use: {state.daemon.config_unused}",
        cards=_cards(state),
    )


def _resources(state: NodeState) -> tuple[ResourceView, ...]:
    accepted = registered(state)
    allocated = {
        resource: len(ids) for resource, ids in allocated_ids(state, state.published.device_lists).items()
    }
    is_on = state.daemon.settings.device_plugin
    not_served = f"this daemon is {state.daemon.role}" if is_on else "--device-plugin is off"
    views = []
    for resource, device_list in sorted(state.published.device_lists.items()):
        plugin = state.published.plugins.get(resource)
        views.append(
            ResourceView(
                name=resource,
                registered=accepted.get(resource, False),
                problem=(plugin.problem or "") if plugin is not None else not_served,
                listed=len(device_list),
                healthy=sum(device.health is Health.HEALTHY for device in device_list),
                allocated=allocated.get(resource, 0),
            )
        )
    return tuple(views)


def _devices(state: NodeState, at: float) -> tuple[DeviceView, ...]:
    devices = state.index.devices
    views = [_present(state, r, devices[r.key], at) for r in report(state)]
    views += _gone_devices(state, at)
    return tuple(sorted(views, key=lambda view: view.address))


def _present(state: NodeState, reported: DeviceReport, device: Device, at: float) -> DeviceView:
    function = device.units[0] if device.units else None  # None: its parent is no PCI function
    mediated, inspection = state.host.mediated.get(device.key), state.host.seen.get(device.key)
    model = (function.model or None) if function is not None else None
    polled = last_poll(state, device)
    return DeviceView(
        address=device.key,
        id=reported.id,
        present=True,
        vendor=function.vendor if function is not None else "",
        device=function.device if function is not None else "",
        class_code=function.class_code if function is not None else "",
        driver=device.driver,
        iommu_group=device.group,
        group=tuple(Member(member.address, member.driver) for member in device.members),
        numa_node=device.numa_node,
        model=mediated.type_name if mediated is not None else model,
        resource=reported.resource,
        health=str(reported.health),
        cause=str(reported.cause),
        reason=reported.reason,
        owner=reported.owner,
        holders=reported.holders,
        history=_changes(reported.history, at),
        remedy=_remedy(state, device, reported.holders),
        listed=reported.listed,
        for_claims=device_of_claims_view(state, device.key),
        since_s=ago(_since(reported, inspection), at),
        nodes=_own_nodes(device),
        inspected_s=ago(inspection.at, at) if inspection is not None else None,
        polled_s=ago(polled.at, at) if polled is not None else None,
        calls=_calls(state, device.key, at),
        dead=sign.message if (sign := dead(device)) is not None else None,
        releases=_releases(state, device.key, function, at),
        kind=device.kind,
        parent=_parent(state, device),
        profile=_profile(device),
        vm=reported.vm or None,
        egm=_egm(state, device.key),
        partitions=tuple(_partitions(state, device.key)),
    )


def _egm(state: NodeState, key: DeviceKey) -> EgmView | None:
    egms = (s for s in state.known_sets.sets if s.source is SetSource.EGM and key in s.devices)
    return next((EgmView(egm.name, egm.node, egm.devices) for egm in egms), None)


def _partitions(state: NodeState, key: DeviceKey) -> Iterable[PartitionView]:
    records = state.partitions.records if state.partitions is not None else {}
    for found in state.known_sets.sets:
        if found.source is SetSource.FABRIC_MANAGER and key in found.devices:
            record = records.get(PartitionId(found.name))
            done, problem = (str(record.state), record.problem) if record is not None else (None, "")
            yield PartitionView(found.name, found.devices, found.is_active, done, problem)


def _own_nodes(device: Device) -> tuple[str, ...]:
    """Return the device's own nodes. Those of its container include the nodes of the other members of its group."""
    is_function = bool(device.units) and device_key(device.units[0].address) == device.key
    nodes = device.units[0].nodes if is_function else device.nodes
    return tuple(node for node in nodes if node not in _SHARED_NODES)


def _parent(state: NodeState, device: Device) -> str | None:
    """Return the device that it is a part of; the name in sysfs of one that is no PCI function."""
    if device.parent is not None:
        return device.parent
    mediated = state.host.mediated.get(device.key)
    return mediated.parent_name or None if mediated is not None else None


def _profile(device: Device) -> str | None:
    """Return the name of its vGPU profile, which is its model; None if its model is a pair of PCI ids, or unknown."""
    is_function = not device.model or (bool(device.units) and device.model == ids_of(device.units[0]))
    return None if is_function else device.model


def _cards(state: NodeState) -> tuple[CardView, ...]:
    """Return the parents that are no devices, and theirs."""
    devices, functions = state.index.devices, state.host.functions
    cards, wanted = dict[DeviceKey, CardView](), {device.parent for device in devices.values()}
    while wanted:
        key = wanted.pop()
        if (
            key is None
            or key in devices
            or key in cards
            or (function := functions.get(function_address(key))) is None
        ):
            continue
        parent = None if function.physical is None else device_key(function.physical)
        model = function.model or None
        cards[key] = CardView(key, function.vendor, function.device, model, function.driver, parent)
        wanted.add(parent)
    return tuple(cards[key] for key in sorted(cards))


def _since(reported: DeviceReport, inspection: Seen | None) -> float:
    """Return when the device got its health and cause. For one that is not listed, an inspection decides them."""
    since = -math.inf
    for change in reversed(reported.history):
        if (change.health, change.cause) != (reported.health if reported.listed else None, reported.cause):
            break
        since = change.at
    return since if reported.listed or inspection is None else max(since, inspection.changed_at)


def _calls(state: NodeState, device: DeviceKey, at: float) -> tuple[LastCallView, ...]:
    return tuple(
        LastCallView(str(call.kind), max(0.0, at - call.at), call.refused, tuple(map(str, call.causes)))
        for call in state.calls.last.get(device, ())
    )


def _releases(
    state: NodeState, device: DeviceKey, function: PciFunction | None, at: float
) -> tuple[ReleaseView, ...]:
    presence = function.presence if function is not None else 0
    return tuple(
        ReleaseView(
            tenant=release.tenant,
            age_s=max(0.0, at - release.at),
            reset_methods=release.reset_methods,
            enumerated_again=0 not in (presence, release.presence) and presence != release.presence,
        )
        for release in state.kubelet.releases.get(device, ())
    )


def _gone_devices(state: NodeState, at: float) -> Iterable[DeviceView]:
    """Return the devices that are gone or not selected any more: still listed because a pod has them, kept by a claim,
    or known from their history."""
    index = state.index
    listed = {
        a.key: (resource, a)
        for resource, device_list in state.published.device_lists.items()
        for a in device_list
    }
    kept = (
        listed.keys() | state.published.history.keys() | (state.gpus.reserved.keys() & index.present.keys())
    )
    for device in kept - index.devices.keys():
        resource, entry = listed.get(device, ("", None))
        owner = index.owners.get(device)
        yield _gone(device, resource, entry, owner, state, at)


def _gone(
    device: DeviceKey,
    resource: str,
    entry: AdvertisedDevice | None,
    owner: Owner | None,
    state: NodeState,
    at: float,
) -> DeviceView:
    history = state.published.history.get(device, ())
    why = _why_gone(state, device, history)
    is_gone = entry is not None or why.cause is Cause.GONE
    return DeviceView(
        address=device,
        id=entry.id if entry is not None else device,
        present=False,
        vendor="",
        device="",
        class_code="",
        driver=None,
        iommu_group=None,
        group=(),
        numa_node=entry.numa_node if entry is not None else None,
        model=None,
        resource=resource,
        health=str(entry.health) if entry is not None else NOT_LISTED,
        cause=str(entry.cause if entry is not None else why.cause),
        reason=entry.reason if entry is not None else why.message,
        owner=owner.name if owner is not None else None,
        holders=(),
        history=_changes(history, at),
        remedy="delete the pod: its GPU will not come back to it" if owner is not None and is_gone else None,
        listed=entry is not None,
        for_claims=device_of_claims_view(state, device) if not is_gone else None,
        since_s=ago(history[-1].at if history else -math.inf, at),
        calls=_calls(state, device, at),
        vm=(owner.vm or None) if owner is not None else None,
        releases=_releases(state, device, None, at),
    )


def _why_gone(state: NodeState, device: DeviceKey, history: Sequence[Transition]) -> Reason:
    """Return why a device is not in the index. One that is not selected any more is read as long as a claim has it."""
    is_left_out = bool(history) and history[-1].cause is Cause.NOT_SELECTED
    if is_left_out or device in state.index.present:
        return Reason(Cause.NOT_SELECTED, "no selector matches it any more (--select)")
    return gone(device)


def _changes(history: Iterable[Transition], at: float) -> tuple[Change, ...]:
    return tuple(
        Change(
            max(0.0, at - change.at),
            str(change.health) if change.health is not None else None,
            change.reason,
            str(change.cause),
        )
        for change in history
    )


def _remedy(state: NodeState, device: Device, holders: tuple[Holder, ...]) -> str | None:
    """Return the remedy for the device's owner or holder; None if there is none, or if the reason itself names it."""
    named = " and ".join(str(holder) for holder in holders) or "its holder"
    if is_unbinding(device, use_of(state, device)):
        return None
    held = state.assessments[device.key].holding
    match held.reason.cause if held is not None else Cause.FREE:
        case Cause.GROUP_IN_USE:
            return "nothing: an IOMMU group is allocated to one VM as a whole, and is free when that VM has ended"
        case Cause.CARD_IN_USE:
            return (
                "nothing: a device and its parts are not allocated at once; it is free when that VM has ended"
            )
        case Cause.ORPHANED:
            return (
                f"wait until {named} has ended, or end it; the GPU is offered again as soon as it is closed"
            )
        case Cause.HELD_BY_OTHER:
            ask = "" if holders else " (--holders proc names it)"
            return (
                f"end {named}{ask} if it should not have the GPU; it is offered again as soon as it is closed"
            )
        case Cause.HOLDER_UNKNOWN:
            return "nothing at first; if it persists, make kubelet's ledger readable"
        case _:
            return None
