"""What happens on the node of a soak, drawn from a seed. Pure: a seed always gives the same events.

`Draw` knows what it has drawn before, so it takes away only what is there. What a draw cannot know, such as which GPU
the scheduler chose, the player finds out: an event that does not fit then is left out, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

MOST_EVENTS: Final = 4
"""Of a round: they meet each other, and what went wrong is still to be told from them."""

MOST_PODS: Final = 9
"""At a time. There are GPUs for about as many, so some wait."""

DAEMON_GAP: Final = 120
"""Events between two restarts of the daemon, so that a process lives long enough to show a leak. Kubelet also delays
the restart of a container that has crashed within 10 minutes (MaxContainerBackOff in pkg/kubelet/kubelet.go)."""

AWAY_S: Final = (1, 8)
"""A component is away for so long."""

PLUGIN, CLAIM, CROSSING, CHANNEL = "plugin", "claim", "crossing", "channel"
PODS: Final = (PLUGIN, CLAIM, CROSSING, CHANNEL)
"""By device plugin; by a claim of a GPU on the host driver; by a claim of one that the device plugin offers as well;
and a workload of a compute domain."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens."""

    kind: str
    name: str = ""
    """Of a pod or domain."""
    number: int = 0
    """GPUs that a pod asks for; the index of a card; seconds that a component is away."""

    def __str__(self) -> str:
        return " ".join(str(part) for part in (self.kind, self.name, self.number) if part != "")


@dataclass(slots=True)
class Drawn:
    """What is there by the events so far."""

    cards: int
    """How many the host has."""
    pods: dict[str, str] = field(default_factory=dict)
    """Kind by name."""
    out: set[int] = field(default_factory=set)
    """Cards that were pulled out."""
    unbound: set[int] = field(default_factory=set)
    domain: str = ""
    made: int = 0
    """Pods and domains so far: no name is used twice."""
    since_daemon: int = 0
    """Events since the daemon was restarted."""

    def has(self, kind: str) -> bool:
        """A pod of a kind is there."""
        return kind in self.pods.values()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event."""

    weight: float
    """How often it is drawn, among those that are possible."""
    is_possible: Callable[[Drawn], bool]
    make: Callable[[Drawn, random.Random], Event]
    is_alone: bool = False
    """Nothing else happens in its round."""


def _pod(kind: str, most_gpus: int) -> Callable[[Drawn, random.Random], Event]:
    def make(drawn: Drawn, chance: random.Random) -> Event:
        drawn.made += 1
        name = f"{kind}-{drawn.made}"
        drawn.pods[name] = kind
        return Event(kind, name, chance.randint(min(1, most_gpus), most_gpus))

    return make


def _end(kind: str) -> Callable[[Drawn, random.Random], Event]:
    def make(drawn: Drawn, chance: random.Random) -> Event:
        name = chance.choice(sorted(drawn.pods))
        del drawn.pods[name]
        return Event(kind, name)

    return make


def _domain(drawn: Drawn, chance: random.Random) -> Event:
    drawn.made += 1
    drawn.domain = f"domain-{drawn.made}"
    return Event("domain", drawn.domain)


def _end_domain(drawn: Drawn, chance: random.Random) -> Event:
    name, drawn.domain = drawn.domain, ""
    return Event("end domain", name)


def _card(
    kind: str, of: Callable[[Drawn], set[int]], to: Callable[[Drawn], set[int]] | None
) -> Callable[..., Event]:
    """An event of a card that leaves a set, or comes into one."""

    def make(drawn: Drawn, chance: random.Random) -> Event:
        free = set(range(drawn.cards)) - drawn.out - drawn.unbound
        number = chance.choice(sorted(of(drawn) if to is None else free))
        (of(drawn).remove if to is None else to(drawn).add)(number)
        return Event(kind, number=number)

    return make


def _away(kind: str) -> Callable[[Drawn, random.Random], Event]:
    return lambda drawn, chance: Event(kind, number=chance.randint(*AWAY_S))


def _daemon(kind: str) -> Callable[[Drawn, random.Random], Event]:
    def make(drawn: Drawn, chance: random.Random) -> Event:
        drawn.since_daemon = 0
        return Event(kind)

    return make


def _room(drawn: Drawn) -> bool:
    return len(drawn.pods) < MOST_PODS


def _outs(drawn: Drawn) -> set[int]:
    return drawn.out


def _unbounds(drawn: Drawn) -> set[int]:
    return drawn.unbound


KINDS: Final[Mapping[str, Kind]] = {
    PLUGIN: Kind(7, _room, _pod(PLUGIN, 2)),
    CLAIM: Kind(7, _room, _pod(CLAIM, 2)),
    # A claim and a pod of the device plugin that ask for one card at once are a race of kubelet and the scheduler.
    CROSSING: Kind(4, lambda drawn: _room(drawn) and not drawn.has(CROSSING), _pod(CROSSING, 1), is_alone=True),
    "domain": Kind(2, lambda drawn: not drawn.domain, _domain),
    CHANNEL: Kind(
        5, lambda drawn: _room(drawn) and bool(drawn.domain) and not drawn.has(CHANNEL), _pod(CHANNEL, 0)
    ),
    "end domain": Kind(1, lambda drawn: bool(drawn.domain) and not drawn.has(CHANNEL), _end_domain),
    "end": Kind(12, lambda drawn: bool(drawn.pods), _end("end")),
    "force away": Kind(2, lambda drawn: bool(drawn.pods), _end("force away")),
    "unbind": Kind(2, lambda drawn: len(drawn.out | drawn.unbound) < 3, _card("unbind", _outs, _unbounds)),
    "bind": Kind(3, lambda drawn: bool(drawn.unbound), _card("bind", _unbounds, None)),
    "pull out": Kind(2, lambda drawn: len(drawn.out | drawn.unbound) < 3, _card("pull out", _outs, _outs)),
    "plug in": Kind(3, lambda drawn: bool(drawn.out), _card("plug in", _outs, None)),
    "pull out under a pod": Kind(1, lambda drawn: bool(drawn.pods), _away("pull out under a pod")),
    "restart kubelet": Kind(1.5, lambda drawn: True, lambda drawn, chance: Event("restart kubelet")),
    "kubelet away": Kind(1, lambda drawn: True, _away("kubelet away")),
    "API server away": Kind(0.7, lambda drawn: True, _away("API server away")),
    "update the daemon": Kind(2, lambda drawn: drawn.since_daemon >= DAEMON_GAP, _daemon("update the daemon")),
    "kill the daemon": Kind(2, lambda drawn: drawn.since_daemon >= DAEMON_GAP, _daemon("kill the daemon")),
}  # fmt: skip
"""All kinds, by name."""

OF_DOMAINS: Final = frozenset({"domain", CHANNEL, "end domain"})


@final
class Draw:
    """The events of one soak, round by round."""

    def __init__(self, seed: int, *, cards: int, has_domains: bool) -> None:
        self._chance = random.Random(seed)
        self._drawn = Drawn(cards)
        self._kinds = {name: kind for name, kind in KINDS.items() if has_domains or name not in OF_DOMAINS}

    def round(self) -> Sequence[Event]:
        """What happens next, one upon another."""
        wanted, found = self._chance.randint(1, MOST_EVENTS), list[Event]()
        while len(found) < wanted:
            possible = {
                name: kind for name, kind in self._kinds.items()
                if kind.is_possible(self._drawn) and not (kind.is_alone and found)
            }  # fmt: skip
            (name,) = self._chance.choices(list(possible), [kind.weight for kind in possible.values()])
            found.append(possible[name].make(self._drawn, self._chance))
            self._drawn.since_daemon += 1
            if possible[name].is_alone:
                break
        return found
