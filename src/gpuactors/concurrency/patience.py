"""A deadline for what runs beside the loop, in a thread or in the kernel: it is not late because the loop is.

Must not know what is waited for, nor end it. A file of its own: reads and writes in threads have it, and it knows no
thread.
"""

from __future__ import annotations

from typing import Final, final

import trio

_STEPS: Final = 20
"""A deadline is waited for in so many steps, of which a late loop costs one."""


@final
class Patience:
    """The time that somebody waits for one act, over all its waits.

    A deadline of trio also ends while the loop is held up, by long steps or as the process has no processor time: the
    result is there then, and the loop has not taken it. Here each wake-up counts for one step, however late it is.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: of a loop that is on time."""
        self._step_s = seconds / _STEPS
        self._steps = _STEPS

    async def ends(self, over: trio.Event) -> bool:
        """Wait for `over`; return False once the patience is at its end. A cancelled wait counts nothing."""
        while not over.is_set() and self._steps:
            with trio.move_on_after(self._step_s) as step:
                await over.wait()
            if step.cancelled_caught:
                self._steps -= 1
                await trio.lowlevel.checkpoint()  # what a thread has delivered meanwhile is taken first
        return over.is_set()
