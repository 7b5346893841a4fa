"""What makes two states of the daemon the same for all that can follow: numbers by their order, which is all that the
core does with them, and times from now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpuactors import limits
from gpuactors.core.host.inspections import UEVENTS_END_S
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, Claims, domain_of, gpus_of
from gpuactors.core.values.model import InspectedKey


def ranked(numbers: Iterable[int]) -> dict[int, int]:
    """The rank of each."""
    return {number: rank for rank, number in enumerate(sorted({*numbers}))}


def of_claims(claims: Claims, since: Mapping[int, int], at: float) -> object:
    """Of the claims of one driver. `since` are the ranks of what their entries remember of the node's numbers."""
    ranks = ranked(_of_claims(claims))
    return (
        (claims.loaded, claims.unwritten, ranks[claims.checkpoint], ranks[claims.durable]),
        frozenset((uid, ranks[n]) for uid, n in claims.reads.items()),
        tuple(sorted((c.uid, c.prepares, c.deadline - at) for c in claims.calls.values())),
        tuple((uid, since[e.since], *_entry(e, ranks, at)) for uid, e in claims.entries.items()),
    )


def _of_claims(claims: Claims) -> Iterator[int]:
    yield from (0, claims.checkpoint, claims.durable, *claims.reads.values())
    for entry in claims.entries.values():
        yield from (entry.intent, *entry.acts.values())


def _entry(entry: ClaimRecord, ranks: Mapping[int, int], at: float) -> tuple[object, ...]:
    return (
        (
            entry.state,
            gpus_of(entry).gpus,
            domain_of(entry).domain,
            entry.problem,
            entry.missing,
            entry.claim is None,
        ),
        (ranks[entry.intent], frozenset((key, ranks[n]) for key, n in entry.acts.items())),
        frozenset(gpus_of(entry).bound.items()),
        (entry.retry_at - at, entry.collect_at - at),
    )


def seen_early(state: NodeState, since_at: float) -> frozenset[InspectedKey]:
    """What was last seen so soon after `since_at` that an inspection after a hint is waited for."""
    return frozenset(a for a, s in state.host.seen.items() if s.at < since_at + UEVENTS_END_S)


def _age(seconds: float, *, exact: bool) -> float:
    """How old a read of the ledger is: one that is not fresh any more is only old, unless something is compared with
    it."""
    return seconds if exact else max(seconds, -2 * limits.LEDGER_FRESH_S)


def numbers_of(state: NodeState) -> Iterator[int]:
    """The numbers in it, of one counter."""
    yield from {
        state.host.inspections.last,
        state.host.inspections.whole.outstanding or 0,
        *state.host.inspections.functions.values(),
        *(s.inspection for s in state.host.seen.values()),
        state.kubelet.ledger.read,
        state.kubelet.ledger.refresh.outstanding or 0,
        state.kubelet.ledger.done,
        state.host.polls.done,
        state.host.polls.refresh.outstanding or 0,
        *(r.inspection for r in state.host.inspections.retries.values()),
        *(o.since for o in state.host.polls.groups.values()),
        *(s.poll for s in state.host.polls.seen.values()),
        *(n for d in state.kubelet.orphans.values() for n in (d.read, d.use or 0)),
        *(c.since for c in state.calls.waiting.values()),
        *(c.doubted or 0 for c in state.calls.waiting.values()),
        state.kubelet.ledger.asking.listed,
        state.kubelet.ledger.asking.done,
    }


def of_ledger(state: NodeState, ranks: Mapping[int, int], at: float) -> object:
    """Of kubelet's ledger."""
    ledger = state.kubelet.ledger
    asking, books = ledger.asking, ledger.books
    is_exact = bool(state.kubelet.pending_allocations or state.calls.waiting)
    return (
        ranks[ledger.read],
        frozenset(ledger.entries.items()),
        (ledger.claimed, ledger.unplaced, ledger.cdi),
        ledger.tried,
        ranks[ledger.refresh.outstanding or 0],
        ledger.refresh.again,
        ledger.refresh.due_at - at,
        ranks[ledger.done],
        _age(ledger.read_at - at, exact=is_exact),
        _age(ledger.asked_at - at, exact=is_exact),
        (asking.lists, asking.pods, asking.wanted, ranks[asking.listed], ranks[asking.done], asking.has_get),
        (books.came - asking.came, asking.gap_s),
        _age(asking.listed_at - at, exact=is_exact),
        (frozenset(books.uids.items()), books.ended, frozenset(books.lives.items()), books.seen),
        frozenset((uid, since - at) for uid, since in books.absent_since.items()),
        frozenset((name, since - at) for name, since in books.granted.items()),
        books.confirmed,
    )


def of_node(state: NodeState, ranks: Mapping[int, int], at: float) -> object:
    """Of the node and of kubelet, all but claims. `ranks` are those of its numbers."""
    inspections, polls = state.host.inspections, state.host.polls
    return (
        (
            ranks[inspections.last],
            ranks[inspections.whole.outstanding or 0],
            inspections.whole.again,
            frozenset((a, ranks[n]) for a, n in inspections.functions.items()),
            inspections.whole.due_at - at,
            frozenset((a, r.again, r.due_at - at) for a, r in inspections.single.items()),
            frozenset((a, r.attempt, ranks[r.inspection]) for a, r in inspections.retries.items()),
        ),
        frozenset((a, ranks[s.inspection]) for a, s in state.host.seen.items()),
        frozenset(state.host.functions.items()),
        (state.host.scanned, state.host.uevents, state.daemon.role, state.daemon.stopping),
        frozenset(state.published.device_lists.items()),
        frozenset(
            (r, p.empty_since is None, (p.empty_since or at) - at) for r, p in state.published.plugins.items()
        ),
        frozenset((r, until - at) for r, until in state.calls.no_removal_until.items()),
        frozenset(
            (
                *(t, c.kind, c.requests, ranks[c.since], c.deadline - at, frozenset(c.seen.items())),
                *(c.came_at - at, None if c.doubted is None else ranks[c.doubted]),
                seen_early(state, c.came_at),
            )
            for t, c in state.calls.waiting.items()
        ),
        of_ledger(state, ranks, at),
        (
            frozenset(
                (g, ranks[polls.seen[g].poll], o.in_use, ranks[o.since], o.holders, o.open)
                for g, o in polls.groups.items()
            ),
            frozenset(polls.baselines.items()),
            polls.leaving,
            polls.doubtful,
            ranks[polls.done],
            ranks[polls.refresh.outstanding or 0],
            polls.refresh.again,
            (polls.asked_groups, polls.again_groups),
            polls.refresh.due_at - at,
            max(0.0, polls.fast_until - at),
        ),
        frozenset(state.kubelet.resolved.items()),
        frozenset(state.published.served.items()),
        frozenset((a, until - at) for a, until in state.kubelet.pending_allocations.items()),
        frozenset((a, d.pod, ranks[d.read], ranks[d.use or 0]) for a, d in state.kubelet.orphans.items()),
    )
