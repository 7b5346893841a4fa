"""The operator's command for the partitions: a program without a shell, with a deadline."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest
import trio

from gpuactors.core.kinds.sets import KnownSets, Partition, PartitionGpu
from gpuactors.core.values.partition import Goal, PartitionId
from gpuactors.host.partition_command import LOCK_NAME, PartitionCommand
from gpuactors.ports.errors import HostError
from tests.support.patience import patient

LISTED = {
    "version": 16909068,
    "numPartitions": 1,
    "partitionInfo": [
        {
            "partitionId": 3,
            "isActive": 1,
            "gpuInfo": [
                {"physicalId": 1, "uuid": "", "pciBusId": "00000000:00:00.0"},
                {"physicalId": 2, "uuid": "GPU-2", "pciBusId": ""},
            ],
        }
    ],
}
FOUND = Partition(3, True, (PartitionGpu(1, "", "00000000:00:00.0"), PartitionGpu(2, "GPU-2", "")))


def command(directory: Path, *lines: str) -> Path:
    """A program in Python."""
    path = directory / "a command; touch x"
    path.write_text("\n".join((f"#!{sys.executable} -S", "import sys, time", *lines)) + "\n")
    path.chmod(0o755)
    return path


async def failure(path: Path, deadline_s: float = patient(5.0)) -> str:
    with trio.fail_after(patient(60.0)), pytest.raises(HostError) as error:
        await PartitionCommand(path, deadline_s=deadline_s).read()
    return str(error.value)


async def test_the_partitions_are_those_that_it_prints(tmp_path: Path) -> None:
    path = command(tmp_path, "assert sys.argv[1:] == ['query']", f"print({json.dumps(LISTED)!r})")
    reader = PartitionCommand(path, deadline_s=patient(5.0))
    with trio.fail_after(patient(60.0)):
        assert await reader.read() == KnownSets(partitions=(FOUND,))
        assert await reader.read() == KnownSets(partitions=(FOUND,)), "it can be asked again"
    assert os.listdir(tmp_path) == [path.name], "no shell has read its name"


async def test_a_wrong_partition_costs_that_one(tmp_path: Path) -> None:
    content = {"partitionInfo": [{"partitionId": "x"}, *LISTED["partitionInfo"]]}  # type: ignore[misc]
    path = command(tmp_path, f"print({json.dumps(content)!r})")
    known = await PartitionCommand(path, deadline_s=patient(5.0)).read()
    assert known.partitions == (FOUND,)
    (problem,) = known.problems
    assert problem.startswith("--partition-command, partitionInfo[0] (partition x): ")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("print('no manager', file=sys.stderr)", "sys.exit(3)"), "ends with status 3, and says no manager"),
        (("sys.exit(4)",), "ends with status 4, and says nothing"),
        (("print('Failed to connect')",), "prints no JSON"),
        ((), "prints no JSON"),
        (("print('[' * 60_000)",), "prints no JSON: it nests deeper"),
    ],
    ids=["a status", "a status without words", "words", "nothing", "deep"],
)  # fmt: skip
async def test_a_command_that_fails_is_named_with_the_remedy(
    tmp_path: Path, lines: tuple[str, ...], words: str
) -> None:
    path = command(tmp_path, *lines)
    reason = await failure(path)
    assert reason.startswith(f"{path} query ")
    assert words in reason


async def test_a_command_that_hangs_is_killed_at_its_deadline(tmp_path: Path) -> None:
    path = command(tmp_path, "time.sleep(3600)")
    assert "query has not ended within 0.3 s" in await failure(path, 0.3)


async def test_a_command_that_is_missing_or_no_program_is_an_error(tmp_path: Path) -> None:
    assert "query cannot be run: No such file or directory (ENOENT); correct" in await failure(
        tmp_path / "no"
    )
    (tmp_path / "text").write_text("{}")
    assert "query cannot be run: Permission denied (EACCES)" in await failure(tmp_path / "text")


async def test_a_list_of_another_form_names_itself(tmp_path: Path) -> None:
    known = await PartitionCommand(command(tmp_path, "print('{}')"), deadline_s=patient(5.0)).read()
    assert known == KnownSets(
        problems=(
            "--partition-command: it has no list partitionInfo; have the command print what fmpm -l prints",
        )
    )


async def test_an_act_has_its_word_and_the_number_of_the_partition(tmp_path: Path) -> None:
    path = command(tmp_path, "assert sys.argv[1:] in (['activate', '7'], ['deactivate', '7'])")
    with trio.fail_after(patient(60.0)):
        for goal in Goal:
            await PartitionCommand(path, act_s=patient(5.0)).act(goal, PartitionId("7"))


async def test_an_act_that_fails_says_what_the_tool_has_printed(tmp_path: Path) -> None:
    path = command(tmp_path, "print('Failed to activate partition. fmReturn: -12')", "sys.exit(244)")
    with trio.fail_after(patient(60.0)), pytest.raises(HostError) as error:
        await PartitionCommand(path, act_s=patient(5.0)).act(Goal.ACTIVATE, PartitionId("7"))
    assert "activate 7 ends with status 244" in str(error.value)
    assert "Failed to activate partition. fmReturn: -12" in str(error.value)


async def test_none_is_run_beside_one_that_a_killed_daemon_has_left(tmp_path: Path) -> None:
    """Its act may come after a query of the next daemon."""
    path = command(tmp_path, "print('[]' if sys.argv[1] == 'query' else '')")
    state = tmp_path / "state"
    state.mkdir()
    left = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(left, fcntl.LOCK_EX)
    again = PartitionCommand(path, state_dir=state, deadline_s=0.2)
    with trio.fail_after(patient(60.0)):
        with pytest.raises(HostError) as error:
            await again.read()
        assert "was not run: the command that an earlier gpuactors has started has not ended" in str(
            error.value
        )
        os.close(left)
        assert await PartitionCommand(path, state_dir=state, deadline_s=patient(5.0)).read() == KnownSets()


async def test_a_command_has_the_lock_until_it_has_ended(tmp_path: Path) -> None:
    """Also what it has started, and also when the daemon has closed its own descriptor."""
    state = tmp_path / "state"
    state.mkdir()
    program = "import fcntl, os; fcntl.flock(os.open({!r}, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    path = command(tmp_path, program.format(str(state / LOCK_NAME)))
    with trio.fail_after(patient(60.0)), pytest.raises(HostError) as error:
        await PartitionCommand(path, state_dir=state, act_s=patient(5.0)).act(Goal.ACTIVATE, PartitionId("7"))
    assert "BlockingIOError" in str(error.value)


EXAMPLE = Path(__file__).resolve().parents[2] / "deploy/examples/partitions/command.py"


async def test_the_example_calls_nvidias_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "assert sys.argv[1:3] == ['--unix-domain-socket', '/run/nvidia-fabricmanager/socket']",
        f"print({json.dumps(LISTED)!r} if sys.argv[3:] == ['-l'] else sys.argv[3:])",
        "sys.exit(0 if sys.argv[3:] in (['-l'], ['-a', '3']) else 1)",
    )
    monkeypatch.setenv("FMPM", str(command(tmp_path, *lines)))
    example = PartitionCommand(EXAMPLE, deadline_s=patient(5.0), act_s=patient(5.0))
    with trio.fail_after(patient(60.0)):
        assert await example.read() == KnownSets(partitions=(FOUND,))
        await example.act(Goal.ACTIVATE, PartitionId("3"))
        with pytest.raises(HostError) as error:
            await example.act(Goal.DEACTIVATE, PartitionId("3"))
    assert "['-d', '3']" in str(error.value)
