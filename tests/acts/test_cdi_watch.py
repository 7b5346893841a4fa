"""A CDI file that somebody else removes is noticed, and written again."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import trio
import trio.testing

from gpuactors.acts import cdi_watch
from gpuactors.acts.cdi_watch import MountedDirectory
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.claims import cdi
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.values.claim import ClaimName, ClaimUid
from tests.support.patience import patient

PATIENCE_S = patient(20.0)
UID = ClaimUid("0f1e2d3c-0000-4000-8000-000000000001")
CLAIM = ClaimName("ns", "gpus", UID)


def files(tmp_path: Path) -> ClaimFiles:
    return ClaimFiles(
        RealDisk(), driver="gpu.nvidia.com", cdi_dir=str(tmp_path / "cdi"), plugin_dir=str(tmp_path / "p")
    )


def write(tmp_path: Path) -> None:
    files(tmp_path).write(ClaimContents(CLAIM, cdi.device_file("gpu.nvidia.com", CLAIM, ()), ()))


def path(tmp_path: Path) -> Path:
    return tmp_path / f"cdi/k8s.gpu.nvidia.com-claim_{UID}.json"


async def quiet(touches: AsyncIterator[frozenset[ClaimUid] | None]) -> bool:
    """Nothing has happened; the generator may not be used any more."""
    with trio.move_on_after(0.1):
        await anext(touches)
        return False
    return True


@pytest.mark.parametrize("how", ["removed", "emptied", "directory"])
async def test_a_touched_file_is_noticed_and_can_be_written_again(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdi_watch, "CDI_DIR_RETRY_S", 0.01)
    write(tmp_path)
    with trio.fail_after(PATIENCE_S):
        async with aclosing(files(tmp_path).touches()) as touches:
            assert await anext(touches) is None
            match how:
                case "removed":
                    path(tmp_path).unlink()
                case "emptied":
                    path(tmp_path).write_text("")
                case _:
                    shutil.rmtree(tmp_path / "cdi")
                    write(tmp_path)
            assert await anext(touches) == (None if how == "directory" else {UID})
            write(tmp_path)
            assert path(tmp_path).stat().st_size > 0


async def test_what_is_written_again_without_a_change_is_no_touch_nor_are_others_files(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    with trio.fail_after(PATIENCE_S):
        async with aclosing(files(tmp_path).touches()) as touches:
            await anext(touches)
            write(tmp_path)
            (tmp_path / "cdi/nvidia.yaml").write_text("x")
            (tmp_path / "cdi/k8s.other.example-claim_x.json").write_text("x")
            assert await quiet(touches)


async def test_a_directory_that_is_removed_is_noticed_so_that_it_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody made it again: the container of a prepared claim could not restart until the next prepare."""
    monkeypatch.setattr(cdi_watch, "CDI_DIR_RETRY_S", 0.01)
    write(tmp_path)
    with trio.fail_after(PATIENCE_S):
        async with aclosing(files(tmp_path).touches()) as touches:
            await anext(touches)
            for _ in range(2):
                shutil.rmtree(tmp_path / "cdi")
                await anext(touches)
                write(tmp_path)
                await anext(touches)
                assert path(tmp_path).is_file()


async def test_of_a_directory_that_was_removed_under_its_mount_a_restart_is_asked_for(tmp_path: Path) -> None:
    """In a container nothing can be made in it any more, and inotify says nothing."""
    made = tmp_path / "cdi"
    made.mkdir()
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mounted = MountedDirectory(f"/proc/self/fd/{descriptor}")
        assert await mounted.unreachable() == ()
        made.rmdir()
        (sentence,) = await mounted.unreachable()
        assert "was removed on the host" in sentence
        made.mkdir()
        assert await mounted.unreachable() == (sentence,), "the one that is mounted is still the old one"
    finally:
        os.close(descriptor)
    assert await MountedDirectory(str(made)).unreachable() == ()
    assert await MountedDirectory(str(made / "none")).unreachable() == (), "it can be made"


async def test_a_directory_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdi_watch, "CDI_DIR_RETRY_S", 0.01)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            async def then_made() -> None:
                await trio.testing.wait_all_tasks_blocked()
                write(tmp_path)

            nursery.start_soon(then_made)
            async with aclosing(files(tmp_path).touches()) as touches:
                await anext(touches)
