"""A class that becomes a dataclass when it is first used is the same one from then on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from gpuactors.grpc_trio import on_demand


@on_demand.dataclass(eq=False, repr=False)
class Message:
    name: str = dataclasses.field(default_factory=str)
    parts: list[int] = dataclasses.field(default_factory=list)


def declared() -> type[Message]:
    """Another one that nobody has used."""
    namespace = {"__annotations__": Message.__annotations__} | {
        name: dataclasses.field(default_factory=made) for name, made in (("name", str), ("parts", list))
    }
    return on_demand.dataclass(eq=False, repr=False)(type("Message", (), namespace))


@pytest.mark.parametrize(
    "use",
    [
        lambda cls: cls(name="n"),
        dataclasses.fields,
        dataclasses.is_dataclass,
    ],
    ids=["called", "asked for its fields", "asked whether it is one"],
)
def test_its_first_use_makes_it(use: Callable[[type[Message]], object]) -> None:
    cls = declared()
    assert isinstance(vars(cls)[on_demand.FIELDS], on_demand._Fields)
    use(cls)
    assert isinstance(vars(cls)[on_demand.FIELDS], dict)
    assert [field.name for field in dataclasses.fields(cls)] == ["name", "parts"]
    made = vars(cls)["__init__"]
    first, second = cls("n", [1]), cls()
    assert (first.name, first.parts, second.name, second.parts) == ("n", [1], "", [])
    assert vars(cls)["__init__"] is made, "once"
    assert "__eq__" not in vars(cls), "its options are kept"


def test_wrong_arguments_are_refused_as_by_a_dataclass() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nam'"):
        declared()(nam="n")  # type: ignore[call-arg]
