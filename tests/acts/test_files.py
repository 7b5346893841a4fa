"""The files of a claim: by UID, in place where they are mounted, healed, and killed at every operation."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.disk import RealDisk, temporary_of
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.claims import cdi
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.claims.metadata import metadata_files
from gpuactors.core.kinds.pci_function import PCI_BUS_ID, PCI_FUNCTION
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, Claim, ClaimName, ClaimUid
from gpuactors.core.values.domain import DomainUid
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.vfio import VfioConfig
from gpuactors.ports.errors import StateFileError
from tests.memory.disk import FakeDisk, StoppedError

DRIVER = "gpu.nvidia.com"
CDI_DIR = "/var/run/cdi"
PLUGIN_DIR = f"/var/lib/kubelet/plugins/{DRIVER}"
UID = ClaimUid("0f1e2d3c-0000-4000-8000-000000000001")
DEVICES = f"{CDI_DIR}/k8s.gpu.nvidia.com-claim_{UID}.json"
MOUNTS = f"{CDI_DIR}/gpu.nvidia.com-metadata_{UID}.json"
THEIRS = f"{CDI_DIR}/k8s.gpu.nvidia.com-claim_{UID}.yaml"
METADATA = f"{PLUGIN_DIR}/metadata/{UID}/main.json"


def contents(
    uid: ClaimUid = UID, group: int = 51, model: str = "H100", requests: tuple[str, ...] = ("main",)
) -> ClaimContents:
    results = tuple(AllocatedDevice(r, "node-1", f"gpu-{n}") for n, r in enumerate(requests))
    claim = Claim(ClaimName("ns", "gpus", uid), None, 0, results)
    functions = (BoundFunction(PciAddress("0000:23:00.0"), "vfio-pci", group, None, vfio=True),)
    attributes = {r.device: {PCI_BUS_ID: "0000:23:00.0", "productName": model} for r in results}
    devices = [PCI_FUNCTION.edits(result, None, functions, VfioConfig()) for result in results]
    return ClaimContents(
        claim.name,
        cdi.device_file(DRIVER, claim.name, devices),
        metadata_files(DRIVER, claim, attributes),
    )


def files(disk: FakeDisk) -> ClaimFiles:
    return ClaimFiles(disk, driver=DRIVER, cdi_dir=CDI_DIR, plugin_dir=PLUGIN_DIR)


def written(*all_contents: ClaimContents) -> FakeDisk:
    disk = FakeDisk()
    for one in all_contents or (contents(),):
        files(disk).write(one)
    return disk


def decoded(disk: FakeDisk, path: str) -> Any:
    return json.loads(disk.files[path])


def test_a_claim_has_two_cdi_files_and_a_metadata_file_per_request() -> None:
    disk = written(contents(requests=("main", "other")))
    assert sorted(disk.files) == sorted([DEVICES, MOUNTS, METADATA, METADATA.replace("main", "other")])
    assert decoded(disk, DEVICES)["kind"] == "k8s.gpu.nvidia.com/claim"
    mount = decoded(disk, MOUNTS)["devices"][0]["containerEdits"]["mounts"][0]
    assert mount == {
        "hostPath": METADATA,
        "containerPath": "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/gpus/main/"
        "gpu.nvidia.com-metadata.json",
        "options": ["ro", "bind"],
    }


def test_it_is_durable_when_write_returns_and_what_lies_in_memory_is_written_again_after_a_reboot() -> None:
    disk = written()
    before = disk.files
    disk.power_cut()
    assert disk.files == {METADATA: before[METADATA]}
    files(disk).write(contents())
    assert disk.files == before


def test_the_metadata_is_there_before_the_cdi_file_that_mounts_it() -> None:
    operations = written().operations
    renames = [o.split()[-1] for o in operations if o.startswith("rename")]
    assert renames == [METADATA, MOUNTS, DEVICES]


def test_a_temporary_file_is_none_that_a_cdi_reader_takes() -> None:
    for operation in written().operations:
        if operation.startswith("write"):
            name = operation.rpartition("/")[2]
            assert name.startswith(".")
            assert not name.endswith(".json")


def test_a_mounted_metadata_file_is_rewritten_in_place() -> None:
    disk = written()
    mounted = disk.inode(METADATA)
    files(disk).write(contents(model="H200"))
    assert disk.inode(METADATA) == mounted
    assert b"H200" in disk.files[METADATA]
    assert b"H100" not in disk.files[METADATA]


def test_a_repeated_write_leaves_what_is_right_alone() -> None:
    disk = written()
    before = len(disk.operations)
    files(disk).write(contents())
    assert all(operation.startswith("fsync") for operation in disk.operations[before:])


def test_a_device_that_has_another_group_after_a_bind_has_another_cdi_file() -> None:
    disk = written()
    files(disk).write(contents(group=77))
    assert decoded(disk, DEVICES)["devices"][0]["containerEdits"]["deviceNodes"][0]["path"] == "/dev/vfio/77"


@pytest.mark.parametrize("lost", [DEVICES, MOUNTS, METADATA])
def test_a_file_that_was_removed_or_emptied_is_healed(lost: str) -> None:
    disk = written()
    before = disk.files
    disk.unlink(lost)
    files(disk).write(contents())
    assert disk.files == before
    disk.write(lost, b"")
    files(disk).write(contents())
    assert disk.files == before


def test_removing_the_old_claim_leaves_the_new_one_of_the_same_name_alone() -> None:
    new = ClaimUid("0f1e2d3c-0000-4000-8000-000000000002")
    disk = written(contents(), contents(new))
    files(disk).remove(UID)
    assert disk.files == written(contents(new)).files


def test_removing_leaves_nothing_not_even_after_a_power_cut_and_again_is_no_error() -> None:
    disk = written()
    files(disk).remove(UID)
    assert disk.files == {}
    disk.power_cut()
    assert disk.files == {}
    files(disk).remove(UID)
    files(FakeDisk()).remove(UID)
    assert files(disk).found() == {}


def test_the_cdi_file_that_nvidias_driver_wrote_for_the_claim_goes_with_it_and_no_other_one() -> None:
    disk = written()
    other = THEIRS.replace(UID, "0f1e2d3c-0000-4000-8000-000000000002")
    disk.put(THEIRS, b"kind: k8s.gpu.nvidia.com/claim")
    disk.put(other, b"kind: k8s.gpu.nvidia.com/claim")
    assert files(disk).found().keys() == {UID}, "it is no file of ours"
    files(disk).remove(UID)
    assert disk.files == {other: b"kind: k8s.gpu.nvidia.com/claim"}


def test_what_a_container_would_be_started_with_goes_first() -> None:
    """Whatever comes in between, no CDI file names the nodes of a GPU that is about to be another claim's."""
    disk = written()
    before = len(disk.operations)
    files(disk).remove(UID)
    unlinked = [o.split()[-1] for o in disk.operations[before:] if o.startswith("unlink")]
    left = [temporary_of(DEVICES), temporary_of(MOUNTS)]
    assert unlinked == [DEVICES, MOUNTS, THEIRS, *left, METADATA]


def test_removing_takes_along_what_a_write_that_failed_has_left() -> None:
    """Found by a history: it stayed until the next start."""
    disk = written()
    for path in (DEVICES, MOUNTS):
        disk.put(temporary_of(path), b"{")
    files(disk).remove(UID)
    assert disk.files == {}


@pytest.mark.parametrize("uid", ["", "..", "../../etc", "a/b", "a\n", "-a", "a" * 64])
def test_a_uid_that_is_no_part_of_a_path_is_refused_and_removes_nothing(uid: str) -> None:
    disk = FakeDisk()
    with pytest.raises(StateFileError, match="no part of a path"):
        files(disk).write(contents(ClaimUid(uid)))
    files(disk).remove(ClaimUid(uid))
    assert disk.operations == []


def test_what_is_there_is_found_and_other_drivers_files_are_not_ours() -> None:
    disk = written()
    disk.put(f"{CDI_DIR}/k8s.gpu.nvidia.com-device_base.json", b"{}")
    disk.put(f"{CDI_DIR}/k8s.other.example-claim_{UID}.json", b"{}")
    disk.put(f"{CDI_DIR}/k8s.gpu.nvidia.com-claim_a b.json", b"{}")
    ((uid, found),) = files(disk).found().items()
    assert uid == UID
    assert found.claim == ClaimName("ns", "gpus", UID)
    assert found.devices == ("gpu-0",)


@pytest.mark.parametrize(
    "left", [{DEVICES: b"\xff{"}, {METADATA: b'{"metadata": 3} ['}, {DEVICES: b'{"devices":[3,{"name":1}]}'}]
)
def test_half_of_a_claims_files_is_found_as_well(left: dict[str, bytes]) -> None:
    disk = FakeDisk()
    for path, content in left.items():
        disk.put(path, content)
    ((uid, found),) = files(disk).found().items()
    assert (uid, found.claim) == (UID, None)
    assert found.devices == (() if DEVICES in left else None)
    files(disk).remove(UID)
    assert disk.files == {}


def test_temporary_files_that_a_killed_daemon_left_are_swept_and_others_are_not() -> None:
    disk = written()
    whole = disk.files
    disk.put(f"{CDI_DIR}/.k8s.gpu.nvidia.com-claim_{UID}.json.new", b"x")
    disk.put(f"{PLUGIN_DIR}/metadata/{UID}/.main.json.new", b"x")
    disk.put(f"{CDI_DIR}/.other.json.new", b"x")
    files(disk).sweep()
    assert disk.files == {**whole, f"{CDI_DIR}/.other.json.new": b"x"}


def test_an_error_names_the_claim_and_the_directory() -> None:
    disk = written()
    disk.failures[len(disk.operations) + 2] = errno.EROFS
    with pytest.raises(
        StateFileError, match=rf"the files of claim {UID} in {CDI_DIR} .* cannot be written \(Read"
    ):
        files(disk).write(contents(model="H200"))


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("step", ["write", "rewrite", "remove"])
def test_killed_at_every_operation_a_next_start_completes_it_or_removes_it(step: str, power: bool) -> None:
    def begin() -> FakeDisk:
        return FakeDisk() if step == "write" else written()

    def go(disk: FakeDisk) -> None:
        match step:
            case "write":
                files(disk).write(contents())
            case "rewrite":
                files(disk).write(contents(group=77, model="H200"))
            case _:
                files(disk).remove(UID)

    clean = begin()
    first = len(clean.operations)
    go(clean)
    points = 0
    for stop, torn, (name, content) in product(
        range(first, len(clean.operations)), (False, True), product((False, True), repeat=2)
    ):
        for finish in (contents(group=77, model="H200"), None):
            disk = begin()
            disk.stop_at, disk.torn = stop, torn
            with pytest.raises(StoppedError):
                go(disk)
            if power:
                disk.power_cut(keep=lambda what, n=name, c=content: c if " " in what else n)  # type: ignore[misc]
            else:
                disk.restart()
            if finish is not None:
                files(disk).write(finish)
                files(disk).sweep()
                assert disk.files == written(finish).files
            else:
                for uid in files(disk).found():
                    files(disk).remove(uid)
                files(disk).sweep()
                assert disk.files == {}
                disk.power_cut()
                assert disk.files == {}
            points += 1
    assert points > 30


# --- directories that a container has mounted -------------------------------------------------------------------------

DOMAIN = f"{PLUGIN_DIR}/domains/0f1e2d3c-0000-4000-8000-00000000000d"


def with_domain() -> FakeDisk:
    return written(replace(contents(), directories=(DOMAIN,)))


def test_a_mounted_directory_is_there_before_the_file_that_mounts_it() -> None:
    operations = with_domain().operations
    made = operations.index(f"mkdir {DOMAIN}")
    assert made < next(n for n, o in enumerate(operations) if o.startswith("rename"))


def test_a_mounted_directory_goes_with_what_its_container_has_written_and_after_the_files() -> None:
    disk = with_domain()
    for name in ("nodes_config.cfg", "logs/imex.log"):
        disk.put(f"{DOMAIN}/{name}", b"x")
    files(disk).remove(UID, (DOMAIN,))
    assert not [path for path in disk.files if path.startswith(PLUGIN_DIR)]
    with pytest.raises(FileNotFoundError):
        disk.names(DOMAIN)
    operations = disk.operations
    assert operations.index(f"unlink {DEVICES}") < operations.index(f"rmdir {DOMAIN}")
    files(disk).remove(UID, (DOMAIN,))  # it is gone: no error


def test_all_mounted_directories_can_be_cleared_and_the_files_of_claims_stay() -> None:
    disk = with_domain()
    disk.put(f"{DOMAIN}/nodes_config.cfg", b"x")
    files(disk).clear_mounted(None)
    assert not [path for path in disk.files if path.startswith(DOMAIN)]
    with pytest.raises(FileNotFoundError):
        disk.names(DOMAIN)
    assert DEVICES in disk.files
    files(disk).clear_mounted(None)  # none is there: no error


def test_directories_of_domains_that_ended_under_nvidias_driver_are_cleared_and_no_other() -> None:
    """NVIDIA's driver leaves them to a sweep each 10 minutes, which ours has ended."""
    ended, claimed, mounted = (DomainUid(f"0f1e2d3c-0000-4000-8000-0000000000{n:02x}") for n in (1, 2, 3))
    domains, disk = f"{PLUGIN_DIR}/domains", FakeDisk()
    for uid in (ended, claimed, mounted, "of-an-operator"):
        for name in ("imexd.cfg.tmpl", "imexd.cfg", "nodes.cfg"):
            disk.put(f"{domains}/{uid}/{name}", b"x")
    spec = f'{{"hostPath": "{domains}/{mounted}", "containerPath": "/imexd"}}'
    disk.put(f"{CDI_DIR}/k8s.compute-domain.nvidia.com-claim_{UID}.yaml", spec.encode())
    assert files(disk).clear_mounted({claimed}) == ()
    assert disk.names(domains) == (claimed, mounted, "of-an-operator")


def test_no_directory_is_cleared_while_a_cdi_file_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may name any of them."""
    disk, domain, path = FakeDisk(), f"{PLUGIN_DIR}/domains/{UID}", f"{CDI_DIR}/k8s.other-claim.yaml"
    disk.put(f"{domain}/nodes.cfg", b"x")
    disk.put(path, b"x")

    def read(path: str, bytes_max: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(disk, "read", read)
    with pytest.raises(
        StateFileError, match=r"domains cannot be cleared .*k8s.other-claim.yaml: .*next start"
    ):
        files(disk).clear_mounted(())
    assert disk.names(domain) == ("nodes.cfg",)


def test_no_directory_is_cleared_while_a_cdi_file_is_too_large_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may name one behind what is read of it."""
    disk, domain, path = FakeDisk(), f"{PLUGIN_DIR}/domains/{UID}", f"{CDI_DIR}/k8s.other-claim.yaml"
    disk.put(f"{domain}/nodes.cfg", b"x")
    monkeypatch.setattr(limits, "CLAIMS_FILE_MAX_BYTES", 64)
    disk.put(path, b"x" * 64 + str(UID).encode())
    with pytest.raises(
        StateFileError, match=r"domains cannot be cleared .*k8s.other-claim.yaml: File too large"
    ):
        files(disk).clear_mounted(())
    assert disk.names(domain) == ("nodes.cfg",)


def test_a_link_in_a_mounted_directory_goes_and_what_it_names_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    domain = tmp_path / "plugin" / "domains" / "d"
    real = ClaimFiles(
        RealDisk(), driver=DRIVER, cdi_dir=str(tmp_path / "cdi"), plugin_dir=str(tmp_path / "plugin")
    )
    real.write(replace(contents(), directories=(str(domain),)))
    (domain / "inner").mkdir()
    (domain / "inner" / "log").write_text("x")
    (domain / "link").symlink_to(precious)
    real.remove(UID, (str(domain),))
    assert not domain.exists()
    assert (precious / "file").read_text() == "kept"


# --- a real disk: what is no file ---------------------------------------------------------------------------------

OBJECTS: dict[str, Callable[[str], None]] = {
    "fifo": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "link": lambda path: os.symlink("/nowhere/else", path),
}


def on_disk(directory: Path) -> ClaimFiles:
    return ClaimFiles(
        RealDisk(), driver=DRIVER, cdi_dir=str(directory / "cdi"), plugin_dir=str(directory / "plugin")
    )


def of_real(contents: ClaimContents, directory: Path) -> list[Path]:
    on_disk(directory).write(contents)
    uid = contents.claim.uid
    return [
        directory / f"cdi/k8s.{DRIVER}-claim_{uid}.json",
        directory / f"cdi/{DRIVER}-metadata_{uid}.json",
        directory / f"plugin/metadata/{uid}/main.json",
    ]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_is_no_file_under_a_claims_name_is_replaced_and_hangs_nobody(tmp_path: Path, kind: str) -> None:
    for path in of_real(contents(), tmp_path):
        for name in (path, path.with_name(f".{path.name}.new")):
            name.unlink(missing_ok=True)
            OBJECTS[kind](str(name))
    assert on_disk(tmp_path).found().keys() == {UID}
    for path in of_real(contents(), tmp_path):
        assert not path.is_symlink()
        assert path.read_text().startswith("{")
    on_disk(tmp_path).remove(UID)
    assert on_disk(tmp_path).found() == {}


@pytest.mark.timeout(20)
def test_a_directory_or_fifo_of_one_claims_name_costs_only_that_claim(tmp_path: Path) -> None:
    other = ClaimUid("0f1e2d3c-0000-4000-8000-000000000002")
    for path in of_real(contents(), tmp_path)[:2]:
        path.unlink()
        path.mkdir()
    os.mkfifo(tmp_path / f"plugin/metadata/{other}")
    os.mkfifo(tmp_path / "cdi/vendor.json")
    assert UID in on_disk(tmp_path).found()
    with pytest.raises(StateFileError, match="Is a directory"):
        on_disk(tmp_path).write(contents())
    third = ClaimUid("0f1e2d3c-0000-4000-8000-000000000003")
    for path in of_real(contents(third), tmp_path):
        assert path.read_text().startswith("{")


# --- what NVIDIA's driver leaves of a claim -------------------------------------------------------------------

THEIR_METADATA = f"{PLUGIN_DIR}/dra-device-metadata/ns_gpus/main/metadata.json"
THEIR_MOUNT = f"{CDI_DIR}/gpu.nvidia.com_metadata_{UID}_main.json"


def with_their_metadata(uid: str = UID) -> FakeDisk:
    disk = FakeDisk()
    disk.put(THEIRS, b"- path: /dev/vfio/51")
    disk.put(THEIR_MOUNT, json.dumps({"mounts": [{"hostPath": THEIR_METADATA}]}).encode())
    disk.put(THEIR_METADATA, json.dumps({"kind": "DeviceMetadata", "metadata": {"uid": uid}}).encode())
    return disk


def test_the_metadata_of_a_claim_that_nvidias_driver_has_prepared_goes_with_it() -> None:
    disk = with_their_metadata()
    files(disk).remove(UID)
    assert [path for path in disk.files if "claim_" in path or "metadata" in path] == []


def test_the_metadata_of_the_next_claim_of_that_name_stays() -> None:
    disk = with_their_metadata(uid="0f1e2d3c-0000-4000-8000-000000000002")
    files(disk).remove(UID)
    assert THEIR_METADATA in disk.files
    assert THEIR_MOUNT not in disk.files


def test_a_mount_that_leads_elsewhere_removes_nothing_there() -> None:
    disk = with_their_metadata()
    other = f"{PLUGIN_DIR}/dra-device-metadata/../metadata.json"
    disk.put(THEIR_MOUNT, json.dumps({"mounts": [{"hostPath": other}]}).encode())
    disk.put(f"{PLUGIN_DIR}/metadata.json", UID.encode())
    files(disk).remove(UID)
    assert f"{PLUGIN_DIR}/metadata.json" in disk.files
