"""The command's one function: reads the facts, examines them, and returns the report with whether anything failed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import trio

from gpuactors.cli.doctor import report
from gpuactors.cli.doctor.checks import Group, examine
from gpuactors.cli.doctor.facts import Facts
from gpuactors.cli.doctor.gather import gather
from gpuactors.cli.output import UNFOLDED
from gpuactors.cli.progress import Progress
from gpuactors.config import Resolved


@dataclass(frozen=True, slots=True)
class Examined:
    """The facts of a node, and the findings."""

    facts: Facts
    groups: tuple[Group, ...]

    @property
    def is_failed(self) -> bool:
        """Whether any finding is a FAIL."""
        return report.is_failed(self.groups)

    def text(self, columns: int = UNFOLDED) -> str:
        """The report, in so many columns."""
        return report.as_text(self.facts, self.groups, columns)

    def json(self) -> str:
        """The report for programs."""
        return report.as_json(self.facts, self.groups)


def examined(resolved: Resolved, *, pre: bool, progress: Progress) -> Examined:
    """The node as it is now. `progress` shows what is waited for. Raises nothing: what cannot be read is a finding."""
    facts = trio.run(partial(gather, resolved, pre=pre, progress=progress))
    return Examined(facts, examine(facts))
