"""Touches of the CDI files are posted, and no more often than is good for the daemon."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator

import trio
import trio.testing

from gpuactors.actors import cdi_watcher
from gpuactors.core.events import Event
from gpuactors.core.events.claims import FilesTouched
from gpuactors.core.values.claim import ClaimsOf, ClaimUid


class Touches:
    """Implements `ports.claims.TouchedFiles`: somebody touches them all the time, or for so many times."""

    def __init__(self, times: float = math.inf) -> None:
        self.times = times

    async def touches(self) -> AsyncGenerator[frozenset[ClaimUid] | None, None]:
        """As `ports.claims.TouchedFiles.touches`."""
        while self.times > 0:
            await trio.lowlevel.checkpoint()
            self.times -= 1
            yield frozenset({ClaimUid("b"), ClaimUid("a")})
        await trio.sleep_forever()


async def test_each_touch_is_posted(autojump_clock: trio.testing.MockClock) -> None:
    send, receive = trio.open_memory_channel[Event](9)
    with trio.move_on_after(600):
        await cdi_watcher.run(Touches(3), send, ClaimsOf.GPUS)
    assert [receive.receive_nowait() for _ in range(receive.statistics().current_buffer_used)] == [
        FilesTouched(ClaimsOf.GPUS, (ClaimUid("a"), ClaimUid("b")))
    ] * 3


async def test_a_program_that_touches_them_all_the_time_costs_one_look_a_second(
    autojump_clock: trio.testing.MockClock,
) -> None:
    send, receive = trio.open_memory_channel[Event](1000)
    with trio.move_on_after(10.5):
        await cdi_watcher.run(Touches(), send, ClaimsOf.GPUS)
    assert receive.statistics().current_buffer_used == 11
