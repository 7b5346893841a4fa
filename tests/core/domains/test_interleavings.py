"""Every interleaving of NVIDIA issue 641: the old claim's unprepare, the new claim's prepare, the daemon's prepare, the
patches of the label, conflicts of these, and restarts of the daemon, at any moment between the steps of what is under
way: a claim, a domain or the label is read, the checkpoint is written, files are done. Enumerated, not sampled.

Two orders that lead to the same node go on in the same way, so a node is followed once, and counted for each of them.
Time passes only when nothing else can happen. Kubelet repeats what failed with the daemon.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from gpuactors.core.domains.model import ComputeDomain, DeviceKind, LabelChange, LabelPatch, NodeLabel
from gpuactors.core.domains.outputs import DomainsWanted, domains_wanted
from gpuactors.core.domains.state import Domains
from gpuactors.core.dra.claim import ClaimName, ClaimsOf, ClaimUid, Prepared, Unprepared
from gpuactors.core.dra.entries import Entry
from gpuactors.core.dra.outputs import CheckpointWanted
from gpuactors.core.dra.table import OWNING, ClaimState
from gpuactors.core.effects import Effect, Refused, Reply
from gpuactors.core.events import (
    ActDone,
    CheckpointRead,
    CheckpointWritten,
    ClaimRead,
    DomainRead,
    Event,
    HostScanned,
    ImexRead,
    LabelConflicted,
    LabelPatched,
    LabelRead,
    PrepareAsked,
    Ticked,
    UnprepareAsked,
)
from gpuactors.core.model import Token
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state, next_deadline, step
from tests.core.builders import SETTINGS, ledger_read
from tests.core.domains.domain_core import DAEMON, DOMAIN_SETTINGS, IMEX, NODE, RED, channel, daemon, name

OLD, NEW = name("old"), name("new")
CLAIMS = {claim.name.uid: claim for claim in (channel(OLD), channel(NEW), daemon(DAEMON))}
CHANNELS = frozenset({OLD.uid, NEW.uid})

LIVE = OWNING | {ClaimState.WAITING}


class WrongError(AssertionError):
    """Something that must never be so."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The node without the daemon."""

    label: str | None = None
    disk: CheckpointWanted | None = None
    files: frozenset[ClaimUid] = frozenset()
    calls: Mapping[Token, tuple[ClaimUid, bool]] = field(default_factory=dict)
    """Calls without an answer: the claim, and whether it is a prepare."""
    prepared: frozenset[ClaimUid] = frozenset()
    """Claims that kubelet has as prepared."""
    unprepared: frozenset[ClaimUid] = frozenset()
    refused: str = ""
    """Why the new claim was refused."""
    followed: bool = False
    """The new claim has waited for the old one since that had the channel."""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """The world and the daemon's state."""

    outside: Outside
    state: NodeState
    at: float = 0.0

    @property
    def wanted(self) -> DomainsWanted:
        return domains_wanted(self.state)

    @property
    def entries(self) -> Mapping[ClaimUid, Entry]:
        return self.state.domains.claims.entries


def with_(node: Node, **changes: object) -> Node:
    return replace(node, outside=replace(node.outside, **changes))  # type: ignore[arg-type]


# --- the daemon -------------------------------------------------------------------------------------------------


def stepped(node: Node, event: Event) -> Node:
    """The node after an event, and after what the host, the disk's reader and kubelet's ledger answer at once."""
    before = node.wanted.label_patch
    state, effects = step(node.state, event, node.at)
    node = replace(node, state=state)
    for effect in effects:
        node = replied(node, effect)
    node = watched(node)
    check(node, before.patch if before is not None else None)
    if (answer := at_once(node)) is not None:
        return stepped(node, answer)
    return node


def at_once(node: Node) -> Event | None:
    if (scan := node.state.host.inspections.scan) is not None:
        return HostScanned(scan, ())
    if (read := node.state.kubelet.ledger.outstanding) is not None:
        return ledger_read(read)
    wanted = node.wanted
    if wanted.claims.load and not node.state.domains.claims.loaded:
        disk = node.outside.disk
        return CheckpointRead(disk.entries if disk is not None else (), of=ClaimsOf.DOMAINS)
    return ImexRead(wanted.imex, IMEX) if wanted.imex else None


def replied(node: Node, effect: Effect) -> Node:
    if not isinstance(effect, Reply):
        return node
    o = node.outside
    if effect.token not in o.calls:
        raise WrongError(f"call {effect.token} is answered a second time, or was never made")
    uid, prepares = o.calls[effect.token]
    node = with_(node, calls={t: c for t, c in o.calls.items() if t != effect.token})
    match effect.answer:
        case Prepared() if prepares:
            return with_(node, prepared=o.prepared | {uid})
        case Unprepared() if not prepares:
            return with_(node, unprepared=o.unprepared | {uid})
        case Refused(_, reason) if prepares:
            return with_(node, refused=reason)
        case _:
            raise WrongError(f"a call about {uid} is answered with {effect.answer}")


def started(node: Node) -> Node:
    """The daemon starts: it knows what is on disk. Kubelet's calls have failed."""
    node = with_(node, calls={}, followed=False)
    return stepped(replace(node, state=initial_state(SETTINGS, domain_settings=DOMAIN_SETTINGS)), Ticked())


# --- what must be so after each step ------------------------------------------------------------------------------


def watched(node: Node) -> Node:
    states = {uid: entry.state for uid, entry in node.entries.items()}
    new = states.get(NEW.uid)
    if new not in LIVE:
        return with_(node, followed=False)
    return with_(node, followed=node.outside.followed or states.get(OLD.uid) in OWNING)


def check(node: Node, patch_before: LabelPatch | None) -> None:
    o = node.outside
    owners = [e.name for e in node.entries.values() if e.state in OWNING and e.name.uid in CHANNELS]
    if len(owners) > 1:
        raise WrongError(f"two live claims on channel-0: {owners}")
    if len(o.prepared & CHANNELS) > 1:
        raise WrongError("kubelet has two claims with channel-0 as prepared")
    if o.prepared & CHANNELS and o.label != RED:
        raise WrongError(f"a claim is prepared, and the label is {o.label}")
    if o.followed and o.label != RED:
        raise WrongError("the label was gone where one claim follows the other")
    wanted = node.wanted.label_patch
    live = [e.name for e in node.entries.values() if e.state in LIVE and e.name.uid in CHANNELS]
    if wanted is None or wanted.patch == patch_before:
        return
    if wanted.patch.change is LabelChange.REMOVE and live:
        raise WrongError(f"the label is to be removed, and {live} live")
    if wanted.patch.change is LabelChange.ADD and not live:
        raise WrongError("the label is to be added, and no claim lives")
    if wanted.patch.value != RED:
        raise WrongError(f"the label is to be {wanted.patch}")


def check_end(node: Node) -> None:
    """Nothing can happen any more: the new claim has the channel, or was refused with the old one's name."""
    o = node.outside
    if NEW.uid not in o.prepared and str(OLD) not in o.refused:
        raise WrongError(f"the new claim is neither prepared nor refused for the old one: {o.refused!r}")
    if OLD.uid in o.files or OLD.uid not in o.unprepared or o.label != RED:
        raise WrongError(f"something of the old claim is left, or the label is not there: {o}")
    last = settled(asked(node, NEW, prepares=False))
    if last.outside.label is not None or last.outside.files & CHANNELS:
        raise WrongError(f"after the last claim the label is {last.outside.label}")


# --- the steps --------------------------------------------------------------------------------------------------


def asked(node: Node, claim: ClaimName, *, prepares: bool) -> Node:
    o, token = node.outside, Token(node.outside.tokens + 1)
    prepared = o.prepared if prepares else o.prepared - {claim.uid}
    node = with_(node, tokens=token, prepared=prepared, calls={**o.calls, token: (claim.uid, prepares)})
    event = PrepareAsked if prepares else UnprepareAsked
    return stepped(node, event(token, claim, ClaimsOf.DOMAINS))


def claim_read(node: Node) -> Node:
    read = node.wanted.claims.reads[0]
    return stepped(node, ClaimRead(read.number, CLAIMS[read.claim.uid], ClaimsOf.DOMAINS))


def domain_read(node: Node) -> Node:
    """The controller says Ready as soon as the daemon's claim is prepared."""
    read = node.wanted.domains[0]
    ready = frozenset({NODE}) if DAEMON.uid in node.outside.prepared else frozenset[str]()
    return stepped(node, DomainRead(read.number, read.uid, ComputeDomain(RED, "red", "default", ready)))


def label_read(node: Node) -> Node:
    return stepped(node, LabelRead(node.wanted.label_read, NodeLabel(node.outside.label)))


def changed(node: Node) -> Node:
    """The patch is made at the API server; its answer is under way."""
    wanted = node.wanted.label_patch
    assert wanted is not None
    is_added = wanted.patch.change is LabelChange.ADD
    if node.outside.label != (None if is_added else wanted.patch.value):
        return node
    return with_(node, label=wanted.patch.value if is_added else None)


def label_patched(node: Node) -> Node:
    wanted = node.wanted.label_patch
    assert wanted is not None
    after = changed(node)
    if after is node:
        return stepped(node, LabelConflicted(wanted.number, "the label is another one"))
    return stepped(after, LabelPatched(wanted.number))


def conflicted(node: Node) -> Node:
    """Somebody has changed the label, and changed it back."""
    wanted = node.wanted.label_patch
    assert wanted is not None
    return stepped(node, LabelConflicted(wanted.number, "the label is another one"))


def checkpoint_written(node: Node) -> Node:
    wanted = node.wanted.claims.checkpoint
    assert wanted is not None
    return stepped(with_(node, disk=wanted), CheckpointWritten(wanted.number, ClaimsOf.DOMAINS))


def files_done(node: Node) -> Node:
    act = min(node.wanted.claims.files.values(), key=lambda a: a.number)
    files = node.outside.files
    left = files - {act.name.uid} if act.claim is None else files | {act.name.uid}
    return stepped(with_(node, files=left), ActDone(act.number, of=ClaimsOf.DOMAINS))


def under_way(node: Node) -> dict[str, Callable[[Node], Node]]:
    """What can happen without kubelet."""
    wanted = node.wanted
    return {
        words: happens
        for words, happens, is_possible in (
            ("a claim is read", claim_read, bool(wanted.claims.reads)),
            ("the domain is read", domain_read, bool(wanted.domains)),
            ("the label is read", label_read, bool(wanted.label_read)),
            ("the label is patched", label_patched, wanted.label_patch is not None),
            ("the checkpoint is written", checkpoint_written, wanted.claims.checkpoint is not None),
            ("files are done", files_done, bool(wanted.claims.files)),
        )
        if is_possible
    }


def settled(node: Node) -> Node:
    """The node when nothing is under way any more, and 20 s later."""
    until = node.at + 20.0
    while True:
        while steps := under_way(node):
            node = next(iter(steps.values()))(node)
        if next_deadline(node.state) > until:
            return node
        node = passed(node)


def passed(node: Node) -> Node:
    """Time passes until something is due."""
    return stepped(replace(node, at=max(node.at, next_deadline(node.state))), Ticked())


def kubelet_s(node: Node) -> dict[str, Callable[[Node], Node]]:
    """Each call once, and again after a restart that it got no answer from."""
    o, found = node.outside, dict[str, Callable[[Node], Node]]()
    is_asked = {uid for uid, _ in o.calls.values()}
    if OLD.uid not in is_asked | o.unprepared:
        found["the old claim is unprepared"] = lambda n: asked(n, OLD, prepares=False)
    if NEW.uid not in is_asked | o.prepared and not o.refused:
        found["the new claim is prepared"] = lambda n: asked(n, NEW, prepares=True)
    if DAEMON.uid not in is_asked | o.prepared:
        found["the daemon is prepared"] = lambda n: asked(n, DAEMON, prepares=True)
    return found


# --- all of them ------------------------------------------------------------------------------------------------


def every_interleaving(begin: Node, restarts: int, conflicts: int) -> tuple[int, int]:
    """Follows every order to its end; returns how many there are, and how many different nodes were checked."""
    met: dict[object, int] = {}
    return follow(begin, restarts, conflicts, (), met), len(met)


def follow(node: Node, restarts: int, conflicts: int, path: tuple[str, ...], met: dict[object, int]) -> int:
    key = canonical(node), restarts, conflicts
    if (known := met.get(key)) is not None:
        return known
    try:
        found = _followed(node, restarts, conflicts, path, met)
    except WrongError as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(f"after: {'; '.join(path)}")
        raise
    met[key] = found
    return found


def _followed(
    node: Node, restarts: int, conflicts: int, path: tuple[str, ...], met: dict[object, int]
) -> int:
    steps, found = {**kubelet_s(node), **under_way(node)}, 0
    for words, happens in steps.items():
        found += follow(happens(node), restarts, conflicts, (*path, words), met)
    if not steps:
        if node.outside.calls:
            return follow(passed(node), restarts, conflicts, (*path, "time passes"), met)
        check_end(node)
        found = 1
    if restarts:
        found += follow(started(node), restarts - 1, conflicts, (*path, "restart"), met)
        if node.wanted.label_patch is not None:
            after = started(changed(node))
            found += follow(after, restarts - 1, conflicts, (*path, "restart after the patch"), met)
    if conflicts and node.wanted.label_patch is not None:
        found += follow(conflicted(node), restarts, conflicts - 1, (*path, "conflict"), met)
    return found


def canonical(node: Node) -> object:
    """What two nodes have in common that go on in the same way: the numbers only count by their order."""
    o = node.outside
    calls = tuple(sorted((uid, prepares) for uid, prepares in o.calls.values()))
    disk = tuple((e.name.uid, e.state) for e in o.disk.entries) if o.disk is not None else None
    outside = (o.label, disk, o.files, calls, o.prepared, o.unprepared, bool(o.refused), o.followed)
    host = node.state.host.scanned, node.state.kubelet.ledger.tried
    return outside, node.at, host, of_claims(node.state.domains), of_looks(node.state.domains)


def of_claims(domains: Domains) -> object:
    claims = domains.claims
    entries = [*claims.entries.values()]
    ranks = ranked(
        claims.durable,
        claims.checkpoint,
        *claims.reads.values(),
        *(number for e in entries for number in (e.intent, e.order, *e.acts.values())),
    )
    return (
        claims.loaded,
        ranks[claims.durable],
        ranks[claims.checkpoint],
        tuple(sorted((uid, ranks[n]) for uid, n in claims.reads.items())),
        tuple(
            (
                e.name.uid,
                e.state,
                ranks[e.intent],
                ranks[e.order],
                tuple(sorted((key, ranks[n]) for key, n in e.acts.items())),
                e.domain,
                e.problem,
                e.retry_at,
                e.missing,
                e.collect_at,
            )
            for e in entries
        ),
    )


def of_looks(domains: Domains) -> object:
    label, imex, view = domains.label, domains.imex, domains.known.get(RED)
    numbers = [label.read, label.patch_number if label.patch else 0, label.added, imex.number]
    numbers += [imex.refresh.outstanding or 0]
    numbers += [view.number, view.refresh.outstanding or 0] if view is not None else []
    since = {uid: e.since for uid, e in domains.claims.entries.items() if e.claim is not None}
    ranks = ranked(*numbers, *since.values())
    return (
        tuple(ranks[n] for n in numbers),
        tuple((uid, ranks[n]) for uid, n in since.items()),
        replace(label, read=0, patch_number=0, added=0),
        imex.refresh.again,
        view is not None and (view.domain, view.refresh.again, view.refresh.due_at, view.problem),
    )


def ranked(*numbers: int) -> dict[int, int]:
    return {number: rank for rank, number in enumerate(sorted({*numbers}))}


def begin(*, with_daemon: bool) -> Node:
    """OLD has the channel; the daemon's claim is prepared, or is to be prepared again."""
    node = started(Node(Outside(), initial_state(SETTINGS, domain_settings=DOMAIN_SETTINGS)))
    node = settled(asked(node, DAEMON, prepares=True))
    node = settled(asked(node, OLD, prepares=True))
    assert node.outside.prepared == {OLD.uid, DAEMON.uid}
    if not with_daemon:
        node = settled(asked(node, DAEMON, prepares=False))
        while DAEMON.uid in node.entries:
            node = passed(node)
            node = settled(node)
    assert node.outside.label == RED
    assert all(d.kind is DeviceKind.CHANNEL for d in node.entries[OLD.uid].domain.devices)  # type: ignore[union-attr]
    return with_(node, unprepared=frozenset())


COUNTS = {
    (True, 0, 0): 46,
    (True, 1, 1): 262_098,
    (True, 2, 0): 149_961_985,
    (False, 0, 0): 45_405,
    (False, 0, 3): 2_567_152,
}
"""The interleavings, by whether the daemon is prepared at the begin, the number of restarts, and that of conflicts."""

MORE = {(False, 1, 1): 44_386_468_918}
"""With `DOMAIN_INTERLEAVINGS=more` as well: minutes."""

if os.environ.get("DOMAIN_INTERLEAVINGS") == "more":
    COUNTS |= MORE


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("with_daemon", "restarts", "conflicts"), COUNTS)
def test_after_every_interleaving_the_new_claim_has_the_channel_and_the_label_was_never_gone(
    with_daemon: bool, restarts: int, conflicts: int
) -> None:
    found, nodes = every_interleaving(begin(with_daemon=with_daemon), restarts, conflicts)
    print(f"{restarts} restarts, {conflicts} conflicts: {found} interleavings, {nodes} different nodes")
    assert found == COUNTS[with_daemon, restarts, conflicts]
