"""When a fact is told: what passes is not, what lasts is told again, and a node never tells too much."""

from __future__ import annotations

import math

from gpuactors import limits
from gpuactors.core.reports.event_series import (
    EVENT_BURST,
    EVENT_REFILL_S,
    EVENTS_MAX,
    NOTHING_POSTED,
    PostedFacts,
    due,
    failed,
    look,
    next_at,
    posted,
)
from gpuactors.core.reports.kube_events import KubeEvent, OurNode


def fact(number: int = 1) -> KubeEvent:
    return KubeEvent(OurNode(), "HeldByOther", f"gpu {number}")


def told_at(told: PostedFacts, at: float) -> tuple[PostedFacts, list[KubeEvent]]:
    """Tells all that is due, as the poster does."""
    found: list[KubeEvent] = []
    while True:
        told, event = due(told, at)
        if event is None:
            return told, found
        found.append(event)
        told = posted(told, event, told.series[event].count + 1, at)


def test_what_passes_by_itself_is_not_told() -> None:
    told = look(NOTHING_POSTED, (fact(),), 100.0)
    assert next_at(told) == 100.0 + limits.EVENT_SETTLE_S
    told, found = told_at(told, 100.0 + limits.EVENT_SETTLE_S - 0.1)
    assert found == []
    told = look(told, (), 109.0)
    assert told.series == {}
    assert next_at(told) == math.inf


def test_what_lasts_is_told_once_and_again_before_the_server_forgets_it() -> None:
    told = look(NOTHING_POSTED, (fact(),), 100.0)
    times = []
    for at in range(100, 100 + 2 * int(limits.EVENT_TTL_S)):
        told, found = told_at(look(told, (fact(),), float(at)), float(at))
        times += [float(at)] * len(found)
    first = 100.0 + limits.EVENT_SETTLE_S
    assert times == [first + i * limits.EVENT_REPEAT_S for i in range(4)]
    assert told.series[fact()].count == 4
    assert told.series[fact()].first_at == first


def test_what_comes_and_goes_is_told_again_only_after_a_while_and_counted() -> None:
    told = NOTHING_POSTED
    times = []
    for at in range(100, 1000):
        holds = (fact(),) if at % 40 < 20 else ()
        told, found = told_at(look(told, holds, float(at)), float(at))
        times += [at] * len(found)
    # It comes at 120, 160, … and has stood for 10 s at 130, 170, …; the first of these after 300 s is 450.
    assert times == [130, 450, 770]
    assert told.series[fact()].count == 3


def test_what_is_long_gone_is_forgotten() -> None:
    told, found = told_at(look(NOTHING_POSTED, (fact(),), 0.0), limits.EVENT_SETTLE_S)
    assert found == [fact()]
    told = look(told, (), 100.0)
    assert fact() in told.series
    assert next_at(told) == math.inf
    assert look(told, (), limits.EVENT_SETTLE_S + limits.EVENT_TTL_S).series == {}


def test_a_node_with_too_much_to_tell_tells_it_one_after_the_other() -> None:
    facts = tuple(map(fact, range(100)))
    told = look(NOTHING_POSTED, facts, 0.0)
    told, found = told_at(told, limits.EVENT_SETTLE_S)
    assert found == list(facts[:EVENT_BURST]), "the one that is due for longest first"
    later = next_at(told)
    assert later == limits.EVENT_SETTLE_S + EVENT_REFILL_S
    told, found = told_at(told, later)
    assert found == [facts[EVENT_BURST]]
    # What went meanwhile is not told any more.
    told = look(told, facts[-1:], later + 1.0)
    told, found = told_at(told, later + EVENT_REFILL_S)
    assert found == [facts[-1]]


def test_what_could_not_be_told_is_tried_again_and_costs_a_token() -> None:
    told = look(NOTHING_POSTED, (fact(1), fact(2)), 0.0)
    told, event = due(told, 20.0)
    assert event == fact(1)
    told = failed(told, event, 320.0)
    told, found = told_at(told, 21.0)
    assert found == [fact(2)]
    assert told.tokens < EVENT_BURST - 1.9
    told, found = told_at(told, 319.0)
    assert found == []
    told, found = told_at(told, 320.0)
    assert found == [fact(1)]
    assert told.series[fact(1)].count == 1


def test_no_more_facts_are_known_than_the_bound() -> None:
    many = tuple(map(fact, range(2 * EVENTS_MAX)))
    told = look(NOTHING_POSTED, many, 0.0)
    assert list(told.series) == list(many[:EVENTS_MAX])
    told, _ = told_at(told, limits.EVENT_SETTLE_S)
    told = look(told, many[EVENTS_MAX:], 20.0)
    assert len(told.series) == EVENTS_MAX
    assert set(told.series) == set(many[EVENTS_MAX:])


def test_what_happened_in_a_moment_is_told_at_once_and_only_again_when_it_happens_again() -> None:
    def happened(at: float) -> tuple[KubeEvent, ...]:
        return (KubeEvent(OurNode(), "HeldByOther", "Allocate refused", happened_at=at),)

    told, found = told_at(look(NOTHING_POSTED, happened(100.0), 100.5), 100.5)
    assert len(found) == 1
    told, found = told_at(look(told, happened(100.0), 10_000.0), 10_000.0)
    assert (found, next_at(told)) == ([], math.inf)
    told = look(told, happened(10_001.0), 10_001.0)
    told = look(told, happened(10_009.0), 10_009.0)
    told, found = told_at(told, 10_009.0)
    assert found == list(happened(10_009.0))
    told, found = told_at(look(told, happened(10_020.0), 10_020.0), 10_020.0)
    assert found == []
    assert next_at(told) == 10_009.0 + limits.EVENT_AGAIN_S


def test_of_facts_that_are_gone_the_one_that_was_told_first_is_forgotten_first() -> None:
    """One that comes back soon must not be told anew, as one that the API server does not know."""
    told = NOTHING_POSTED
    for number in range(EVENTS_MAX):
        at = number * 1.0
        told = posted(look(told, (fact(number),), at), fact(number), 1, at)
    told = look(told, (fact(-1), fact(-2)), EVENTS_MAX * 1.0)
    assert len(told.series) == EVENTS_MAX
    assert [n for n in range(EVENTS_MAX) if fact(n) not in told.series] == [0, 1]


def test_a_quiet_time_saves_up_no_more_than_a_burst() -> None:
    told, found = told_at(look(NOTHING_POSTED, (), 0.0), 0.0)
    assert found == []
    facts, at = tuple(map(fact, range(3 * EVENT_BURST))), 1000 * EVENT_REFILL_S
    told = look(told, facts, at)
    _, found = told_at(told, at + limits.EVENT_SETTLE_S)
    assert len(found) == EVENT_BURST
