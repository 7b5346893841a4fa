"""A deadline for work outside the loop, in a thread or in the kernel, that a late loop does not shorten.

Must not know the work, nor end it. A file of its own: reads and writes in threads use it, and it knows no thread.
"""

from __future__ import annotations

from typing import Final, final

import trio

_STEPS: Final = 20
"""The number of steps of a wait; a loop that is late, however long, costs one."""


@final
class Patience:
    """The time to wait for one act, over all waits for it.

    trio's own deadline also passes while the loop is held up, although the result is there and only not taken yet. Here
    each wake-up counts for one step, however late it is.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: the deadline if the loop is on time."""
        self._step_s = seconds / _STEPS
        self._steps = _STEPS

    async def ends(self, over: trio.Event) -> bool:
        """Wait for `over`; return False when the time is used up. A cancelled wait uses up nothing."""
        while not over.is_set() and self._steps:
            with trio.move_on_after(self._step_s) as step:
                await over.wait()
            if step.cancelled_caught:
                self._steps -= 1
                await trio.lowlevel.checkpoint()  # what a thread has delivered meanwhile is taken first
        return over.is_set()
