"""A world of compute domains: channels, their daemons and the node's label. Only the core.

What the daemon reads of the node (the host's functions, IMEX, kubelet's ledger) and of the disk at its start is
answered at once; what it asks of the API server and what it writes, one by one. NVIDIA's controller says Ready of the
node as long as the domain's daemon is prepared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.outputs import CheckpointWanted, ClaimsWanted, FilesAct
from gpuactors.core.domains.config import chosen
from gpuactors.core.domains.exclusion import DAEMON_SETTLES_S
from gpuactors.core.domains.outputs import DomainsWanted, LabelPatchWanted, domains_wanted
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActFailed
from gpuactors.core.events.domains import (
    DomainRead,
    DomainsTouched,
    ImexRead,
    LabelPatched,
    LabelRead,
    NodeTouched,
)
from gpuactors.core.events.host import HostScanned
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, StoredEntry
from gpuactors.core.state.domains import Domains
from gpuactors.core.step import initial_state
from gpuactors.core.values.claim import Claim, ClaimName, ClaimsOf, ClaimUid
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.domain import (
    DRIVER,
    Clique,
    ComputeDomain,
    DeviceKind,
    DomainConfig,
    DomainUid,
    LabelChange,
    NodeLabel,
)
from gpuactors.core.values.model import ClaimedDevice, Pod
from tests.core.builders import SETTINGS, ledger_read
from tests.core.claims.on_disk import read_back, stored
from tests.core.claims.small_world import ClaimsNode, ClaimsOutside, calls, forced_deletion
from tests.core.domains.domain_core import DOMAIN_SETTINGS, IMEX, NODE
from tests.core.orders import Happening, SmallWorld, WrongError, all_answered, begun, until_answered
from tests.core.sameness import of_claims, of_ledger, ranked

SOMEBODY_S: Final = "33333333-3333-3333-3333-333333333333"
"""The label's value that somebody else sets."""

PASSING_S: Final = 36.0
"""How far the clock jumps: beyond the deadline of a call and all retries."""

_LIVE: Final = OWNING | {ClaimState.WAITING}
_KEPT: Final = OWNING - {ClaimState.RELEASING}
_HAVE_DAEMON: Final = (ClaimState.PREPARED, ClaimState.VERIFYING)


# --- the world ----------------------------------------------------------------------------------------------------


class Subject(Struct, frozen=True):
    """A claim of the world, and what it is for: also where the daemon has not read it."""

    claim: Claim
    domain: DomainUid
    device: str

    @property
    def is_channel(self) -> bool:
        return self.device.startswith(DeviceKind.CHANNEL)


def _subject(claim: Claim) -> Subject:
    config = chosen(claim)
    assert isinstance(config, DomainConfig)
    assert claim.results
    return Subject(claim, config.domain, claim.results[0].device)


class World(Struct, frozen=True):
    """The node before the daemon's first start."""

    subjects: Mapping[ClaimUid, Subject]
    channels: int
    begins: tuple[str, ...]
    """What has happened before the orders begin."""

    @property
    def claims(self) -> list[ClaimName]:
        return [subject.claim.name for subject in self.subjects.values()]


def world_of(*claims: Claim, channels: int = 1, begins: Iterable[str] = ()) -> World:
    """A world with these claims."""
    return World({claim.name.uid: _subject(claim) for claim in claims}, channels, tuple(begins))


class Outside(ClaimsOutside, frozen=True, kw_only=True):
    """The node without the daemon, its kubelet and its API server."""

    world: World
    label: str | None = None
    is_edited: bool = False
    """Somebody has changed the label since the daemon read it, or patched it."""
    found: str | None = None
    """What was there when the daemon read the label first."""
    is_stale: bool | None = None
    """No claim had a channel when the daemon knew that and what each claim is for: what was there counts as left by a
    daemon before it. None: it does not know yet."""
    held: frozenset[str] = frozenset()
    """The domains whose label a claim had while it had a channel, and that claims have lived of ever since, one
    following the other; nobody else has changed the label meanwhile."""
    ready: frozenset[DomainUid] = frozenset()
    """The domains that the API server has said to be Ready here since their label was added."""
    gone: frozenset[DomainUid] = frozenset()
    """Domains that somebody has deleted; NVIDIA's controller has taken their label away."""
    adds: int = 0
    """How often the label of such a domain has been wanted since."""
    old: frozenset[ClaimUid] = frozenset()
    """Claims of daemons that were prepared when the label was last taken away: Kubernetes ends these daemons, soon."""
    old_until: float = 0.0
    """Those that are still there then are not ended."""

    @property
    def listed(self) -> tuple[ClaimedDevice, ...]:
        """Kubelet lists what it has prepared, for pods that it knows."""
        return tuple(
            ClaimedDevice(DRIVER, NODE, of.device, str(of.claim.name), Pod("default", of.claim.name.name, ""))
            for uid, of in self.world.subjects.items()
            if uid in self.kubelet.prepared - self.deleted
        )


class Node(ClaimsNode[Outside], frozen=True):
    """The world and the daemon's state."""

    of = ClaimsOf.DOMAINS
    wanted: DomainsWanted
    """Of the state."""

    @property
    def orders(self) -> ClaimsWanted:
        return self.wanted.claims

    def in_api(self, claim: ClaimName) -> Claim:
        return self.outside.world.subjects[claim.uid].claim

    def in_state(self, state: NodeState) -> Self:
        return replace(self, state=state, wanted=domains_wanted(state))

    def noticed(self, before: Self, event: Event) -> Self:
        return _counted(before, _watched(self))

    def check_step(self, before: Self) -> None:
        check_always(before, self)

    def check_prepared(self, before: Self, uid: ClaimUid) -> None:
        super().check_prepared(before, uid)
        of = self.outside.world.subjects[uid]
        if of.is_channel and before.entries[uid].state is ClaimState.VERIFYING:
            _check_usable(self, of)

    def answer_at_once(self) -> Event | None:
        if (scan := self.state.host.inspections.whole.outstanding) is not None:
            return HostScanned(scan, ())
        if (read := self.state.kubelet.ledger.refresh.outstanding) is not None:
            return ledger_read(read, claims=self.outside.listed)
        if self.orders.disk.load and not self.claims.loaded:
            return read_back(self.outside.disk, self.of)
        return ImexRead(self.wanted.imex, IMEX) if self.wanted.imex else None

    def asked(self, claim: ClaimName, *, prepares: bool) -> Self:
        old = self.outside.old if prepares else self.outside.old - {claim.uid}
        return ClaimsNode.asked(self.with_(old=old), claim, prepares=prepares)


N = TypeVar("N", bound=Node)


def start(world: World) -> Node:
    """A daemon that has started in this world."""
    return begun(_started(Outside(world=world), 0.0), happenings(world), world.begins)


def _started(outside: Outside, at: float) -> Node:
    settings = replace(DOMAIN_SETTINGS, channels=outside.world.channels)
    outside = replace(
        outside,
        is_edited=False,
        found=None,
        is_stale=None,
        held=frozenset(),
        ready=frozenset(),
        old=frozenset(),
    )  # `old`: a daemon of ours that starts does not know since when a label is there
    state = initial_state(SETTINGS, domain_settings=settings)
    return Node(outside, state, at, domains_wanted(state)).ticked(at)


# --- the daemon ---------------------------------------------------------------------------------------------------


def _watched(node: N) -> N:
    """The node with what follows for the label from the claims as they are now."""
    o = node.outside
    if o.is_stale is None and node.state.domains.label.is_read:
        is_read = all(entry.claim is not None for entry in node.entries.values() if entry.state in OWNING)
        node = node.with_(is_stale=not _channels(node, OWNING)) if is_read else node
    owned = {of.domain for of, _ in _channels(node, OWNING)}
    live = {of.domain for of, _ in _channels(node, _LIVE)}
    held = frozenset((o.held | (owned & {o.label})) & live)
    return node if held == o.held else node.with_(held=held)


def _counted(before: N, node: N) -> N:
    """The node with a new patch counted that adds the label of a domain that was deleted."""
    wanted, o = node.wanted.label_patch, node.outside
    if wanted is None or wanted == before.wanted.label_patch:
        return node
    is_back = wanted.patch.change is LabelChange.ADD and wanted.patch.value in o.gone
    return node.with_(adds=o.adds + 1) if is_back else node


# --- what kubelet and others do -----------------------------------------------------------------------------------


def edited(node: Node, value: str | None) -> Node:
    """Somebody changes the label; our watch of the Node says so."""
    node = _taken_away(node) if value is None else node
    return node.with_(label=value, is_edited=True, held=frozenset()).stepped(NodeTouched())


def _taken_away(node: Node) -> Node:
    """The label goes: Kubernetes ends the daemons."""
    o = node.outside
    old = o.kubelet.prepared & {uid for uid, of in o.world.subjects.items() if not of.is_channel}
    return node.with_(label=None, old=old, old_until=node.at + DAEMON_SETTLES_S)


def domain_deleted(node: Node, domain: DomainUid) -> Node:
    """Somebody deletes a domain, and NVIDIA's controller takes its label away."""
    node = node.with_(gone=node.outside.gone | {domain})
    return edited(node, None) if node.outside.label == domain else node.stepped(DomainsTouched())


def restarted(node: Node) -> Node:
    """The daemon is killed and starts again: what is on disk counts, and kubelet's calls fail."""
    return _started(replace(node.outside, kubelet=node.outside.kubelet.failed()), node.at)


def lost(node: Node) -> Node:
    """The daemon is killed, and its checkpoint lost: the claims whose files are there are found by these."""
    o = node.outside
    names = (o.world.subjects[uid].claim.name for uid in sorted(o.files))
    found = tuple(StoredEntry(name, ClaimState.PREPARED, None, None) for name in names)
    return restarted(node.with_(disk=CheckpointWanted(0, found, ())))


def passed(node: Node, seconds: float = PASSING_S) -> Node:
    """Time passes; what is due in the meantime is due now."""
    at = node.at + seconds
    old = node.outside.old if at < node.outside.old_until else frozenset()
    return node.with_(old=old).ticked(at)


# --- what the daemon asks for ---------------------------------------------------------------------------------------


def domain_read(node: Node) -> Node:
    """The API server answers the first read of a domain."""
    o, read = node.outside, node.wanted.domains[0]
    daemons = (uid for uid, of in o.world.subjects.items() if not of.is_channel and of.domain == read.uid)
    is_ready = any(uid in o.kubelet.prepared for uid in daemons)
    node = node.with_(ready=o.ready | {read.uid} if is_ready else o.ready - {read.uid})
    found = ComputeDomain(read.uid, "some", "default", is_deleted=read.uid in o.gone)
    clique = Clique(frozenset({NODE} if is_ready else ()))
    return node.stepped(DomainRead(read.number, read.uid, found, clique))


def label_read(node: Node) -> Node:
    """The API server answers the read of the label."""
    o = node.outside
    found = o.found if node.state.domains.label.is_read else o.label
    return node.with_(is_edited=False, found=found).stepped(
        LabelRead(node.wanted.label_read, NodeLabel(o.label))
    )


def _patch(node: Node) -> LabelPatchWanted:
    wanted = node.wanted.label_patch
    assert wanted is not None
    return wanted


def patched_there(node: Node) -> Node:
    """The patch is made at the API server; its answer is under way. The same node if its test fails."""
    o, patch = node.outside, _patch(node).patch
    if patch.change is LabelChange.ADD:
        if o.label is not None:
            return node
        return node.with_(label=patch.value, is_edited=False, ready=o.ready - {patch.value})
    if o.label != patch.value:
        return node
    _check_removal(node, patch.value, OWNING)
    return _taken_away(node).with_(is_edited=False)


def label_patched(node: Node) -> Node:
    """The patch is answered."""
    after = patched_there(node)
    return conflicted(node) if after is node else after.stepped(LabelPatched(_patch(node).number))


def conflicted(node: Node) -> Node:
    """The label is another one; also where somebody has changed it, and changed it back."""
    return node.stepped(LabelPatched(_patch(node).number, "the label is another one", conflict=True))


def patch_lost(node: Node) -> Node:
    """The patch is made, and its answer lost."""
    return patched_there(node).stepped(LabelPatched(_patch(node).number, "the connection broke"))


def _first_act(node: Node) -> FilesAct:
    return min(node.wanted.claims.files.values(), key=lambda act: act.number)


def files_failed(node: Node) -> Node:
    """It is not."""
    return node.stepped(ActFailed(_first_act(node).number, "the disk is full", driver_kind=ClaimsOf.DOMAINS))


ANSWERS: Final[tuple[Happening[Node], ...]] = (
    Happening("a claim is read", lambda n: bool(n.wanted.claims.reads), Node.claim_read),
    Happening("a domain is read", lambda n: bool(n.wanted.domains), domain_read),
    Happening("the label is read", lambda n: bool(n.wanted.label_read), label_read),
    Happening("the label is patched", lambda n: n.wanted.label_patch is not None, label_patched),
    Happening(
        "the checkpoint is written",
        lambda n: n.wanted.claims.disk.checkpoint is not None,
        Node.checkpoint_written,
    ),
    Happening("files are done", lambda n: bool(n.wanted.claims.files), lambda n: n.files_done(_first_act(n))),
)
"""What the daemon asks for is done, each by itself."""


def all_done(node: Node) -> Node:
    """Everything that the daemon asks for is done."""
    return all_answered(node, ANSWERS)


# --- what happens ---------------------------------------------------------------------------------------------------


def _is_patched(node: Node) -> bool:
    return node.wanted.label_patch is not None


def happenings(world: World) -> tuple[Happening[Node], ...]:
    """Everything that can happen, in no order."""
    return (
        *calls(world.claims),
        forced_deletion(world.claims[0]),
        *ANSWERS,
        Happening("all that is asked for is done", lambda _: True, all_done),
        Happening("a patch conflicts", _is_patched, conflicted),
        Happening("a patch's answer is lost", _is_patched, patch_lost),
        Happening("files fail", lambda n: bool(n.wanted.claims.files), files_failed),
        Happening(
            "somebody sets the label",
            lambda n: n.outside.label != SOMEBODY_S,
            lambda n: edited(n, SOMEBODY_S),
        ),
        Happening(
            "somebody removes the label",
            lambda n: n.outside.label is not None,
            lambda n: edited(n, None),
        ),
        *(
            Happening(
                f"the domain {domain[0]} is deleted",
                partial(lambda domain, node: domain not in node.outside.gone, domain),
                partial(lambda domain, node: domain_deleted(node, domain), domain),
            )
            for domain in (next(iter(world.subjects.values())).domain,)
        ),
        Happening("the daemon restarts", lambda _: True, restarted),
        Happening("the checkpoint is lost", lambda n: n.outside.disk is not None, lost),
        Happening("time passes", lambda _: True, passed),
        Happening(
            "the label's time is over",
            lambda n: n.at < n.state.domains.label.lingers_until < math.inf,
            lambda n: passed(n, n.state.domains.label.lingers_until - n.at),
        ),
    )


# --- what must hold after each step -----------------------------------------------------------------------------------


def _channels(node: Node, states: Iterable[ClaimState]) -> list[tuple[Subject, ClaimRecord]]:
    """The channels' claims in these states."""
    subjects = node.outside.world.subjects
    found = ((subjects[uid], entry) for uid, entry in node.entries.items() if entry.state in states)
    return [(of, entry) for of, entry in found if of.is_channel]


def check_always(before: Node, node: Node) -> None:
    """After every event."""
    o = node.outside
    _check_owners("have", [o.world.subjects[u] for u, e in node.entries.items() if e.state in OWNING])
    _check_owners("are prepared with", [o.world.subjects[uid] for uid in sorted(o.kubelet.prepared)])
    if o.held - {o.label}:
        raise WrongError(f"the label is {o.label}, and was {[*o.held]}, of which claims live")
    for call in o.kubelet.calls.values():
        if call.at + limits.CLAIM_ANSWER_S <= node.at:
            raise WrongError(f"a call about {call.uid} is not answered within {limits.CLAIM_ANSWER_S:g} s")
    for uid in o.kubelet.prepared - o.deleted:
        _check_running(node, uid)
    for uid, act in node.wanted.claims.files.items():
        if act.claim is not None and uid not in stored(o.disk):
            raise WrongError(f"files of {uid} are to be written, and the checkpoint does not say so")
    for of, entry in _channels(node, (ClaimState.WRITING,)):
        known = before.entries.get(entry.name.uid)
        if known is not None and known.state is ClaimState.BINDING:
            _check_usable(node, of)
    patch = node.wanted.label_patch
    if patch is not None and patch != before.wanted.label_patch:
        _check_patch(node, patch)


def _check_owners(words: str, owners: list[Subject]) -> None:
    names = [str(of.claim.name) for of in owners]
    if len({of.device for of in owners}) < len(owners):
        raise WrongError(f"two claims {words} one device: {names}")
    if len({of.domain for of in owners if of.is_channel}) > 1:
        raise WrongError(f"claims {words} channels of two domains: {names}")


def _check_running(node: Node, uid: ClaimUid) -> None:
    """Kubelet runs containers with the claim, or may start one that has ended, without a call to us. Whether it goes on
    is being decided where a prepare has come again."""
    o, entry = node.outside, node.entries.get(uid)
    if o.kubelet.waits_for(o.world.subjects[uid].claim.name, prepares=True):
        return
    if node.state.domains.claims.loaded and (entry is None or entry.state not in _KEPT):
        raise WrongError(f"kubelet runs containers with {uid}, and the claim is {entry and entry.state}")
    if uid not in o.files:
        raise WrongError(f"kubelet runs containers with {uid}, and its files are gone")


def _check_usable(node: Node, of: Subject) -> None:
    """A channel that a claim has waited for is usable: the label, the daemon's claim, its readiness."""
    o = node.outside
    if o.label != of.domain and not o.is_edited:
        raise WrongError(f"{of.claim.name} gets its channel, and the label is {o.label}")
    daemons = (uid for uid, s in o.world.subjects.items() if not s.is_channel and s.domain == of.domain)
    there = {u for u in daemons if u in node.entries and node.entries[u].state in _HAVE_DAEMON}
    if not there:
        raise WrongError(f"{of.claim.name} gets its channel, and its domain has no daemon here")
    if there <= o.old and not o.is_edited:
        raise WrongError(f"{of.claim.name} gets its channel, and its domain's daemon is about to end")
    if of.domain not in o.ready:
        raise WrongError(f"{of.claim.name} gets its channel, and its domain was not Ready since the label")


def _check_patch(node: Node, wanted: LabelPatchWanted) -> None:
    """When a patch is wanted that was not before."""
    o, patch = node.outside, wanted.patch
    if patch.change is LabelChange.REMOVE:
        _check_removal(node, patch.value, _LIVE)
        return
    needing = (of for of, e in _channels(node, _KEPT) if e.state is not ClaimState.RESERVED)
    if not any(of.domain == patch.value and of.claim.name.uid in stored(o.disk) for of in needing):
        raise WrongError(f"the label is to be {patch.value}, and no claim of that domain is on disk")
    if o.adds > 1:
        raise WrongError(f"the label is to be {patch.value} once more, and the domain is deleted")


def _check_removal(node: Node, value: str, live: Iterable[ClaimState]) -> None:
    o = node.outside
    if value == SOMEBODY_S and not (o.is_stale and o.found == value):
        raise WrongError("the label that somebody else has set is removed")
    if lives := [str(of.claim.name) for of, _ in _channels(node, live) if of.domain == value]:
        raise WrongError(f"the label {value} is removed, and {lives} live")
    on_disk = (o.world.subjects[uid] for uid in stored(o.disk))
    if ended := [str(of.claim.name) for of in on_disk if of.is_channel and of.domain == value]:
        raise WrongError(f"the label {value} is removed, and {ended} are still on disk")


# --- what must hold in the end ----------------------------------------------------------------------------------------


def check_settled(node: Node, met: set[object]) -> None:
    """When everything is answered, the label is there exactly while a claim needs it; when all claims are unprepared,
    nothing is left, and the channel can be claimed again. `met` are the nodes, on the way to each of these ends, of
    which this is known."""
    settled = _answered(node, "settled", met)
    settled = settled and _answered(passed(settled), "settled, later", met)
    if settled is None:
        return
    if (lingers_s := settled.state.domains.label.lingers_until - settled.at) < math.inf:
        settled = all_done(passed(settled, lingers_s))
    if settled.outside.label == SOMEBODY_S:
        if settled.outside.is_stale and settled.outside.found == SOMEBODY_S:
            raise WrongError("a stale label stays")
        settled = all_done(edited(settled, None))
    # A claim of no pod is released, what failed is tried again, and then the label lingers.
    for _ in range(4):
        if _wrong_label(settled):
            settled = all_done(passed(settled))
    if wrong := _wrong_label(settled):
        raise WrongError(wrong)
    ended: Node | None = settled.with_(deleted=frozenset())
    for claim in settled.outside.world.claims:
        ended = ended and ended.asked(claim, prepares=False)
    ended = ended and _answered(ended, "ended", met)
    for passing in range(3):  # the tombstones are forgotten
        ended = ended and _answered(passed(ended), f"ended, {passing}", met)
    if ended is not None:
        _check_nothing(ended)
        _check_claimed_again(ended.with_(gone=frozenset()))


def _answered(node: Node, end: str, met: set[object]) -> Node | None:
    """As `all_answered`; None if a node on the way is known to come to this end."""
    for on_the_way in until_answered(node, ANSWERS):
        key = end, canonical(on_the_way)
        if key in met:
            return None
        met.add(key)
    return on_the_way


def _wrong_label(node: Node) -> str:
    """Of a claim that is found by its files, and that the API server has no more, nobody knows what it is for: then the
    label stays as it is."""
    owners = _channels(node, OWNING)
    of_claims_read = {of.domain for of, entry in owners if entry.claim is not None}
    if of_claims_read & node.outside.gone and node.outside.label is None:
        return ""
    needed: set[str | None] = {*of_claims_read}
    unread = {of.domain for of, entry in owners if entry.claim is None}
    if node.outside.label in (needed or {None, *unread}):
        return ""
    return f"the label is {node.outside.label}, and claims live of {[*needed, *unread]}"


def _check_nothing(node: Node) -> None:
    o, claims = node.outside, node.state.domains.claims
    if o.kubelet.calls or claims.calls:
        raise WrongError(f"calls were never answered: {dict(o.kubelet.calls)}")
    if claims.entries or o.files or stored(o.disk) or claims.reads or node.state.domains.views:
        raise WrongError(f"something is left: {dict(claims.entries)}, files {o.files}, disk {stored(o.disk)}")
    if o.label is not None:
        raise WrongError(f"no claim is left, and the label is {o.label}")


def _check_claimed_again(node: Node) -> None:
    """The first claim, and its domain's daemon."""
    subjects = node.outside.world.subjects
    first = next(iter(subjects.values()))
    again = {
        u for u, of in subjects.items() if of is first or (of.domain == first.domain and not of.is_channel)
    }
    for uid in sorted(again):
        node = node.asked(subjects[uid].claim.name, prepares=True)
    node = all_done(passed(all_done(node), DOMAIN_READ_S))
    if node.outside.kubelet.prepared != again:
        raise WrongError(f"the channel cannot be claimed again: {[e.problem for e in node.entries.values()]}")


def small_world(world: World) -> SmallWorld[Node]:
    """All that can happen there."""
    met: set[object] = set()
    return SmallWorld(start(world), happenings(world), lambda node: check_settled(node, met), canonical)


# --- what makes two nodes the same ------------------------------------------------------------------------------------


def canonical(node: Node) -> object:
    """What makes two nodes the same for all that can follow, but for the reasons of refusals."""
    o, domains, at = node.outside, node.state.domains, node.at
    ledger = node.state.kubelet.ledger
    own = ranked(_numbers(domains))
    return (
        (
            o.label,
            o.is_edited,
            o.found,
            o.is_stale,
            o.held,
            o.ready,
            _disk(o),
            frozenset(o.files),
            (o.deleted, o.gone, o.adds, o.old, o.old_until - at if o.old else 0.0),
            o.kubelet.key,
        ),
        tuple(sorted(call.at - at for call in o.kubelet.calls.values())),
        node.state.host.scanned,
        of_ledger(node.state, ranked((0, ledger.read, ledger.refresh.outstanding or 0, ledger.done)), at),
        of_claims(domains.claims, own, at),
        of_reads(domains, own, at),
    )


def of_reads(domains: Domains, ranks: Mapping[int, int], at: float) -> object:
    """Of the label, of domains and of IMEX. `ranks` are those of their numbers."""
    label, imex = domains.label, domains.imex
    label = replace(
        label,
        refresh=replace(
            label.refresh,
            outstanding=ranks[label.refresh.outstanding or 0],
            due_at=label.refresh.due_at - at,
        ),
        added=ranks[label.added],
        added_at=max(label.added_at - at, -DAEMON_SETTLES_S),
        absent=ranks[label.absent],
        lingers_from=ranks[label.lingers_from],
        lingers_until=label.lingers_until - at,
        retry_at=label.retry_at - at,
    )
    views = frozenset(
        (
            (uid, view.domain, view.clique, view.problem, ranks[view.number]),
            max(view.read_at - at, -DAEMON_SETTLES_S),
            (ranks[view.refresh.outstanding or 0], view.refresh.again, view.refresh.due_at - at),
        )
        for uid, view in domains.views.items()
    )
    return label, views, ranks[imex.number], imex.facts, imex.refresh.due_at - at


def _numbers(domains: Domains) -> Iterable[int]:
    label = domains.label
    yield from (0, label.refresh.outstanding or 0, label.added, label.absent, label.lingers_from)
    yield domains.imex.number
    for view in domains.views.values():
        yield from (view.number, view.refresh.outstanding or 0)
    for entry in domains.claims.entries.values():
        yield entry.since


def _disk(outside: Outside) -> object:
    if outside.disk is None:
        return None
    return tuple((e.name.uid, e.state, e.claim is None) for e in outside.disk.entries)
