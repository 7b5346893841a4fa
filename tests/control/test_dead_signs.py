"""The file of signs of dead functions: of this boot, whole at any moment, and no reason for anybody to stop."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuactors.control.dead_signs import DEAD_SIGNS_FILE_MAX_BYTES, FILE_NAME, dead_signs_json
from gpuactors.core.values.dead_signs import DeadSign
from gpuactors.core.values.model import Sign, pci_address
from gpuactors.ports.errors import StateFileError

SIGNS = {
    pci_address("0000:3b:00.0"): DeadSign(4711, Sign.SILENT),
    pci_address("0000:5d:00.0"): DeadSign((1 << 63) + 1, Sign.PORT),
}
WRITTEN = {
    "boot": "one",
    "functions": {
        "0000:3b:00.0": {"presence": 4711, "sign": "silent"},
        "0000:5d:00.0": {"presence": (1 << 63) + 1, "sign": "port"},
    },
}


async def test_what_was_written_is_read_in_this_boot_alone(tmp_path: Path) -> None:
    assert await dead_signs_json(str(tmp_path), "one").read() == {}, "there is no file yet"
    await dead_signs_json(str(tmp_path), "one").write(SIGNS)
    assert await dead_signs_json(str(tmp_path), "one").read() == SIGNS
    assert await dead_signs_json(str(tmp_path), "two").read() == {}
    assert json.loads((tmp_path / FILE_NAME).read_text()) == WRITTEN
    assert os.listdir(tmp_path) == [FILE_NAME], "nothing is left of how it was made"
    await dead_signs_json(str(tmp_path), "one").write({})
    assert await dead_signs_json(str(tmp_path), "one").read() == {}


def of_one(address: str = "0000:3b:00.0", **changes: object) -> bytes:
    function = {"presence": 4711, "sign": "silent", **changes}
    return json.dumps({"boot": "one", "functions": {address: function}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"boot": "one"}', b'{"boot": "", "functions": {}}',
        b'{"boot": "one", "functions": []}', b"[" * 100_000, of_one("../x"), of_one("0000:3B:00.0"),
        of_one(presence=0), of_one(presence=-1), of_one(presence="4711"), of_one(presence=1.5),
        of_one(sign="well"), of_one(sign=None),
        b'{"boot": "' + b"x" * DEAD_SIGNS_FILE_MAX_BYTES + b'", "functions": {}}',
    ],
    ids=lambda c: ascii(c[-50:]),
)  # fmt: skip
async def test_a_damaged_file_is_reported_and_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    file = dead_signs_json(str(tmp_path), "one")
    with pytest.raises(StateFileError, match=r"is no list of dead functions .*it is written again"):
        await file.read()
    await file.write(SIGNS)
    assert await file.read() == SIGNS


async def test_a_directory_that_is_gone_cannot_be_written(tmp_path: Path) -> None:
    file = dead_signs_json(str(tmp_path / "gone"), "one")
    with pytest.raises(StateFileError, match=r"cannot write .*dead-signs\.json: No such file or directory"):
        await file.write(SIGNS)
