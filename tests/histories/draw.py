"""Draws histories: each step out of what can happen at that moment, only by a seeded generator.

A `Guide` remembers which pairs of kinds have followed each other and prefers those that have not: of those that can
come now, the rarest. Where none can, it takes a step after which most of them can. It is shared by the histories of one
process, so what a seed draws depends on those before it; what was drawn is a script like any other, and replays without
a guide.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, final

from gpuactors_simulation.host.kernel import NVIDIA
from tests.histories.claim_events import FIRST_OF_CLAIMS
from tests.histories.claims import ClaimsNode
from tests.histories.dead_events import DEAD_KINDS
from tests.histories.domain_events import FIRST_OF_DOMAINS
from tests.histories.domains import DomainsNode
from tests.histories.events import Serves
from tests.histories.kinds import SLOTS, Kind
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.play import Chooser
from tests.histories.script import Step
from tests.histories.world import CARDS, World

WAITS_S: Final = (0.0, 0.0, 0.0, 0.001, 0.05, 0.3, 3.0, 11.0)
"""No wait, most often: that is where races are. The longest is longer than most backoffs."""

WAITS_WITH_CLAIMS_S: Final = (*WAITS_S, 0.0, 0.0, 0.0, 0.001, 0.05, 0.3, 3.0, 70.0)
"""The longest is longer than most of kubelet's retries of a prepare. It costs as much as twenty steps without one."""

STEPS_MAX: Final = 20

_COMES: Final = 0.5
"""While no pod has a claim, one comes with that probability: without one little else is tried. So it does, on a card
that is to be bound, while something is planned for the next uevents: nothing else brings any."""

_PAIR_COMES: Final = 0.25
"""On a node with sets a pod for two cards comes with that probability: only it shows what the sets are for."""

_DIES: Final = 0.2
"""On a node whose cards die, one dies, answers again or comes again with that probability: a history is about few of
the many other kinds."""

_NEXT_COUNTS: Final = 5
"""How much more a wanted pair counts that the step after the next one can bring than one that may come later."""

_GUIDED: Final = 0.9
"""The share of steps for which a pair that has not occurred is searched."""


@final
class Guide:
    """The pairs that are still wanted, on nodes of one kind. Each of several processes has its own share (`part` of
    `parts`)."""

    def __init__(self, part: int = 0, parts: int = 1, of: Serves = Serves.PLUGIN) -> None:
        numbered = sorted(of.pairs)
        mine = (pair for n, pair in enumerate(numbered) if n % parts == part)
        self._wanted: dict[str, dict[str, None]] = {name: {} for name in of.kinds}
        self._wanting: Counter[str] = Counter()
        """In how many wanted pairs each kind is."""
        for before, after in mine:
            self._wanted[before][after] = None
            self._wanting.update((before, after))

    def wanted_after(self, kind: str) -> list[str]:
        """The kinds that have not come right after this one yet, in a fixed order."""
        return list(self._wanted[kind])

    def wanting(self, kind: str) -> int:
        """In how many wanted pairs it is: a high number means that it can seldom happen."""
        return self._wanting[kind]

    def happened(self, before: str, after: str) -> None:
        """`after` came right after `before`."""
        if after in self._wanted[before]:
            del self._wanted[before][after]
            self._wanting.subtract((before, after))


def drawn(rng: random.Random, guide: Guide | None = None, steps_max: int = STEPS_MAX) -> Chooser:
    """A history of 2 to `steps_max` steps, drawn while it is played."""

    def choose(world: World) -> Iterator[Step]:
        before: str | None = None
        for _ in range(rng.randint(2, steps_max)):
            kind, slot = _next(world, rng, guide, before)
            if guide is not None and before is not None:
                guide.happened(before, kind)
            before = kind
            yield Step(kind, slot, rng.choice(WAITS_S if world.dra is None else WAITS_WITH_CLAIMS_S))

    return choose


def _next(world: World, rng: random.Random, guide: Guide | None, before: str | None) -> tuple[str, int]:
    if world.claims is not None and rng.random() < _COMES:
        slot = _slot_for_claim(world, world.claims, rng)
        if slot is not None:
            return FIRST_OF_CLAIMS, slot
    if world.domains is not None and rng.random() < _COMES:
        slot = _slot_for_channel(world, world.domains, rng)
        if slot is not None:
            return FIRST_OF_DOMAINS, slot
    has_sets = (world.sets, world.fabric, world.egms) != (None, None, None)
    if has_sets and rng.random() < _PAIR_COMES:
        slot = _slot_for(world, rng, FOR_TWO) if FOR_TWO in _kinds(world) else None
        if slot is not None:
            return FOR_TWO, slot
    if world.deaths is not None and rng.random() < _DIES:
        slots = {kind.name: _slot_for(world, rng, kind.name) for kind in DEAD_KINDS}
        possible = [(name, slot) for name, slot in slots.items() if slot is not None]
        if possible:
            return rng.choice(possible)
    if guide is not None and rng.random() < _GUIDED:
        return _guided(world, rng, guide, before)
    slot = rng.randrange(SLOTS)
    return rng.choice([name for name, kind in _kinds(world).items() if kind.enabled(world, slot)]), slot


def _guided(world: World, rng: random.Random, guide: Guide, before: str | None) -> tuple[str, int]:
    """Choose a kind that is wanted right after `before`; else one after which most of what can happen now is wanted."""
    slots = {name: slot for name in _kinds(world) if (slot := _slot_for(world, rng, name)) is not None}

    def next_wanted(name: str) -> int:
        # What can happen now can nearly always happen after one more step.
        return sum(after in slots for after in guide.wanted_after(name))

    wanted = [name for name in guide.wanted_after(before) if name in slots] if before is not None else []
    if wanted:
        # A kind that can seldom happen is taken when it can; the others come later.
        rng.shuffle(wanted)
        kind = max(wanted, key=lambda name: guide.wanting(name) + _NEXT_COUNTS * next_wanted(name))
    else:
        names = list(slots)
        kind = rng.choices(names, [1 + next_wanted(name) ** 4 for name in names])[0]
    return kind, slots[kind]


def _slot_for_claim(world: World, claims: ClaimsNode, rng: random.Random) -> int | None:
    """For a pod with a claim, if one is needed now; None if it is not, or cannot come."""
    if world.uevent_mode is not None:
        on_host = [card for card in range(CARDS) if claims.home.get(world.address(card)) == NVIDIA]
        return _slot_for(world, rng, FIRST_OF_CLAIMS, on_host)
    return None if claims.claims else _slot_for(world, rng, FIRST_OF_CLAIMS)


def _slot_for_channel(world: World, domains: DomainsNode, rng: random.Random) -> int | None:
    """For a pod with a channel, if none has one."""
    return None if domains.claims else _slot_for(world, rng, FIRST_OF_DOMAINS)


def _kinds(world: World) -> dict[str, Kind]:
    """What is drawn from."""
    if world.domains is not None:
        return Serves.DOMAINS.kinds
    if world.egms is not None:
        return Serves.EGMS.kinds
    if world.kata is not None:
        return Serves.KATA.kinds
    if world.fabric is not None:
        return (Serves.FABRIC if world.claims is None else Serves.CLAIMED_FABRIC).kinds
    if world.deaths is not None:
        return (Serves.DEAD if world.claims is None else Serves.CLAIMED_DEAD).kinds
    if world.claims is None:
        if world.sets is not None:
            return Serves.SETS.kinds
        with_parts = Serves.VGPUS if world.has_vgpus else Serves.PARTS
        return (with_parts if world.has_parts else Serves.PLUGIN).kinds
    if world.has_vgpus:
        return Serves.CLAIMED_VGPUS.kinds
    return (Serves.CLAIMS if world.claims.administrator is None else Serves.ADMINISTRATORS).kinds


def _slot_for(world: World, rng: random.Random, kind: str, cards: Sequence[int] = range(CARDS)) -> int | None:
    """A slot for which it can happen now, some card's; None if it cannot for any."""
    detail = rng.randrange(SLOTS // CARDS) * CARDS
    for card in rng.sample(cards, len(cards)):
        if _kinds(world)[kind].enabled(world, detail + card):
            return detail + card
    return None
