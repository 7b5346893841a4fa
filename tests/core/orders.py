"""Every order of a few events, and every interleaving of those under way: what all small worlds have in common.

A node is the world outside and the daemon's state, one value, and what happens to it is a pure function, so a tree of
orders shares all its beginnings. Two orders that lead to the same node go on in the same way: a node is followed once,
and counted for each of them. Nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

N = TypeVar("N")
"""A node."""


class WrongError(AssertionError):
    """What must hold does not, after this order."""


@dataclass(frozen=True, slots=True)
class Happening(Generic[N]):
    """One kind of event: when it can happen, and the node after it."""

    name: str
    enabled: Callable[[N], bool]
    happens: Callable[[N], N]


@dataclass(frozen=True, slots=True)
class Rules(Generic[N]):
    """What can happen in a world, and what must hold in it."""

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


def every_order(start: N, rules: Rules[N], length: int) -> Count:
    """Tries every order of at most `length` events. Raises `WrongError` with the order that fails."""
    met = _Met()
    orders = _follow(start, rules, length, (), met)
    return Count(orders, len(met.numbers))


def _follow(node: N, rules: Rules[N], left: int, names: tuple[str, ...], met: _Met) -> int:
    """The number of orders that begin here."""
    number = met.numbers.setdefault(rules.canonical(node), fresh := len(met.numbers))
    if (known := met.orders.get((number, left))) is not None:
        return known
    if number == fresh:
        _named(rules.check, node, names)
    orders = 1
    for happening in rules.happenings if left else ():
        if happening.enabled(node):
            path = (*names, happening.name)
            orders += _follow(_named(happening.happens, node, path), rules, left - 1, path, met)
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
    steps: Callable[[N], Mapping[str, Callable[[N], N]]],
    is_end: Callable[[N], bool],
    canonical: Callable[[N], object],
) -> Count:
    """Follows every order of `steps` until nothing can happen any more, and counts those that come to an end. Raises
    `WrongError` with the order that fails; `is_end` checks an end."""
    met: dict[object, int] = {}

    def follow(node: N, names: tuple[str, ...]) -> int:
        key = canonical(node)
        if (known := met.get(key)) is not None:
            return known
        found = int(_named(is_end, node, names))
        for name, step in steps(node).items():
            path = (*names, name)
            found += follow(_named(step, node, path), path)
        met[key] = found
        return found

    return Count(follow(start, ()), len(met))
