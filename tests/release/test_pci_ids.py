"""The shipped names of GPUs: how old they may be at a release, and what a newer file changes."""

from __future__ import annotations

import datetime
from hashlib import sha256
from pathlib import Path

import pytest

from gpuactors.host.pci_ids import NVIDIA, SHIPPED, PciIds, date_of
from tests.release.pci_ids import AGE_MAX, DIGEST, changed_names, too_old


def test_the_shipped_file_has_a_date_and_the_gpus_of_2026() -> None:
    assert (date_of(SHIPPED) or "") >= "2026-06-16"
    names = PciIds(SHIPPED).section(NVIDIA)
    assert names["3182"] == "GB110 [B300 SXM6 AC]"
    assert names["31c2"] == "GB110 [GB300]"
    assert names["2330"] == "GH100 [H100 SXM5 80GB]"


def test_the_shipped_file_is_the_packages() -> None:
    assert sha256(SHIPPED.read_bytes()).hexdigest() == DIGEST.read_text(encoding="ascii").strip()


@pytest.mark.parametrize(("days", "is_released"), [(0, True), (270, True), (271, False), (-1, True)])
def test_a_release_refuses_an_old_file_and_says_how_old_it_is(days: int, is_released: bool) -> None:
    assert AGE_MAX.days == 270
    today = datetime.date(2026, 6, 16) + datetime.timedelta(days=days)
    why = too_old("2026-06-16", today)
    assert (why == "") is is_released
    assert is_released or f"{days} days old" in why


def test_what_changes_a_resources_name_is_found(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text("10de  NVIDIA\n\t0001  A [B]\n\t0002  C\n\t0003  D\n\t0005  E [f-g]\n")
    after.write_text("10de  NVIDIA\n\t0001  A [B]\n\t0002  C [X]\n\t0004  new\n\t0005  E [fg]\n")
    assert changed_names(before, after) == {
        "10de:0002": ("nvidia.com/C", "nvidia.com/C_X"),
        "10de:0003": ("nvidia.com/D", "nvidia.com/0003"),
    }
