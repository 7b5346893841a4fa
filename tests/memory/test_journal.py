"""The journals of simulated daemons: many of them write in one process, and none outlives its daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.histories.trace import Trace
from tests.histories.world import open_world
from tests.support.descriptors import open_files


@pytest.mark.trio
async def test_no_journal_is_left_open_by_daemons_that_ended_or_were_killed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await trio.sleep(60)
        (first,) = world.daemons
        assert len(open_files(tmp_path)) == 1
        await world.kill_daemon(first)
        await first.ended.wait()
        assert open_files(tmp_path) == []
        await world.start_daemon()
        await trio.sleep(60)
        assert len(open_files(tmp_path)) == 1
    assert open_files(tmp_path) == []
