"""The CDI files of the device plugin on disk: healed, whole at any moment, and no other program's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuactors.acts.blocking_runner import OneThread, in_a_thread
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.spec_files import SpecFiles
from gpuactors.core.values.device_spec import DeviceSpecs, file_name
from gpuactors.core.values.model import DeviceId, ResourceName
from tests.core.builders import H100, A, B
from tests.memory.disk import FakeDisk, StoppedError
from tests.support.kata import sandbox_nodes

A100 = ResourceName("nvidia.com/A100.80_SXM")
CDI_DIR = "/var/run/cdi"
ONE: DeviceSpecs = {H100: {DeviceId(A): ("/dev/vfio/vfio", "/dev/vfio/1")}}
OTHER: DeviceSpecs = {
    H100: {DeviceId(A): ("/dev/vfio/vfio", "/dev/vfio/9"), DeviceId(B): ("/dev/vfio/vfio", "/dev/vfio/2")},
    A100: {DeviceId("7"): ("/dev/vfio/vfio", "/dev/vfio/7")},
}


def files(directory: Path) -> SpecFiles:
    return SpecFiles(RealDisk(), str(directory), in_a_thread)


def test_what_is_written_is_resolved_and_written_again_it_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "run/cdi"
    assert files(directory).write_now(OTHER) == {}
    nodes = {"/dev/vfio/vfio", "/dev/vfio/9", "/dev/vfio/7"}
    assert sandbox_nodes([directory], {H100: [A], A100: ["7"]}) == nodes
    before = {path: path.stat().st_ino for path in directory.iterdir()}
    assert len(before) == 2
    assert files(directory).write_now(OTHER) == {}
    assert {path: path.stat().st_ino for path in directory.iterdir()} == before


@pytest.mark.parametrize(
    "content", [b"", b'{"cdiVersion": "0.6', b'{"kind": "nvidia.com/pgpu"}', b"\0" * 100], ids=repr
)
def test_a_torn_or_foreign_file_of_the_name_is_replaced_and_others_are_left(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / file_name(H100)).write_bytes(content)
    foreign = tmp_path / "nvidia.com-pgpu.yaml"
    foreign.write_text("kind: nvidia.com/pgpu\n")
    assert files(tmp_path).write_now(ONE) == {}
    foreign.rename(tmp_path / "theirs")
    assert sandbox_nodes([tmp_path], {H100: [A]}) == {"/dev/vfio/vfio", "/dev/vfio/1"}
    assert (tmp_path / "theirs").read_text() == "kind: nvidia.com/pgpu\n"


def test_a_fifo_or_a_link_in_its_place_is_replaced_and_nothing_behind_the_link(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    path = tmp_path / "cdi" / file_name(H100)
    os.mkfifo(path)
    assert files(path.parent).write_now(ONE) == {}
    path.unlink()
    (tmp_path / "secret").write_text("kept")
    path.symlink_to(tmp_path / "secret")
    assert files(path.parent).write_now(ONE) == {}
    assert (tmp_path / "secret").read_text() == "kept"
    assert sandbox_nodes([path.parent], {H100: [A]}) == {"/dev/vfio/vfio", "/dev/vfio/1"}


def test_a_directory_in_the_place_of_one_file_is_that_files_problem_alone(tmp_path: Path) -> None:
    (tmp_path / file_name(A100) / "in it").mkdir(parents=True)
    problems = files(tmp_path).write_now(OTHER)
    assert problems.keys() == {A100}
    assert problems[A100].startswith(f"{tmp_path / file_name(A100)} cannot be written or removed (")
    assert sandbox_nodes([tmp_path], {H100: [A]}) == {"/dev/vfio/vfio", "/dev/vfio/9"}


def test_a_file_is_found_only_as_it_is_to_be_and_looking_changes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "cdi"
    assert files(directory).find_now(OTHER) == set()
    assert not directory.exists()
    assert files(directory).write_now(OTHER) == {}
    assert files(directory).find_now(OTHER) == {H100, A100}
    assert files(directory).find_now(ONE) == set(), "it has other nodes"
    (directory / file_name(A100)).unlink()
    os.mkfifo(directory / file_name(A100))
    (directory / ".left.new").write_text("torn")
    before = sorted(directory.iterdir())
    assert files(directory).find_now(OTHER) == {H100}
    (directory / file_name(H100)).write_bytes(b"\0")
    assert files(directory).find_now(OTHER) == set()
    assert sorted(directory.iterdir()) == before


def test_a_directory_that_cannot_be_made_is_every_files_problem(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("a file")
    assert files(tmp_path / "cdi").write_now(OTHER).keys() == {H100, A100}


def test_the_file_of_a_resource_that_has_none_is_removed_and_a_killed_daemons_temporary_one(
    tmp_path: Path,
) -> None:
    assert files(tmp_path).write_now(OTHER) == {}
    (tmp_path / f".{file_name(H100)}.new").write_text("torn")
    (tmp_path / ".others.new").write_text("theirs")
    assert files(tmp_path).write_now(ONE) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".others.new", file_name(H100)]
    assert files(tmp_path).write_now({}) == {}
    assert [path.name for path in tmp_path.iterdir()] == [".others.new"]


def test_without_any_file_no_directory_is_made(tmp_path: Path) -> None:
    assert files(tmp_path / "cdi").write_now({}) == {}
    assert not (tmp_path / "cdi").exists()


def test_killed_at_any_operation_each_file_is_the_old_or_the_new_one_and_the_next_write_heals(
    tmp_path: Path,
) -> None:
    def on(disk: FakeDisk) -> SpecFiles:
        return SpecFiles(disk, CDI_DIR, in_a_thread)

    def resolved(disk: FakeDisk, where: str) -> list[set[str]]:
        """What Kata reads of the disk: the nodes of each device that both contents have."""
        directory = tmp_path / where
        directory.mkdir()
        for path, content in disk.files.items():
            (directory / os.path.basename(path)).write_bytes(content)
        return [sandbox_nodes([directory], {H100: [A]})]

    whole = FakeDisk()
    on(whole).write_now(ONE)
    begun = len(whole.operations)
    on(whole).write_now(OTHER)
    for stop in range(begun, len(whole.operations)):
        disk = FakeDisk()
        on(disk).write_now(ONE)
        disk.stop_at = stop
        with pytest.raises(StoppedError):
            on(disk).write_now(OTHER)
        disk.stop_at = None
        (nodes,) = resolved(disk, f"killed at {stop}")
        assert nodes in ({"/dev/vfio/vfio", "/dev/vfio/1"}, {"/dev/vfio/vfio", "/dev/vfio/9"})
        assert on(disk).write_now(OTHER) == {}
        assert disk.files == whole.files
    assert len(whole.operations) - begun > 6, "two files, each written, synced and renamed"


async def test_it_writes_in_a_thread(tmp_path: Path) -> None:
    assert await SpecFiles(RealDisk(), str(tmp_path), OneThread("CDI files")).write(ONE) == {}
    assert sandbox_nodes([tmp_path], {H100: [A]}) == {"/dev/vfio/vfio", "/dev/vfio/1"}
