"""The registration of one resource with kubelet: its socket, its Register call, its stream.

Theory of operation. Registered means one open ListAndWatch stream. Each missing step is repeated, with backoff and
without end: first the endpoint's socket must serve (bind), then Register is called, then kubelet opens the stream. Each
step is ordered by a growing number and answered with that number; every failure in the chain (a failed bind, a failed
Register, no stream in time, the last stream's end, a new kubelet.sock) leads back to its beginning.

Kubelet's rules behind it (kubelet 1.36): it never dials again after a stream ended, so its end must lead to Register;
a Register that fails makes it drop the running client as well, so another one must follow even if a stream is open;
registering while the old stream is open is undone when the old one ends, so an old stream is ended first. And an open
stream does not show that kubelet has our list: another plugin may serve the resource. `listing.py` compares the lists;
two reads against us end the registration as well.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.requests import Failure
from gpuactors.core.values.model import PluginState

STREAM_OPEN_DEADLINE_S: Final = 10.0
"""How long kubelet may take from its answer to Register to ListAndWatch, in seconds: seen within milliseconds. After it
we register again."""

REGISTER_BACKOFF_S: Final = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The waits before registering again, in seconds, by the number of failures in a row; the last one repeats for ever.
After a stream that lasted there is none: 0 to 100 ms between a stream's end and Register lost 0 of 189 registrations.
The next ones are short because kubelet.sock exists for a moment before kubelet listens on it."""

STREAM_STABLE_S: Final = 5.0
"""A stream that ended sooner than this after it opened counts as a failed registration, so that a kubelet that drops
the stream at once leads to no tight loop."""

OLD_STREAM_GRACE_S: Final = 0.5
"""How long a stream of the old kubelet may stay open beside a new kubelet.sock, in seconds, before we end it ourselves
and register. Its end comes within milliseconds."""

KUBELET_LIST_TAKEN_S: Final = 1.0
"""The time after which kubelet has a device list that was sent, in seconds, unless it has another one; it takes
milliseconds. The two are compared no more often than this, however often the ledger is read."""

DESERTED_MAX_S: Final = 20.0
"""The longest wait of `limits.CONTEND_BACKOFF_S` where kubelet has no healthy device of the resource at all: there is
no other plugin to contend with, and each further second is one without GPUs on this node."""

AGAINST: Final = 2
"""The number of reads in a row with another list than ours that are a contention: one read may come from a device list
that kubelet was slow to take."""


class PluginOrder(Struct, frozen=True, gc=False):
    """The orders to the plugin actor, as growing numbers; see `PluginState`."""

    bind: int
    register: int
    renew: bool
    """True if the streams of the old endpoint are ended and a new one is made, even if its socket is still there."""


def new_plugin() -> PluginState:
    """Return the state of a resource that has just appeared: its endpoint is to be made."""
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
    """Return the order that follows from a plugin's state."""
    return PluginOrder(bind=plugin.bind, register=plugin.register, renew=plugin.renew)


def is_registered(plugin: PluginState) -> bool:
    """Return whether kubelet accepted us, holds a stream open, and has our list as far as it is known."""
    return _is_streaming(plugin) and not is_contested(plugin)


def is_contested(plugin: PluginState) -> bool:
    """Return whether kubelet's list differs, although it holds one of our streams open."""
    return plugin.listing.against >= AGAINST


def _is_streaming(plugin: PluginState) -> bool:
    return plugin.accepted and plugin.kubelet_stream in plugin.streams


def begin(plugin: PluginState) -> PluginState:
    """Begin the chain again: first the socket, then Register."""
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
    """Register, as the endpoint serves, unless kubelet is absent (`absence` says why)."""
    if bind != plugin.bind or plugin.bound:
        return plugin
    plugin = replace(plugin, bound=True, bind_failures=0)
    if absence is not None:
        return replace(plugin, problem=absence)
    return replace(plugin, register=plugin.register + 1, registering=True)


def socket_failed(plugin: PluginState, bind: int, reason: str, at: float) -> PluginState:
    """Plan another try of an endpoint that could not be made, or failed."""
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


def register_answered(plugin: PluginState, register: int, failure: Failure | None, at: float) -> PluginState:
    """Handle kubelet's answer to Register. If it accepted, its stream must open, or have been opened meanwhile. If it
    did not, call Register again, even with a stream open: kubelet may have dropped the client that the stream belongs
    to."""
    if register != plugin.register or not plugin.registering:
        return plugin
    if failure is not None:
        failures = plugin.register_failures + 1
        return replace(
            plugin,
            registering=False,
            register_failures=failures,
            retry_at=at + _backoff(REGISTER_BACKOFF_S, failures),
            problem=failure,
        )
    plugin = replace(plugin, registering=False, accepted=True)
    if plugin.kubelet_stream is not None:
        if plugin.kubelet_stream in plugin.streams:
            return replace(plugin, retry_at=None, problem=None)
        return _lost(plugin, at)
    return replace(
        plugin,
        retry_at=at + STREAM_OPEN_DEADLINE_S,
        problem="registered, but kubelet has not opened ListAndWatch yet",
    )


def stream_opened(plugin: PluginState, stream: int, at: float) -> PluginState:
    """Record an open stream. The first one since Register was called is kubelet's; any other is another client's."""
    plugin = replace(plugin, streams=plugin.streams | {stream})
    if plugin.kubelet_stream is not None or not (plugin.registering or plugin.accepted):
        return plugin
    plugin = replace(plugin, kubelet_stream=stream, stream_opened_at=at)
    return replace(plugin, retry_at=None, problem=None) if plugin.accepted else plugin


def stream_ended(plugin: PluginState, stream: int, absence: str | None, at: float) -> PluginState:
    """Handle the end of a stream. The end of kubelet's is the end of the registration: kubelet does not dial again."""
    plugin = replace(plugin, streams=plugin.streams - {stream})
    if stream != plugin.kubelet_stream or not plugin.accepted:
        return plugin  # while Register is out, its answer decides
    return _lost(plugin, at) if absence is None else replace(plugin, accepted=False, problem=absence)


def _lost(plugin: PluginState, at: float) -> PluginState:
    """Register again after a lost registration, at once if the stream had lasted.

    Not in a contention: then the other plugin may have caused it, and kubelet may have its list already.
    """
    if plugin.listing.reclaims:
        problem = "kubelet's ListAndWatch stream ended while another plugin serves the same resource"
        return _contending(list_changed(replace(plugin, accepted=False, problem=problem), at), at)
    lasted = at - plugin.stream_opened_at >= STREAM_STABLE_S
    failures = 0 if lasted else plugin.register_failures + 1
    return replace(
        plugin,
        accepted=False,
        register_failures=failures,
        retry_at=at + _backoff(REGISTER_BACKOFF_S, max(0, failures - 1)),
        problem="kubelet's ListAndWatch stream ended",
    )


def kubelet_appeared(plugin: PluginState, at: float) -> PluginState:
    """Register at once with a new kubelet. A stream of the old one ends by itself; if not, the next order ends it."""
    plugin = replace(plugin, register_failures=0)
    if _is_streaming(plugin):
        return replace(
            plugin,
            retry_at=at + OLD_STREAM_GRACE_S,
            listing=replace(plugin.listing, read=None, against=0),
            problem="a new kubelet is there; the old one's stream is still open",
        )
    return begin(plugin)


def kubelet_gone(plugin: PluginState, absence: str) -> PluginState:
    """Record that there is no kubelet to register with. An open stream stays as it is."""
    problem = plugin.problem if _is_streaming(plugin) else absence
    retry_at = plugin.retry_at if not plugin.bound else None  # the socket is made all the same
    return replace(plugin, retry_at=retry_at, problem=problem)


def due(plugin: PluginState, at: float) -> PluginState:
    """Begin the chain again when that is due."""
    if plugin.retry_at is None or plugin.retry_at > at:
        return plugin
    return begin(plugin)


# --- kubelet's own list: the rules are in `listing.py` -----------------------------------------------------


def list_changed(plugin: PluginState, at: float) -> PluginState:
    """Record that our list changed: an outstanding read may return the list before.

    After an odd observation that no read has cleared up yet, our list may have replaced another plugin's, and no later
    read will show that: it is one read against us.
    """
    after = replace(plugin, listing=replace(plugin.listing, changed_at=at, read=None))
    return _doubted(after) if _is_unchecked(plugin) else after


def _doubted(plugin: PluginState) -> PluginState:
    """Count one read against us, which no later agreeing one cancels: our last list may have replaced another
    plugin's."""
    listing = plugin.listing
    if listing.against or not _is_streaming(plugin):
        return plugin
    doubted = replace(listing, against=1, disputed_at=listing.changed_at, agreed_since=None)
    return replace(plugin, listing=doubted)


def is_doubted(plugin: PluginState) -> bool:
    """Return whether only a list with one of our devices shows that kubelet has our list."""
    return plugin.listing.against > 0 or _is_unchecked(plugin)


def _is_unchecked(plugin: PluginState) -> bool:
    """Return whether no read since an odd observation, with the stream open, has shown whose list kubelet has."""
    return plugin.listing.sighted_at >= plugin.stream_opened_at


def sighted(plugin: PluginState, at: float) -> PluginState:
    """Record that another process's socket came or went.

    One of our lists that was under way just then may have come to kubelet after the other plugin's, or after its end,
    and have replaced the list that kubelet had from that. Not the first list of a stream: kubelet opens a stream to the
    plugin that registered last.
    """
    after = replace(plugin, listing=replace(plugin.listing, sighted_at=at))
    changed_at = plugin.listing.changed_at
    crossed = changed_at > plugin.stream_opened_at and at - changed_at < KUBELET_LIST_TAKEN_S
    return _doubted(after) if crossed else after


def read_asked(plugin: PluginState, read: int, at: float) -> PluginState:
    """Note whether a read that was just requested is valid for this resource."""
    wanted = read if at >= comparable_from(plugin) else None
    if plugin.listing.read == wanted:
        return plugin
    return replace(plugin, listing=replace(plugin.listing, read=wanted))


def comparable_from(plugin: PluginState) -> float:
    """Return the time from which a requested read is valid: kubelet has had our list, or has been without it, for long
    enough. Infinite while the resource is not registered."""
    if not (_is_streaming(plugin) or waits_in_contention(plugin)):
        return math.inf
    listing = plugin.listing
    since = max(listing.changed_at, listing.compared_at, plugin.stream_opened_at)
    return since + KUBELET_LIST_TAKEN_S


def not_compared(plugin: PluginState, at: float) -> PluginState:
    """Record that the read came back without kubelet's list."""
    return replace(plugin, listing=replace(plugin.listing, read=None, compared_at=at))


def agreed(plugin: PluginState, at: float, *, asked_at: float) -> PluginState:
    """Record that kubelet has our list. After long enough without a dispute the contention is over.

    `asked_at` is when the read was requested; it clears up no odd observation since then.
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


def disputed(plugin: PluginState, why: str, at: float, *, is_empty: bool) -> PluginState:
    """Record that kubelet has another list. If the read before showed that too, register again, after a wait that grows
    each time.

    `is_empty`: none of the resource's devices is healthy in it.
    """
    listing = plugin.listing
    if waits_in_contention(plugin):
        plugin = not_compared(plugin, at)
        return replace(plugin, retry_at=_sooner(plugin, at)) if is_empty else plugin
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
    return replace(after, retry_at=_sooner(after, at)) if is_empty else after


def _contending(plugin: PluginState, at: float) -> PluginState:
    """Plan to register again, once more against another plugin."""
    listing = plugin.listing
    retry_at = at + _backoff(limits.CONTEND_BACKOFF_S, listing.reclaims)
    return replace(plugin, retry_at=retry_at, listing=replace(listing, reclaims=listing.reclaims + 1))


def _sooner(plugin: PluginState, at: float) -> float:
    """Return when to register where kubelet has no healthy device: no other plugin serves, so little is lost by it."""
    wait_s = min(_backoff(limits.CONTEND_BACKOFF_S, plugin.listing.reclaims - 1), DESERTED_MAX_S)
    return min(math.inf if plugin.retry_at is None else plugin.retry_at, at + wait_s)


def waits_in_contention(plugin: PluginState) -> bool:
    """Return whether the resource waits to register again, because its stream ended in a contention."""
    waits = plugin.bound and not plugin.accepted and not plugin.registering and plugin.retry_at is not None
    return bool(plugin.listing.reclaims) and waits


def next_comparison_at(plugin: PluginState) -> float:
    """Return when the next read of kubelet's list is wanted for this resource; infinite while nothing is odd, once one
    came after the registration."""
    listing = plugin.listing
    if waits_in_contention(plugin) or (_is_streaming(plugin) and listing.against):
        wait_s = limits.KUBELET_LIST_AGAIN_S
    elif _is_streaming(plugin) and listing.reclaims:
        wait_s = limits.LEDGER_S
    elif is_uncompared(plugin):
        # The pod is ready when kubelet is seen to have our list (`reports/readiness.py`): an update of the
        # fleet waits for it.
        return comparable_from(plugin)
    else:
        return math.inf
    return max(listing.compared_at + wait_s, comparable_from(plugin))


def is_uncompared(plugin: PluginState) -> bool:
    """Return whether it is registered and no read since then has shown kubelet's list."""
    return _is_streaming(plugin) and plugin.listing.compared_at < plugin.stream_opened_at


def _backoff(waits_s: tuple[float, ...], failures: int) -> float:
    return waits_s[min(failures, len(waits_s) - 1)]
