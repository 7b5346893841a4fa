"""The last results of pure functions of frozen values: what is derived of the state is made anew only when it differs.

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
"""Results of one function, or of each of its inputs: a step reads what follows from the state before it and from the
one after."""

_forgetting: Final[list[Callable[[], None]]] = []


def forget() -> None:
    """Forget all results. A test does that which replaces a function that they were made by."""
    for forgets in _forgetting:
        forgets()


def memoized(function: Callable[Inputs, Value]) -> Callable[Inputs, Value]:
    """Return the last results of `function` again for equal arguments, which are passed by position."""
    kept: list[tuple[tuple[object, ...], Value]] = []
    _forgetting.append(kept.clear)

    @wraps(function)
    def remembered(*inputs: Inputs.args, **named: Inputs.kwargs) -> Value:
        for known, value in kept:
            if known == inputs:
                return value
        value = function(*inputs, **named)
        kept.insert(0, (inputs, value))
        del kept[_KEPT:]
        return value

    return remembered


class OfEach(Protocol[_Input, _Value]):
    """Make the value of each input, by the same keys."""

    def __call__(self, inputs: Mapping[Key, _Input], /) -> Mapping[Key, _Value]: ...


def memoized_each(function: Callable[[_Input], _Value]) -> OfEach[_Input, _Value]:
    """Apply `function` to each input of a mapping. Of one that equals the last input with its key, return the result of
    that again."""
    kept: deque[dict[Any, tuple[_Input, _Value]]] = deque(maxlen=_KEPT)
    _forgetting.append(kept.clear)

    def remembered(inputs: Mapping[Key, _Input]) -> Mapping[Key, _Value]:
        known: dict[Any, tuple[_Input, _Value]] = {}
        for before in kept:
            known.update(before)
        made = {
            key: last if (last := known.get(key)) is not None and last[0] == now else (now, function(now))
            for key, now in inputs.items()
        }
        kept.append(made)
        return {key: value for key, (_, value) in made.items()}

    return remembered
