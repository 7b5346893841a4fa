"""The file of the names of vGPU types: of this boot, whole at any moment, and no reason for anybody to stop."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import trio.testing

from gpuactors.control import boot_json
from gpuactors.control.vgpu_types import FILE_NAME, vgpu_types_json
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.ports.errors import StateFileError

CARD = PciAddress("0000:3b:00.0")
TYPES = {CARD: CardTypes(4711, {1147: ("NVIDIA L40S-1Q",), 1148: ("NVIDIA L40S-2Q",)})}
WRITTEN = {
    "boot": "one",
    "cards": {CARD: {"driverBind": 4711, "names": {"1147": "NVIDIA L40S-1Q", "1148": "NVIDIA L40S-2Q"}}},
}


async def test_what_was_written_is_read_in_this_boot_alone(tmp_path: Path) -> None:
    assert await vgpu_types_json(str(tmp_path), "one").read() == {}, "there is no file yet"
    await vgpu_types_json(str(tmp_path), "one").write(TYPES)
    assert await vgpu_types_json(str(tmp_path), "one").read() == TYPES
    assert await vgpu_types_json(str(tmp_path), "two").read() == {}
    assert json.loads((tmp_path / FILE_NAME).read_text()) == WRITTEN
    assert os.listdir(tmp_path) == [FILE_NAME], "nothing is left of how it was made"


async def test_a_number_with_several_names_is_not_kept(tmp_path: Path) -> None:
    file = vgpu_types_json(str(tmp_path), "one")
    await file.write({CARD: CardTypes(4711, {1147: ("A", "B"), 1148: ("C",)})})
    assert await file.read() == {CARD: CardTypes(4711, {1148: ("C",)})}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"boot": "one"}', b'{"boot": "one", "cards": []}', b"[" * 100_000,
        b'{"boot": 5, "cards": {}}', b'{"boot": "one", "cards": {"a": null}}',
        b'{"boot": "one", "cards": {"0000:3b:00.0": {"driverBind": 0, "names": {}}}}',
        b'{"boot": "one", "cards": {"0000:3b:00.0": {"driverBind": 1, "names": {"x": "A"}}}}',
        b'{"boot": "one", "cards": {"0000:3b:00.0": {"driverBind": 1, "names": {"5": "\\u0007"}}}}',
        b'{"boot": "one", "cards": {"0000:3b:00.0": {"driverBind": 1, "names": {"5": ""}}}}',
        b'{"boot": "' + b"x" * (1 << 20) + b'", "cards": {}}',
    ],
    ids=lambda c: ascii(c[:20]),
)  # fmt: skip
async def test_a_damaged_file_is_reported_and_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    file = vgpu_types_json(str(tmp_path), "one")
    with pytest.raises(StateFileError, match="is no list of vGPU types"):
        await file.read()
    await file.write(TYPES)
    assert await file.read() == TYPES


async def test_a_card_without_an_address_is_left_out(tmp_path: Path) -> None:
    cards = {**WRITTEN, "cards": {"../x": {"driverBind": 1, "names": {}}}}
    (tmp_path / FILE_NAME).write_text(json.dumps(cards))
    assert await vgpu_types_json(str(tmp_path), "one").read() == {}


async def test_a_directory_that_is_gone_cannot_be_written(tmp_path: Path) -> None:
    file = vgpu_types_json(str(tmp_path / "gone"), "one")
    with pytest.raises(StateFileError, match=r"cannot write .*vgpu-types\.json: No such file or directory"):
        await file.write(TYPES)


async def test_a_disk_that_hangs_costs_the_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(boot_json, "read_plain", lambda *_: hangs.wait(60))
    try:
        with pytest.raises(StateFileError, match="no answer within 2 s"):
            await vgpu_types_json(str(tmp_path), "one").read()
    finally:
        hangs.set()
