"""One resource's standing with kubelet: its socket, its registration, its stream.

Theory of operation. Registered means one open ListAndWatch stream. Whatever is missing is done again and again, with
backoff, for ever: first the endpoint's socket must serve (bind), then Register is called, then kubelet opens the
stream. Each step is ordered by a growing number and answered with that number; whatever ends the chain (a failed
bind, a failed Register, no stream in time, the last stream's end, a new kubelet.sock) leads back to its beginning.

Kubelet's rules behind it (kubelet 1.36): it never dials again after a stream ended, so its end must lead to Register;
a Register that fails makes it forget the running client as well, so another one must follow even if a stream is open;
registering while the old stream is open is undone when the old one ends, so an old stream is ended first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpuactors import limits
from gpuactors.core.model import PluginState


@dataclass(frozen=True, slots=True)
class PluginOrder:
    """What the plugin actor is to do, as growing numbers; see `PluginState`."""

    bind: int
    register: int
    renew: bool
    """End the streams of the old endpoint and make a new one, even if its socket is still there."""


def new_plugin() -> PluginState:
    """A resource that has just appeared: its endpoint is to be made."""
    return PluginState(
        bind=1,
        bound=False,
        bind_failures=0,
        register=0,
        registering=False,
        register_failures=0,
        accepted=False,
        renew=False,
        streams=frozenset(),
        kubelet_stream=None,
        stream_opened_at=-math.inf,
        retry_at=None,
        problem="not registered yet",
        empty_since=None,
    )


def order(plugin: PluginState) -> PluginOrder:
    """The standing order that follows from a plugin's state."""
    return PluginOrder(bind=plugin.bind, register=plugin.register, renew=plugin.renew)


def is_registered(plugin: PluginState) -> bool:
    """Kubelet accepted us and holds a stream open."""
    return plugin.accepted and plugin.kubelet_stream in plugin.streams


def begin(plugin: PluginState) -> PluginState:
    """The chain from its beginning: see to the socket, then register."""
    return replace(
        plugin,
        bind=plugin.bind + 1,
        bound=False,
        registering=False,
        accepted=False,
        renew=bool(plugin.streams),
        kubelet_stream=None,
        retry_at=None,
    )


def socket_bound(plugin: PluginState, bind: int, absence: str | None) -> PluginState:
    """The endpoint serves: register, unless kubelet is absent (`absence` says why)."""
    if bind != plugin.bind or plugin.bound:
        return plugin
    plugin = replace(plugin, bound=True, bind_failures=0)
    if absence is not None:
        return replace(plugin, problem=absence)
    return replace(plugin, register=plugin.register + 1, registering=True)


def socket_failed(plugin: PluginState, bind: int, reason: str, at: float) -> PluginState:
    """The endpoint could not be made, or died: again later."""
    if bind != plugin.bind:
        return plugin
    wait_s = _backoff(limits.SERVE_BACKOFF_S, plugin.bind_failures)
    return replace(
        plugin,
        bound=False,
        bind_failures=plugin.bind_failures + 1,
        registering=False,
        accepted=False,
        retry_at=at + wait_s,
        problem=reason,
    )


def register_succeeded(plugin: PluginState, register: int, at: float) -> PluginState:
    """Kubelet accepted; now its stream must open, or have been opened meanwhile."""
    if register != plugin.register or not plugin.registering:
        return plugin
    plugin = replace(plugin, registering=False, accepted=True)
    if plugin.kubelet_stream is not None:
        if plugin.kubelet_stream in plugin.streams:
            return replace(plugin, retry_at=None, problem=None)
        return _lost(plugin, at)
    return replace(
        plugin,
        retry_at=at + limits.STREAM_OPEN_DEADLINE_S,
        problem="registered, but kubelet has not opened ListAndWatch yet",
    )


def register_failed(plugin: PluginState, register: int, reason: str, at: float) -> PluginState:
    """Again, even with a stream open: kubelet may have forgotten the client that the stream belongs to."""
    if register != plugin.register or not plugin.registering:
        return plugin
    failures = plugin.register_failures + 1
    return replace(
        plugin,
        registering=False,
        register_failures=failures,
        retry_at=at + _backoff(limits.REGISTER_BACKOFF_S, failures),
        problem=reason,
    )


def stream_opened(plugin: PluginState, stream: int, at: float) -> PluginState:
    """A stream is open. The first one since Register was called is kubelet's; any other is a bystander's."""
    plugin = replace(plugin, streams=plugin.streams | {stream})
    if plugin.kubelet_stream is not None or not (plugin.registering or plugin.accepted):
        return plugin
    plugin = replace(plugin, kubelet_stream=stream, stream_opened_at=at)
    return replace(plugin, retry_at=None, problem=None) if plugin.accepted else plugin


def stream_ended(plugin: PluginState, stream: int, absence: str | None, at: float) -> PluginState:
    """The end of kubelet's stream is the end of the registration; kubelet will not dial again."""
    plugin = replace(plugin, streams=plugin.streams - {stream})
    if stream != plugin.kubelet_stream or not plugin.accepted:
        return plugin  # while Register is out, its answer decides
    return _lost(plugin, at) if absence is None else replace(plugin, accepted=False, problem=absence)


def _lost(plugin: PluginState, at: float) -> PluginState:
    """Registered no more: register again, at once if the stream had lasted."""
    lasted = at - plugin.stream_opened_at >= limits.STREAM_STABLE_S
    failures = 0 if lasted else plugin.register_failures + 1
    return replace(
        plugin,
        accepted=False,
        register_failures=failures,
        retry_at=at + _backoff(limits.REGISTER_BACKOFF_S, max(0, failures - 1)),
        problem="kubelet's ListAndWatch stream ended",
    )


def kubelet_appeared(plugin: PluginState, at: float) -> PluginState:
    """A new kubelet.sock: register at once. A stream of the old kubelet ends by itself; if not, we end it."""
    plugin = replace(plugin, register_failures=0)
    if is_registered(plugin):
        return replace(
            plugin,
            retry_at=at + limits.OLD_STREAM_GRACE_S,
            problem="a new kubelet is there; the old one's stream is still open",
        )
    return begin(plugin)


def kubelet_gone(plugin: PluginState, absence: str) -> PluginState:
    """Nobody to register with. An open stream stays what it is."""
    problem = plugin.problem if is_registered(plugin) else absence
    retry_at = plugin.retry_at if not plugin.bound else None  # the socket is made all the same
    return replace(plugin, retry_at=retry_at, problem=problem)


def due(plugin: PluginState, at: float) -> PluginState:
    """Begins anew when the time for it has come."""
    if plugin.retry_at is None or plugin.retry_at > at:
        return plugin
    return begin(plugin)


def _backoff(waits_s: tuple[float, ...], failures: int) -> float:
    return waits_s[min(failures, len(waits_s) - 1)]
