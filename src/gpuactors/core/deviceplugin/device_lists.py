"""The device lists: the devices of each resource as kubelet gets them, derived from the facts after every event.

Here a never-seen model becomes a resource with a plugin, and an emptied resource retires. A device that is gone or
unbound while a pod has it stays listed, Unhealthy, until its pod is gone: a shrinking list makes capacity smaller than
allocated. One whose unbind waits stays, Unhealthy, until the process that has it open releases it. And no list loses a
device while kubelet may be using it in a call, as kubelet 1.36 panics if it does, nor before kubelet's ledger has been
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin import specs
from gpuactors.core.deviceplugin.entries import entries, leaving
from gpuactors.core.deviceplugin.registration import new_plugin
from gpuactors.core.host.inspections import last_seen, never_seen
from gpuactors.core.kinds.table import is_key
from gpuactors.core.ledger.identity import alias_ids, awaits_inspection, lost, not_listed
from gpuactors.core.ledger.ledger import allocated_ids
from gpuactors.core.state import NodeState, with_plugins
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Effect, Field, Level, Log
from gpuactors.core.values.model import (
    AdvertisedDevice,
    Changes,
    DeviceId,
    DeviceKey,
    DeviceList,
    Difference,
    Health,
    PluginState,
    ResourceName,
    Role,
    Transition,
    differences,
)
from gpuactors.core.values.owner import Allocation, Named
from gpuactors.core.values.quote import quoted_id, quoted_ids
from gpuactors.core.values.status import Reason

HISTORY_ENTRIES: Final = 20
"""The number of changes of a device's health and reason that are kept for `explain`: a few hours of an unsteady one."""

HISTORY_UNKNOWN_MAX: Final = 64
"""The number of IDs in kubelet's ledger for which the history is kept although they mean no function of this node, or
not any more."""

_ID: Final = attrgetter("id")


def publish(before: NodeState, state: NodeState, at: float) -> tuple[NodeState, Changes, list[Effect]]:
    """Update the device lists and plugins from the facts; return also how the lists changed, and the log lines of the
    changes."""
    if state.daemon.stopping:
        return with_plugins(state, {}), {}, []
    if not is_ready(state) or _nothing_changed(before, state, at):
        return state, {}, []
    view = _view(state)
    new_lists, changes = dict[ResourceName, DeviceList](), dict[ResourceName, Sequence[Difference]]()
    for resource in sorted({*state.published.plugins, *view.listed}):
        listed = state.published.device_lists.get(resource, ())
        new_lists[resource], changes[resource] = _device_list(
            state, resource, view.listed.setdefault(resource, {}), listed, at
        )
    device_lists: dict[ResourceName, DeviceList] = {}
    plugins: dict[ResourceName, PluginState] = {}
    effects: list[Effect] = []
    for resource, device_list in _with_rules_kept(state, view, new_lists, changes, effects).items():
        plugin = _aged(state.published.plugins.get(resource), device_list, at)
        if plugin is None:
            effects.append(Log(Level.INFO, "resource.retired", {"resource": resource}))
            continue
        if resource not in state.published.device_lists:
            effects.append(Log(Level.INFO, "resource.appeared", {"resource": resource}))
        device_lists[resource], plugins[resource] = device_list, plugin
        if device_list is not new_lists[resource]:
            changes[resource] = differences(state.published.device_lists.get(resource, ()), device_list)
        effects.extend(_changes(state, view, resource, changes[resource]))
    history = _recorded(state, view, device_lists, changes, at)
    serving = state.daemon.role is Role.SERVING and state.daemon.settings.device_plugin
    served = _served(state, device_lists, retired=new_lists.keys() - device_lists.keys())
    plugins = plugins if serving else {}
    files = specs.specs_of(state, device_lists)
    published = replace(
        state.published,
        served=served,
        device_lists=device_lists,
        plugins=plugins,
        history=history,
        specs=files,
        written=specs.still_written(state, files),
    )
    return replace(state, published=published), changes, effects


def _served(
    state: NodeState, device_lists: Mapping[ResourceName, DeviceList], retired: Set[ResourceName]
) -> Mapping[ResourceName, frozenset[str]]:
    """Return the resources of gpuactors, with the models that had this name."""
    models = state.index.models
    served = {resource: old for resource, old in state.published.served.items() if resource not in retired}
    for resource in device_lists:
        served[resource] = served.get(resource, frozenset()) | models.get(resource, frozenset())
    return served


class _View(Struct, frozen=True, gc=False):
    """Values derived from the state that one publication needs in several places."""

    ids: Mapping[DeviceKey, DeviceId]
    """The older IDs of devices, from `identity.alias_ids`."""
    allocated: Mapping[ResourceName, Set[DeviceId]]
    """The allocated IDs of this daemon's resources, from `ledger.allocated_ids`: kubelet's ledger has other plugins' as
    well."""
    listed: dict[ResourceName, dict[DeviceId, AdvertisedDevice]]
    """The entries to list: offered devices, and those that are lost while a pod has them; an entry that a list keeps
    for now is added later."""


def _view(state: NodeState) -> _View:
    allocated, ids = allocated_ids(state, state.index.resources), alias_ids(state)
    return _View(ids=ids, allocated=allocated, listed=_listed(state, ids, allocated))


def is_ready(state: NodeState) -> bool:
    """Return whether the host has been scanned, the groups polled and the ledger read once: a first device list made
    from less would be a guess.

    Where a group is in use, the ledger must have been read since that was seen, if it can be read at all: a GPU with an
    external holder must not be offered at first. Nor must one that belongs to a claim, by the checkpoint or, where that
    is lost, by kubelet's list; nor, where kubelet's file could not be read, one that a pod may have by another ID.
    """
    if not state.gpus.claims.is_known or _awaits_lost_claims(state) or _awaits_owners(state):
        return False
    if not (
        state.host.scanned
        and state.kubelet.ledger.tried
        and (state.host.polls.done > 0 or state.host.polls.refresh.outstanding is None)
    ):
        return False
    if not state.published.device_lists and awaits_inspection(state):
        return False
    if state.published.device_lists or state.kubelet.ledger.problem is not None:
        return True
    uses, read = state.host.polls.groups, state.kubelet.ledger.read
    return not any(uses[group].since > read for group in state.index.in_use)


def _awaits_lost_claims(state: NodeState) -> bool:
    """Return whether the checkpoint is lost and kubelet has not been asked for its list since (`claims/recovery.py`). A
    daemon that takes over may not ask, and offers nothing."""
    since = state.gpus.claims.lost_since
    is_serving = state.daemon.role is Role.SERVING
    return is_serving and since is not None and state.kubelet.ledger.asking.done <= since


def _awaits_owners(state: NodeState) -> bool:
    """Return whether nothing has named the devices of pods yet: kubelet's file could not be read, and kubelet has not
    answered List. A daemon that takes over may not ask. If kubelet does not answer, nothing is waited for."""
    ledger = state.kubelet.ledger
    return state.daemon.role is Role.SERVING and not ledger.names_owners and ledger.problem is None


def _nothing_changed(before: NodeState, state: NodeState, at: float) -> bool:
    return (
        is_ready(before)
        and _facts(before) == _facts(state)
        and _held(before) <= _held(state)
        and not any(_is_over(plugin, at) for plugin in state.published.plugins.values())
    )


def _facts(state: NodeState) -> tuple[object, ...]:
    """Return everything that the lists follow from, except calls and the time."""
    ledger, polls = state.kubelet.ledger, state.host.polls
    return (
        state.daemon.role,
        ledger.read == 0,
        ledger.entries,
        state.kubelet.pending_allocations.keys(),
        state.kubelet.resolved,
        state.host.functions,
        state.host.mediated,
        state.assessments,
        polls.seen if state.index.unbinding else None,  # only a poll shows that an unbind waits, or has ended
        specs.inputs(state),
        state.daemon.settings,  # the names alone may be others
    )


def _held(state: NodeState) -> set[ResourceName]:
    """Return the resources whose lists lose no entry for now. One resource more changes no list."""
    return {*state.calls.no_removal_until, *(call.resource for call in state.calls.waiting.values())}


def _listed(
    state: NodeState,
    ids: Mapping[DeviceKey, DeviceId],
    allocated: Mapping[ResourceName, Set[DeviceId]],
) -> dict[ResourceName, dict[DeviceId, AdvertisedDevice]]:
    """Return the entries to list, in the order of their IDs: offered devices, and those that are lost while a pod has
    them."""
    listed = entries(state, ids)
    for resource, of_pods in allocated.items():
        of_resource = listed.setdefault(resource, {})
        if lost := of_pods - of_resource.keys():
            before = {a.id: a for a in state.published.device_lists.get(resource, ())}
            for device_id in lost:
                of_resource[device_id] = _tombstone(state, ids, (resource, device_id), before.get(device_id))
    for resource, entry in leaving(state, ids):
        listed.setdefault(resource, {}).setdefault(entry.id, entry)
    return {resource: dict(sorted(of_resource.items())) for resource, of_resource in listed.items()}


def _tombstone(
    state: NodeState, ids: Mapping[DeviceKey, DeviceId], name: Named, listed: AdvertisedDevice | None
) -> AdvertisedDevice:
    """Return the entry of an ID that is allocated to a pod and that no other entry has: its device is not offered any
    more, or is listed by another ID, or the ID means no device here. So capacity is not smaller than allocated.
    `listed` is the entry that the published list has for it."""
    resource, device_id = name
    owner, target = _allocation(state, name), state.kubelet.resolved.get(name)
    address = target.key if target is not None else DeviceKey(device_id)
    numa_node = listed.numa_node if listed is not None and target is not None else None
    if (why := lost(state, resource, target)) is not None:
        reason = f"{owner.message}, but {why.message}"
        return AdvertisedDevice(device_id, address, Health.UNHEALTHY, numa_node, reason, why.cause)
    reason = owner.message
    if address in state.index.devices:
        reason += f"; it is listed as {ids.get(address, address)} too"
    return AdvertisedDevice(device_id, address, Health.HEALTHY, numa_node, reason, owner.cause)


def _allocation(state: NodeState, name: Named) -> Allocation:
    """Return the entry of kubelet's ledger with that name; a pending allocation if there is none."""
    return Allocation(*name, state.kubelet.ledger.entries.get(name))


def _device_list(
    state: NodeState,
    resource: ResourceName,
    entries: dict[DeviceId, AdvertisedDevice],
    listed: DeviceList,
    at: float,
) -> tuple[DeviceList, Sequence[Difference]]:
    """Return the device list of a resource, the same object as `listed` if nothing changed, and how it differs from
    that. Add an entry that the list keeps for now to the `entries`."""
    new_list = tuple(entries.values())
    changes = differences(listed, new_list)
    in_call = any(call.resource == resource for call in state.calls.waiting.values())
    # Before the first read a pod may have any device that is gone: a daemon before this one may have allocated it.
    blind = state.kubelet.ledger.read == 0
    if in_call or blind or state.calls.no_removal_until.get(resource, at) > at:
        unlisted = [was for was, now in changes if was is not None and now is None]
        # Kubelet may have chosen one that was Healthy when the call began, but never an ID that means no device here.
        kept = [entry for entry in unlisted if blind or is_key(entry.key)]
        listed_as = {a.key: a.id for a in entries.values()} if kept else {}
        for entry in kept:
            other = listed_as.get(entry.key)
            why = (
                Reason(Cause.LISTED_AS_OTHER, f"it is listed as {other} now")
                if other is not None
                else not_listed(state, resource, entry.key)
            )
            entries[entry.id] = _unhealthy(entry, why)
        if kept:
            new_list = tuple(sorted(entries.values(), key=_ID))
            changes = differences(listed, new_list)
    return (new_list, changes) if changes else (listed, ())


def _unhealthy(entry: AdvertisedDevice, why: Reason) -> AdvertisedDevice:
    return replace(entry, health=Health.UNHEALTHY, reason=why.message, cause=why.cause)


def _why_unlisted(state: NodeState, view: _View, resource: ResourceName, listed: AdvertisedDevice) -> Reason:
    """Return why a device is not listed any more, by the function that is at its address now."""
    if listed.id != view.ids.get(listed.key, DeviceId(listed.key)) or not is_key(listed.id):
        return Reason(Cause.ID_RELEASED, "no pod has it by this ID any more")
    return not_listed(state, resource, listed.key)


def _aged(plugin: PluginState | None, device_list: DeviceList, at: float) -> PluginState | None:
    """Return the plugin, a new one for a new resource; None once an emptied resource has been empty for long enough."""
    plugin = plugin or new_plugin()
    if device_list:
        return plugin if plugin.empty_since is None else replace(plugin, empty_since=None)
    if _is_over(plugin, at):
        return None
    return plugin if plugin.empty_since is not None else replace(plugin, empty_since=at)


def _is_over(plugin: PluginState, at: float) -> bool:
    return plugin.empty_since is not None and plugin.empty_since + limits.RETIRE_EMPTY_AFTER_S <= at


def _changes(
    state: NodeState,
    view: _View,
    resource: ResourceName,
    changes: Sequence[Difference],
) -> list[Effect]:
    """Return one log line per device whose status changed, with the cause and reason that every reader gets. Changes to
    one status of more devices than a node of today has GPUs share a line: a line takes longer than all else that is
    done for a device. Of IDs that mean no function of this node a few have lines of their own, and the others share
    one: kubelet's ledger may have any number of them."""
    if not changes:
        return []
    unlisted = [was for was, now in changes if was is not None and now is None]
    changed = [
        now
        for was, now in changes
        if now is not None and (was is None or (was.health, was.reason) != (now.health, now.reason))
    ]
    reported = {
        now.id
        for was, now in changes
        if was is not None and now is not None and _has_been_said(state, was, now)
    }
    effects: list[Effect] = []
    for entry in _worth_a_line(state, unlisted):
        why = _why_unlisted(state, view, resource, entry)
        fields = {
            "resource": resource,
            "device": quoted_id(entry.id),
            "cause": str(why.cause),
            "reason": why.message,
        }
        effects.append(Log(Level.INFO, "device.gone", dict(fields)))
    logged = _worth_a_line(state, changed)
    alike: dict[tuple[Level, Health, Cause, str], list[AdvertisedDevice]] = {}
    for entry in logged:
        # A device that a claim of gpuactors has is no reason to warn, nor one whose CDI file is being written.
        is_being_written = (
            entry.cause is Cause.CDI_FILE_UNWRITTEN and resource not in state.published.unwritten
        )
        is_meant = entry.health is Health.HEALTHY or entry.key in state.gpus.reserved or is_being_written
        level = Level.INFO if is_meant or entry.id in reported else Level.WARNING
        alike.setdefault((level, entry.health, entry.cause, entry.reason), []).append(entry)
    for (level, health, cause, reason), like_entries in alike.items():
        shared_fields: dict[str, Field] = {"health": str(health), "cause": str(cause), "reason": reason}
        if len(like_entries) > limits.QUOTED_ITEMS_MAX:
            devices = quoted_ids([entry.id for entry in like_entries])
            effects.append(
                Log(level, "devices.changed", {"resource": resource, "devices": devices, **shared_fields})
            )
            continue
        effects += [
            Log(
                level,
                "device.changed",
                {"resource": resource, "device": quoted_id(entry.id), **shared_fields},
            )
            for entry in like_entries
        ]
    if len(logged) < len(changed):
        count = len(changed) - len(logged)
        effects.append(
            Log(Level.WARNING, "devices.unknown", {"resource": resource, "count": count, "reason": _OTHERS})
        )
    return effects


def _has_been_said(state: NodeState, was: AdvertisedDevice, now: AdvertisedDevice) -> bool:
    """Return whether the change tells nothing new. A poll that names the process, or one more, does not; nor does a
    moment in which the holder is unknown, as when a daemon begins to serve, nor what was said before that moment."""
    if was.health is not now.health:
        return False
    if now.cause in (was.cause, Cause.HOLDER_UNKNOWN):
        return True
    history = state.published.history.get(now.key, ()) if was.cause is Cause.HOLDER_UNKNOWN else ()
    logged = (change for change in reversed(history) if change.cause is not Cause.HOLDER_UNKNOWN)
    return any((change.health, change.cause) == (now.health, now.cause) for change in islice(logged, 1))


_OTHERS: Final = (
    "more IDs of this resource in kubelet's ledger match no function of this node; each is listed as Unhealthy while "
    "a pod has it: find the pods, and the plugin that served this resource before"
)


def _worth_a_line(state: NodeState, entries: Sequence[AdvertisedDevice]) -> list[AdvertisedDevice]:
    """Return all entries of functions of this node, and the first of the others."""
    others = (a for a in entries if last_seen(state.host, a.key) is None)
    first = {a.id for a in islice(others, limits.QUOTED_ITEMS_MAX)}
    return [a for a in entries if a.id in first or last_seen(state.host, a.key) is not None]


def _recorded(
    state: NodeState,
    view: _View,
    device_lists: Mapping[ResourceName, DeviceList],
    changes: Changes,
    at: float,
) -> Mapping[DeviceKey, tuple[Transition, ...]]:
    """Return the history with the changes of this publication."""
    if device_lists == state.published.device_lists:
        return state.published.history
    retired = (
        a
        for r in state.published.device_lists.keys() - device_lists.keys()
        for a in state.published.device_lists[r]
    )
    listed = [a for of_resource in changes.values() for pair in of_resource for a in pair if a is not None]
    touched = {a.key for a in (*retired, *listed)}
    if not touched:
        return state.published.history
    old = _entries_of(touched, state.published.device_lists)
    new = _entries_of(touched, device_lists)
    history = dict(state.published.history)
    for address in sorted(touched):
        _, was = old.get(address, (None, None))
        _, now = new.get(address, (None, None))
        if now is None:
            why = _why_unlisted(state, view, *old[address])
            change = Transition(at, None, f"no longer listed: {why.message}", why.cause)
        elif was is None or (was.health, was.reason) != (now.health, now.reason):
            change = Transition(at, now.health, now.reason, now.cause)
        else:
            continue
        history[address] = (*history.pop(address, ()), change)[-HISTORY_ENTRIES:]
    never = never_seen(state.host, history.keys() - state.index.present.keys())
    unknown = [device for device in history if device in never] if never else []
    for device in unknown[:-HISTORY_UNKNOWN_MAX]:  # the longest unchanged
        del history[device]
    return history


def _entries_of(
    devices: Set[DeviceKey], device_lists: Mapping[ResourceName, DeviceList]
) -> dict[DeviceKey, tuple[ResourceName, AdvertisedDevice]]:
    """Return the entry of each of these devices that is listed, and the resource that it is listed for."""
    return {a.key: (r, a) for r, listed in device_lists.items() for a in listed if a.key in devices}


def _with_rules_kept(
    state: NodeState,
    view: _View,
    device_lists: Mapping[ResourceName, DeviceList],
    changes: Changes,
    effects: list[Effect],
) -> Mapping[ResourceName, DeviceList]:
    """Return the device lists, with the rules kept. A broken rule is a bug: raise AssertionError where the settings are
    strict. In production, list the entry that breaks it as Unhealthy, so that it is not allocated, log it once, and
    serve the rest."""
    broken = _broken(state, view, device_lists, changes)
    if not broken:
        return device_lists
    if state.daemon.settings.strict:
        raise AssertionError("; ".join(f"{entry.id}: {rule}" for _, entry, rule in broken))
    aside = {resource: {a.id: a for a in device_list} for resource, device_list in device_lists.items()}
    for resource, entry, rule in broken:
        reason = (
            f"quarantined, the rest is served: {rule}; this is a bug in gpuactors: report it with the journal"
        )
        aside[resource][entry.id] = _unhealthy(entry, Reason(Cause.SET_ASIDE, reason))
        if aside[resource][entry.id] not in state.published.device_lists.get(resource, ()):
            fields = {"resource": resource, "device": quoted_id(entry.id), "reason": reason}
            effects.append(Log(Level.ERROR, "rule.broken", fields))
    return {r: tuple(sorted(entries.values(), key=lambda a: a.id)) for r, entries in aside.items()}


def _broken(
    state: NodeState,
    view: _View,
    device_lists: Mapping[ResourceName, DeviceList],
    changes: Changes,
) -> list[tuple[ResourceName, AdvertisedDevice, str]]:
    """Return the broken rules of the lists (architecture, "Which devices are Healthy"): the resource, the entry, the
    rule.

    A device list describes a device once; by another ID as well only while a pod has it by that ID, or, Unhealthy,
    while a call holds the list (for a moment two device lists may describe it: a card swapped for another model). Every
    device that kubelet's ledger lists is listed, and Healthy unless it is really lost; so allocatable - allocated is
    the number of Healthy devices without an owner, less the allocated ones that are lost, and capacity is not smaller
    than allocated.
    """
    broken: list[tuple[ResourceName, AdvertisedDevice, str]] = []
    aliases = {name[0] for name in state.index.listed_aliases}
    aliases |= {
        r
        for r, of_r in changes.items()
        if any(now is not None and now.id != DeviceId(now.key) for _, now in of_r)
    }
    for resource, device_list in device_lists.items():
        if resource not in aliases:
            continue  # each is listed once, as an ID is
        by_pods = view.allocated.get(resource, ())
        healthy = [a for a in device_list if a.health is Health.HEALTHY]
        described = {a.key for a in healthy if a.id in by_pods}
        for entry in healthy:
            if entry.id in by_pods:
                continue
            if entry.key in described:
                broken.append((resource, entry, f"{resource} describes a device twice: {entry.key}"))
            described.add(entry.key)
    for resource, device_id in _not_healthy(view, device_lists):
        name = resource, device_id
        listed = view.listed[resource].get(device_id) if resource in device_lists else None
        allocated = _allocation(state, name).message
        if listed is None:
            missing = AdvertisedDevice(
                device_id, DeviceKey(device_id), Health.UNHEALTHY, None, allocated, Cause.SET_ASIDE
            )
            broken.append((resource, missing, f"it is {allocated} but not listed"))
        elif lost(state, resource, state.kubelet.resolved.get(name)) is None:
            broken.append((resource, listed, f"it is {allocated} but Unhealthy ({listed.reason})"))
    return broken


def _not_healthy(view: _View, device_lists: Mapping[ResourceName, DeviceList]) -> Iterator[Named]:
    """Yield the IDs that are allocated to pods and not listed, or not as Healthy."""
    for resource, ids in view.allocated.items():
        unhealthy = {a.id for a in device_lists.get(resource, ()) if a.health is not Health.HEALTHY}
        unlisted = frozenset(ids).difference(view.listed.get(resource, ()))
        yield from ((resource, device_id) for device_id in sorted(unlisted | (ids & unhealthy)))
