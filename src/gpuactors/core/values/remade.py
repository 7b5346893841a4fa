"""Values by key that are made anew only where what they are made of is another.

Every floor above derives its values in this way; see `devices/inventory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress, repeat
from operator import is_not
from typing import Any, Final, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Input = TypeVar("Input")

_NONE_YET: Final = object()


def same_if_equal(before: Value | None, now: Value) -> Value:
    """`before` where `now` equals it: what is derived of it then needs only a comparison by identity."""
    return before if before is not None and before == now else now


def remade(
    before: Mapping[Key, Value],
    was: Mapping[Key, Input],
    inputs: Mapping[Key, Input],
    make: Callable[[Key, Input], Value],
    differ: Callable[[Any, Any], bool] = is_not,
) -> Mapping[Key, Value]:
    """The value of each input, in the order of the inputs. `before` was made in the same way of `was`: what was made of
    the same input stays, as does what is equal, and the whole mapping stays the same object if all of it does.
    `differ`: whether two inputs do, where they are made for the comparison (`operator.ne`)."""
    made: dict[Key, Value] = {}
    for key in other_keys(was, inputs, differ):
        made[key] = same_if_equal(before.get(key), make(key, inputs[key]))
    if was.keys() != inputs.keys():
        return {key: made[key] if key in made else before[key] for key in inputs}
    return {**before, **made} if any(before[key] is not value for key, value in made.items()) else before


def grouped(keys: Collection[Key], values: Iterable[Value]) -> Mapping[Key, tuple[Value, ...]]:
    """The values of each key, in their order; `keys` has the key of each value. Nearly always a key has one value."""
    pairs = [*zip(keys, values, strict=True)]
    found = {key: (value,) for key, value in pairs}
    if len(found) == len(pairs):
        return found
    several: dict[Key, list[Value]] = {}
    for key, value in pairs:
        several.setdefault(key, []).append(value)
    return {key: tuple(of_it) for key, of_it in several.items()}


def amended(before: Mapping[Key, Value], changes: Mapping[Key, Value | None]) -> Mapping[Key, Value]:
    """`before` with these values, and without the keys of which the value is None; the same object if that changes
    nothing. What is equal stays the object that it was."""
    other = {key: value for key, value in changes.items() if before.get(key) != value}
    if not other:
        return before
    now = dict(before)
    for key, value in other.items():
        if value is None:
            del now[key]
        else:
            now[key] = value
    return now


def replaced(before: frozenset[Key], of: Collection[Key], now: Collection[Key]) -> frozenset[Key]:
    """`before` with, of these keys, those of `now` only; the same object if that changes nothing."""
    if all((key in before) == (key in now) for key in of):
        return before
    return before.difference(of).union(now)


def those(
    values: Collection[Value], attribute: Callable[[Value], Any], is_wanted: Callable[[Any], Any]
) -> list[Value]:
    """The values of which an attribute is a wanted one. As `other_keys` without a step of the interpreter for each of
    the others, if both functions are built in (`operator.attrgetter`)."""
    return [*compress(values, map(is_wanted, map(attribute, values)))]


def is_same_keys(before: Mapping[Key, Any], now: Mapping[Key, Any]) -> bool:
    """They have the same keys."""
    return before is now or before.keys() == now.keys()


def changed_keys(before: Mapping[Key, Any], now: Mapping[Key, Any]) -> set[Key]:
    """The keys whose values changed, and those that are gone."""
    if before is now:
        return set()
    found = {key for key in other_keys(before, now) if key not in before or before[key] != now[key]}
    there = len(before) + sum(key not in before for key in found)  # if none is gone
    return found if len(now) == there else found | (before.keys() - now.keys())


def other_keys(
    before: Mapping[Key, Any], now: Mapping[Key, Any], differ: Callable[[Any, Any], bool] = is_not
) -> list[Key]:
    """The keys of `now` whose values differ from those before: without a step of the interpreter for each of the
    others, as nearly all are the same."""
    return (
        []
        if before is now
        else [*compress(now, map(differ, now.values(), map(before.get, now, repeat(_NONE_YET))))]
    )
