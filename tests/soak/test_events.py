"""The events of a soak: a seed gives the same ones, each is possible when it comes, and every kind comes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.soak.events import DAEMON_GAP, KINDS, MOST_EVENTS, MOST_PODS, OF_DOMAINS, PODS, Draw, Event

ROUNDS = 3000
CARDS = 8


def rounds(seed: int, *, has_domains: bool = True) -> Iterator[list[Event]]:
    draw = Draw(seed, cards=CARDS, has_domains=has_domains)
    return (list(draw.round()) for _ in range(ROUNDS))


def test_a_seed_gives_the_same_events_again() -> None:
    first, again, other = (list(rounds(seed)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_comes(seed: int) -> None:
    assert {event.kind for events in rounds(seed) for event in events} == set(KINDS)


def test_without_programs_there_are_no_domains() -> None:
    found = {event.kind for events in rounds(1, has_domains=False) for event in events}
    assert found == set(KINDS) - OF_DOMAINS


@pytest.mark.parametrize("seed", range(3))
def test_only_what_is_there_is_taken_away(seed: int) -> None:
    pods: set[str] = set()
    domains: set[str] = set()
    moved: dict[int, str] = {}
    for event in (event for events in rounds(seed) for event in events):
        match event.kind:
            case kind if kind in PODS:
                assert event.name not in pods
                pods.add(event.name)
                assert len(pods) <= MOST_PODS
            case "end" | "force away":
                pods.remove(event.name)
            case "domain":
                assert not domains
                domains.add(event.name)
            case "end domain":
                assert not any(pod.startswith("channel") for pod in pods)
                domains.remove(event.name)
            case "unbind" | "pull out":
                assert 0 <= event.number < CARDS
                assert event.number not in moved
                moved[event.number] = event.kind
            case "bind":
                assert moved.pop(event.number) == "unbind"
            case "plug in":
                assert moved.pop(event.number) == "pull out"


def test_a_crossing_claim_is_alone_in_its_round() -> None:
    found = [events for events in rounds(2) if any(event.kind == "crossing" for event in events)]
    assert found
    assert all(len(events) == 1 for events in found)


def test_the_daemon_lives_for_a_while() -> None:
    events = [event for events in rounds(3) for event in events]
    at = [index for index, event in enumerate(events) if event.kind.endswith("the daemon")]
    assert len(at) > 10
    assert all(later - sooner >= DAEMON_GAP for sooner, later in pairwise(at))
    assert max(len(events) for events in rounds(3)) == MOST_EVENTS
