"""How a scenario is shown: plain text with the rows that changed since the last step, or JSON lines for a program.

Must not play anything and must not judge. Apart from times, the text depends only on the scenario and its seed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TextIO, final

from msgspec import Struct

from gpuactors_simulation.kubelet.device_manager import DeviceRow, KubeletView, Phase
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.situation import ClaimSeen
from gpuactors_simulation.world import Moment

_LOG_LINES_SHOWN: Final = 15
_CALLS_SHOWN: Final = 6

Row = tuple[str, ...]


class StepResult(Struct, frozen=True):
    """How a step went."""

    number: int
    step: Step
    moment: Moment
    unmet: tuple[str, ...]
    settled_s: float
    negative_s: float
    """How long of it the scheduler would have seen a free count below zero."""

    @property
    def ok(self) -> bool:
        return not self.unmet


class ScenarioResult(Struct, frozen=True):
    """How a scenario went."""

    scenario: Scenario
    seed: int
    steps: int
    """Steps that were played."""
    of: int
    unmet: tuple[str, ...]
    took_s: float
    log: tuple[str, ...]
    """The daemon's last log lines; empty if all went well."""

    @property
    def ok(self) -> bool:
        return not self.unmet


class Show(Protocol):
    """Shows one scenario, from its opening to its result."""

    def opening(self, scenario: Scenario, seed: int) -> None: ...

    def step_begins(self, number: int, steps: int, step: Step) -> None: ...

    def step_ends(self, result: StepResult) -> None: ...

    def closing(self, result: ScenarioResult) -> None: ...


# --- for a program ---------------------------------------------------------------------------------------------


def counts_of(view: KubeletView) -> dict[str, dict[str, int]]:
    """Kubelet's counts of each resource, for JSON."""
    return {
        name: {
            "capacity": f.capacity,
            "allocatable": f.allocatable,
            "allocated": f.allocated,
            "free": f.free,
        }
        for name, f in view.resources.items()
    }


@final
class JsonLines:
    """One object per step, then one with the result."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def opening(self, scenario: Scenario, seed: int) -> None:
        pass

    def step_begins(self, number: int, steps: int, step: Step) -> None:
        pass

    def step_ends(self, result: StepResult) -> None:
        view = result.moment.view
        self._line(
            step=result.number,
            title=result.step.title,
            at_s=round(result.moment.at_s, 4),
            settled_s=round(result.settled_s, 4),
            free_negative_s=round(result.negative_s, 4),
            resources=counts_of(view),
            devices=[
                {
                    "resource": row.resource,
                    "id": row.id,
                    "health": row.health,
                    "numa_nodes": list(row.numa_nodes),
                    "pod": row.pod,
                    "reason": reason_of(row, result.moment),
                }
                for row in view.devices
            ],
            gpus=[
                {
                    "address": gpu.address,
                    "driver": gpu.driver,
                    "companions": dict(gpu.companions),
                    "offered": gpu.is_offered,
                    "tainted": gpu.is_tainted,
                }
                for gpu in result.moment.claims.gpus
            ],
            claims=[
                {
                    "name": claim.name,
                    "devices": sorted(claim.devices),
                    "prepared": claim.is_prepared,
                    "state": claim.state or None,
                    "problem": claim.problem or None,
                }
                for claim in result.moment.claims.claims
            ],
            domain=_domain_object(result.moment),
            pods={name: {"phase": pod.phase, "message": pod.message} for name, pod in view.pods.items()},
            expected=[str(expectation) for expectation in result.step.expect],
            unmet=list(result.unmet),
            ok=result.ok,
        )

    def closing(self, result: ScenarioResult) -> None:
        self._line(
            result="ok" if result.ok else "failed",
            scenario=result.scenario.name,
            seed=result.seed,
            steps=result.steps,
            of=result.of,
            unmet=list(result.unmet),
            took_s=round(result.took_s, 4),
            log=list(result.log),
        )

    def _line(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields, ensure_ascii=False) + "\n")
        self._out.flush()


def _domain_object(moment: Moment) -> dict[str, Any] | None:
    """Return the domain of a node that has compute domains; None on another one."""
    seen = moment.claims.domains
    if seen is None:
        return None
    return {
        "name": seen.domain,
        "label": seen.labels[-1],
        "labels": list(seen.labels),
        "says": seen.says or None,
        "offered": list(seen.offered),
        "calls": [
            {
                "at_s": round(call.began_s, 4),
                "call": call.call,
                "claim": call.claim,
                "took_s": round(call.took_s, 4),
                "error": call.error or None,
            }
            for call in seen.calls
        ],
    }


# --- for people ------------------------------------------------------------------------------------------------


@final
class PlainText:
    """A block of text per step, in so many columns; tables may be wider. A table has the rows that changed; after a
    step that is not as expected, it has all of them."""

    def __init__(self, out: TextIO, columns: int) -> None:
        self._out = out
        self._columns = columns
        self._before: dict[str, list[Row]] = {}
        """The rows of each table after the step before, by the table's noun."""

    def opening(self, scenario: Scenario, seed: int) -> None:
        self._say(f"Scenario {scenario.name} (seed {seed})", "")
        self._prose(scenario.text)

    def step_begins(self, number: int, steps: int, step: Step) -> None:
        title = f"Step {number} of {steps}: {step.title}"
        self._say("", title, "-" * len(title))
        self._prose(step.text)
        self._out.flush()

    def step_ends(self, result: StepResult) -> None:
        for table in TABLES:
            rows = table.rows(result.moment)
            before = [] if table.is_whole or not result.ok else self._before.get(table.noun, [])
            if lines := changed_lines(table, before, rows):
                self._say("", *(f"  {line}" for line in lines))
            self._before[table.noun] = rows
        if remarks := remark_lines(result.moment):
            self._say("")
            self._wrapped(remarks)
        self._say("")
        self._wrapped(outcome_lines(result))
        self._out.flush()

    def closing(self, result: ScenarioResult) -> None:
        self._say("")
        self._wrapped(closing_lines(result))
        self._out.flush()

    def _prose(self, text: str) -> None:
        for number, paragraph in enumerate(_paragraphs(text)):
            self._say(*([""] if number else []), *textwrap.wrap(paragraph, self._columns))

    def _wrapped(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(*textwrap.wrap(line, self._columns, initial_indent="  ", subsequent_indent="    "))

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._out.write(line.rstrip() + "\n")


# --- the words -------------------------------------------------------------------------------------------------


def resource_rows(moment: Moment) -> list[Row]:
    """Return the figures of each resource."""
    return [
        (name, str(f.capacity), str(f.allocatable), str(f.allocated), str(f.free))
        for name, f in moment.view.resources.items()
    ]


def device_rows(moment: Moment) -> list[Row]:
    """Return the devices that kubelet knows; of the resource's name the part after the slash."""
    return [
        (
            row.resource.partition("/")[2],
            row.id,
            ",".join(map(str, row.numa_nodes)) or "-",
            row.health,
            row.pod or "",
        )
        for row in moment.view.devices
    ]


def gpu_rows(moment: Moment) -> list[Row]:
    """Return the GPUs of a node that serves claims, on whatever driver, and their claims."""
    return [
        (
            gpu.address,
            gpu.driver or "-",
            ", ".join(driver or "-" for _, driver in gpu.companions) or "-",
            ("tainted" if gpu.is_tainted else "offered") if gpu.is_offered else "-",
            ", ".join(
                _claim_words(c) for c in moment.claims.claims if gpu.address in c.devices and c.is_known
            ),
        )
        for gpu in moment.claims.gpus
    ]


def domain_rows(moment: Moment) -> list[Row]:
    """Return the domain of a node that has compute domains."""
    seen = moment.claims.domains
    return [] if seen is None else [(seen.domain, seen.labels[-1] or "-", seen.says or "-")]


def imex_rows(moment: Moment) -> list[Row]:
    """Its devices, and their claims."""
    seen = moment.claims.domains
    return [
        (
            name,
            "offered",
            ", ".join(_claim_words(c) for c in moment.claims.claims if name in c.devices and c.is_known),
        )
        for name in (seen.offered if seen is not None else ())
    ]


def call_rows(moment: Moment) -> list[Row]:
    """Kubelet's calls about claims that are over, the last ones."""
    calls = moment.claims.domains.calls if moment.claims.domains is not None else ()
    return [
        (f"{call.began_s:.3f} s", call.call, call.claim, _duration(call.took_s), call.error or "done")
        for call in calls[-_CALLS_SHOWN:]
    ]


class Table(Struct, frozen=True):
    """A table about the node after a step."""

    noun: str
    """The name of one row."""
    head: Row
    rows: Callable[[Moment], list[Row]]
    right: frozenset[int]
    """The columns of numbers."""
    key: int = 1
    """How many columns say what a row is about; 0 if a row that is no longer there has no meaning."""
    is_whole: bool = False
    """Whether every row is shown, also one that is as before."""


RESOURCES: Final = Table(
    "resource",
    ("Resource", "Capacity", "Allocatable", "Allocated", "Free"),
    resource_rows,
    frozenset({1, 2, 3, 4}),
    is_whole=True,
)
DEVICES: Final = Table(
    "device", ("Resource", "Device", "NUMA", "Health", "Pod"), device_rows, frozenset({2}), key=2
)
TABLES: Final = (
    RESOURCES,
    DEVICES,
    Table("GPU", ("GPU", "Driver", "Companion", "ResourceSlice", "Claim"), gpu_rows, frozenset()),
    Table("domain", ("ComputeDomain", "Node's label", "Says of the node"), domain_rows, frozenset()),
    Table("IMEX device", ("Device", "ResourceSlice", "Claim"), imex_rows, frozenset()),
    Table("call", ("At", "Kubelet's call", "Claim", "Took", "Answer"), call_rows, frozenset({0, 3}), key=0),
)


def changed_lines(table: Table, before: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Return the rows that are not as `before`, then how many are, and which are gone."""
    changed = [row for row in rows if row not in before]
    there = {row[: table.key] for row in rows}
    gone = [row[table.key - 1] for row in before if table.key and row[: table.key] not in there]
    same = len(rows) - len(changed)
    lines = aligned(table.head, changed, right=table.right)
    if same and table.key:
        lines.append(f"{same} {table.noun}{'s' if same > 1 else ''} as before")
    return [*lines, f"gone: {', '.join(gone)}"] if gone else lines


def _claim_words(claim: ClaimSeen) -> str:
    return f"{claim.name} ({'Prepared' if claim.is_prepared else claim.state or 'not prepared'})"


def reason_of(row: DeviceRow, moment: Moment) -> str | None:
    """Return why a device is not Healthy, if it is known."""
    if row.health == "Healthy":
        return None
    if not moment.view.running:
        return "kubelet is not running"
    if row.resource not in moment.view.connected:
        return "kubelet has lost the plugin's stream"
    return moment.reasons.get(row.id)


def remark_lines(moment: Moment) -> list[str]:
    """All that is not as it should be: kubelet if it does not run, devices that are not Healthy, pods that wait."""
    lines = [] if moment.view.running else ["Kubelet is not running; these are its last figures."]
    listed = {row.resource for row in moment.view.devices}
    lost = sorted(listed - moment.view.connected) if moment.view.running else []
    lines += [f"{resource}: kubelet has lost the plugin's stream" for resource in lost]
    lines += [
        f"{row.id}: {reason}"
        for row in moment.view.devices
        if row.resource in moment.view.connected and (reason := reason_of(row, moment)) is not None
    ]
    lines += [
        f"{claim.name}: {claim.problem}" for claim in moment.claims.claims if claim.is_known and claim.problem
    ]
    return lines + [
        f"{pod.name}: {pod.phase}" + (f", {pod.message}" if pod.message else "")
        for pod in moment.view.pods.values()
        if pod.phase is not Phase.RUNNING
    ]


def outcome_lines(result: StepResult) -> list[str]:
    """Return the expectations, and whether they are met."""
    if not result.ok:
        return ["NOT AS EXPECTED:", *(f"- {problem}" for problem in result.unmet)]
    lines = [f"As expected after {_duration(result.settled_s)}."]
    if result.negative_s > 0:
        lines.append(
            f"For {_duration(result.negative_s)} of it kubelet had no list from the plugin, so that free was below "
            "zero (kubelet posts its figures every 10 s, so a gap this short is seldom posted)."
        )
    return lines


def closing_lines(result: ScenarioResult) -> list[str]:
    """Return how the scenario ended."""
    played = f"{result.steps} of {result.of} steps in {_duration(result.took_s)}"
    if result.ok:
        return [
            f"{result.scenario.name}: every step as expected ({played}). No GPU was handed out twice, no pod was "
            "disturbed, and no step ended with a negative free count."
        ]
    lines = [f"{result.scenario.name} FAILED ({played}):", *(f"- {problem}" for problem in result.unmet)]
    if result.log:
        lines += ["The daemon's last warnings and errors:", *result.log[-_LOG_LINES_SHOWN:]]
    lines.append(f"Play it again: gpuactors simulate --scenario {result.scenario.name} --seed {result.seed}")
    return lines


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n") if paragraph]


def aligned(head: Row, rows: Sequence[Row], *, right: frozenset[int]) -> list[str]:
    """Return a table as lines; nothing if it has no rows. `right` are the columns of numbers."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
