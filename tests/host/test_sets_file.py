"""The operator's file of sets: each mistake is named with its place and the remedy, and the rest counts."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import trio

from gpuactors.core.kinds.sets import DeviceSet, KnownSets, SetSource
from gpuactors.host import sets_file
from gpuactors.host.sets_file import SETS_FILE_MAX_BYTES, SETS_READ_S, SetsFile
from gpuactors.ports.errors import HostError
from tests.core.kinds.boards import key


def pair(number: int, *gpus: int) -> DeviceSet:
    return DeviceSet(tuple(map(key, gpus)), SetSource.OPERATOR, str(number))


async def read(path: Path, content: object) -> KnownSets:
    await trio.Path(path).write_text(json.dumps(content))
    return await SetsFile(path).read()


async def test_a_file_has_sets_and_module_ids(tmp_path: Path) -> None:
    content = {
        "sets": {"2": [[key(1), "02:00.0"], [key(3), key(4)]]},
        "gpuModuleIDs": {"01:00.0": 5, key(2): 0},
    }
    assert await read(tmp_path / "sets.json", content) == KnownSets(
        (pair(1, 1, 2), pair(2, 3, 4)), {key(1): 5}
    )
    assert await read(tmp_path / "sets.json", {}) == KnownSets()


async def test_a_wrong_set_costs_that_set(tmp_path: Path) -> None:
    path = tmp_path / "sets.json"
    known = await read(path, {"sets": {"2": [[key(1)], [key(3), key(4)]]}, "gpuModuleIDs": {key(1): "x"}})
    assert known.sets == (pair(2, 3, 4),)
    wrong_set, wrong_id = known.problems
    assert wrong_set.startswith(f"{path}, sets of 2, number 1: it has 1 addresses; move it to its size")
    assert wrong_id.startswith(f"{path}, module id of {key(1)}: x is no number")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no JSON object"),
        (b"[]", "is no JSON object"),
        (b'{"sets": ', "is no JSON object"),
        (b"\xff", "is no JSON object"),
        (b"[" * 100_000, "is no JSON object: it nests deeper"),
        (b'{"set": {}}', "has an unknown field set; it may have sets and gpuModuleIDs: correct it"),
        (b" " * (SETS_FILE_MAX_BYTES + 1), "has more than 1048576 bytes; shorten it"),
    ],
    ids=["empty", "a list", "cut off", "no text", "deep", "unknown field", "long"],
)  # fmt: skip
async def test_a_file_that_is_none_is_an_error_with_the_remedy(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "sets.json"
    path.write_bytes(content)
    with pytest.raises(HostError) as error:
        await SetsFile(path).read()
    assert str(path) in str(error.value)
    assert words in str(error.value)


async def test_a_file_that_is_missing_or_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        HostError, match=r"cannot read .*/sets\.json \(--sets-file\): No such file or directory; corr"
    ):
        await SetsFile(tmp_path / "sets.json").read()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(HostError, match=r"a FIFO"):
        await SetsFile(tmp_path / "fifo").read()


async def test_a_file_system_that_hangs_is_given_up_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun = threading.Event(), []

    def hanging(*_: object) -> bytes:
        begun.append(1)
        answers.wait(60)
        return b"{}"

    monkeypatch.setattr(sets_file, "read_plain", hanging)
    monkeypatch.setattr(sets_file, "SETS_READ_S", 0.05)
    file = SetsFile(tmp_path / "sets.json")
    assert SETS_READ_S == 2.0
    with trio.fail_after(30):
        for _ in range(2):
            with pytest.raises(HostError, match="no answer within"):
                await file.read()
        assert len(begun) == 1, "one thread hangs there at most"
        answers.set()
        while True:
            try:
                assert await file.read() == KnownSets()
                return
            except HostError:
                await trio.sleep(0.01)
