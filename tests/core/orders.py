"""The engine of all small worlds: every order of a few events, and every interleaving of those under way.

A node is the world outside and the daemon's state, one value, and what happens to it is a pure function, so a tree of
orders shares all its beginnings. Two orders that lead to the same node go on in the same way: a node is followed once,
and counted for each of them. Nothing is drawn.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.state import NodeState
from gpuactors.core.values.effects import Effect, Reply
from tests.support.in_order import checked_step

LENGTH: Final = int(os.environ.get("SMALL_WORLDS_LENGTH", "2"))
"""The number of events in an order."""

ENDLESS: Final = 200
"""A daemon that reads or asks that often without an event from outside does so for ever."""


class WrongError(AssertionError):
    """What must hold does not, after this order."""


# --- a node ---------------------------------------------------------------------------------------------------------

W = TypeVar("W", bound=Struct)
"""The node without the daemon."""


class Node(Struct, Generic[W], frozen=True):
    """The world outside and the daemon's state. A small world says how the one follows from the other."""

    outside: W
    state: NodeState
    at: float
    """Seconds of the world's clock."""

    def with_(self, **changes: object) -> Self:
        """The node with these changes outside."""
        return replace(self, outside=replace(self.outside, **changes))

    def ticked(self, at: float) -> Self:
        """The node at a later time; what is due by then is due now."""
        return replace(self, at=at).stepped(Ticked())

    def stepped(self, event: Event) -> Self:
        """The node after an event, and after what is answered at once; checked after each. Raises `WrongError` where
        the core raises, where a check fails, or where the daemon reads without end."""
        node, following = self, event
        for _ in range(ENDLESS):
            before = node
            try:
                state, effects = node.apply(following)
            except (AssertionError, KeyError) as error:
                raise WrongError(f"the core ends with {error!r} at {type(following).__name__}") from error
            node = node.in_state(state).noticed(before, following)
            for effect in effects:
                if isinstance(effect, Reply):
                    node = node.replied(before, effect)
            node.check_step(before)
            if (answer := node.answer_at_once()) is None:
                return node
            following = answer
        raise WrongError("the daemon reads the node without end")

    def apply(self, event: Event) -> tuple[NodeState, list[Effect]]:
        """The core's step; what it derives of the state is compared with the same derived anew."""
        return checked_step(self.state, event, self.at)

    def in_state(self, state: NodeState) -> Self:
        """The node with another state of the daemon."""
        return replace(self, state=state)

    def noticed(self, before: Self, event: Event) -> Self:
        """The node with what its world remembers of an event that has been applied."""
        return self

    def replied(self, before: Self, reply: Reply) -> Self:
        """The node after kubelet has read the answer to one of its calls."""
        raise NotImplementedError

    def check_step(self, before: Self) -> None:
        """Raises `WrongError` if something is wrong after an event."""

    def answer_at_once(self) -> Event | None:
        """The answer to something that this world answers without an event of its own."""
        return None


# --- what happens -----------------------------------------------------------------------------------------------------

N = TypeVar("N")
"""A node."""


@dataclass(frozen=True, slots=True)
class Happening(Generic[N]):
    """One kind of event: when it can happen, and the node after it."""

    name: str
    enabled: Callable[[N], bool]
    happens: Callable[[N], N]


def begun(node: N, happenings: Iterable[Happening[N]], names: Iterable[str]) -> N:
    """The node after what has happened before the orders begin."""
    by_name = {happening.name: happening for happening in happenings}
    for name in names:
        assert by_name[name].enabled(node), f"that cannot happen there: {name}"
        node = by_name[name].happens(node)
    return node


def until_answered(node: N, answers: Iterable[Happening[N]]) -> Iterator[N]:
    """The nodes from this one to that where nothing is asked for any more, each after the first of `answers` that can
    happen. Raises `WrongError` if there is no such node."""
    for _ in range(ENDLESS):
        yield node
        answer = next((a for a in answers if a.enabled(node)), None)
        if answer is None:
            return
        node = answer.happens(node)
    raise WrongError("the daemon asks without end")


def all_answered(node: N, answers: Iterable[Happening[N]]) -> N:
    """The node when nothing is asked for any more."""
    return deque(until_answered(node, answers), maxlen=1).pop()


# --- every order ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SmallWorld(Generic[N]):
    """Where orders begin, what can happen there, and what must hold."""

    start: N
    happenings: tuple[Happening[N], ...]
    check: Callable[[N], None]
    """Of a node after any order. Raises `WrongError`; what must hold between two nodes a happening checks itself."""
    canonical: Callable[[N], object]
    """What makes two nodes the same for all that can follow."""


@dataclass(slots=True)
class Count:
    """What was covered."""

    orders: int = 0
    """Orders of events, those included that lead to a node that was met before."""
    nodes: int = 0
    """Different nodes after them, each checked."""


@dataclass(slots=True)
class _Met:
    """The different nodes that were met, numbered, and the orders that begin at one with so many events left."""

    numbers: dict[object, int] = field(default_factory=dict)
    orders: dict[tuple[int, int], int] = field(default_factory=dict)


def check_every_order(world: SmallWorld[N]) -> None:
    """Try every order of at most `LENGTH` events. Raises `WrongError` with the order that fails."""
    count = every_order(world, LENGTH)
    print(f"{count.orders} orders of up to {LENGTH} events, {count.nodes} different nodes after them")
    assert count.nodes > LENGTH


def is_found(world: SmallWorld[N], length: int) -> bool:
    """Whether a planted bug is found by an order of at most `length` events, and that order is named."""
    try:
        every_order(world, length)
    except WrongError as error:
        return "; after: " in str(error)
    return False


def every_order(world: SmallWorld[N], length: int) -> Count:
    """Try every order of at most `length` events. Raises `WrongError` with the order that fails."""
    met = _Met()
    orders = _follow(world.start, world, length, (), met)
    return Count(orders, len(met.numbers))


def _follow(node: N, world: SmallWorld[N], left: int, names: tuple[str, ...], met: _Met) -> int:
    """The number of orders that begin here."""
    number = met.numbers.setdefault(world.canonical(node), fresh := len(met.numbers))
    if (known := met.orders.get((number, left))) is not None:
        return known
    if number == fresh:
        _named(world.check, node, names)
    orders = 1
    for happening in world.happenings if left else ():
        if happening.enabled(node):
            path = (*names, happening.name)
            orders += _follow(_named(happening.happens, node, path), world, left - 1, path, met)
    met.orders[number, left] = orders
    return orders


R = TypeVar("R")


def _named(does: Callable[[N], R], node: N, names: tuple[str, ...]) -> R:
    try:
        return does(node)
    except (AssertionError, KeyError) as error:
        raise WrongError(f"{error}; after: {'; '.join(names) or 'the start'}") from error


def every_interleaving(
    start: N,
    happenings: Iterable[Happening[N]],
    is_end: Callable[[N], bool],
    canonical: Callable[[N], object],
) -> Count:
    """Follow every order of `happenings` until nothing can happen any more, and count those that come to an end. Raises
    `WrongError` with the order that fails; `is_end` checks an end."""
    met: dict[object, int] = {}

    def follow(node: N, names: tuple[str, ...]) -> int:
        key = canonical(node)
        if (known := met.get(key)) is not None:
            return known
        found = int(_named(is_end, node, names))
        for happening in happenings:
            if happening.enabled(node):
                path = (*names, happening.name)
                found += follow(_named(happening.happens, node, path), path)
        met[key] = found
        return found

    return Count(follow(start, ()), len(met))
