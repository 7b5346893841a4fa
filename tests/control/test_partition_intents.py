"""The file of intents of partitions: of this boot, whole at any moment, and not empty where it is damaged."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import trio.testing

from gpuactors.control import boot_json
from gpuactors.control.partition_intents import FILE_NAME, partition_intents_json
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.ports.errors import StateFileError

GPUS = ("0000:3b:00.0", "0000:5d:00.0")
INTENTS = (
    Intent(PartitionId("7"), frozenset(map(DeviceKey, GPUS)), Goal.ACTIVATE),
    Intent(PartitionId("8"), frozenset({DeviceKey("0000:9b:00.0")}), Goal.DEACTIVATE),
)
WRITTEN = {
    "boot": "one",
    "partitions": [
        {"id": "7", "goal": "activate", "devices": list(GPUS)},
        {"id": "8", "goal": "deactivate", "devices": ["0000:9b:00.0"]},
    ],
}


async def test_what_was_written_is_read_in_this_boot_alone(tmp_path: Path) -> None:
    assert await partition_intents_json(str(tmp_path), "one").read() == (), "there is no file yet"
    await partition_intents_json(str(tmp_path), "one").write(INTENTS)
    assert await partition_intents_json(str(tmp_path), "one").read() == INTENTS
    assert await partition_intents_json(str(tmp_path), "two").read() == ()
    assert json.loads((tmp_path / FILE_NAME).read_text()) == WRITTEN
    assert os.listdir(tmp_path) == [FILE_NAME], "nothing is left of how it was made"


async def test_the_last_content_is_the_whole_content(tmp_path: Path) -> None:
    file = partition_intents_json(str(tmp_path), "one")
    await file.write(INTENTS)
    await file.write(INTENTS[1:])
    assert await file.read() == INTENTS[1:]
    await file.write(())
    assert await file.read() == ()


PARTITION = {"id": "7", "goal": "activate", "devices": list(GPUS)}


def with_partition(**changes: object) -> bytes:
    return json.dumps({"boot": "one", "partitions": [{**PARTITION, **changes}]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"boot": "one"}', b'{"boot": "", "partitions": []}',
        b'{"boot": "one", "partitions": {}}', b'{"boot": "one", "partitions": [null]}', b"[" * 100_000,
        with_partition(id=7), with_partition(id="-1"), with_partition(id="7\n"), with_partition(id=""),
        with_partition(goal="active"), with_partition(devices=[]), with_partition(devices=["a b"]),
        json.dumps({"boot": "one", "partitions": 2 * [PARTITION]}).encode(),
        b'{"boot": "' + b"x" * (1 << 16) + b'", "partitions": []}',
    ],
    ids=lambda c: ascii(c[-40:]),
)  # fmt: skip
async def test_a_damaged_file_is_not_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StateFileError, match=r"has no list of partitions.*remove the file"):
        await partition_intents_json(str(tmp_path), "one").read()


async def test_a_directory_that_is_gone_cannot_be_written(tmp_path: Path) -> None:
    file = partition_intents_json(str(tmp_path / "gone"), "one")
    with pytest.raises(StateFileError, match=r"cannot write .*partitions\.json: No such file or directory"):
        await file.write(INTENTS)


async def test_a_file_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StateFileError, match=r"cannot read .*partitions\.json: "):
        await partition_intents_json(str(tmp_path), "one").read()


async def test_a_disk_that_hangs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(boot_json, "read_plain", lambda *_: hangs.wait(60))
    try:
        with pytest.raises(StateFileError, match="no answer within 2 s"):
            await partition_intents_json(str(tmp_path), "one").read()
    finally:
        hangs.set()
