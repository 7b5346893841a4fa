"""The fake disk: it keeps what was synced, loses the rest, and stops where it is told."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gpuactors.acts.disk import Disk, RealDisk
from tests.memory.disk import FakeDisk, StoppedError


def disk_with(path: str, content: bytes) -> FakeDisk:
    disk = FakeDisk()
    disk.put(path, content)
    return disk


def test_an_unsynced_content_is_lost_and_a_synced_one_is_not() -> None:
    disk = disk_with("/a/x", b"old")
    disk.write("/a/x", b"new")
    disk.power_cut()
    assert disk.files == {"/a/x": b"old"}
    disk.write("/a/x", b"new")
    disk.sync("/a/x")
    disk.power_cut()
    assert disk.files == {"/a/x": b"new"}


def test_a_name_is_lost_until_its_directory_is_synced() -> None:
    disk = disk_with("/a/x", b"old")
    disk.write("/a/y", b"new")
    disk.sync("/a/y")
    disk.rename("/a/y", "/a/x")
    assert disk.files == {"/a/x": b"new"}
    disk.power_cut()
    assert disk.files == {"/a/x": b"old"}


def test_a_file_is_lost_with_its_directory_until_the_one_above_is_synced() -> None:
    disk = disk_with("/a/x", b"old")
    disk.make_directory("/a/d")
    disk.write("/a/d/y", b"new")
    disk.sync("/a/d/y")
    disk.sync_directory("/a/d")
    disk.power_cut()
    assert disk.names("/a") == ("x",)


def test_a_rename_without_a_sync_of_the_content_leaves_an_empty_file() -> None:
    disk = disk_with("/a/x", b"old")
    disk.write("/a/y", b"new")
    disk.rename("/a/y", "/a/x")
    disk.sync_directory("/a")
    disk.power_cut()
    assert disk.files == {"/a/x": b""}


def test_the_disk_may_keep_what_was_not_synced() -> None:
    disk = disk_with("/a/x", b"old")
    disk.unlink("/a/x")
    disk.write("/a/y", b"new")
    disk.power_cut(keep=lambda what: what == "/a/y")
    assert disk.files == {"/a/x": b"old", "/a/y": b""}


def test_a_removed_file_is_back_until_its_directory_is_synced() -> None:
    disk = disk_with("/a/x", b"old")
    disk.unlink("/a/x")
    disk.power_cut()
    assert disk.files == {"/a/x": b"old"}
    disk.unlink("/a/x")
    disk.sync_directory("/a")
    disk.power_cut()
    assert disk.files == {}


def test_a_tmpfs_is_empty_after_a_power_cut_and_not_after_a_kill() -> None:
    disk = disk_with("/var/run/cdi/x", b"1")
    disk.restart()
    assert disk.files == {"/var/run/cdi/x": b"1"}
    disk.power_cut()
    assert disk.files == {}
    with pytest.raises(FileNotFoundError):
        disk.names("/var/run/cdi")


def test_it_stops_before_the_operation_that_it_is_told_and_a_write_may_be_torn() -> None:
    disk = disk_with("/a/x", b"old")
    disk.stop_at = 1
    disk.write("/a/y", b"1")
    with pytest.raises(StoppedError):
        disk.rename("/a/y", "/a/x")
    with pytest.raises(StoppedError):
        disk.write("/a/y", b"5678")
    assert disk.files == {"/a/x": b"old", "/a/y": b"1"}
    disk.torn = True
    with pytest.raises(StoppedError):
        disk.write("/a/y", b"5678")
    assert disk.files["/a/y"] == b"56"
    disk.restart()
    disk.rename("/a/y", "/a/x")
    assert disk.operations == ["write /a/y", "rename /a/y /a/x"]


def test_an_operation_may_fail() -> None:
    disk = disk_with("/a/x", b"old")
    disk.failures[0] = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        disk.write("/a/x", b"new")
    disk.write("/a/x", b"new")
    assert disk.files == {"/a/x": b"new"}


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_both_disks_do_and_refuse_the_same(kind: str, tmp_path: Path) -> None:
    disk: Disk = RealDisk() if kind == "real" else FakeDisk(in_memory=())
    base = str(tmp_path) if kind == "real" else "/base"
    if isinstance(disk, FakeDisk):
        disk.make_directory(base)
    disk.make_directory(f"{base}/d")
    disk.write(f"{base}/d/a", b"a longer content")
    disk.write(f"{base}/d/a", b"short")
    disk.sync(f"{base}/d/a")
    disk.rename(f"{base}/d/a", f"{base}/d/b")
    disk.sync_directory(f"{base}/d")
    assert disk.names(f"{base}/d") == ("b",)
    assert disk.names(base) == ("d",)
    assert disk.read(f"{base}/d/b", 100) == b"short"
    assert disk.read(f"{base}/d/b", 2) == b"sho"
    for failing, expected in (
        (lambda: disk.make_directory(f"{base}/d"), errno.EEXIST),
        (lambda: disk.remove_directory(f"{base}/d"), errno.ENOTEMPTY),
        (lambda: disk.read(f"{base}/d/none", 1), errno.ENOENT),
        (lambda: disk.unlink(f"{base}/d/none"), errno.ENOENT),
        (lambda: disk.rename(f"{base}/d/none", f"{base}/d/x"), errno.ENOENT),
        (lambda: disk.write(f"{base}/none/x", b""), errno.ENOENT),
        (lambda: disk.names(f"{base}/none"), errno.ENOENT),
        (lambda: disk.sync(f"{base}/none"), errno.ENOENT),
    ):
        with pytest.raises(OSError, match=r".") as caught:
            failing()
        assert caught.value.errno == expected
    disk.unlink(f"{base}/d/b")
    disk.remove_directory(f"{base}/d")
    assert disk.names(base) == ()
    disk.make_directory(f"{base}/d")
    disk.make_directory(f"{base}/d/inner")
    for name in ("a", "b", "inner/c"):
        disk.write(f"{base}/d/{name}", b"")
    with pytest.raises(OSError, match=r".") as caught:
        disk.remove_tree(f"{base}/d", 2)
    assert caught.value.errno == errno.ENOTEMPTY
    disk.remove_tree(f"{base}/d", 10)
    assert disk.names(base) == ()
    with pytest.raises(FileNotFoundError):
        disk.remove_tree(f"{base}/d", 10)
