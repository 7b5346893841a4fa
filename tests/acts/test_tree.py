"""What others have made in a directory that is removed: nested, many, linked, mounted, immutable."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuactors.acts.disk import RealDisk
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.tree import remove_tree
from gpuactors.core.values.claim import ClaimUid
from gpuactors.ports.errors import DirectoryLeftError

MANY = 1_000_000
UID = ClaimUid("0f1e2d3c-0000-4000-8000-000000000001")
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10  # include/uapi/linux/fs.h


def nested(path: Path, depth: int) -> Path:
    """A directory in a directory, so deep, with a file at each level. Its path is longer than PATH_MAX."""
    path.mkdir(parents=True)
    above = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=above))
        os.mkdir("inner", dir_fd=above)
        inner = os.open("inner", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = inner
    os.close(above)
    return path


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def claim_files(base: Path) -> ClaimFiles:
    return ClaimFiles(
        RealDisk(), driver="compute-domain.nvidia.com", cdi_dir=str(base / "cdi"), plugin_dir=str(base)
    )


def test_a_nested_directory_is_removed_with_a_few_descriptors_whatever_its_depth(tmp_path: Path) -> None:
    """A container of a compute domain's daemon made 1,500 in its mount: RecursionError, at each try and each start."""
    path = nested(tmp_path / "domain", 3_000)
    with few_descriptors(8):
        remove_tree(str(path), MANY)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("of_a_claim", [True, False], ids=["by its claim", "at a start"])
def test_a_nested_directory_of_a_container_ends_with_its_claim(tmp_path: Path, of_a_claim: bool) -> None:
    path = nested(tmp_path / "domains" / "d", 1_500)
    if of_a_claim:
        claim_files(tmp_path).remove(UID, (str(path),))
    else:
        assert claim_files(tmp_path).clear_mounted(None) == ()
    assert not path.exists()


def test_one_act_removes_no_more_than_its_bound_and_the_next_goes_on(tmp_path: Path) -> None:
    path = nested(tmp_path / "domain", 25)  # 50 files and directories
    tries = 0
    while path.exists():
        tries += 1
        with suppress(OSError):
            remove_tree(str(path), 10)
    assert 5 <= tries <= 10, "a directory that was left is counted again"
    nested(path, 25)
    with pytest.raises(OSError, match="10 files and directories were removed") as caught:
        remove_tree(str(path), 10)
    assert caught.value.errno == errno.ENOTEMPTY


def test_links_go_and_what_they_name_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    path = tmp_path / "domain"
    (path / "inner").mkdir(parents=True)
    for link in ("link", "inner/link"):
        (path / link).symlink_to(precious)
    (path / "to itself").symlink_to(path)
    os.mkfifo(path / "fifo")
    remove_tree(str(path), MANY)
    path.symlink_to(precious)
    remove_tree(str(path), MANY)
    assert os.listdir(tmp_path) == ["precious"]
    assert (precious / "file").read_text() == "kept"


def test_what_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_tree(str(tmp_path / "none"), MANY)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root and a private mount namespace")
@pytest.mark.parametrize("at", ["domain", "domain/inner", "domain/inner/deep"])
def test_what_is_mounted_is_not_touched(tmp_path: Path, at: str) -> None:
    """A bind mount of the same file system: its files have the same device number as those that are removed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (tmp_path / "domain/inner/deep").mkdir(parents=True)
    script = (
        "import ctypes, sys\n"
        "from gpuactors.acts.tree import remove_tree\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x20000) or libc.mount(None, b'/', None, 0x44000, None) or libc.mount(\n"
        "    sys.argv[1].encode(), sys.argv[2].encode(), None, 0x1000, None):\n"
        "    sys.exit(77)\n"
        "try:\n"
        "    remove_tree(sys.argv[3], 1000)\n"
        "except OSError as error:\n"
        "    print(error.errno, error.filename)\n"
    )
    command = (sys.executable, "-c", script, str(precious), str(tmp_path / at), str(tmp_path / "domain"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 77:
        pytest.skip("no mount namespace of its own")
    number, _, named = done.stdout.strip().partition(" ")
    assert (int(number), named.startswith(str(tmp_path / "domain"))) == (errno.EBUSY, True), done.stderr
    assert (precious / "file").read_text() == "kept"


def test_a_stuck_directory_is_named_and_those_beside_it_go(tmp_path: Path) -> None:
    stuck, other = tmp_path / "domains" / "a", tmp_path / "domains" / "b"
    for path in (stuck, other):
        path.mkdir(parents=True)
        (path / "nodes.cfg").write_text("")
    with _immutable(stuck / "nodes.cfg"):
        with pytest.raises(DirectoryLeftError, match=r"nodes\.cfg: Operation not permitted"):
            claim_files(tmp_path).remove(UID, (str(stuck),))
        (sentence,) = claim_files(tmp_path).clear_mounted(None)
        assert str(stuck) in sentence
        assert os.listdir(tmp_path / "domains") == ["a"]
    assert claim_files(tmp_path).clear_mounted(None) == ()
    assert not (tmp_path / "domains").exists()


@contextmanager
def _immutable(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flags = struct.unpack("l", fcntl.ioctl(descriptor, _GET_FLAGS, struct.pack("l", 0)))[0]
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", flags | _IMMUTABLE))
    except OSError as error:
        pytest.skip(f"no file can be made immutable here: {error.strerror}")
    try:
        yield
    finally:
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", flags))
        os.close(descriptor)


def test_a_link_that_takes_the_place_of_a_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the open, as whoever has the directory mounted may do at any moment."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "domain").symlink_to(outside)
    real = os.lstat

    def looked_before(name: str, *, dir_fd: int | None = None) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd) if name == "domain" else real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "lstat", looked_before)
    with pytest.raises(OSError, match="Not a directory"):
        remove_tree(str(tmp_path / "domain"), MANY)
    assert [*outside.iterdir()] == [outside / "kept"]
