"""The last results of pure functions of frozen values: values derived from the state are made again only if it differs.

The inputs are compared as a whole, by value. A mapping equals another one in any order, so a result must not depend on
the order of a mapping among its inputs, unless that is sorted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec, Protocol, TypeVar

Inputs = ParamSpec("Inputs")
Key = TypeVar("Key")
Value = TypeVar("Value")
_Input = TypeVar("_Input", contravariant=True)
_Value = TypeVar("_Value", covariant=True)

_KEPT: Final = 2
"""The number of results kept for one function, or for each of its inputs: a step reads the values derived from the
state before it and from the state after it."""

_forgetting: Final[list[Callable[[], None]]] = []


def forget() -> None:
    """Forget all results, for a test that replaces a function that made them."""
    for forgets in _forgetting:
        forgets()


def memoized(function: Callable[Inputs, Value]) -> Callable[Inputs, Value]:
    """Return the last results of `function` again for equal arguments, which are passed by position."""
    results: list[tuple[tuple[object, ...], Value]] = []
    _forgetting.append(results.clear)

    @wraps(function)
    def remembered(*inputs: Inputs.args, **named: Inputs.kwargs) -> Value:
        for last_inputs, value in results:
            if last_inputs == inputs:
                return value
        value = function(*inputs, **named)
        results.insert(0, (inputs, value))
        del results[_KEPT:]
        return value

    return remembered


class OfEach(Protocol[_Input, _Value]):
    """Make the value of each input, by the same keys."""

    def __call__(self, inputs: Mapping[Key, _Input], /) -> Mapping[Key, _Value]: ...


def memoized_each(function: Callable[[_Input], _Value]) -> OfEach[_Input, _Value]:
    """Apply `function` to each input of a mapping. For an input that equals the last one with its key, return the last
    result."""
    kept: deque[dict[Any, tuple[_Input, _Value]]] = deque(maxlen=_KEPT)
    _forgetting.append(kept.clear)

    def remembered(inputs: Mapping[Key, _Input]) -> Mapping[Key, _Value]:
        last_by_key: dict[Any, tuple[_Input, _Value]] = {}
        for before in kept:
            last_by_key.update(before)
        made = {
            key: last
            if (last := last_by_key.get(key)) is not None and last[0] == now
            else (now, function(now))
            for key, now in inputs.items()
        }
        kept.append(made)
        return {key: value for key, (_, value) in made.items()}

    return remembered
