"""The checkpoint on disk: corrupt, older, newer, of another boot; and killed or without power at every operation."""

from __future__ import annotations

import errno
import json
import os
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.checkpoint import (
    CORRUPT_FILES_KEPT,
    CheckpointFile,
    CheckpointNewerError,
    newer_checkpoint,
)
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.theirs import TheirClaims
from gpuactors.core.claims.checkpoint import Checkpoint, Origin
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.values.claim import ClaimUid, OriginalDriver
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import PciAddress, device_key
from gpuactors.host.places import Places
from gpuactors.host.root import HostRoot
from gpuactors.ports.errors import StateFileError
from tests.memory.disk import FakeDisk, StoppedError
from tests.support.nvidia_checkpoint import GPUS, Release, gpu, prepared, their_checkpoint, vfio

DIRECTORY = "/plugins/gpu.nvidia.com"
PATH = f"{DIRECTORY}/gpuactors-checkpoint.json"
BOOT = "b1"

A, B = PciAddress("0000:23:00.0"), PciAddress("0000:23:00.1")
FIRST = {A: OriginalDriver(A, "nvidia")}


def checkpoint(*uids: str) -> Checkpoint:
    return Checkpoint({ClaimUid(uid): {"state": "prepared", "name": uid} for uid in uids}, FIRST)


ONE, TWO = checkpoint("u1"), checkpoint("u1", "u2")


def file(disk: FakeDisk, boot_id: str = BOOT) -> CheckpointFile:
    theirs = TheirClaims(disk, driver="gpu.nvidia.com", cdi_dir="/cdi", places=None)
    return CheckpointFile(disk, DIRECTORY, boot_id, theirs)


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


def test_the_original_drivers_of_this_boot_are_in_it() -> None:
    assert file(written(ONE)).read().checkpoint.original_drivers == FIRST


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


WHOLE = Checkpoint(
    {ClaimUid("u1"): {"state": "Prepared", "quota": (1, None)}},
    {A: OriginalDriver(A, "nvidia", False, 7, ids="10de:2330"), B: OriginalDriver(B, None, True)},
    {"channels": {"0": "u1"}},
    {B: {"newer": True}},
    ({"uid": "u0", "address": A},),
    {ClaimUid("u2"): {"state": "TakenOver"}},
    "sha256:00",
    {ClaimUid("u3"): {device_key(A): "10de:2330"}},
)

RECORDED = (
    b'{"checksum":"sha256:ef5fe0aa7b62743579327b813906702aa3c63ddaf95f7c4114b406a47a74df48",'
    b'"checkpoint":{"channels":{"0":"u1"},"takenOver":{"from":"sha256:00",'
    b'"claims":{"u2":{"state":"TakenOver"}}},"version":1,"bootId":"b1",'
    b'"firstDrivers":{"0000:23:00.0":{"driver":"nvidia","vfio":false,"presence":7,"ids":"10de:2330"},'
    b'"0000:23:00.1":{"newer":true,"driver":null,"vfio":true}},"claims":{"u1":{"state":"Prepared",'
    b'"quota":[1,null]}},"owed":[{"uid":"u0","address":"0000:23:00.0"}],'
    b'"earlierModels":{"u3":{"0000:23:00.0":"10de:2330"}}}}\n'
)
"""As the daemons before it was left to msgspec wrote it."""


def test_the_file_has_the_bytes_of_the_daemons_before() -> None:
    assert written(WHOLE).files[PATH] == RECORDED
    disk = FakeDisk()
    disk.put(PATH, RECORDED)
    assert file(disk).read().checkpoint == WHOLE


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
        {"version": 1, "bootId": BOOT, "claims": {}, "firstDrivers": {}, "new": float("nan")},
    ],
)
def test_a_content_that_is_none_of_ours_is_corrupt_whatever_its_checksum(content: object) -> None:
    disk = FakeDisk()
    stored(disk, content)
    assert file(disk).read().origin is Origin.CORRUPT


def test_a_mistake_is_told_with_its_place() -> None:
    disk = FakeDisk()
    stored(
        disk, {"version": 1, "bootId": BOOT, "claims": {}, "firstDrivers": {A: {"driver": 1, "vfio": False}}}
    )
    wrong = f"(the original driver of {A}: Expected `str | null`, got `int` - at `$.driver`)"
    assert wrong in file(disk).read().sentence


def test_corrupt_ones_do_not_fill_the_disk() -> None:
    disk = FakeDisk()
    for _ in range(CORRUPT_FILES_KEPT + 3):
        disk.put(PATH, b"x")
        file(disk).read()
    assert len(disk.files) == CORRUPT_FILES_KEPT


def test_only_a_newer_one_is_known_as_newer() -> None:
    newer, corrupt, unreadable = FakeDisk(), FakeDisk(), FakeDisk()
    stored(newer, {"version": 99})
    corrupt.put(PATH, b"{}")
    unreadable.put(f"{PATH}/x", b"")  # a directory: EISDIR
    assert newer_checkpoint(DIRECTORY, newer) == (PATH, 99)
    for disk in (written(ONE), FakeDisk(), corrupt, unreadable):
        assert newer_checkpoint(DIRECTORY, disk) is None


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


def test_a_directory_that_somebody_made_anew_is_synced_again() -> None:
    disk = FakeDisk()
    writer = file(disk)
    writer.write(ONE)
    disk.lose_directory(DIRECTORY)
    disk.make_directory(DIRECTORY)
    writer.write(TWO)
    disk.power_cut()
    assert file(disk).read().checkpoint == TWO


def test_another_directory_in_the_place_of_one_that_is_held_is_noticed(tmp_path: Path) -> None:
    """Most file systems give the number of a removed directory to the next one."""
    directory = tmp_path / "d"
    for remove in (directory.rmdir, lambda: directory.rename(tmp_path / "aside")):
        directory.mkdir()
        held = RealDisk().hold(str(directory))
        assert held.is_at(str(directory))
        remove()
        assert not held.is_at(str(directory))
        directory.mkdir()
        assert not held.is_at(str(directory))
        directory.rmdir()
    with pytest.raises(FileNotFoundError):
        RealDisk().hold(str(directory))


# --- the old name, which is NVIDIA's ----------------------------------------------------------------------------------

OLD = f"{DIRECTORY}/checkpoint.json"
UID = "0f1e2d3c-0000-4000-8000-000000000001"
UUID = "GPU-0f1e2d3c-1111-4000-8000-000000000001"
THEIRS = their_checkpoint(BOOT, {UID: prepared(vfio(UID, "node-1", 0, "0000:23:00.0"))})


def under_the_old_name(*contents: Checkpoint) -> FakeDisk:
    """As a daemon before the file had a name of its own left it."""
    disk = written(*contents)
    disk.rename(PATH, OLD)
    return disk


def test_ours_under_the_old_name_is_read_and_renamed() -> None:
    disk = under_the_old_name(ONE, TWO)
    restored = file(disk).read()
    assert (restored.checkpoint, restored.origin, restored.theirs) == (TWO, Origin.FOUND, None)
    assert set(disk.files) == {PATH}
    disk.power_cut()
    assert file(disk).read().checkpoint == TWO


def test_ours_under_the_old_name_is_the_newest_an_older_daemon_has_written_it() -> None:
    disk = under_the_old_name(TWO)
    disk.put(PATH, written(ONE).files[PATH])
    assert file(disk).read(touches=False).checkpoint == TWO
    assert set(disk.files) == {OLD, PATH}, "another daemon serves: it is read there"
    assert file(disk).read().checkpoint == TWO
    assert set(disk.files) == {PATH}


@pytest.mark.parametrize("damaged", [b'{"checksum":"sha256:00', under_the_old_name(TWO).files[OLD][:200]])
def test_a_corrupt_one_of_ours_under_the_old_name_is_set_aside(damaged: bytes) -> None:
    disk = FakeDisk()
    disk.put(OLD, damaged)
    assert file(disk).read().origin is Origin.CORRUPT
    assert disk.files == {f"{PATH}.corrupt-1": damaged}


def test_nvidias_is_read_and_never_touched() -> None:
    disk = FakeDisk()
    disk.put(OLD, THEIRS)
    restored = file(disk).read()
    assert restored.origin is Origin.NONE
    assert restored.theirs is not None
    (taken,) = restored.theirs.claims
    assert (taken.name.uid, taken.state) == (UID, ClaimState.TAKEN_OVER)
    assert [(gpu.key, bool(gpu.keep_on_vfio)) for gpu in gpus_of(taken).gpus] == [(device_key(A), True)]
    assert taken.given[0].cdi_ids == (f"k8s.gpu.nvidia.com/claim={UID}-gpu-vfio-0",)
    file(disk).write(ONE)
    assert (file(disk).read().checkpoint, disk.files[OLD]) == (ONE, THEIRS)
    assert set(disk.files) == {OLD, PATH}


@pytest.mark.parametrize(
    "parameters",
    [b"[" * 400 + b"]" * 400, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"a":1e999}', rb'{"a":"\ud800","a":1}'],
    ids=["400 levels", "5,000 levels", "a number without a value", "half of a pair, a key twice"],
)
def test_the_parameters_in_nvidias_are_not_decoded(parameters: bytes) -> None:
    """A user writes them: those of one claim refused the claims of all."""
    config = b'"config":[{"opaque":{"driver":"gpu.nvidia.com","parameters":%s}}],"results":' % parameters
    disk = FakeDisk()
    disk.put(OLD, THEIRS.replace(b'"results":', config))
    assert disk.files[OLD] != THEIRS
    theirs = file(disk).read().theirs
    disk.put(OLD, THEIRS)
    plain = file(disk).read().theirs
    assert theirs is not None
    assert plain is not None
    assert (len(theirs.claims), theirs.claims) == (1, plain.claims)


def test_nvidias_of_another_boot_has_no_claim_of_this_one() -> None:
    disk = FakeDisk()
    disk.put(OLD, THEIRS)
    theirs = file(disk, boot_id="b2").read().theirs
    assert theirs is not None
    assert theirs.claims == ()


def test_of_nvidias_that_names_no_boot_only_claims_with_a_cdi_file_count() -> None:
    """/var/run is empty after a boot; releases before 25.12 say nothing of it."""
    other = UID.replace("0f", "1f")
    disk = FakeDisk()
    claims = {uid: prepared(vfio(uid, "node-1", 0, A)) for uid in (UID, other)}
    disk.put(OLD, their_checkpoint("", claims, release=Release.R25_12))
    disk.put(f"/cdi/k8s.gpu.nvidia.com-claim_{other}.yaml", b"devices: []")
    theirs = file(disk).read().theirs
    assert theirs is not None
    assert [claim.name.uid for claim in theirs.claims] == [other]


def test_a_gpu_whose_address_nvidias_does_not_say_is_found_by_its_uuid_or_the_node_of_its_cdi_file(
    tmp_path: Path,
) -> None:
    """Releases up to 25.12 do not say it of a GPU on vfio, and none says it of one on NVIDIA's driver."""
    for path, text in (
        (
            "proc/driver/nvidia/gpus/0000:24:00.0/information",
            f"Model: \t H100\nGPU UUID: \t {UUID}\n",
        ),
        ("sys/bus/pci/devices/0000:23:00.0/class", "0x030200\n"),
        ("sys/bus/pci/devices/0000:23:00.1/class", "0x040300\n"),
        ("sys/bus/pci/devices/0000:25:00.0/class", "0x030200\n"),
        ("sys/kernel/iommu_groups/51/devices/0000:23:00.0", ""),
        ("sys/kernel/iommu_groups/51/devices/0000:23:00.1", ""),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    vfio_devices = tmp_path / "sys/class/vfio-dev"
    vfio_devices.mkdir(parents=True)
    (vfio_devices / "vfio3").symlink_to("../../devices/pci0000:00/0000:25:00.0/vfio-dev/vfio3")
    of_uuid, by_group, by_cdev, nowhere = (UID.replace("0f", f"{n}f") for n in range(1, 5))
    disk = FakeDisk()
    for uid, nodes in {
        of_uuid: b"- path: /dev/nvidia1",
        by_group: b"- path: /dev/vfio/51\n- path: /dev/vfio/vfio",
        by_cdev: b"- path: /dev/vfio/devices/vfio3\n- path: /dev/iommu",
        nowhere: b"devices: []",
    }.items():
        disk.put(f"/cdi/k8s.gpu.nvidia.com-claim_{uid}.yaml", nodes)
    claims = {
        of_uuid: prepared(gpu(of_uuid, "node-1", 1, UUID)),
        by_group: prepared(vfio(by_group, "node-1", 0, A)),
        by_cdev: prepared(vfio(by_cdev, "node-1", 2, A)),
        nowhere: prepared(vfio(nowhere, "node-1", 3, A)),
    }
    disk.put(OLD, their_checkpoint("", claims, release=Release.R25_12))
    places = Places(HostRoot(str(tmp_path)))
    theirs = TheirClaims(disk, driver=GPUS, cdi_dir="/cdi", places=places)
    restored = CheckpointFile(disk, DIRECTORY, BOOT, theirs).read().theirs
    assert restored is not None
    assert {c.name.uid: ([g.key for g in gpus_of(c).gpus], c.unplaced) for c in restored.claims} == {
        of_uuid: (["0000:24:00.0"], ()),
        by_group: (["0000:23:00.0"], ()),
        by_cdev: (["0000:25:00.0"], ()),
        nowhere: ([], ("gpu-vfio-3",)),
    }


def test_a_cdi_file_of_theirs_that_cannot_be_read_now_is_no_claim_that_has_ended() -> None:
    """Of an older release the file alone says that the claim lives."""
    disk = FakeDisk()
    claims = {UID: prepared(vfio(UID, "node-1", 0, A))}
    disk.put(OLD, their_checkpoint("", claims, release=Release.R25_12))
    path = f"/cdi/k8s.gpu.nvidia.com-claim_{UID}.yaml"
    disk.put(f"{path}/x", b"")  # a directory: EISDIR
    with pytest.raises(StateFileError, match=r"cannot be read .*claim_.*Is a directory.*it is tried again"):
        file(disk).read()
    disk.lose_directory(path)
    theirs = file(disk).read().theirs
    assert theirs is not None
    assert theirs.claims == ()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("name", ["listdir", "readlink", "open", "stat"])
def test_where_their_gpu_is_is_asked_again_for_want_of_descriptors_only(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A place that is not known keeps all GPUs from all claims as long as this one lives."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    disk = FakeDisk()
    path = f"/cdi/k8s.gpu.nvidia.com-claim_{UID}.yaml"
    disk.put(path, b"- path: /dev/vfio/51\n- path: /dev/vfio/devices/vfio3")
    disk.put(OLD, their_checkpoint(BOOT, {UID: prepared(gpu(UID, "node-1", 1, UUID))}))
    for at in ("proc/driver/nvidia/gpus/0000:24:00.0/information", "sys/kernel/iommu_groups/51/devices/0000:23:00.0",
               "sys/bus/pci/devices/0000:23:00.0/class"):  # fmt: skip
        (tmp_path / at).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / at).write_text("0x030200\n")
    theirs = TheirClaims(disk, driver=GPUS, cdi_dir="/cdi", places=Places(HostRoot(str(tmp_path))))
    monkeypatch.setattr(os, name, fails)
    if number == errno.EMFILE:
        with pytest.raises(StateFileError, match="no file descriptors left"):
            CheckpointFile(disk, DIRECTORY, BOOT, theirs).read()
    else:
        found = CheckpointFile(disk, DIRECTORY, BOOT, theirs).read().theirs
        assert found is not None
        assert len(found.claims) == 1


@pytest.mark.parametrize(
    "damaged",
    [
        THEIRS[:200],
        THEIRS.replace(b'"PoolName"', b'"Pool"'),
        b'{"checksum":1,"v1":[],"v2":7}',
        b'{"checksum":1,"v2":' + b"[" * 9999 + b"}",
    ],
)
def test_nvidias_that_cannot_be_read_is_left_and_no_claim_is_served(damaged: bytes) -> None:
    disk = written(ONE)
    disk.put(OLD, damaged)
    before = dict(disk.files)
    with pytest.raises(StateFileError, match="NVIDIA's DRA driver and cannot be read"):
        file(disk).read()
    assert disk.files == before


@pytest.mark.parametrize("content", [b"", b"\0" * 99, b"{ not JSON", b'{"data":{}}'])
def test_nobodys_file_is_left_and_counts_as_a_lost_one_of_ours_only_where_ours_is_not_there(
    content: bytes,
) -> None:
    disk = FakeDisk()
    disk.put(OLD, content)
    assert file(disk).read().origin is Origin.CORRUPT
    assert disk.files == {OLD: content}
    file(disk).write(ONE)
    restored = file(disk).read()
    assert (restored.checkpoint, restored.origin) == (ONE, Origin.FOUND)
    assert OLD in restored.sentence


def test_a_daemon_that_knows_nothing_of_claims_that_were_taken_over_keeps_them() -> None:
    taken = replace(ONE, taken_over={ClaimUid(UID): {"state": "TakenOver"}}, taken_from="sha256:00")
    disk = written(taken)
    stored = json.loads(disk.files[PATH])["checkpoint"]
    assert stored["takenOver"] == {"from": "sha256:00", "claims": {UID: {"state": "TakenOver"}}}
    assert set(stored["claims"]) == {"u1"}, "an older one takes none of them for its own"
    assert file(disk).read().checkpoint == taken


def test_a_claim_of_theirs_has_the_cdi_ids_that_kubelet_was_answered() -> None:
    """Their checkpoint lacks that of the metadata, which Kubernetes' helper puts behind it."""
    disk = FakeDisk()
    with_metadata, without = UID, UID.replace("0f", "1f")
    claims = {uid: prepared(vfio(uid, "node-1", 0, A)) for uid in (with_metadata, without)}
    disk.put(OLD, their_checkpoint(BOOT, claims))
    disk.put(f"/cdi/gpu.nvidia.com_metadata_{with_metadata}_gpu.json", b"{}")
    theirs = TheirClaims(disk, driver=GPUS, cdi_dir="/cdi", places=None)
    restored = CheckpointFile(disk, DIRECTORY, BOOT, theirs).read().theirs
    assert restored is not None
    ids = {claim.name.uid: claim.given[0].cdi_ids for claim in restored.claims}
    own = {uid: f"k8s.gpu.nvidia.com/claim={uid}-gpu-vfio-0" for uid in claims}
    assert ids == {
        with_metadata: (own[with_metadata], f"gpu.nvidia.com/metadata={with_metadata}_gpu"),
        without: (own[without],),
    }
