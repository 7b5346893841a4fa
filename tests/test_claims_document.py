"""What docs/dra.md#gpus-as-claims quotes is what the program says: its errors, its rules, its defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuactors.core.values.prebound import Rule
from gpuactors.core.values.vfio import BackendPolicy, VfioConfig
from tests.support.markdown import chapter
from tests.support.said import is_said

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "dra.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return chapter(DOCUMENT, heading)


def errors() -> list[str]:
    rows = [line for line in section("Errors of claims").splitlines() if line.startswith("| ")][1:]
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("quoted", errors())
def test_an_error_that_is_explained_is_one_that_the_program_says(quoted: str) -> None:
    assert is_said(quoted)


def test_what_the_program_does_not_say_is_found() -> None:
    assert len(errors()) > 12
    assert not is_said("the write to … has never returned")


def test_the_defaults_of_a_configuration_are_as_said() -> None:
    assert VfioConfig() == VfioConfig(BackendPolicy.LEGACY_ONLY, enable_api_device=True)
    assert "iommu: {backendPolicy: LegacyOnly, enableAPIDevice: true}     # the defaults" in DOCUMENT


def test_the_rules_of_pre_bound_gpus_are_those_that_explain_names() -> None:
    rows = [line for line in section("Pre-bound GPUs").splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*Rule]
    for shown in ("At a claim's end", "it stays on its vfio driver: "):
        assert is_said(shown)
