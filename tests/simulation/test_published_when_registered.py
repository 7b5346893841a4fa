"""Devices are published once kubelet has registered the driver: a pod that the scheduler sends sooner is prepared 60 to
90 s later (issue 24, 8)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.histories.claims import CLAIMS
from tests.histories.domains import DOMAINS
from tests.histories.trace import Trace
from tests.histories.world import open_world

WITHIN_S = 60.0
"""Of the mock clock."""


@pytest.mark.trio
@pytest.mark.parametrize("of", [CLAIMS, DOMAINS], ids=["claims", "domains"])
async def test_a_daemon_that_kubelet_has_not_registered_publishes_nothing(
    of: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, of | 1, Trace()) as world:
        assert world.dra is not None
        api, driver = world.dra.api, world.dra.driver
        await world.kubelet.stop()
        await world.kill_daemon(world.daemons[0])
        world.dra.surroundings.wipe(driver)
        await world.start_daemon()
        await trio.sleep(WITHIN_S)
        assert api.slices(driver) == []
        await world.start_kubelet()
        with trio.fail_after(WITHIN_S):
            while not api.slices(driver):
                await api.store.changed.wait()
        assert world.problems == []
