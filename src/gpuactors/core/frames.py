"""The frames: what kubelet is told of each resource, made anew from the facts after every event.

Here a never-seen model becomes a resource with a plugin, and an emptied resource retires. A device that is gone or
unbound while a pod has it stays listed, Unhealthy, until its pod is gone: a shrinking list makes capacity smaller than
allocated. One whose unbind waits stays, Unhealthy, until whoever has it open lets go. And no list loses a device while
kubelet may be using it in a call, as kubelet 1.36 panics if it does, nor before kubelet's ledger has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Final

from gpuactors import limits
from gpuactors.core.effects import Effect, Level, Say
from gpuactors.core.health import not_offered, verdict
from gpuactors.core.identity import device_ids, is_looking
from gpuactors.core.inventory import Device, ids_of, named, node_devices, our_resources
from gpuactors.core.model import (
    Advertised,
    DeviceId,
    Frame,
    Health,
    NodeState,
    Observed,
    PciAddress,
    PluginState,
    Resolved,
    ResourceName,
    Role,
    Transition,
    is_pci_address,
)
from gpuactors.core.quote import quoted_id
from gpuactors.core.registration import new_plugin
from gpuactors.core.standing import Owner, Standing, given_away, is_offered, owners, stand_of


def publish(before: NodeState, state: NodeState, at: float) -> tuple[NodeState, list[Effect]]:
    """`state` with its frames and plugins as the facts demand, and the changes as log lines."""
    if state.stopping:
        return replace(state, plugins={}), []
    if not is_ready(state) or _nothing_changed(before, state, at):
        return state, []
    owned = owners(state)
    listed = _listed(state, owned)
    made = {
        resource: _frame(state, resource, listed.get(resource, {}), state.frames.get(resource, ()), at)
        for resource in sorted({*state.plugins, *listed})
    }
    frames: dict[ResourceName, Frame] = {}
    plugins: dict[ResourceName, PluginState] = {}
    effects: list[Effect] = []
    for resource, frame in _sound(state, made, effects).items():
        plugin = _aged(state.plugins.get(resource), frame, at)
        if plugin is None:
            effects.append(Say(Level.INFO, "resource.retired", {"resource": resource}))
            continue
        if resource not in state.frames:
            effects.append(Say(Level.INFO, "resource.appeared", {"resource": resource}))
        frames[resource], plugins[resource] = frame, plugin
        effects.extend(_changes(state, resource, state.frames.get(resource, ()), frame))
    history = _recorded(state, frames, at)
    serving = state.role is Role.SERVING
    served = (state.served | frames.keys()) - (made.keys() - frames.keys())
    plugins = plugins if serving else {}
    return replace(state, served=served, frames=frames, plugins=plugins, history=history), effects


def is_ready(state: NodeState) -> bool:
    """All three sides have been looked at once: a first frame made from less would be a guess.

    Where a group is in use, the ledger must have been read since that was seen, if it can be read at all: a stranger's
    GPU is not to be offered at first.
    """
    if not (
        state.scanned and state.ledger.tried and (state.polls.done > 0 or state.polls.outstanding is None)
    ):
        return False
    if not state.frames and is_looking(state):
        return False
    undecided = any(o.in_use and o.since > state.ledger.read for o in state.polls.groups.values())
    return bool(state.frames) or state.ledger.problem is not None or not undecided


def _nothing_changed(before: NodeState, state: NodeState, at: float) -> bool:
    return (
        is_ready(before)
        and before.facts is state.facts
        and before.calls.keys() == state.calls.keys()
        and before.no_shrink_until.keys() == state.no_shrink_until.keys()
        and before.ledger.entries is state.ledger.entries
        and before.ledger.claims == state.ledger.claims
        and before.ledger.problem == state.ledger.problem
        and (before.ledger.read == 0) == (state.ledger.read == 0)
        and _same_uses(before, state)
        and before.departed == state.departed
        and before.granted.keys() == state.granted.keys()
        and before.resolved is state.resolved
        and before.role is state.role
        and not any(_is_over(plugin, at) for plugin in state.plugins.values())
    )


_seen: Final = attrgetter(*(f.name for f in fields(Observed) if f.name != "poll"))
"""Of a group's use all but when it was seen."""


def _same_uses(before: NodeState, state: NodeState) -> bool:
    """A poll and a read of the ledger that came back meanwhile found every group used as it was, by the same."""
    was, now = before.polls.groups, state.polls.groups
    if now is was and state.ledger.read == before.ledger.read:
        return True
    if state.departed or now.keys() != was.keys():  # whose a use is depends on which came later
        return False
    if now is not was and any(
        f.function is not None and f.function.driver is None and f.function.has_node
        for f in state.facts.values()
    ):
        return False  # whether its unbind waits is known as of the last poll alone
    return all(
        _is_decided(use, state) == _is_decided(was[group], before) and _seen(use) == _seen(was[group])
        for group, use in now.items()
    )


def _is_decided(use: Observed, state: NodeState) -> bool:
    """The ledger has been read since somebody was first seen using the group."""
    return use.in_use and use.since < state.ledger.read


def _listed(
    state: NodeState, owned: Mapping[PciAddress, Owner]
) -> dict[ResourceName, dict[DeviceId, Advertised]]:
    """What there is to list: offered devices, and those that are lost while a pod has them."""
    ids = device_ids(state)
    listed: dict[ResourceName, dict[DeviceId, Advertised]] = {}
    devices = node_devices(state)
    for device in devices:
        stand = stand_of(state, device, owned)
        if is_offered(state, device) or stand.standing is Standing.ALLOCATED:
            device_id = ids[device.function.address]
            before = next(
                (a for a in state.frames.get(device.resource, ()) if a.address == device.function.address),
                None,
            )
            health, reason = verdict(device, stand, before)
            listed.setdefault(device.resource, {})[device_id] = _advertised(device_id, device, health, reason)
    # Kubelet's ledger has other plugins' resources as well.
    ours = our_resources(state, (d.resource for d in devices))
    for (resource, device_id), said in given_away(state, ours).items():
        of_resource = listed.setdefault(resource, {})
        if device_id not in of_resource:
            of_resource[device_id] = _tombstone(state, resource, device_id, said, ids)
    return listed


def _advertised(device_id: DeviceId, device: Device, health: Health, reason: str) -> Advertised:
    return Advertised(device_id, device.function.address, health, device.function.numa_node, reason)


def _tombstone(
    state: NodeState,
    resource: ResourceName,
    device_id: DeviceId,
    said: str,
    ids: Mapping[PciAddress, DeviceId],
) -> Advertised:
    """What kubelet has given to a pod by an ID that is listed for nothing else: a device that is not offered any more,
    or one that is listed by another ID, or an ID that means nothing here. Capacity is not smaller than allocated."""
    meant = state.resolved.get((resource, device_id))
    if meant is None:
        reason = f"{said}, but no device of {resource} on this node is known by this ID"
        return Advertised(device_id, PciAddress(device_id), Health.UNHEALTHY, None, reason)
    old = next((a for a in state.frames.get(resource, ()) if a.id == device_id), None)
    numa_node = old.numa_node if old is not None else None
    if _is_lost(state, resource, meant):
        reason = f"{said}, but {_why_gone(state, resource, meant.address)}"
        return Advertised(device_id, meant.address, Health.UNHEALTHY, numa_node, reason)
    if (listed := ids.get(meant.address)) is not None:
        said += f"; it is listed as {listed} too"
    return Advertised(device_id, meant.address, Health.HEALTHY, numa_node, said)


def _is_lost(state: NodeState, resource: ResourceName, meant: Resolved | None) -> bool:
    """A pod cannot have that device of that resource any more: it is gone, unbound, or another model's.

    One whose ids could never be read is not: which model it is was known when it was given away. Nor is one that is
    what it was and has another name, as pci.ids was renewed.
    """
    fact = state.facts.get(meant.address) if meant is not None else None
    function = fact.function if fact is not None else None
    if meant is None or function is None or not function.vfio_bound:
        return True
    return ids_of(function) not in ("", meant.ids) and named(function) != resource


def _frame(
    state: NodeState,
    resource: ResourceName,
    devices: Mapping[DeviceId, Advertised],
    listed: Frame,
    at: float,
) -> Frame:
    frame = dict(devices)
    listed_as = {a.address: a.id for a in frame.values()}
    in_call = any(call.resource == resource for call in state.calls.values())
    blind = state.ledger.read == 0  # whatever is gone, a pod may have it that a daemon before us gave it to
    if in_call or blind or state.no_shrink_until.get(resource, at) > at:
        for old in listed:
            if old.id in devices:
                continue
            other = listed_as.get(old.address)
            why = (
                f"it is listed as {other} now"
                if other is not None
                else _why_gone(state, resource, old.address)
            )
            frame[old.id] = replace(old, health=Health.UNHEALTHY, reason=why)
    return tuple(sorted(frame.values(), key=lambda a: a.id))


def _why_gone(state: NodeState, resource: ResourceName, address: PciAddress) -> str:
    fact = state.facts.get(address)
    if fact is None or fact.function is None:
        return "the PCI function is gone from this node"
    if fact.function.vfio_bound and named(fact.function) == resource:
        return "no selector chooses it any more (--select)"
    if fact.function.vfio_bound:
        return f"another device is there now ({fact.function.vendor}:{fact.function.device})"
    return not_offered(fact.function)


def _why_unlisted(state: NodeState, resource: ResourceName, listed: Advertised) -> str:
    """Why a device that was listed is not any more: what is at its address now."""
    if listed.id != device_ids(state).get(listed.address, listed.address) or not is_pci_address(listed.id):
        return "no pod has it by this ID any more"
    return _why_gone(state, resource, listed.address)


def _aged(plugin: PluginState | None, frame: Frame, at: float) -> PluginState | None:
    """A new plugin for a new resource; None once an emptied one has been empty for long enough."""
    plugin = plugin or new_plugin()
    if frame:
        return plugin if plugin.empty_since is None else replace(plugin, empty_since=None)
    if _is_over(plugin, at):
        return None
    return plugin if plugin.empty_since is not None else replace(plugin, empty_since=at)


def _is_over(plugin: PluginState, at: float) -> bool:
    return plugin.empty_since is not None and plugin.empty_since + limits.RETIRE_EMPTY_AFTER_S <= at


def _changes(state: NodeState, resource: ResourceName, before: Frame, after: Frame) -> list[Effect]:
    """One log line per device whose verdict changed, in the words that everybody else uses."""
    old, new = {a.id: a for a in before}, {a.id: a for a in after}
    said: list[Effect] = [
        Say(
            Level.INFO,
            "device.gone",
            {"resource": resource, "device": quoted_id(i), "reason": _why_unlisted(state, resource, old[i])},
        )
        for i in sorted(old.keys() - new.keys())
    ]
    for i, now in new.items():
        if i not in old or (old[i].health, old[i].reason) != (now.health, now.reason):
            level = Level.INFO if now.health is Health.HEALTHY else Level.WARNING
            fields = {
                "resource": resource,
                "device": quoted_id(i),
                "health": str(now.health),
                "reason": now.reason,
            }
            said.append(Say(level, "device.changed", dict(fields)))
    return said


def _recorded(
    state: NodeState, frames: Mapping[ResourceName, Frame], at: float
) -> Mapping[PciAddress, tuple[Transition, ...]]:
    """The history with what changes now."""
    old = {a.address: a for frame in state.frames.values() for a in frame}
    resource_of = {a.address: resource for resource, frame in state.frames.items() for a in frame}
    new = {a.address: a for frame in frames.values() for a in frame}
    history = dict(state.history)
    for address in sorted(old.keys() | new.keys()):
        was, now = old.get(address), new.get(address)
        if now is None:
            why = _why_unlisted(state, resource_of[address], old[address])
            change = Transition(at, None, f"no longer listed: {why}")
        elif was is None or (was.health, was.reason) != (now.health, now.reason):
            change = Transition(at, now.health, now.reason)
        else:
            continue
        history[address] = (*history.pop(address, ()), change)[-limits.HISTORY_ENTRIES :]
    unknown = [address for address in history if address not in state.facts]
    for address in unknown[: -limits.HISTORY_UNKNOWN_MAX]:  # the longest unchanged
        del history[address]
    return history


def _sound(
    state: NodeState, frames: Mapping[ResourceName, Frame], effects: list[Effect]
) -> Mapping[ResourceName, Frame]:
    """The frames, if they keep the rules. Else it is a bug: AssertionError where the settings are strict; in production
    what breaks a rule is listed Unhealthy, so that nobody gets it, and said once, and the rest is served."""
    broken = _broken(state, frames)
    if not broken:
        return frames
    if state.settings.strict:
        raise AssertionError("; ".join(f"{entry.id}: {rule}" for _, entry, rule in broken))
    aside = {resource: {a.id: a for a in frame} for resource, frame in frames.items()}
    for resource, entry, rule in broken:
        reason = (
            f"set aside, the rest is served: {rule}; that is a bug in gpuactors, report it with its journal"
        )
        aside[resource][entry.id] = replace(entry, health=Health.UNHEALTHY, reason=reason)
        if aside[resource][entry.id] not in state.frames.get(resource, ()):
            fields = {"resource": resource, "device": entry.id, "reason": reason}
            effects.append(Say(Level.ERROR, "rule.broken", fields))
    return {r: tuple(sorted(entries.values(), key=lambda a: a.id)) for r, entries in aside.items()}


def _broken(
    state: NodeState, frames: Mapping[ResourceName, Frame]
) -> list[tuple[ResourceName, Advertised, str]]:
    """What does not hold that must whatever happened (architecture, "The books"): the resource, the entry, the rule.

    A frame describes a device once; by another ID as well only while a pod has it by that ID, or, Unhealthy, while a
    call holds the list (for a moment two frames may describe it: a card swapped for another model). Every device that
    kubelet's ledger lists is listed, and Healthy unless it is really lost; so allocatable - allocated is the number of
    Healthy devices that nobody has, less the allocated ones that are lost, and capacity is not smaller than allocated.
    """
    broken: list[tuple[ResourceName, Advertised, str]] = []
    given = given_away(state, frames)
    for resource, frame in frames.items():
        healthy = [a for a in frame if a.health is Health.HEALTHY]
        described = {a.address for a in healthy if (resource, a.id) in given}
        for entry in healthy:
            if (resource, entry.id) in given:
                continue
            if entry.address in described:
                broken.append((resource, entry, f"{resource} describes a device twice: {entry.address}"))
            described.add(entry.address)
    for (resource, device_id), said in given.items():
        listed = next((a for a in frames[resource] if a.id == device_id), None)
        if listed is None:
            nobody = Advertised(device_id, PciAddress(device_id), Health.UNHEALTHY, None, said)
            broken.append((resource, nobody, f"it is {said} but not listed"))
        elif listed.health is not Health.HEALTHY and not _is_lost(
            state, resource, state.resolved.get((resource, device_id))
        ):
            broken.append((resource, listed, f"it is {said} but Unhealthy ({listed.reason})"))
    return broken
