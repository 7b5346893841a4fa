"""The file of served resources: whole at any moment, and no reason for anybody to stop."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from gpuactors.control import served
from gpuactors.control.served import FILE_NAME, ServedFile
from gpuactors.core.values.model import ResourceName
from gpuactors.ports.errors import StateFileError

H100 = ResourceName("nvidia.com/GH100_H100_SXM5_80GB")
OLD = ResourceName("nvidia.com/2330")
SERVED = {H100: frozenset({"10de:2330"})}


async def test_before_the_first_daemon_nothing_was_served(tmp_path: Path) -> None:
    assert await ServedFile(str(tmp_path)).read() == {}


async def test_what_was_written_is_read(tmp_path: Path) -> None:
    served = {H100: frozenset({"10de:2330", "10de:2331"}), OLD: frozenset[str]()}
    await ServedFile(str(tmp_path)).write(served)
    assert await ServedFile(str(tmp_path)).read() == served
    assert os.listdir(tmp_path) == [FILE_NAME], "nothing is left of how it was made"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"resources": 5}', b'{"resources": [5]}', b"[" * 100_000,
        b'{"resources": ["nvidia.com/H100"]}', b'{"resources": {"a": null}}', b'{"resources": {"a": "10de:2330"}}',
        b'{"resources": {"a": [5]}}', b'{"resources": {}, "profiles": []}',
        b'{"resources": {"a": []}, "profiles": {"a": ["\\u0007"]}}', b'{"resources": {}, "profiles": {"a": [""]}}',
        b'{"resources": {}, "a": NaN}', b'{"resources": {"a": ["10de:2330", "H100"]}}',
        b'{"resources": {"' + b"x" * (1 << 20) + b'": []}}',
    ],
    ids=lambda c: ascii(c[:20]),
)  # fmt: skip
async def test_a_file_that_is_none_of_ours_is_said_and_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    file = ServedFile(str(tmp_path))
    with pytest.raises(StateFileError, match="is no list of resources"):
        await file.read()
    await file.write(SERVED)
    assert await file.read() == SERVED


async def test_a_link_at_the_name_of_a_new_file_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "passwd"
    target.write_text("theirs")
    for name in (FILE_NAME, f"{FILE_NAME}.new"):
        (tmp_path / name).symlink_to(target)
    await ServedFile(str(tmp_path)).write(SERVED)
    assert target.read_text() == "theirs"
    assert await ServedFile(str(tmp_path)).read() == SERVED


@pytest.mark.timeout(20)
async def test_a_fifo_in_its_place_is_said_and_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    file = ServedFile(str(tmp_path))
    with pytest.raises(StateFileError, match="it is a FIFO, and a regular file is needed"):
        await file.read()
    await file.write(SERVED)
    assert await file.read() == SERVED


async def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    file = ServedFile(str(tmp_path / "gone" / "gpuactors"))
    with pytest.raises(StateFileError, match=r"cannot write .*served\.json: No such file or directory"):
        await file.write(SERVED)


async def test_a_daemon_with_another_state_directory_reads_what_was_served(tmp_path: Path) -> None:
    """Found by histories: a pod's GPU left kubelet's list, and the free count was -1."""
    nodes, first, second = (tmp_path / name for name in ("gpuactors", "first", "second"))
    first.mkdir()
    second.mkdir()
    await ServedFile(str(nodes), str(first)).write(SERVED)
    assert await ServedFile(str(nodes), str(second)).read() == SERVED
    older = {OLD: frozenset({"10de:2330"})}
    await ServedFile(str(second)).write(older)
    assert await ServedFile(str(nodes), str(second)).read() == SERVED | older
    assert await ServedFile(str(first)).read() == SERVED, "an older daemon reads this one alone"


async def test_one_of_the_two_places_is_enough(tmp_path: Path) -> None:
    """Kubelet is not installed yet; or the disk of the state directory is broken."""
    missing, there = str(tmp_path / "kubelet" / "gpuactors"), str(tmp_path)
    for places in ((missing, there), (there, missing)):
        await ServedFile(*places).write(SERVED)
        assert await ServedFile(*places).read() == SERVED
    (tmp_path / FILE_NAME).write_text("damaged")
    assert await ServedFile(there, str(tmp_path / "empty")).read() == {}


async def test_the_profiles_of_vgpus_are_where_an_older_daemon_does_not_look(tmp_path: Path) -> None:
    file = ServedFile(str(tmp_path))
    vgpu = ResourceName("nvidia.com/NVIDIA_L40S-1Q")
    served = SERVED | {vgpu: frozenset({"NVIDIA L40S-1Q", "NVIDIA L40S-1Q "})}
    await file.write(served)
    assert await file.read() == served
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {
        "resources": {H100: ["10de:2330"], vgpu: []},
        "profiles": {vgpu: ["NVIDIA L40S-1Q", "NVIDIA L40S-1Q "]},
    }


async def test_another_model_of_a_name_is_kept_beside_the_first(tmp_path: Path) -> None:
    file = ServedFile(str(tmp_path))
    await file.write(SERVED)
    more = {H100: frozenset({"10de:2330", "10de:2331"})}
    await file.write(more)
    assert await file.read() == more
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"resources": {H100: ["10de:2330", "10de:2331"]}}


async def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StateFileError, match=r"cannot read .*served\.json: it is a directory"):
        await ServedFile(str(tmp_path)).read()


async def test_a_disk_that_hangs_stops_nobody(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(served, "read_plain", lambda *_: answers.wait())
    try:
        with pytest.raises(StateFileError, match=r"cannot read .*served\.json: no answer within 2 s"):
            await ServedFile(str(tmp_path)).read()
    finally:
        answers.set()
