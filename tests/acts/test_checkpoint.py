"""The checkpoint on disk: corrupt, older, newer, of another boot; and killed or without power at every operation."""

from __future__ import annotations

import errno
import json
from hashlib import sha256
from itertools import product

import pytest

from gpuactors import limits
from gpuactors.acts.checkpoint import CheckpointFile, CheckpointNewerError
from gpuactors.core.dra.checkpoint import Checkpoint, Origin
from gpuactors.core.dra.claim import ClaimUid, FirstDriver
from gpuactors.core.model import PciAddress
from gpuactors.ports import StateFileError
from gpuactors.simulation.disk.disk import FakeDisk, StoppedError

DIRECTORY = "/plugins/gpu.nvidia.com"
PATH = f"{DIRECTORY}/checkpoint.json"
BOOT = "b1"

A = PciAddress("0000:23:00.0")
FIRST = {A: FirstDriver(A, "nvidia")}


def checkpoint(*uids: str) -> Checkpoint:
    return Checkpoint({ClaimUid(uid): {"state": "prepared", "name": uid} for uid in uids}, FIRST)


ONE, TWO = checkpoint("u1"), checkpoint("u1", "u2")


def file(disk: FakeDisk, boot_id: str = BOOT) -> CheckpointFile:
    return CheckpointFile(disk, DIRECTORY, boot_id)


def written(*contents: Checkpoint) -> FakeDisk:
    disk = FakeDisk()
    for content in contents:
        file(disk).write(content)
    return disk


def stored(disk: FakeDisk, content: object) -> None:
    """Any content, with the right checksum."""
    body = json.dumps(content, separators=(",", ":"))
    text = f'{{"checksum":"sha256:{sha256(body.encode()).hexdigest()}","checkpoint":{body}}}\n'
    disk.put(PATH, text.encode())


def test_what_is_written_is_read_in_the_same_boot() -> None:
    restored = file(written(ONE, TWO)).read()
    assert (restored.checkpoint, restored.origin) == (TWO, Origin.FOUND)


def test_without_a_file_nothing_was_ever_prepared() -> None:
    restored = file(FakeDisk()).read()
    assert (restored.checkpoint, restored.origin) == (Checkpoint(), Origin.NONE)


def test_the_first_drivers_of_this_boot_are_in_it() -> None:
    assert file(written(ONE)).read().checkpoint.first_drivers == FIRST


def test_after_a_reboot_it_counts_as_empty() -> None:
    restored = file(written(TWO), boot_id="b2").read()
    assert (restored.checkpoint, restored.origin) == (Checkpoint(), Origin.OTHER_BOOT)


def test_fields_of_a_newer_daemon_are_kept_through_a_downgrade() -> None:
    disk = FakeDisk()
    newer = {
        "version": 1,
        "bootId": BOOT,
        "firstDrivers": {A: {"driver": "nvidia", "vfio": False, "persistence": True}},
        "claims": {"u1": {"state": "prepared", "quota": [1, {"x": None}]}},
        "channels": {"0": "u1"},
    }
    stored(disk, newer)
    older = file(disk)
    older.write(older.read().checkpoint)
    assert json.loads(disk.files[PATH])["checkpoint"] == newer


def test_a_field_more_makes_no_file_corrupt_as_the_checksum_is_of_the_stored_bytes() -> None:
    disk = written(ONE)
    body = disk.files[PATH].partition(b'"checkpoint":')[2][:-2]
    assert sha256(body).hexdigest().encode() in disk.files[PATH]
    spaced = json.dumps(json.loads(body), indent=1).encode()
    disk.put(
        PATH, b'{"checksum":"sha256:%s","checkpoint":%s}' % (sha256(spaced).hexdigest().encode(), spaced)
    )
    assert file(disk).read().checkpoint == ONE


CORRUPT = {
    "empty": b"",
    "zeros": b"\0" * 300,
    "half": written(TWO).files[PATH][:200],
    "one bit": written(TWO).files[PATH].replace(b"prepared", b"preparee", 1),
    "not ours": b'{"apiVersion":"v1","checksum":1}',
    "deep": b'{"checksum":"sha256:%s","checkpoint":{"x":%s}}'
    % (sha256(b'{"x":' + b"[" * 99999 + b"}").hexdigest().encode(), b"[" * 99999),
    "huge": b" " * (limits.CLAIMS_FILE_MAX_BYTES + 1),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_one_is_set_aside_and_said_and_never_taken_for_an_empty_one(kind: str) -> None:
    disk = FakeDisk()
    disk.put(PATH, CORRUPT[kind])
    restored = file(disk).read()
    assert restored.origin is Origin.CORRUPT
    assert f"{PATH}.corrupt-1" in restored.sentence
    assert disk.files == {f"{PATH}.corrupt-1": CORRUPT[kind]}
    disk.power_cut()
    # A start that is killed before it writes one is followed by one that knows as little.
    again = file(disk).read()
    assert again.origin is Origin.CORRUPT
    file(disk).write(ONE)
    assert file(disk).read().origin is Origin.FOUND


@pytest.mark.parametrize(
    "content",
    [
        {"bootId": BOOT, "claims": {}, "firstDrivers": {}},
        {"version": 0, "bootId": BOOT, "claims": {}, "firstDrivers": {}},
        {"version": "1", "bootId": BOOT, "claims": {}, "firstDrivers": {}},
        {"version": 1, "claims": {}, "firstDrivers": {}},
        {"version": 1, "bootId": BOOT, "claims": [], "firstDrivers": {}},
        {"version": 1, "bootId": BOOT, "claims": {"u1": 1}, "firstDrivers": {}},
        {"version": 1, "bootId": BOOT, "claims": {}, "firstDrivers": {"x": {"driver": None, "vfio": False}}},
        {"version": 1, "bootId": BOOT, "claims": {}, "firstDrivers": {A: {"driver": 1, "vfio": False}}},
        {"version": 1, "bootId": BOOT, "claims": {}, "firstDrivers": {A: {"driver": "nvidia"}}},
    ],
)
def test_a_content_that_is_none_of_ours_is_corrupt_whatever_its_checksum(content: object) -> None:
    disk = FakeDisk()
    stored(disk, content)
    assert file(disk).read().origin is Origin.CORRUPT


def test_corrupt_ones_do_not_fill_the_disk() -> None:
    disk = FakeDisk()
    for _ in range(limits.CORRUPT_FILES_KEPT + 3):
        disk.put(PATH, b"x")
        file(disk).read()
    assert len(disk.files) == limits.CORRUPT_FILES_KEPT


@pytest.mark.parametrize("boot_id", [BOOT, "another"])
def test_a_newer_one_is_refused_and_nothing_is_touched(boot_id: str) -> None:
    disk = FakeDisk()
    stored(disk, {"version": 2, "bootId": boot_id, "entries": []})
    before = disk.files
    with pytest.raises(CheckpointNewerError, match=r"version 2, this gpuactors knows 1.*Nothing was touched"):
        file(disk).read()
    assert disk.files == before
    assert disk.operations == []


def test_one_that_cannot_be_read_is_not_set_aside() -> None:
    disk = FakeDisk()
    disk.put(f"{PATH}/x", b"")  # a directory: EISDIR
    with pytest.raises(StateFileError, match=r"cannot read .*none is touched"):
        file(disk).read()
    assert disk.operations == []


@pytest.mark.parametrize("failing", range(5))
def test_a_failed_write_leaves_the_old_one(failing: int) -> None:
    disk = written(ONE)
    disk.failures[len(disk.operations) + failing] = errno.ENOSPC
    with pytest.raises(StateFileError, match=r"No space left.*it is tried again"):
        file(disk).write(TWO)
    # A failed sync of the directory comes after the rename.
    assert file(disk).read().checkpoint in ((ONE, TWO) if failing == 4 else (ONE,))
    file(disk).write(TWO)
    assert file(disk).read().checkpoint == TWO


def test_killed_or_without_power_at_every_operation_the_old_or_the_new_one_is_there() -> None:
    points = 0
    whole = written(ONE, TWO)
    first = len(written(ONE).operations)
    for stop, torn, (name, content) in product(
        range(first, len(whole.operations) + 1), (False, True), product((False, True), repeat=2)
    ):
        for power in (False, True):
            disk = written(ONE)
            disk.stop_at, disk.torn = stop, torn
            try:
                file(disk).write(TWO)
                done = True
            except StoppedError:
                done = False
            if power:
                disk.power_cut(
                    keep=lambda what, name=name, content=content: content if " " in what else name  # type: ignore[misc]
                )
            else:
                disk.restart()
            restored = file(disk).read()
            assert restored.origin is Origin.FOUND
            assert restored.checkpoint in ((TWO,) if done else (ONE, TWO))
            file(disk).write(TWO)
            assert file(disk).read().checkpoint == TWO
            points += 1
    assert points >= 40


def test_the_first_one_is_there_or_not_whenever_the_power_goes() -> None:
    whole = written(ONE)
    for stop in range(len(whole.operations) + 1):
        disk = FakeDisk()
        disk.stop_at = stop
        try:
            file(disk).write(ONE)
        except StoppedError:
            disk.power_cut()
            assert file(disk).read().origin in (Origin.NONE, Origin.FOUND)
            file(disk).write(ONE)
        disk.power_cut()
        assert file(disk).read().checkpoint == ONE


def test_a_directory_that_a_killed_daemon_made_is_synced_by_the_next_one() -> None:
    disk = FakeDisk()
    disk.stop_at = written(ONE).operations.index("fsync /plugins/")
    with pytest.raises(StoppedError):
        file(disk).write(ONE)
    disk.restart()
    file(disk).write(ONE)
    disk.power_cut()
    assert file(disk).read().checkpoint == ONE
