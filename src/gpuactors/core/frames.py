"""The frames: what kubelet is told of each resource, made anew from the facts after every event.

Here a never-seen model becomes a resource with a plugin, and an emptied resource retires. A list never loses a device
while kubelet may be using it in a call: kubelet 1.36 panics if it does. Such a device stays listed Unhealthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuactors import limits
from gpuactors.core.calls import device_id
from gpuactors.core.effects import Effect, Level, Say
from gpuactors.core.health import not_offered, verdict
from gpuactors.core.inventory import Device, devices_of, is_offered
from gpuactors.core.model import Advertised, DeviceId, Frame, Health, NodeState, PluginState, ResourceName
from gpuactors.core.registration import new_plugin


def publish(before: NodeState, state: NodeState, at: float) -> tuple[NodeState, list[Effect]]:
    """`state` with its frames and plugins as the facts demand, and the changes as log lines."""
    if state.stopping:
        return replace(state, frames={}, plugins={}), []
    if not state.scanned or _nothing_changed(before, state, at):
        return state, []
    offered = _offered(state)
    frames: dict[ResourceName, Frame] = {}
    plugins: dict[ResourceName, PluginState] = {}
    effects: list[Effect] = []
    for resource in sorted({*state.plugins, *offered}):
        listed = state.frames.get(resource, ())
        frame = _frame(state, resource, offered.get(resource, {}), listed, at)
        plugin = _aged(state.plugins.get(resource), frame, at)
        if plugin is None:
            effects.append(Say(Level.INFO, "resource.retired", {"resource": resource}))
            continue
        if resource not in state.plugins:
            effects.append(Say(Level.INFO, "resource.appeared", {"resource": resource}))
        frames[resource], plugins[resource] = frame, plugin
        effects.extend(_changes(resource, listed, frame))
    _check(frames)
    return replace(state, frames=frames, plugins=plugins), effects


def _nothing_changed(before: NodeState, state: NodeState, at: float) -> bool:
    same = before.facts is state.facts and before.scanned and before.calls.keys() == state.calls.keys()
    held = before.no_shrink_until.keys() == state.no_shrink_until.keys()
    retiring = any(_is_over(plugin, at) for plugin in state.plugins.values())
    return same and held and not retiring


def _offered(state: NodeState) -> dict[ResourceName, dict[DeviceId, Device]]:
    offered: dict[ResourceName, dict[DeviceId, Device]] = {}
    for device in devices_of(state.facts, state.settings.selectors):
        if is_offered(device):
            offered.setdefault(device.resource, {})[device_id(device)] = device
    return offered


def _frame(
    state: NodeState, resource: ResourceName, devices: Mapping[DeviceId, Device], listed: Frame, at: float
) -> Frame:
    frame = {i: _advertised(i, d) for i, d in devices.items()}
    in_call = any(call.resource == resource for call in state.calls.values())
    if in_call or state.no_shrink_until.get(resource, at) > at:
        for old in listed:
            frame.setdefault(old.id, replace(old, health=Health.UNHEALTHY, reason=_why_gone(state, old)))
    return tuple(sorted(frame.values(), key=lambda a: a.id))


def _advertised(device_id: DeviceId, device: Device) -> Advertised:
    health, reason = verdict(device)
    return Advertised(device_id, device.function.address, health, device.function.numa_node, reason)


def _why_gone(state: NodeState, old: Advertised) -> str:
    fact = state.facts.get(old.address)
    if fact is None or fact.function is None:
        return "the PCI function is gone from this node"
    if fact.function.vfio_bound:
        return f"another device is there now ({fact.function.vendor}:{fact.function.device})"
    return not_offered(fact.function)


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


def _changes(resource: ResourceName, before: Frame, after: Frame) -> list[Effect]:
    """One log line per device whose verdict changed, in the words that everybody else uses."""
    old, new = {a.id: a for a in before}, {a.id: a for a in after}
    said: list[Effect] = [
        Say(Level.INFO, "device.gone", {"resource": resource, "device": i}) for i in old.keys() - new.keys()
    ]
    for i, now in new.items():
        if i not in old or (old[i].health, old[i].reason) != (now.health, now.reason):
            level = Level.INFO if now.health is Health.HEALTHY else Level.WARNING
            fields = {"resource": resource, "device": i, "health": str(now.health), "reason": now.reason}
            said.append(Say(level, "device.changed", dict(fields)))
    return said


def _check(frames: Mapping[ResourceName, Frame]) -> None:
    """What must hold whatever happened: a frame describes a device once.

    For a moment two frames may: a card swapped for another model while a call holds the old resource's list.
    """
    for resource, frame in frames.items():
        ids = [advertised.id for advertised in frame]
        assert len(ids) == len(set(ids)), f"{resource} describes a device twice: {ids}"
