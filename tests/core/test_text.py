"""What enters the core can be written down: no lone surrogate where the host's names are no UTF-8."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.events import GroupsObserved, HostScanned, Ticked
from gpuactors.core.model import GroupUse, Holder, pci_address
from gpuactors.core.text import all_encodable, encodable
from tests.core.builders import gpu

GPU = pci_address("0000:23:00.0")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("vfio-pci", "vfio-pci"),
        ("grün µ 日本", "grün µ 日本"),
        ("drv\udcff", r"drv\xff"),
        ("grün\udcfc", r"grün\xfc"),
        ("\udcc3\udcbc", "ü"),  # two bytes that are a letter together
        ("\ud800x", r"\ud800x"),
    ],
)
def test_a_text(text: str, told: str) -> None:
    assert encodable(text) == told


@given(st.text(st.characters(), max_size=8))
def test_any_text_can_be_encoded(text: str) -> None:
    encodable(text).encode()


def test_every_text_in_an_event_and_nothing_else() -> None:
    function = gpu(GPU)
    odd = replace(function, driver="a\udcff", model="b\udcff", fault="c\udcff", nodes=("/dev/vfio/\udcff",))
    told = replace(function, driver=r"a\xff", model=r"b\xff", fault=r"c\xff", nodes=(r"/dev/vfio/\xff",))
    assert all_encodable(HostScanned(1, (function, odd))) == HostScanned(1, (function, told))
    use = GroupUse(35, {GPU: 1}, frozenset({GPU}), (Holder(7, "qemu\udcff", None),), None)
    seen = all_encodable(GroupsObserved(2, (use,)))
    assert seen == GroupsObserved(2, (replace(use, holders=(Holder(7, r"qemu\xff", None),)),))


def test_an_event_without_such_a_text_is_the_same_object() -> None:
    for event in (Ticked(), HostScanned(1, (gpu(GPU),)), GroupsObserved(2, ())):
        assert all_encodable(event) is event
