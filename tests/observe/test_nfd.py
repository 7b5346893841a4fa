"""The feature file as NFD reads it: whole at any moment, with its expiry, and a sentence where it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuactors.observe.nfd import NfdFile
from gpuactors.ports.errors import StateFileError

LABELS = {"gpuactors.feature.node.kubernetes.io/iommu": "true"}
NOON = 1_795_348_800.0


async def test_the_file_has_its_expiry_before_the_labels(tmp_path: Path) -> None:
    path = tmp_path / "gpuactors"
    await NfdFile(path).write(LABELS, NOON)
    assert path.read_text().splitlines() == [
        "# Written by gpuactors, and renewed while it runs.",
        "# +expiry-time=2026-11-22T12:00:00Z",
        "gpuactors.feature.node.kubernetes.io/iommu=true",
    ]
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["gpuactors"], "nothing else is left there"


async def test_the_file_is_replaced_and_never_written_into(tmp_path: Path) -> None:
    path = tmp_path / "gpuactors"
    await NfdFile(path).write(LABELS, NOON)
    os.link(path, tmp_path / "old")
    await NfdFile(path).write({}, NOON)
    assert "iommu=true" in (tmp_path / "old").read_text()
    assert "iommu" not in path.read_text()


async def test_a_link_at_the_name_of_a_new_file_is_not_written_through(tmp_path: Path) -> None:
    """It was `.gpuactors.new`, known to everybody who can write in NFD's directory: root wrote where it pointed to."""
    target = tmp_path / "passwd"
    target.write_text("theirs")
    (tmp_path / ".gpuactors.new").symlink_to(target)
    await NfdFile(tmp_path / "gpuactors").write(LABELS, NOON)
    assert target.read_text() == "theirs"
    assert "iommu=true" in (tmp_path / "gpuactors").read_text()


async def test_a_link_in_its_place_is_somebodys(tmp_path: Path) -> None:
    """With `--nfd-file /dev/stdout`, as root, that was a file for every process of the machine."""
    link = tmp_path / "gpuactors"
    link.symlink_to("/dev/null")
    with pytest.raises(StateFileError, match="gpuactors: it is a link, and a regular file is needed"):
        await NfdFile(link).write(LABELS, NOON)
    assert link.is_symlink()


async def test_a_directory_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "gpuactors"
    with pytest.raises(StateFileError) as caught:
        await NfdFile(path).write(LABELS, NOON)
    assert str(caught.value).startswith(
        f"cannot write {path}: No such file or directory; mount the directory"
    )


async def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "gpuactors").mkdir()
    with pytest.raises(StateFileError):
        await NfdFile(tmp_path / "gpuactors").write(LABELS, NOON)
    assert os.listdir(tmp_path) == ["gpuactors"]
