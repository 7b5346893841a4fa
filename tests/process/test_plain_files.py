"""What is no file is refused at once, and nothing is written through a link."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuactors.process.plain_files import NotPlainError, read_plain, replace_own, replace_plain

OTHERS = {
    "a FIFO": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a directory": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_is_refused_by_its_kind(tmp_path: Path, kind: str) -> None:
    make: Callable[[Path], object] = OTHERS[kind]
    make(tmp_path / "x")
    with pytest.raises(NotPlainError) as caught:
        read_plain(tmp_path / "x", 10)
    assert caught.value.strerror == f"it is {kind}, and a regular file is needed"


def test_a_path_that_the_kernel_cannot_have_is_refused() -> None:
    with pytest.raises(NotPlainError):
        read_plain("/etc/\0passwd", 10)


def test_of_a_larger_file_only_so_much_is_read_and_a_link_to_one_is_followed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")  # as a ConfigMap's files are
    assert read_plain(tmp_path / "link", 3) == b"123"
    assert read_plain(tmp_path / "x", 9) == b"12345"


@pytest.mark.parametrize("kind", ["link", "link to nothing", "FIFO", "directory"])
def test_only_a_regular_file_is_replaced(tmp_path: Path, kind: str) -> None:
    """As root /dev/stdout would be a file, and where a link leads to is not ours."""
    (tmp_path / "target").write_text("theirs")
    path = tmp_path / "x"
    match kind:
        case "link":
            path.symlink_to("target")
        case "link to nothing":
            path.symlink_to("nowhere")
        case "FIFO":
            os.mkfifo(path)
        case _:
            path.mkdir()
    before = path.lstat()
    with pytest.raises(NotPlainError, match=f"it is a {kind.split()[0]}, and a regular file is needed"):
        replace_plain(path, b"ours", 0o644)
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert (tmp_path / "target").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["target", "x"]


def test_a_link_in_a_directory_of_ones_own_is_replaced_and_its_target_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("theirs")
    (tmp_path / "x").symlink_to("target")
    replace_own(tmp_path / "x", b"ours", 0o644, durable=True)
    assert (tmp_path / "target").read_text() == "theirs"
    found = (tmp_path / "x").lstat()
    assert (stat.S_ISREG(found.st_mode), found.st_mode & 0o777) == (True, 0o644)
    assert sorted(os.listdir(tmp_path)) == ["target", "x"]


def test_a_file_is_made_and_replaced_with_its_mode(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        replace_plain(tmp_path / "x", content, 0o640)
        assert ((tmp_path / "x").read_bytes(), stat.S_IMODE((tmp_path / "x").stat().st_mode)) == (
            content,
            0o640,
        )
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_killed_writer_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / f".x.{'0f' * 8}.new"
    others = [
        tmp_path / f".y.{'0f' * 8}.new",
        tmp_path / ".x.0f.new",
        tmp_path / f".x.{'0f' * 8}.new.bak",
        tmp_path / f"x.{'0f' * 8}.new",
    ]
    for path in (left, *others):
        path.write_text("half")
        os.utime(path, (0, 0))
    being_written, link = tmp_path / f".x.{'1f' * 8}.new", tmp_path / f".x.{'2f' * 8}.new"
    being_written.write_text("another daemon's")
    link.symlink_to("elsewhere")
    os.utime(link, (0, 0), follow_symlinks=False)
    replace_plain(tmp_path / "x", b"ours", 0o644)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "x", being_written, link, *others])
