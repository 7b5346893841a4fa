"""The names of vGPU types: merged over a card, remembered while its driver stays bound, or the operator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors.core.host.vgpu_names import learned, remembered
from gpuactors.core.values.model import PciAddress, PciFunction, pci_address
from gpuactors.core.values.vgpu import CardTypes, OwnVgpuType, VendorVgpu, names_of, parse_own_type
from tests.core.builders import gpu

CARD, OTHER = pci_address("0000:3b:00.0"), pci_address("0000:5e:00.0")
BIND: Final = 4711
ONE, TWO = (1147, "NVIDIA L40S-1Q"), (1148, "NVIDIA L40S-2Q")

Cards = Mapping[PciAddress, CardTypes]


def vf(
    number: int, *creatable: tuple[int, str], type_: int = 0, card: PciAddress = CARD, bind: int = BIND
) -> PciFunction:
    address = pci_address(f"{card[:-1]}{number}")
    function = replace(gpu(address, 50 + number, driver="nvidia"), physical=card)
    return replace(function, vgpu=VendorVgpu(type_, creatable, driver_bind=bind))


def after(known: Cards, *functions: PciFunction, changed: tuple[PciFunction, ...] | None = None) -> Cards:
    return learned(known, {f.address: f for f in functions}, functions if changed is None else changed)


def test_the_lists_of_all_functions_of_a_card_are_one() -> None:
    assert after({}, vf(4, ONE), vf(5, TWO), vf(6)) == {
        CARD: CardTypes(BIND, {1147: ("NVIDIA L40S-1Q",), 1148: ("NVIDIA L40S-2Q",)})
    }


def test_a_name_stays_when_the_card_is_full() -> None:
    known = after({}, vf(4, ONE, TWO))
    full = after(known, vf(4, type_=1148), vf(5))
    assert full is known


def test_two_cards_of_one_model_may_number_differently() -> None:
    known = after({}, vf(4, ONE), vf(4, (1147, "NVIDIA L40S-4Q"), card=OTHER))
    assert {card: types.names[1147] for card, types in known.items()} == {
        CARD: ("NVIDIA L40S-1Q",),
        OTHER: ("NVIDIA L40S-4Q",),
    }


def test_present_lists_that_contradict_each_other_leave_the_number_without_a_name() -> None:
    known = after({}, vf(4, ONE), vf(5, (1147, "NVIDIA L40S-1B")))
    assert known[CARD].names == {1147: ("NVIDIA L40S-1B", "NVIDIA L40S-1Q")}
    assert after(known, vf(4), vf(5, (1147, "NVIDIA L40S-1B")))[CARD].names == {1147: ("NVIDIA L40S-1B",)}


def test_a_present_list_comes_before_what_is_remembered() -> None:
    assert after({CARD: CardTypes(BIND, {1147: ("old",), 7: ("kept",)})}, vf(4, ONE))[CARD].names == {
        7: ("kept",),
        1147: ("NVIDIA L40S-1Q",),
    }


def test_a_new_bind_of_the_driver_ends_the_names() -> None:
    known = after({}, vf(4, ONE))
    assert after(known, vf(4, TWO, bind=BIND + 1)) == {CARD: CardTypes(BIND + 1, {1148: ("NVIDIA L40S-2Q",)})}
    mixed = after(known, vf(4, ONE), vf(5, TWO, bind=BIND + 1))
    assert mixed == {CARD: CardTypes(BIND + 1, {1148: ("NVIDIA L40S-2Q",)})}, (
        "the other one is not read again yet"
    )


def test_an_unknown_bind_neither_adds_nor_ends_a_name() -> None:
    known = after({}, vf(4, ONE))
    assert after(known, vf(4, TWO, bind=0)) is known
    assert after({}, vf(4, TWO, bind=0)) == {}


def test_only_a_changed_card_is_read() -> None:
    assert after({}, vf(4, ONE), changed=()) == {}
    assert after({}, gpu(CARD, 1), vf(4, ONE), changed=(gpu(CARD, 1),)) == {}


def test_what_an_earlier_daemon_kept_counts_within_the_same_bind() -> None:
    before = {CARD: CardTypes(BIND, {1147: ("old",), 7: ("kept",)}), OTHER: CardTypes(9, {7: ("other",)})}
    own = after({}, vf(4, ONE))
    assert remembered(own, before) == {
        CARD: CardTypes(BIND, {7: ("kept",), 1147: ("NVIDIA L40S-1Q",)}),
        OTHER: CardTypes(9, {7: ("other",)}),
    }
    bound_anew = after({}, vf(4, ONE, bind=BIND + 1))
    assert remembered(bound_anew, {CARD: before[CARD]}) is bound_anew


# --- the name of a type ----------------------------------------------------------------------------------------------

TYPES: Final = CardTypes(BIND, {1147: ("NVIDIA L40S-1Q",), 9: ("A", "B")})


@pytest.mark.parametrize(
    ("number", "bind", "names"),
    [
        (1147, BIND, ("NVIDIA L40S-1Q",)),
        (1147, BIND + 1, ()),
        (1147, 0, ()),
        (9, BIND, ("A", "B")),
        (8, BIND, ()),
        (0, BIND, ()),
        (None, BIND, ()),
    ],
)
def test_a_number_is_looked_up_in_the_bind_that_it_was_read_in(
    number: int | None, bind: int, names: tuple[str, ...]
) -> None:
    assert names_of(VendorVgpu(number, driver_bind=bind), CARD, TYPES, ()) == names
    assert names_of(VendorVgpu(number, driver_bind=bind), CARD, None, ()) == ()


def test_a_function_s_own_list_names_its_type_where_those_of_the_card_are_not_known() -> None:
    """Found by histories: its card was unplugged before the daemon had read a list, and a process had it open."""
    own = VendorVgpu(1147, ((1147, "NVIDIA L40S-1Q"), (1148, "NVIDIA L40S-2Q")))
    assert names_of(own, CARD, None, ()) == ("NVIDIA L40S-1Q",)
    assert names_of(own, CARD, CardTypes(BIND, {1147: ("of another bind",)}), ()) == ("NVIDIA L40S-1Q",)


def test_the_operator_s_name_comes_first_and_that_for_a_card_before_that_for_all() -> None:
    own = (OwnVgpuType(None, 1147, "for all"), OwnVgpuType(CARD, 1147, "for one"), OwnVgpuType(None, 9, "A"))

    def name(number: int, card: PciAddress) -> tuple[str, ...]:
        return names_of(VendorVgpu(number, driver_bind=BIND), card, TYPES, own)

    assert (name(1147, CARD), name(1147, OTHER), name(9, CARD), name(8, CARD)) == (
        ("for one",),
        ("for all",),
        ("A",),
        (),
    )
    assert names_of(VendorVgpu(0), CARD, TYPES, own) == ()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1147=NVIDIA L40S-1Q", OwnVgpuType(None, 1147, "NVIDIA L40S-1Q")),
        (" 1147=  GRID T4-1Q ", OwnVgpuType(None, 1147, "GRID T4-1Q")),
        ("3B:00.0/7=A=B", OwnVgpuType("0000:3b:00.0", 7, "A=B")),
        ("0000:3b:00.0/7=A", OwnVgpuType("0000:3b:00.0", 7, "A")),
    ],
)
def test_the_operator_s_name_as_it_is_written(text: str, parsed: OwnVgpuType) -> None:
    assert parse_own_type(text) == parsed
    assert parse_own_type(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text", ["", "1147", "=A", "0=A", "4294967296=A", "7= ", "x=A", "3b:00/7=A", "7=\xb2", "/7=A"]
)
def test_what_is_no_name_of_a_type_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="1147=NVIDIA L40S-1Q"):
        parse_own_type(text)
