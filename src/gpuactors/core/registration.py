"""One resource's standing with kubelet: its socket, its registration, its stream.

Theory of operation. Registered means one open ListAndWatch stream. Whatever is missing is done again and again, with
backoff, for ever: first the endpoint's socket must serve (bind), then Register is called, then kubelet opens the
stream. Each step is ordered by a growing number and answered with that number; whatever ends the chain (a failed
bind, a failed Register, no stream in time, the last stream's end, a new kubelet.sock) leads back to its beginning.

Kubelet's rules behind it (kubelet 1.36): it never dials again after a stream ended, so its end must lead to Register;
a Register that fails makes it forget the running client as well, so another one must follow even if a stream is open;
registering while the old stream is open is undone when the old one ends, so an old stream is ended first. And an open
stream does not say that kubelet has our list: another plugin may serve the resource. Whether it has is found out in
`listing.py`; two reads against us are the end of the registration as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from gpuactors import limits
from gpuactors.core.model import PluginState

AGAINST: Final = 2
"""So many reads in a row by which kubelet has another list than ours: one may be a device list that it was slow to
take."""


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
    """Kubelet accepted us, holds a stream open, and has our list as far as it is known."""
    return _is_streaming(plugin) and not is_contested(plugin)


def is_contested(plugin: PluginState) -> bool:
    """Kubelet has another list than ours, although it holds a stream of ours open."""
    return plugin.listing.against >= AGAINST


def _is_streaming(plugin: PluginState) -> bool:
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
        listing=replace(plugin.listing, read=None, against=0, disputed_at=-math.inf, agreed_since=None),
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
    """Registered no more: register again, at once if the stream had lasted.

    Not while the resource is fought for: then it may be the other plugin's doing, and its list be kubelet's already.
    """
    if plugin.listing.reclaims:
        said = "kubelet's ListAndWatch stream ended while another plugin serves the same resource"
        return _contending(list_changed(replace(plugin, accepted=False, problem=said), at), at)
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
    if _is_streaming(plugin):
        return replace(
            plugin,
            retry_at=at + limits.OLD_STREAM_GRACE_S,
            listing=replace(plugin.listing, read=None, against=0),
            problem="a new kubelet is there; the old one's stream is still open",
        )
    return begin(plugin)


def kubelet_gone(plugin: PluginState, absence: str) -> PluginState:
    """Nobody to register with. An open stream stays what it is."""
    problem = plugin.problem if _is_streaming(plugin) else absence
    retry_at = plugin.retry_at if not plugin.bound else None  # the socket is made all the same
    return replace(plugin, retry_at=retry_at, problem=problem)


def due(plugin: PluginState, at: float) -> PluginState:
    """Begins anew when the time for it has come."""
    if plugin.retry_at is None or plugin.retry_at > at:
        return plugin
    return begin(plugin)


# --- kubelet's own list: the rules are in `listing.py` -----------------------------------------------------


def list_changed(plugin: PluginState, at: float) -> PluginState:
    """What we list changed: a read that is out may have been answered by the list before.

    After an odd sight that no read has spoken of yet, our list has perhaps replaced another's, and nothing will show it
    any more: that counts as one read against us.
    """
    after = replace(plugin, listing=replace(plugin.listing, changed_at=at, read=None))
    return _doubted(after) if _is_unlooked(plugin) else after


def _doubted(plugin: PluginState) -> PluginState:
    """Our last list may have replaced another's: one read against us, that no later one which agrees takes back."""
    listing = plugin.listing
    if listing.against or not _is_streaming(plugin):
        return plugin
    doubted = replace(listing, against=1, disputed_at=listing.changed_at, agreed_since=None)
    return replace(plugin, listing=doubted)


def is_doubted(plugin: PluginState) -> bool:
    """It takes a list that shows us to say that kubelet has ours."""
    return plugin.listing.against > 0 or _is_unlooked(plugin)


def _is_unlooked(plugin: PluginState) -> bool:
    """Something odd was seen since the stream opened, and no read has shown yet whose list kubelet has."""
    return plugin.listing.sighted_at >= plugin.stream_opened_at


def sighted(plugin: PluginState, at: float) -> PluginState:
    """A socket of somebody else came or went.

    A list of ours that was on its way just then may have come to kubelet after what that neighbour did, and have
    replaced its list, or the loss of it. Not the first one of a stream: kubelet asks whoever registered last for it.
    """
    after = replace(plugin, listing=replace(plugin.listing, sighted_at=at))
    changed_at = plugin.listing.changed_at
    crossed = changed_at > plugin.stream_opened_at and at - changed_at < limits.KUBELET_LIST_TAKEN_S
    return _doubted(after) if crossed else after


def read_asked(plugin: PluginState, read: int, at: float) -> PluginState:
    """A read was asked for: whether it will be able to speak of this resource."""
    wanted = read if at >= tells_from(plugin) else None
    if plugin.listing.read == wanted:
        return plugin
    return replace(plugin, listing=replace(plugin.listing, read=wanted))


def tells_from(plugin: PluginState) -> float:
    """From when on a read that is asked for can speak: kubelet has had our list, or its loss, for long enough. Infinite
    while we are not registered."""
    if not (_is_streaming(plugin) or waits_for_peace(plugin)):
        return math.inf
    listing = plugin.listing
    since = max(listing.changed_at, listing.compared_at, plugin.stream_opened_at)
    return since + limits.KUBELET_LIST_TAKEN_S


def not_told(plugin: PluginState, at: float) -> PluginState:
    """The read came back and says nothing of kubelet's list."""
    return replace(plugin, listing=replace(plugin.listing, read=None, compared_at=at))


def agreed(plugin: PluginState, at: float, *, asked_at: float) -> PluginState:
    """Kubelet has our list. After long enough whoever was there has let it be.

    `asked_at` is when kubelet was asked; what odd was seen since then is not cleared up by it.
    """
    listing = plugin.listing
    since = at if listing.agreed_since is None else listing.agreed_since
    over = at - since >= limits.CONTENTION_OVER_S
    now = replace(
        listing,
        read=None,
        compared_at=at,
        against=0,
        disputed_at=-math.inf,
        agreed_since=since,
        sighted_at=listing.sighted_at if listing.sighted_at >= asked_at else -math.inf,
        reclaims=0 if over else listing.reclaims,
    )
    if not is_contested(plugin):
        return replace(plugin, listing=now)
    return replace(plugin, listing=now, retry_at=None, problem=None)


def disputed(plugin: PluginState, why: str, at: float, *, nobody: bool) -> PluginState:
    """Kubelet has another list: if it was so before, we register again, after a wait that grows each time.

    `nobody`: none of the resource's devices is healthy in it.
    """
    listing = plugin.listing
    if waits_for_peace(plugin):
        plugin = not_told(plugin, at)
        return replace(plugin, retry_at=_sooner(plugin, at)) if nobody else plugin
    now = replace(
        listing,
        read=None,
        compared_at=at,
        against=listing.against + 1,
        disputed_at=listing.disputed_at if listing.against else at,
        agreed_since=None,
    )
    after = replace(plugin, listing=now)
    if not is_contested(after):
        return after
    after = replace(after, problem=why)
    if not is_contested(plugin):
        after = _contending(after, at)
    return replace(after, retry_at=_sooner(after, at)) if nobody else after


def _contending(plugin: PluginState, at: float) -> PluginState:
    """We shall register again, once more against somebody else."""
    listing = plugin.listing
    retry_at = at + _backoff(limits.CONTEND_BACKOFF_S, listing.reclaims)
    return replace(plugin, retry_at=retry_at, listing=replace(listing, reclaims=listing.reclaims + 1))


def _sooner(plugin: PluginState, at: float) -> float:
    """When to register where kubelet has no healthy device: nobody is to be fought with, and nothing to be lost."""
    wait_s = min(_backoff(limits.CONTEND_BACKOFF_S, plugin.listing.reclaims - 1), limits.DESERTED_MAX_S)
    return min(math.inf if plugin.retry_at is None else plugin.retry_at, at + wait_s)


def waits_for_peace(plugin: PluginState) -> bool:
    """Its stream ended in a contention, and it does not register at once."""
    waits = plugin.bound and not plugin.accepted and not plugin.registering and plugin.retry_at is not None
    return bool(plugin.listing.reclaims) and waits


def next_comparison_at(plugin: PluginState) -> float:
    """When the next read of kubelet's list is wanted for this resource; infinite while nothing is odd."""
    listing = plugin.listing
    if waits_for_peace(plugin) or (_is_streaming(plugin) and listing.against):
        wait_s = limits.KUBELET_LIST_AGAIN_S
    elif _is_streaming(plugin) and listing.reclaims:
        wait_s = limits.LEDGER_S
    else:
        return math.inf
    return max(listing.compared_at + wait_s, tells_from(plugin))


def _backoff(waits_s: tuple[float, ...], failures: int) -> float:
    return waits_s[min(failures, len(waits_s) - 1)]
