"""Every transition of the node's state.

Theory of operation. `step(state, event, at)` is the only function that changes the state, and the registry actor is its
only caller. It is a list of phases (`PHASES_OF_ANY_EVENT`, `PHASES_OF_FACTS`), with the reason for their order. The
derived values that a phase reads (`NodeState.index`, `NodeState.assessments`) are those of the state that it was given.
`snapshot.project` derives the outputs from the state.

Pure: no I/O, no clock (`at` is seconds of the caller's monotonic clock), no logging (`Log` is a value).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core import events, fabric
from gpuactors.core.deviceplugin import calls, listing, registration, specs
from gpuactors.core.deviceplugin.device_lists import publish
from gpuactors.core.host import bindings, inspections, schedule, sets, usage
from gpuactors.core.host.vgpu_names import remembered
from gpuactors.core.kinds.presence import NO_GPU_HERE
from gpuactors.core.ledger import ledger
from gpuactors.core.ledger.identity import resolved, with_ancestors
from gpuactors.core.ledger.releases import record_releases
from gpuactors.core.state import (
    Calls,
    Daemon,
    Host,
    Kubelet,
    NodeState,
    Published,
    with_inspections,
    with_ledger,
    with_plugins,
)
from gpuactors.core.state.claims import ClaimSettings
from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.state.partitions import NO_PARTITIONS
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.domain import DomainSettings
from gpuactors.core.values.effects import Effect, Field, Level, Log, Reply
from gpuactors.core.values.mediated import HostPart, key_of_part
from gpuactors.core.values.model import (
    Call,
    InspectedKey,
    PciAddress,
    PluginState,
    ResourceName,
    Role,
    Settings,
    Token,
)
from gpuactors.core.values.vgpu import CardTypes

CALL_SETTLE_S: Final = 1.0
"""How long a resource's list keeps the devices of an answered call: kubelet 1.36 panics (nil pointer) if a device
vanishes from the list during an Allocate or GetPreferredAllocation that picks it, also shortly after the answer."""

TAKE_OVER_LEDGER_S: Final = 0.1
"""The wait before kubelet's ledger is read again after a predecessor has ended its streams. Until kubelet has the
device lists each millisecond matters, and a read takes two."""

Stepped = tuple[NodeState, list[Effect]]

_REQUESTS: Final = (events.deviceplugin.AllocateAsked, events.deviceplugin.PreStartAsked)
"""The calls that only request facts of the host and of kubelet."""


def initial_state(
    settings: Settings,
    served: Mapping[ResourceName, frozenset[str]] = MappingProxyType({}),
    claim_settings: ClaimSettings | None = None,
    domain_settings: DomainSettings | None = None,
    gpu_settings: GpuSettings | None = None,
    vgpu_types: Mapping[PciAddress, CardTypes] = MappingProxyType({}),
    dead_signs: DeadSigns = MappingProxyType({}),
) -> NodeState:
    """Return the state at start: it knows only the resources that an earlier daemon `served`, with their models, the
    names of vGPU types that one has read, and the signs of dead functions that one has seen. A full scan and a read of
    kubelet's ledger are requested, and a read of the checkpoint if claims are served."""
    wanted = inspections.first_inspections()
    state = NodeState(
        host=Host(
            inspections=replace(wanted, last=wanted.last + 1),
            functions={},
            seen={},
            short={},
            scanned=False,
            uevents="not received yet",
            polls=usage.first_polls(),
            vgpu_types=dict(vgpu_types),
            dead_signs=dict(dead_signs),
        ),
        kubelet=Kubelet(
            socket=None,
            missing="",
            ledger=ledger.first_ledger(wanted.last + 1, lists=not settings.hand_over),
            pending_allocations={},
            resolved={},
            orphans={},
        ),
        calls=Calls(waiting={}, no_removal_until={}),
        published=Published(served=dict(served), device_lists={}, plugins={}, history={}),
        daemon=Daemon(
            settings=settings,
            role=Role.TAKING_OVER if settings.hand_over else Role.SERVING,
            stopping=False,
        ),
        partitions=NO_PARTITIONS if settings.activates_partitions else None,
    )
    if claim_settings is None and domain_settings is None:
        return state
    from gpuactors.core import dra

    return dra.with_claims_served(state, claim_settings, gpu_settings, domain_settings)


class Turn(Struct, frozen=True, gc=False):
    """A step under way."""

    before: NodeState
    """The state before the event."""
    event: events.Event
    at: float
    state: NodeState
    """The state so far."""
    resolved: NodeState
    """The state for which IDs were resolved last."""
    effects: tuple[Effect, ...] = ()
    """The effects so far, in their order."""
    waiting: Mapping[Token, Call] = MappingProxyType({})
    """The calls that waited when they could be answered."""
    answers: tuple[Effect, ...] = ()
    """The answers to some of these calls. They become effects with the lists: a grant names the lists that it has
    changed."""


def apply_event(turn: Turn) -> Turn:
    """Change the part of the state that the event is about."""
    state, effects = _applied(turn.state, turn.event, turn.at)
    return replace(turn, state=state, effects=(*turn.effects, *effects))


def resolve_ids(turn: Turn) -> Turn:
    """Look up the device of each new ID in kubelet's ledger or in a grant; remember the ancestors of one that goes."""
    state = with_ancestors(turn.before, resolved(turn.resolved, turn.state))
    return replace(turn, state=state, resolved=state)


def advance_claims(turn: Turn) -> Turn:
    """Make every transition of a claim that is possible now."""
    state, effects = _claims_advanced(turn.before, turn.state, turn.event, turn.at)
    return replace(turn, state=state, effects=(*turn.effects, *effects))


def request_reads(turn: Turn) -> Turn:
    """Request a poll of groups that appeared or lost a driver, and a read of the ledger for their pods."""
    return replace(turn, state=schedule.poll_brought_forward(turn.before, turn.state, turn.at))


def answer_calls(turn: Turn) -> Turn:
    """Answer the calls whose facts are there; refuse those that cannot wait any longer."""
    state, answers = calls.completed(turn.state, turn.at)
    state = _hold_lists(turn.before, state, answers, turn.at)
    late = list[Effect]()
    if isinstance(turn.event, events.daemon.Ticked):
        state, late = calls.expired(state, turn.at)
    return replace(turn, state=state, waiting=turn.state.calls.waiting, answers=(*answers, *late))


def poll_soon(turn: Turn) -> Turn:
    """Bring the next poll forward if a release is expected."""
    if turn.state.host.polls.refresh.outstanding is not None:
        return turn
    waited_for = calls.waits_for_poll(turn.state)
    return replace(turn, state=schedule.polled_soon(turn.state, turn.at, waited_for=waited_for))


def keep_releases(turn: Turn) -> Turn:
    """Record which devices have lost their owner."""
    return replace(turn, state=record_releases(turn.before, turn.state, turn.at))


def make_lists(turn: Turn) -> Turn:
    """Make the device lists again; resources appear and retire with them."""
    state, changed, logged = publish(turn.before, turn.state, turn.at)
    answers = calls.after_lists([*turn.answers], turn.waiting, changed)
    state = listing.kept(turn.before, state, changed, turn.at)
    return replace(turn, state=state, effects=(*turn.effects, *answers, *logged))


def offer_devices(turn: Turn) -> Turn:
    """Make the offer to claims again."""
    return replace(turn, state=_offered(turn.state))


def follow_partitions(turn: Turn) -> Turn:
    """Tell the partitions of the fabric who uses them now."""
    state, logged = fabric.followed(turn.before, turn.state, turn.event, turn.at)
    return replace(turn, state=state, effects=(*turn.effects, *logged))


Phase = Callable[[Turn], Turn]

PHASES_OF_ANY_EVENT: Final[tuple[Phase, ...]] = (
    apply_event,  # first: all other phases decide with its facts
    resolve_ids,  # before claims and calls: both ask which pod has a device, and the ledger has IDs
    advance_claims,  # before calls: a claim that reserves or returns a GPU decides whether a call may have it
)

PHASES_OF_FACTS: Final[tuple[Phase, ...]] = (
    request_reads,  # before calls: one may have to wait for the poll that is requested here
    answer_calls,  # the overdue ones last: the facts of one may have come with this event
    poll_soon,  # after calls: how soon depends on whether one still waits
    resolve_ids,  # again, before the lists: a grant has named IDs
    keep_releases,  # after all that changes owners; nothing reads it
    make_lists,  # after all that an entry shows: facts, owners, claims and grants
    offer_devices,  # after all others: it depends on them, and none of them reads it
    follow_partitions,  # last: each change of their users counts; a call goes on only after a query
)


def step(state: NodeState, event: events.Event, at: float) -> Stepped:
    """Return the state after `event`, which happened at `at`, and the effects.

    Each phase gets the state of the phase before it, and the values derived from that state. After a call that only
    requests facts, the phases that depend on facts are skipped.
    """
    turn = Turn(before=state, event=event, at=at, state=state, resolved=state)
    for phase in PHASES_OF_ANY_EVENT:
        turn = phase(turn)
    if not (isinstance(event, _REQUESTS) and _is_as_known(state, turn.state)):
        for phase in PHASES_OF_FACTS:
            turn = phase(turn)
    return turn.state, [*turn.effects]


def _is_as_known(before: NodeState, state: NodeState) -> bool:
    """Return whether a call that requests facts has changed nothing but the outstanding requests."""
    parts = (state.kubelet, state.gpus, state.domains)
    return parts == (before.kubelet, before.gpus, before.domains)


def _applied(state: NodeState, event: events.Event, at: float) -> Stepped:
    """Apply the event to the part of the state that it is about."""
    if isinstance(event, events.host.HostEvent):
        after, effects = _host(state, event, at)
        return after, [*effects, *sets.refused(state, after)]
    if isinstance(event, events.host.UsageEvent):
        return usage.observed(state, event, at), []
    if isinstance(event, events.kubelet.LedgerEvent):
        return _ledger(state, event, at)
    if isinstance(event, events.kubelet.KubeletEvent):
        return _kubelet(state, event, at)
    if isinstance(event, events.deviceplugin.PluginEvent):
        return _plugin(state, event, at)
    if isinstance(event, events.deviceplugin.CallEvent):
        return _call(state, event, at)
    if isinstance(event, events.deviceplugin.SpecsWritten):
        return specs.written(state, event), []
    if isinstance(event, events.daemon.ConfigEvent):
        return _config(state, event)
    if isinstance(event, events.daemon.DaemonEvent):
        return _daemon(state, event, at)
    if isinstance(event, events.daemon.Ticked):
        return _ticked(state, at)
    if isinstance(event, events.partitions.PartitionEvent):
        return fabric.applied(state, event, at)
    from gpuactors.core import dra  # all other events are about claims, see below

    return dra.applied(state, event, at)


# --- claims -----------------------------------------------------------------------------------------------
# `dra.py` and `gpus/offer.py` decide about claims and compute domains. They are imported where they are called: a node
# that serves no claims imports neither.


def _claims_advanced(before: NodeState, state: NodeState, event: events.Event, at: float) -> Stepped:
    if not state.serves_claims:
        return state, []
    from gpuactors.core import dra

    return dra.advanced(before, state, event, at)


def _offered(state: NodeState) -> NodeState:
    if state.gpus.claims.settings is None:
        return state
    from gpuactors.core.gpus.offer import offered

    return offered(state)


def _inspections_of_claims(state: NodeState) -> Iterable[InspectedKey]:
    """Return what claims wait to see inspected."""
    if not state.gpus.claims.entries:
        return ()
    from gpuactors.core.gpus.claiming import inspections_waited_for

    return inspections_waited_for(state)


def _claims_deadline(state: NodeState) -> float:
    if not state.serves_claims:
        return math.inf
    from gpuactors.core import dra

    return dra.deadline(state)


# --- the rest of the node ---------------------------------------------------------------------------------


def next_deadline(state: NodeState) -> float:
    """Return when a `Ticked` is due if nothing else happens; infinite if never."""
    plugins = state.published.plugins.values()
    return min(
        inspections.deadline(state.host.inspections),
        schedule.deadline(state),
        _claims_deadline(state),
        fabric.deadline(state),
        *[p.retry_at for p in plugins if p.retry_at is not None],
        *[p.empty_since + limits.RETIRE_EMPTY_AFTER_S for p in plugins if p.empty_since is not None],
        *[call.deadline for call in state.calls.waiting.values()],
        *state.calls.no_removal_until.values(),
    )


def _host(state: NodeState, event: events.host.HostEvent, at: float) -> Stepped:
    match event:
        case events.host.HostChanged():
            wanted = inspections.ask_inspections(
                state.host.inspections, sorted(inspections.hinted(state, event))
            )
            return bindings.released(with_inspections(state, wanted), event), []
        case events.host.UeventsOpened():
            after = _rescanned(state, uevents="", scan_begun=event.scan_begun)
            return after, [Log(Level.INFO, "uevents.opened", {})]
        case events.host.UeventsLost(reason):
            return _rescanned(state, uevents=state.host.uevents), [
                Log(Level.WARNING, "uevents.lost", {"reason": reason, "action": "scanning everything"})
            ]
        case events.host.UeventsUnavailable(reason):
            level = Level.DEBUG if reason == state.host.uevents else Level.WARNING
            return _rescanned(state, uevents=reason, scan_begun=event.scan_begun), [
                Log(level, "uevents.unavailable", {"reason": reason, "action": "scanning everything"})
            ]
        case events.host.HostScanned():
            fields: dict[str, Field] = {"functions": len(event.functions)}
            after = inspections.scanned(state, event, at)
            return after, [
                Log(Level.DEBUG if state.host.scanned else Level.INFO, "host.scanned", fields),
                *_unreadable(state, (*event.functions, *event.mediated)),
                *_without_gpus(state, after),
            ]
        case events.host.ScanFailed(_, reason):
            return inspections.scan_failed(state, event, at), [
                Log(Level.ERROR, "scan.failed", {"reason": reason})
            ]
        case events.host.SetsObserved():
            return sets.observed(state, event)
        case events.host.FunctionInspected():
            return inspections.inspected(state, (event,), at), _unreadable(
                state, (*event.functions, *event.mediated)
            )
        case events.host.FunctionsInspected(several):
            parts: dict[InspectedKey, HostPart] = {f.address: f for one in several for f in one.functions}
            parts |= {device.key: device for one in several for device in one.mediated}
            return inspections.inspected(state, several, at), _unreadable(state, tuple(parts.values()))
        case events.host.InspectionFailed(_, address, reason):
            is_known = event.shortage and state.host.short.get(address) == reason
            # It hung in a scan, and again now: this is the second inspection.
            part = None if event.shortage else inspections.known(state.host, address)
            return inspections.inspection_failed(state, event, at), [
                Log(
                    Level.DEBUG if is_known else Level.WARNING,
                    "inspection.failed",
                    {"address": address, "reason": reason},
                ),
                *_unreadable(state, (part,) if part is not None else ()),
            ]


def _rescanned(state: NodeState, *, uevents: str, scan_begun: bool = True) -> NodeState:
    """Request a full scan, as uevents were, are or will be missed; an outstanding scan that has not begun is enough.
    What a call or a claim waits for is inspected again at once, as neither waits for the scan."""
    wanted = state.host.inspections
    if scan_begun or wanted.whole.outstanding is None:
        wanted = inspections.ask_scan(wanted)
    waited_for = {*calls.inspections_waited_for(state), *_inspections_of_claims(state)}
    wanted = inspections.ask_inspections(wanted, sorted(waited_for))
    return replace(state, host=replace(state.host, inspections=wanted, uevents=uevents))


def _ledger(state: NodeState, event: events.kubelet.LedgerEvent, at: float) -> Stepped:
    match event:
        case events.kubelet.LedgerRead():
            after = ledger.ledger_read(state, event, at)
            contested: list[Effect] = []
            before = state.kubelet.ledger
            if event.read == before.refresh.outstanding:
                after, contested = listing.compared(after, event.read, event.healthy, at)
            is_same = after.kubelet.ledger.entries is before.entries and before.problem is None
            level = Level.DEBUG if is_same and before.read else Level.INFO
            fields: dict[str, Field] = {
                "source": str(after.kubelet.ledger.source),
                "devices": len(after.kubelet.ledger.entries),
                "claims": len(event.claims),
            }
            return after, [
                Log(level, "ledger.read", fields),
                *contested,
                *_damaged(state, after.kubelet.ledger.damaged),
            ]
        case events.kubelet.LedgerUnreadable(_, reason):
            level = Level.DEBUG if state.kubelet.ledger.problem == reason else Level.WARNING
            after = ledger.ledger_unreadable(state, event, at)
            return listing.compared(after, event.read, None, at)[0], [
                Log(level, "ledger.unreadable", {"reason": reason}),
                *_damaged(state, after.kubelet.ledger.damaged),
            ]


def _damaged(before: NodeState, damaged: str) -> list[Effect]:
    """Return the log line for a newly damaged part of kubelet's ledger file, if any."""
    if not damaged or damaged == before.kubelet.ledger.damaged:
        return []
    return [Log(Level.WARNING, "ledger.damaged", {"reason": damaged})]


def _daemon(state: NodeState, event: events.daemon.DaemonEvent, at: float) -> Stepped:
    match event:
        case events.daemon.PredecessorGone(how, before, types, signs):
            if state.daemon.role is Role.SERVING:
                return state, []
            # The predecessor's last grants are only in kubelet's ledger.
            refresh = state.kubelet.ledger.refresh.due_by(at + TAKE_OVER_LEDGER_S)
            unread = replace(state.kubelet.ledger, read=0, read_at=-math.inf, refresh=refresh)
            served = {r: models | state.published.served.get(r, frozenset()) for r, models in before.items()}
            served = {**state.published.served, **served}
            state = replace(
                state,
                daemon=replace(state.daemon, role=Role.SERVING),
                host=inspections.with_remembered_signs(
                    replace(state.host, vgpu_types=remembered(state.host.vgpu_types, types)), signs
                ),
                kubelet=replace(state.kubelet, ledger=unread),
                published=replace(state.published, served=served),
            )
            if not unread.names_owners:  # nothing is offered before
                state = schedule.ask_ledger(state, at, lists=True)
            return state, [Log(Level.INFO, "daemon.serving", {"predecessor": how})]
        case events.daemon.HandOverRequested():
            state, refused = calls.handed_over(state, at)
            return replace(state, daemon=replace(state.daemon, role=Role.HANDED_OVER)), [
                Log(Level.INFO, "daemon.handed_over", {}),
                *refused,
            ]
        case events.daemon.SuccessorLost():
            if state.daemon.role is not Role.HANDED_OVER:
                return state, []
            # The successor may have written the CDI files: they are looked at again.
            published = replace(state.published, written={}, unwritten={}, specs_are_known=False)
            daemon = replace(state.daemon, role=Role.TAKING_OVER)
            return replace(state, daemon=daemon, published=published), [
                Log(Level.WARNING, "daemon.successor_lost", {})
            ]
        case events.daemon.ShutdownRequested():
            state = calls.stopping(state, at)
            return replace(state, daemon=replace(state.daemon, stopping=True)), [
                Log(Level.INFO, "daemon.stopping", {})
            ]


def _config(state: NodeState, event: events.daemon.ConfigEvent) -> Stepped:
    """Use the settings of a changed configuration file, or say why not. Devices and names are derived from the settings
    as a whole; a full scan by the new selectors finds the functions that no older one has chosen."""
    match event:
        case events.daemon.ConfigUsed(keys, selectors, vgpu_types):
            settings = replace(state.daemon.settings, selectors=selectors, vgpu_types=vgpu_types)
            after = replace(state, daemon=replace(state.daemon, settings=settings, config_unused=""))
            after = with_inspections(after, inspections.ask_scan(state.host.inspections))
            return after, [
                Log(Level.INFO, "config.used", {"changed": ", ".join(keys) or "nothing"}),
                *_without_gpus(state, after),
            ]
        case events.daemon.ConfigUnused("", keys):
            reason = f"{', '.join(keys)} changed, which needs a restart: nothing of the change is used"
            log = Log(Level.WARNING, "config.restart_needed", {"keys": ", ".join(keys)})
        case events.daemon.ConfigUnused(reason):
            reason = f"it is refused: {reason}"
            log = Log(Level.ERROR, "config.refused", {"reason": event.reason})
    return replace(state, daemon=replace(state.daemon, config_unused=reason)), [log]


def _without_gpus(before: NodeState, after: NodeState) -> list[Effect]:
    """Return the log line for a node that is to offer GPUs and has none any more, or at the first scan."""
    is_to_offer = after.daemon.settings.device_plugin or after.gpus.claims.settings is not None
    if not is_to_offer or not after.host.scanned or after.index.devices:
        return []
    if before.host.scanned and not before.index.devices:
        return []
    return [Log(Level.WARNING, "host.no_gpus", {"reason": NO_GPU_HERE})]


def _unreadable(state: NodeState, parts: tuple[HostPart, ...]) -> list[Effect]:
    """Return the log lines for functions that cannot be read, once for each: one may be a GPU that no list can show.

    A function is logged only after a second inspection with the same result: during a hot plug sysfs shows a function
    before its attributes (drivers/base/core.c, device_add).
    """
    return [
        Log(Level.WARNING, "function.unreadable", {"address": key_of_part(part), "reason": part.fault})
        for part in parts
        if part.fault is not None and _is_to_be_logged(state, part)
    ]


def _is_to_be_logged(state: NodeState, part: HostPart) -> bool:
    last = inspections.known(state.host, key_of_part(part))
    if last is None or last.fault is None:
        return False
    retry = state.host.inspections.retries.get(key_of_part(part))
    return last.fault != part.fault or retry is None or retry.attempt == 0


def _kubelet(state: NodeState, event: events.kubelet.KubeletEvent, at: float) -> Stepped:
    match event:
        case events.kubelet.KubeletAppeared(socket):
            if socket == state.kubelet.socket:
                return state, []
            plugins = {r: registration.kubelet_appeared(p, at) for r, p in state.published.plugins.items()}
            asking = replace(state.kubelet.ledger.asking, has_get=True)
            state = with_ledger(state, replace(state.kubelet.ledger, asking=asking))
            state = schedule.ask_ledger(state, at, lists=True)
            return replace(
                state,
                kubelet=replace(state.kubelet, socket=socket, missing=""),
                published=replace(state.published, plugins=plugins),
            ), [Log(Level.INFO, "kubelet.appeared", {})]
        case events.kubelet.KubeletGone(reason):
            if state.kubelet.socket is None and state.kubelet.missing == reason:
                return state, []
            plugins = {r: registration.kubelet_gone(p, reason) for r, p in state.published.plugins.items()}
            return replace(
                state,
                kubelet=replace(state.kubelet, socket=None, missing=reason),
                published=replace(state.published, plugins=plugins),
            ), [Log(Level.WARNING, "kubelet.gone", {"reason": reason})]
        case events.kubelet.ForeignSocketsSeen():
            return listing.foreign_sockets_seen(state, event, at), []


def _plugin(state: NodeState, event: events.deviceplugin.PluginEvent, at: float) -> Stepped:
    before = state.published.plugins.get(event.resource)
    if before is None:  # it has been retired meanwhile
        return state, []
    missing = state.kubelet.missing or "kubelet's socket has not been checked yet"
    absence = missing if state.kubelet.socket is None else None
    match event:
        case events.deviceplugin.SocketBound(_, bind):
            after = registration.socket_bound(before, bind, absence)
        case events.deviceplugin.SocketFailed(_, bind, reason):
            after = registration.socket_failed(before, bind, reason, at)
        case events.deviceplugin.RegisterAnswered(_, register, failure):
            after = registration.register_answered(before, register, failure, at)
        case events.deviceplugin.StreamOpened(_, stream):
            after = registration.stream_opened(before, stream, at)
        case events.deviceplugin.StreamEnded(_, stream):
            after = registration.stream_ended(before, stream, absence, at)
    state = with_plugins(state, {**state.published.plugins, event.resource: after})
    if isinstance(event, events.deviceplugin.StreamEnded):
        state = listing.stream_ended(before, state, event, at)
    return state, _registration_change(event.resource, before, after)


def _registration_change(resource: ResourceName, before: PluginState, after: PluginState) -> list[Effect]:
    """Return the log line for a change of a resource's registration with kubelet, if it changed."""
    if registration.is_registered(after) and not registration.is_registered(before):
        return [Log(Level.INFO, "plugin.registered", {"resource": resource})]
    if after.problem != before.problem and after.problem is not None:
        failed = (
            after.bind_failures > before.bind_failures
            or after.register_failures > before.register_failures
            or (before.accepted and not after.accepted)
        )
        # The steps of a successful registration are for debugging only, and a missing kubelet has a line of its own.
        level = Level.WARNING if failed else Level.DEBUG
        return [Log(level, "plugin.unregistered", {"resource": resource, "reason": after.problem})]
    return []


def _call(state: NodeState, event: events.deviceplugin.CallEvent, at: float) -> Stepped:
    match event:
        case events.deviceplugin.AllocateAsked() | events.deviceplugin.PreStartAsked():
            return calls.asked(state, event, at)
        case events.deviceplugin.PreferenceAsked():
            until = {**state.calls.no_removal_until, event.resource: at + CALL_SETTLE_S}
            after = replace(state, calls=replace(state.calls, no_removal_until=until))
            return after, [calls.preferred(state, event)]
        case events.deviceplugin.CallAbandoned(token):
            return calls.abandoned(state, token), []


def _ticked(state: NodeState, at: float) -> Stepped:
    state = schedule.due(inspections.due(state, at), at)
    plugins = _each(state.published.plugins, lambda p: registration.due(p, at))
    held = {r: until for r, until in state.calls.no_removal_until.items() if until > at}
    return replace(
        state,
        published=replace(state.published, plugins=plugins),
        calls=replace(state.calls, no_removal_until=held),
    ), []


def _each(
    plugins: Mapping[ResourceName, PluginState], change: Callable[[PluginState], PluginState]
) -> dict[ResourceName, PluginState]:
    return {resource: change(plugin) for resource, plugin in plugins.items()}


def _hold_lists(before: NodeState, after: NodeState, answers: list[Effect], at: float) -> NodeState:
    """Keep the devices in a resource's list after an answer, for as long as kubelet may still use them."""
    tokens = {effect.token for effect in answers if isinstance(effect, Reply)}
    resources = {call.resource for token, call in before.calls.waiting.items() if token in tokens}
    if not resources:
        return after
    until = dict.fromkeys(resources, at + CALL_SETTLE_S)
    return replace(
        after, calls=replace(after.calls, no_removal_until={**after.calls.no_removal_until, **until})
    )
