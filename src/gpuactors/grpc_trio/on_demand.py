"""Generated messages that become dataclasses when they are first used: a daemon has made 6 of 37 at its first list.

`dataclasses.dataclass` writes and compiles an `__init__` for each class, 0.2 ms each. Must be used from one thread,
which is trio's here.

A file of its own: generated code imports it (`just gen`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, TypeVar, dataclass_transform, final

T = TypeVar("T")

FIELDS: Final = "__dataclass_fields__"
"""The attribute that makes a class a dataclass."""


@dataclass_transform()
def dataclass(**options: bool) -> Callable[[type[T]], type[T]]:
    """`dataclasses.dataclass` with these options, applied when the class is first called or asked for its fields."""

    def declared(cls: type[T]) -> type[T]:
        def made() -> type[Any]:
            del cls.__init__, cls.__dataclass_fields__  # type: ignore[attr-defined]  # ours below
            return dataclasses.dataclass(**options)(cls)

        def first(self: T, *values: object, **named: object) -> None:
            made().__init__(self, *values, **named)

        setattr(cls, FIELDS, _Fields(made))
        cls.__init__ = first  # type: ignore[method-assign, assignment]
        return cls

    return declared


@final
class _Fields:
    """The fields of a class that is not a dataclass yet."""

    def __init__(self, made: Callable[[], type[Any]]) -> None:
        self._made = made

    def __get__(self, instance: object, cls: type[Any]) -> object:
        return getattr(self._made(), FIELDS)
