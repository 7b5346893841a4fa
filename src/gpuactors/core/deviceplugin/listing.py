"""Kubelet's own list of a resource compared with ours: only this shows that another plugin serves it, or none does.

Theory of operation. When another plugin registers one of our resources, our stream stays open and carries no notice;
each device list of either plugin replaces kubelet's list, Allocate goes to the plugin that registered last, and when
that one ends all devices are Unhealthy for ever. If another client's stream was taken for kubelet's, the end of
kubelet's goes unnoticed. So each read of the ledger also asks kubelet for its healthy devices
(GetAllocatableResources). A read is evidence for or against us only if it was requested when kubelet had had our list
for long enough. Two in a row against us end the registration: that is logged, and we register again, ending our stream
first, after a wait that grows each time until the lists have agreed for long.

An agreeing list shows little if our own list has changed since one that differed: our device list has replaced
kubelet's list, and Allocate may still go to the other plugin. That is a read against us as well.

Must not touch a plugin that is not registered: `registration.py` does that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin import registration
from gpuactors.core.events.deviceplugin import StreamEnded
from gpuactors.core.events.kubelet import ForeignSocketsSeen
from gpuactors.core.state import NodeState, with_ledger, with_plugins
from gpuactors.core.values.effects import Effect, Level, Log
from gpuactors.core.values.model import (
    Changes,
    DeviceId,
    DeviceList,
    Health,
    PluginState,
    ResourceName,
    is_news_for_kubelet,
)

KUBELET_LIST_ID_MAX_CHARS: Final = 256
"""The number of characters of an ID in kubelet's list that are compared and kept: another plugin's may have 4 MiB,
those of gpuactors have 12."""

SWITCH_OFF = (
    "find the other plugin of this resource (NVIDIA's sandbox device plugin, for instance) and switch it off: "
    "one resource has one plugin"
)
"""The remedy where another plugin serves the resource."""

_EXAMPLES = 2


def comparable(ids: Iterable[str]) -> tuple[DeviceId, ...]:
    """Return IDs in the form in which two lists are compared: sorted, each once, and bounded in number and length, as
    another plugin's list may be of any size."""
    cut = {device[:KUBELET_LIST_ID_MAX_CHARS] for device in ids}
    return tuple(DeviceId(device) for device in heapq.nsmallest(limits.CALL_DEVICES_MAX, cut))


def healthy(device_list: DeviceList) -> tuple[DeviceId, ...]:
    """Return the Healthy devices of a list, comparable."""
    return comparable(a.id for a in device_list if a.health is Health.HEALTHY)


def asked(state: NodeState) -> tuple[ResourceName, ...]:
    """Return the resources whose list is requested of kubelet with the outstanding read."""
    read = state.kubelet.ledger.refresh.outstanding
    if read is None:
        return ()
    return tuple(sorted(r for r, p in state.published.plugins.items() if p.listing.read == read))


# --- what happens -----------------------------------------------------------------------------------------


def foreign_sockets_seen(state: NodeState, event: ForeignSocketsSeen, at: float) -> NodeState:
    """Record that another process's socket beside kubelet's came or went: kubelet's list may be that plugin's now."""
    plugins = {r: registration.sighted(plugin, at) for r, plugin in state.published.plugins.items()}
    state = replace(state, kubelet=replace(state.kubelet, foreign_sockets=event.sockets))
    return compare_soon(with_plugins(state, plugins), at)


def stream_ended(before: PluginState, state: NodeState, event: StreamEnded, at: float) -> NodeState:
    """Handle the end of a stream that was not taken for kubelet's, and may have been kubelet's.

    This does not indicate another plugin. If kubelet has lost our stream, it gets no more lists from us, so its own
    list continues to show that. Any client may open our stream and leave it, however often.
    """
    unknown = event.stream in before.streams and event.stream != before.kubelet_stream
    return compare_soon(state, at) if unknown and before.accepted else state


def compare_soon(state: NodeState, at: float) -> NodeState:
    """Plan a read of kubelet's list soon after an odd observation, one for all such observations until then."""
    return _compare_at(state, min(state.kubelet.compare_at, at + limits.ODD_SIGHT_S))


def _compare_at(state: NodeState, compare_at: float) -> NodeState:
    return replace(state, kubelet=replace(state.kubelet, compare_at=compare_at))


def compared(
    state: NodeState, read: int, healthy_ids: Mapping[ResourceName, tuple[DeviceId, ...]] | None, at: float
) -> tuple[NodeState, list[Effect]]:
    """Compare the lists of each resource for which the read that came back is valid. `healthy_ids` are kubelet's; None
    if the read has no list of kubelet's."""
    plugins, effects = dict(state.published.plugins), list[Effect]()
    for resource in (r for r, p in state.published.plugins.items() if p.listing.read == read):
        before = plugins[resource]
        after = _compared(state, resource, before, healthy_ids, at)
        plugins[resource] = after
        if registration.is_contested(after) and after.problem != before.problem:
            effects.append(
                Log(Level.WARNING, "plugin.contested", {"resource": resource, "reason": after.problem or ""})
            )
        if registration.is_contested(before) and registration.is_registered(after):
            effects.append(Log(Level.INFO, "plugin.registered", {"resource": resource}))
    return with_plugins(state, plugins), effects


def _compared(
    state: NodeState,
    resource: ResourceName,
    plugin: PluginState,
    healthy_ids: Mapping[ResourceName, tuple[DeviceId, ...]] | None,
    at: float,
) -> PluginState:
    if healthy_ids is None:
        return registration.not_compared(plugin, at)
    ours, kubelets = healthy(state.published.device_lists[resource]), healthy_ids.get(resource, ())
    # While we wait for the other plugin to leave, kubelet can have only its list.
    if not registration.waits_in_contention(plugin) and _agrees(plugin, ours, kubelets):
        return registration.agreed(plugin, at, asked_at=state.kubelet.ledger.read_at)
    return registration.disputed(plugin, _why(state, ours, kubelets), at, is_empty=not kubelets)


def _agrees(plugin: PluginState, ours: tuple[DeviceId, ...], kubelets: tuple[DeviceId, ...]) -> bool:
    if not ours and registration.is_doubted(plugin):
        # Where nothing is healthy, kubelet's list is the same when it has lost our stream. Registering again costs
        # nothing then; otherwise a device that turns healthy next would not reach kubelet.
        return False
    # Our list may have changed because of the read that counts against us: after it, and at the same time.
    replaced = plugin.listing.against and plugin.listing.changed_at >= plugin.listing.disputed_at
    return ours == kubelets and not replaced


def _why(state: NodeState, ours: tuple[DeviceId, ...], kubelets: tuple[DeviceId, ...]) -> str:
    """Return how the lists differ, as a sentence for people."""
    others = f" (other sockets in kubelet's directory: {_names(state.kubelet.foreign_sockets)})" * bool(
        state.kubelet.foreign_sockets
    )
    if not (ours or kubelets):
        return (
            "no device of this resource is healthy, so kubelet's list does not show whether it still has ours after "
            f"another plugin's socket has come or gone: gpuactors registers again{others}"
        )
    if not kubelets:
        return (
            f"kubelet has no healthy device of this resource, and {len(ours)} are listed as healthy: it has lost "
            f"its stream, or changed to another plugin that has ended{others}"
        )
    differs = (
        difference(ours, kubelets) or "kubelet had another list of healthy devices until ours was sent again"
    )
    return f"{differs}: another plugin serves the same resource{others}; {SWITCH_OFF}"


def difference(ours: tuple[DeviceId, ...], kubelets: tuple[DeviceId, ...]) -> str:
    """Return how kubelet's healthy devices of a resource differ from ours, as a part of a sentence; empty if they do
    not. Both are comparable."""
    if ours == kubelets:
        return ""
    if not (unknown := [device for device in kubelets if device not in set(ours)]):
        return f"kubelet has {len(kubelets)} of our {len(ours)} healthy devices"
    named = _names(unknown[:_EXAMPLES]) + (", …" if len(unknown) > _EXAMPLES else "")
    return f"kubelet has {len(unknown)} healthy devices that are not ours ({named})"


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:64]) for name in names)


# --- after each event -------------------------------------------------------------------------------------


def kept(before: NodeState, state: NodeState, changed: Changes, at: float) -> NodeState:
    """Note after an event the changed lists, the resources for which a read that was just requested will be valid, and
    the latest time of the next one."""
    now = (state.published, state.kubelet.ledger, state.kubelet.compare_at)
    if now == (before.published, before.kubelet.ledger, before.kubelet.compare_at):
        return state  # as the event before has left it
    read = state.kubelet.ledger.refresh.outstanding
    new_read = read if read != before.kubelet.ledger.refresh.outstanding else None
    plugins = dict(state.published.plugins)
    for resource in plugins:
        if resource not in before.published.device_lists or is_news_for_kubelet(changed.get(resource, ())):
            plugins[resource] = registration.list_changed(plugins[resource], at)
        if new_read is not None:
            plugins[resource] = registration.read_asked(plugins[resource], new_read, at)
    if any(plugins[r] is not p for r, p in state.published.plugins.items()):
        state = with_plugins(state, plugins)
    if new_read is not None and state.kubelet.compare_at <= at:
        # It may have been requested too soon to count for some resource: then another one.
        early = (p for p in plugins.values() if p.listing.read != new_read)
        compare_at = min((registration.comparable_from(p) for p in early), default=math.inf)
        state = _compare_at(state, compare_at if compare_at > at else math.inf)
    if read is not None:
        return state
    ledger = state.kubelet.ledger
    wanted_at = min([state.kubelet.compare_at, *map(registration.next_comparison_at, plugins.values())])
    if wanted_at >= ledger.refresh.due_at:
        return state
    return with_ledger(state, replace(ledger, refresh=ledger.refresh.due_by(wanted_at)))
