"""The command's one function: reads the facts, examines them, and returns the report with whether anything failed."""

from __future__ import annotations

from functools import partial
from typing import Final

import trio
from msgspec import Struct

from gpuactors.cli.doctor import report
from gpuactors.cli.doctor.checks import Group, examine
from gpuactors.cli.doctor.facts import Facts
from gpuactors.cli.doctor.gather import gather
from gpuactors.cli.output import UNFOLDED
from gpuactors.cli.progress import Progress
from gpuactors.config import Resolved

DOCTOR_AGAIN_S: Final = 2.0
"""Between two examinations of `gpuactors doctor --wait`: a daemon registers within a second."""


class Examined(Struct, frozen=True):
    """The facts of a node, and the findings."""

    facts: Facts
    groups: tuple[Group, ...]

    @property
    def is_failed(self) -> bool:
        """Whether any finding is a FAIL."""
        return report.is_failed(self.groups)

    def text(self, columns: int = UNFOLDED, *, colour: bool = False) -> str:
        """The report, in so many columns."""
        return report.as_text(self.facts, self.groups, columns, colour=colour)

    def json(self) -> str:
        """The report for programs."""
        return report.as_json(self.facts, self.groups)


def examined(resolved: Resolved, *, pre: bool, progress: Progress, wait_s: float = 0.0) -> Examined:
    """The node as it is now, or as soon as nothing is a FAIL, at the latest after `wait_s`. `progress` shows what is
    waited for. Raises nothing: what cannot be read is a finding."""
    return trio.run(partial(examined_within, resolved, pre=pre, progress=progress, wait_s=wait_s))


async def examined_within(resolved: Resolved, *, pre: bool, progress: Progress, wait_s: float) -> Examined:
    """See `examined`."""
    until = trio.current_time() + wait_s
    while True:
        facts = await gather(resolved, pre=pre, progress=progress)
        found = Examined(facts, examine(facts))
        left_s = until - trio.current_time()
        if left_s <= 0 or not found.is_failed:
            return found
        pause = partial(trio.sleep, min(DOCTOR_AGAIN_S, left_s))
        await progress.during(f"the node again: {report.summary(found.groups)}", pause)
