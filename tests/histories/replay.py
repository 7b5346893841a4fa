"""Plays one history and shows kubelet's view after each step, as text or JSON: `./do fuzz --script …`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any, Final, Protocol, TextIO, final

import trio

from gpuactors_simulation.show import DEVICES, RESOURCES, aligned, counts_of, reason_of, remark_lines
from gpuactors_simulation.world import Moment
from tests.histories.play import Failure, Played, play
from tests.histories.script import Script, Step, format_step, replay_line
from tests.histories.world import World

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1

_COLUMNS: Final = 110


class _Show(Protocol):
    """Shows a history while it is played."""

    def step(self, title: str, number: int, moment: Moment) -> None: ...

    def left_out(self, steps: Sequence[Step]) -> None: ...

    def failed(self, failure: Failure, line: str) -> None: ...

    def passed(self, steps: int, at_s: float) -> None: ...


def replay(script: Script, seed: int, *, json_lines: bool, out: TextIO) -> int:
    """Plays and shows a script; returns the exit code: 0, or 1 if anything that must hold did not."""
    show: _Show = _JsonLines(out) if json_lines else _Text(out)
    number, at_s = -1, 0.0

    def on_step(world: World, step: Step | None) -> None:
        nonlocal number, at_s
        number, at_s = number + 1, trio.current_time()
        if step is not None:
            title = f"Step {number}: {format_step(step)}"
        elif number == 0:
            title = "The beginning: three cards, a kubelet and a daemon"
        else:
            title = "The end: what was broken is repaired, and everything has had time"
        show.step(title, number, Moment(at_s, world.kubelet.view, world.reasons()))

    played = play(script, seed, on_step=on_step)
    show.left_out(_left_out(script, played))
    if played.failure is not None:
        show.failed(played.failure, replay_line(seed, played.script))
        return EXIT_FAILED
    show.passed(len(played.script), at_s)
    return EXIT_OK


def _left_out(script: Script, played: Played) -> list[Step]:
    """Steps of the script that could not happen when their turn came; those after a failure are not among them."""
    left_out, rest = [], list(played.script)
    for step in script:
        if rest and rest[0] == step:
            del rest[0]
        elif rest or played.failure is None:
            left_out.append(step)
    return left_out


@final
class _Text:
    """A block of text per step."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def step(self, title: str, number: int, moment: Moment) -> None:
        heading = f"{title} ({moment.at_s:.3f} s)"
        self._say("" if number else None, heading, "-" * len(heading))
        for table in (RESOURCES, DEVICES):
            if lines := aligned(table.head, table.rows(moment), right=table.right):
                self._say(*(f"  {line}" for line in lines), "")
        for remark in remark_lines(moment):
            self._say(*textwrap.wrap(remark, _COLUMNS, initial_indent="  ", subsequent_indent="    "))

    def left_out(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._say("", f"Left out, as it could not happen when its turn came: {format_step(step)}")

    def failed(self, failure: Failure, line: str) -> None:
        when = "when it should have settled" if failure.settled else f"after step {failure.steps}"
        self._say("", *textwrap.wrap(f"FAILED {when}: {failure.check}: {failure.text}", _COLUMNS), line)

    def passed(self, steps: int, at_s: float) -> None:
        self._say(
            "", f"Everything that must hold did, at each of {steps} steps and at the end ({at_s:.0f} s)."
        )

    def _say(self, *lines: str | None) -> None:
        for line in lines:
            if line is not None:
                self._out.write(line.rstrip() + "\n")
        self._out.flush()


@final
class _JsonLines:
    """One object per step, then one with the result."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def step(self, title: str, number: int, moment: Moment) -> None:
        view = moment.view
        self._line(
            step=number,
            title=title,
            at_s=round(moment.at_s, 4),
            resources=counts_of(view),
            devices=[
                {
                    "resource": row.resource,
                    "id": row.id,
                    "health": row.health,
                    "pod": row.pod,
                    "reason": reason_of(row, moment),
                }
                for row in view.devices
            ],
            pods={name: {"phase": pod.phase, "message": pod.message} for name, pod in view.pods.items()},
        )

    def left_out(self, steps: Sequence[Step]) -> None:
        if steps:
            self._line(left_out=[format_step(step) for step in steps])

    def failed(self, failure: Failure, line: str) -> None:
        self._line(result="failed", check=failure.check, text=failure.text, steps=failure.steps, replay=line)

    def passed(self, steps: int, at_s: float) -> None:
        self._line(result="ok", steps=steps, at_s=round(at_s, 4))

    def _line(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields, ensure_ascii=False) + "\n")
        self._out.flush()
