"""Every order of a few events in a world of two partitions that overlap, and longer orders that are drawn."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.partitions.fabric import FAULTS, HONEST, P1, USES, Fabric, check_end, comes, fabric

EVENTS_MAX: Final = 5
FAULTS_MAX: Final = 2


def numbers_left_out(world: Fabric) -> Fabric:
    """The world without the numbers that only grow: two that are the same by it go on in the same way."""
    p, at = world.partitions, world.at
    asked = {token: max(query - p.query, -1) for token, query in p.asked.items()}
    records = {
        key: replace(
            r,
            intent=int(r.intent > p.durable),
            since=(max(r.since - p.query, 0), *sorted(r.since > query for query in p.asked.values())),
            seen_by=tuple(sorted(r.seen_by >= query for query in p.asked.values())),
            seen_before=tuple(sorted(r.seen_before >= query for query in p.asked.values())),
            votes=min(r.votes, 2),
            retry_at=max(r.retry_at - at, 0.0),
        )
        for key, r in p.records.items()
    }
    act = (0, *p.act[1:]) if p.act is not None else None
    left = replace(
        p,
        asked=tuple(asked.values()),
        records=records,
        query=p.query - p.answered,
        answered=0,
        query_at=max(p.query_at - at, 0.0) if p.query_at < math.inf else math.inf,
        act=act,
        acts=0,
        intents=p.intents - p.durable,
        durable=0,
        users=None,
    )
    owners = {key: replace(owner, asks=bool(owner.asks)) for key, owner in world.owners.items()}
    return replace(world, partitions=left, at=0.0, calls=0, owners=owners)


def test_every_order_of_few_uses_and_faults() -> None:
    """An owner has come. Then four more events, of which up to two are faults, each at every moment."""
    start = comes(fabric(), P1)
    todo: deque[tuple[Fabric, int, int, tuple[str, ...]]] = deque([(start, 1, 0, ("1 is wanted",))])
    met: set[str] = set()
    while todo:
        world, uses, faults, order = todo.popleft()
        sign = repr((numbers_left_out(world), uses, faults))
        if sign in met:
            continue
        met.add(sign)
        try:
            check_end(world)
            for enabled, answer in HONEST:
                if enabled(world):
                    todo.append((answer(world), uses, faults, (*order, answer.__name__)))
            for name, enabled, happens in USES:
                if uses + faults < EVENTS_MAX and enabled(world):
                    todo.append((happens(world), uses + 1, faults, (*order, name)))
            for name, enabled, happens in FAULTS:
                if uses + faults < EVENTS_MAX and faults < FAULTS_MAX and enabled(world):
                    todo.append((happens(world), uses, faults + 1, (*order, name)))
        except AssertionError as error:
            error.add_note(f"after {order}")
            raise
    assert len(met) > 3000, "the orders are not followed"


@settings(max_examples=150)
@given(st.data())
def test_longer_orders(data: st.DataObject) -> None:
    world = fabric()
    honest = tuple((answer.__name__, enabled, answer) for enabled, answer in HONEST)
    for _ in range(data.draw(st.integers(5, 40), label="length")):
        kinds = (honest, honest, USES, FAULTS)
        kind = kinds[data.draw(st.integers(0, 3), label="kind")]
        happenings = [(name, happens) for name, enabled, happens in kind if enabled(world)]
        if happenings:
            _, happens = data.draw(st.sampled_from(happenings), label="happening")
            world = happens(world)
    check_end(world)
