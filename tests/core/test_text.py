"""What enters the core can be written down: no lone surrogate where the host's names are no UTF-8."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.values.text import encodable


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
