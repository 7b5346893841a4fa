"""Selectors: what an operator may write, what is refused and with which words, and what is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors.core.values.inventory import is_selected
from gpuactors.core.values.selector import Selector, matches, parse_selector
from tests.core.builders import audio, gpu

H100 = {"vendor": "10de", "device": "2330", "class_code": "030200", "address": "0000:23:00.0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vendor=10de,class=03", Selector(vendor="10de", class_prefix="03")),
        ("vendor=10de,class=0680", Selector(vendor="10de", class_prefix="0680")),
        ("class=0x030200", Selector(class_prefix="030200")),
        ("class=03xxxx", Selector(class_prefix="03")),
        ("class=0680XX", Selector(class_prefix="0680")),
        ("vendor=0x10DE, device=0x2330", Selector(vendor="10de", device="2330")),
        ("address=0000:23:00.0", Selector(address="0000:23:00.0")),
        ("address=23:00.0", Selector(address="0000:23:00.0")),
        ("address=0001:AF:1F.7", Selector(address="0001:af:1f.7")),
        ("address=10000:e1:00.0", Selector(address="10000:e1:00.0")),
        (" vendor = 10de ", Selector(vendor="10de")),
        ("address=00010000:e1:00.0", Selector(address="10000:e1:00.0")),
        ("!vendor=10de,class=03", Selector(vendor="10de", class_prefix="03", exclude=True)),
        (" ! address = 23:00.0", Selector(address="0000:23:00.0", exclude=True)),
        ("mdev=nvidia-593", Selector(mdev="nvidia-593")),
        ("!mdev=NVIDIA  A10-24Q", Selector(mdev="nvidia_a10-24q", exclude=True)),
    ],
)
def test_reads_what_an_operator_writes(text: str, expected: Selector) -> None:
    assert parse_selector(text) == expected


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("", "''", "write for example vendor=10de,class=03"),
        ("10de:2330", "10de:2330", "write for example vendor=10de,class=03"),
        ("vendor=10de,", "''", "is not KEY=VALUE"),
        ("!", "''", "write for example vendor=10de,class=03"),
        ("!!vendor=10de", "!vendor", "stands once"),
        ("class=03,!vendor=10de", "!vendor", "write !vendor=10de as a selector of its own"),
        ("vendor=!10de", "vendor=!10de", "four hex digits"),
        ("vendor=nvidia", "vendor=nvidia", "four hex digits"),
        ("vendor=", "vendor=", "four hex digits"),
        ("mdev=", "mdev", "write the id or the name of a type"),
        ("vendor=10de,vendor=1002", "vendor", "given twice"),
        ("device=233", "device=233", "device=2330"),
        ("Vendor=10de", "'Vendor'", "the keys are vendor, device, class, address"),
        ("driver=vfio-pci", "'driver'", "the keys are vendor, device, class, address"),
        ("class=3", "class=3", "two, four or six hex digits"),
        ("class=", "class=", "two, four or six hex digits"),
        ("class=xxxxxx", "class=xxxxxx", "two, four or six hex digits"),
        ("class=03xx", "class=03xx", "class=0302xx"),
        ("class=03xx00", "class=03xx00", "class=0302xx"),
        ("class=0302xxx", "class=0302xxx", "class=0302xx"),
        ("class=03020000", "class=03020000", "two, four or six"),
        ("address=23:00", "address=23:00", "address=0000:23:00.0"),
        ("address=0000:23:20.0", "address=0000:23:20.0", "lspci -D"),
        ("address=0000:23:00.8", "address=0000:23:00.8", "lspci -D"),
    ],
)
def test_refuses_with_the_key_and_the_remedy(text: str, key: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="selector") as caught:
        parse_selector(text)
    assert key in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("vendor=10de,class=03", True),
        ("vendor=10de,class=0302", True),
        ("class=030200", True),
        ("device=2330", True),
        ("address=23:00.0", True),
        ("vendor=10de,device=2330,class=03,address=23:00.0", True),
        ("vendor=1002,class=03", False),
        ("vendor=10de,class=0680", False),
        ("class=030000", False),
        ("device=2331", False),
        ("address=0001:23:00.0", False),
        ("vendor=10de,device=2330,class=03,address=24:00.0", False),
    ],
)
def test_every_part_that_is_given_has_to_agree(text: str, chosen: bool) -> None:
    assert matches(parse_selector(text), **H100) is chosen


def test_amds_accelerators_have_a_class_of_their_own() -> None:
    """Processing accelerators (1200), and not display controllers: a whole MI300X and its virtual function."""
    for device in ("74a1", "74b5"):
        instinct = {"vendor": "1002", "device": device, "class_code": "120000", "address": "0000:05:00.0"}
        assert not matches(parse_selector("vendor=1002,class=03"), **instinct)
        assert matches(parse_selector("vendor=1002,class=12"), **instinct)


def test_facts_may_be_spelt_as_sysfs_spells_them() -> None:
    selector = parse_selector("vendor=10de,class=03")
    assert matches(selector, vendor="0x10DE", device="0x2330", class_code="0x030000", address="0000:23:00.0")
    assert not matches(
        selector, vendor="0x10de", device="0x10f0", class_code="0x040300", address="0000:23:00.1"
    )


def hex_digits(count: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=count, max_size=count)


addresses = st.builds(
    "{:04x}:{:02x}:{:02x}.{}".format,
    st.integers(0, 0x1FFFF),
    st.integers(0, 0xFF),
    st.integers(0, 0x1F),
    st.integers(0, 7),
)
selectors = st.builds(
    Selector,
    vendor=st.none() | hex_digits(4),
    device=st.none() | hex_digits(4),
    class_prefix=st.none() | hex_digits(2) | hex_digits(4) | hex_digits(6),
    address=st.none() | addresses,
    exclude=st.booleans(),
).filter(lambda selector: str(selector) not in ("", "!"))


@given(selectors)
def test_what_is_written_out_is_read_back(selector: Selector) -> None:
    assert parse_selector(str(selector)) == selector
    assert (
        parse_selector(
            str(selector)
            .upper()
            .replace("VENDOR", "vendor")
            .replace("DEVICE", "device")
            .replace("CLASS", "class")
            .replace("ADDRESS", "address")
        )
        == selector
    )


@given(st.text("!0123456789abcdefx:=,. vendorclass", max_size=40))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    refusal = ""
    try:
        assert parse_selector(str(parse_selector(text))) == parse_selector(text)
    except ValueError as error:
        refusal = str(error)
    assert refusal == "" or refusal.startswith(f"selector {text!r}: ")


# --- selectors that leave out -----------------------------------------------------------------------------


def chosen(*selectors: str) -> list[str]:
    """Which of two H100, of which one has an audio function, an A100 and another maker's card are chosen."""
    functions = (
        gpu("23:00.0"), audio("23:00.1", 0x23), gpu("24:00.0"), gpu("31:00.0", device="20b0"),
        replace(gpu("42:00.0"), vendor="1af4"),
    )  # fmt: skip
    parsed = [parse_selector(text) for text in selectors]
    return [f.address[5:] for f in functions if is_selected(parsed, f)]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (["class=03", "!vendor=10de"], ["42:00.0"]),
        (["!vendor=10de", "class=03"], ["42:00.0"]),
        (["class=03", "!vendor=10de,device=2330"], ["31:00.0", "42:00.0"]),
        (["class=03", "!address=23:00.0", "!device=20b0"], ["24:00.0", "42:00.0"]),
        (["vendor=10de", "!class=04"], ["23:00.0", "24:00.0", "31:00.0"]),
        (["class=04", "class=03", "!class=04"], ["23:00.0", "24:00.0", "31:00.0", "42:00.0"]),
        (["address=23:00.0", "!address=23:00.0"], []),
        (["!vendor=10de"], []),
    ],
)
def test_what_meets_a_selector_that_leaves_out_is_not_chosen(
    selectors: list[str], expected: list[str]
) -> None:
    assert chosen(*selectors) == expected
