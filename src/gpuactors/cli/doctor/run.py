"""The command's one function: reads the facts, examines them, and returns the report with whether anything failed."""

from __future__ import annotations

from functools import partial
from typing import Final

import trio
from msgspec import Struct

from gpuactors.cli.doctor import report
from gpuactors.cli.doctor.checks import Group, examine
from gpuactors.cli.doctor.facts import Facts
from gpuactors.cli.doctor.gather import gather, read_kubevirt
from gpuactors.cli.output import UNFOLDED
from gpuactors.cli.progress import Progress
from gpuactors.config import Resolved

DOCTOR_AGAIN_S: Final = 2.0
"""The pause between two examinations of `gpuactors doctor --wait`, in seconds: a daemon registers within one."""


class Examined(Struct, frozen=True):
    """The facts of a node, and the findings."""

    facts: Facts
    groups: tuple[Group, ...]

    @property
    def is_failed(self) -> bool:
        """True if any finding is a FAIL."""
        return report.is_failed(self.groups)

    def text(self, columns: int = UNFOLDED, *, colour: bool = False) -> str:
        """Return the report as text, in so many columns."""
        return report.as_text(self.facts, self.groups, columns, colour=colour)

    def json(self) -> str:
        """Return the report as JSON."""
        return report.as_json(self.facts, self.groups)


def examined(
    resolved: Resolved,
    *,
    pre: bool,
    progress: Progress,
    wait_s: float = 0.0,
    kubevirt: str | None = None,
    before_nvidia: bool = False,
) -> Examined:
    """Examine the node, and again until nothing is a FAIL, for at most `wait_s`. `progress` shows what is waited for.
    `kubevirt`: the file with the custom resource KubeVirt, read once. `before_nvidia`: NVIDIA's DRA driver is to be
    started on this node. Raises nothing: what cannot be read is a
    finding."""
    examine_it = partial(
        examined_within,
        resolved,
        pre=pre,
        progress=progress,
        wait_s=wait_s,
        kubevirt=kubevirt,
        before_nvidia=before_nvidia,
    )
    return trio.run(examine_it)


async def examined_within(
    resolved: Resolved,
    *,
    pre: bool,
    progress: Progress,
    wait_s: float,
    kubevirt: str | None = None,
    before_nvidia: bool = False,
) -> Examined:
    """Do what `examined` does, in a running event loop."""
    custom_resource = await read_kubevirt(kubevirt, progress) if kubevirt is not None else None
    until = trio.current_time() + wait_s
    while True:
        facts = await gather(
            resolved, pre=pre, progress=progress, kubevirt=custom_resource, before_nvidia=before_nvidia
        )
        node = Examined(facts, examine(facts))
        left_s = until - trio.current_time()
        if left_s <= 0 or not node.is_failed:
            return node
        pause = partial(trio.sleep, min(DOCTOR_AGAIN_S, left_s))
        await progress.during(f"the node again: {report.summary(node.groups)}", pause)
