"""The host's IMEX control tool: real child processes in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from gpuactors.host.imex_ctl import ImexCtl
from tests.host.test_imex import script
from tests.support.patience import patient

WITHIN_S = patient(20.0)


async def problem(ctl: ImexCtl) -> str:
    with trio.fail_after(WITHIN_S):
        return await ctl.problem()


async def test_a_daemon_that_is_ready_is_no_problem(tmp_path: Path) -> None:
    tool = script(tmp_path, '[ "$*" = -q ] && [ "$LC_ALL" = C ] && echo READY')
    assert await problem(ImexCtl(str(tool))) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo NOT_READY", "says NOT_READY, and not READY"),
        ("echo READY; echo more", "says READY\\nmore, and not READY"),
        ("echo ready", "says ready, and not READY"),
        ("exit 0", "says nothing, and not READY"),
        ("echo READY; exit 3", "says READY and ends with status 3, and not READY"),
        ("echo 'cannot connect' >&2; exit 1", "says cannot connect and ends with status 1"),
        ("kill -9 $$", "says nothing and ends with status -9"),
    ],
)
async def test_any_other_answer_is_told_as_it_is(tmp_path: Path, text: str, said: str) -> None:
    tool = script(tmp_path, text)
    found = await problem(ImexCtl(str(tool)))
    assert found.startswith(f"the host's IMEX daemon is not ready: {tool} -q {said}")
    assert "log of nvidia-imex" in found


async def test_a_tool_that_cannot_be_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "nvidia-imex-ctl"
    found = await problem(ImexCtl(str(missing)))
    assert found.startswith(f"{missing} cannot be run: No such file or directory (ENOENT); install")
    missing.write_text("no program")
    assert "Permission denied (EACCES)" in await problem(ImexCtl(str(missing)))


async def test_a_tool_that_does_not_end_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tool = script(tmp_path, f"sleep 600 & echo $! > {pids}.new; mv {pids}.new {pids}; wait")
    ctl = ImexCtl(str(tool), deadline_s=patient(0.5))
    found = await problem(ctl)
    assert f"{tool} -q has not answered within" in found
    assert "has not ended" in found
    child = int(pids.read_text())
    with trio.fail_after(WITHIN_S):
        while is_alive(child):  # noqa: ASYNC110 -- another process's end sets no event
            await trio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_after_one_that_was_killed_the_next_question_is_answered(tmp_path: Path) -> None:
    tool = script(tmp_path, "exec sleep 600")
    ctl = ImexCtl(str(tool), deadline_s=patient(0.5))
    assert "has not ended" in await problem(ctl)
    script(tmp_path, "echo READY")
    with trio.fail_after(WITHIN_S):
        while (said := await ctl.problem()) != "":
            assert "of an earlier question has not ended" in said


async def test_a_tool_that_floods_is_late_and_costs_no_memory(tmp_path: Path) -> None:
    tool = script(tmp_path, "exec yes READY")
    assert "has not ended" in await problem(ImexCtl(str(tool), deadline_s=patient(0.5)))


async def test_no_question_leaves_a_descriptor(tmp_path: Path) -> None:
    ctl = ImexCtl(str(script(tmp_path, "echo READY")))
    await problem(ctl)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await problem(ctl)
    assert len(os.listdir("/proc/self/fd")) == before
