"""A directory is removed although somebody makes files in it, or removes them, at the same time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import directories


@pytest.mark.parametrize("call", ["rmdir", "unlink"])
def test_a_directory_is_removed_while_its_owner_works(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is made before the first rmdir, or is gone before the first unlink."""
    place = tmp_path / "device-plugins"
    place.mkdir()
    (place / "kubelet.sock").touch()
    original, strikes = getattr(os, call), ["once"]

    def late(path: Any, *, dir_fd: int | None = None) -> None:
        if strikes:
            strikes.clear()
            (place / "ours.sock").touch() if call == "rmdir" else (place / "kubelet.sock").unlink()
        original(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, call, late)
    directories.remove(place)
    assert not strikes
    assert not place.exists()


def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(NotADirectoryError):
        directories.remove(tmp_path / "a-file")
