"""A replay as text for people, and as JSON lines for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from gpuactors.core import events
from gpuactors.core.domains.report import domain_reports, label_report
from gpuactors.core.events import domains as domain_events
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import DeviceList, Health
from gpuactors.core.values.quote import printable_json
from gpuactors.observe.journal_format import encoded_effects
from gpuactors.replay.counts import counts_of
from gpuactors.replay.play import Began, Moment, Played, Resumed
from gpuactors.replay.reading import Damage
from gpuactors.replay.words import (
    clock,
    count,
    day,
    domain_words,
    effect_words,
    event_words,
    is_worth_reading,
    process,
)

_ROUTINE = (
    events.daemon.Ticked,
    events.host.GroupsObserved,
    events.kubelet.LedgerRead,
    events.kubelet.LedgerUnreadable,
    events.host.HostScanned,
    domain_events.LabelRead,
    domain_events.NodeTouched,
    domain_events.DomainRead,
    domain_events.DomainsTouched,
    domain_events.ImexRead,
)
"""Routine events. Without any consequence they are counted, not shown."""


@dataclass
class Tally:
    """The result of a replay."""

    steps: int = 0
    differing: int = 0
    """The number of steps, and of states in the journal, that differ."""
    missed: int = 0
    gaps: int = 0
    damage: int = 0
    first_wall: float | None = None
    last_wall: float = 0.0

    def count(self, moment: Moment) -> None:
        """Count one moment."""
        match moment:
            case Damage():
                self.damage += 1
                return
            case Played():
                self.steps += 1
                self.differing += bool(moment.differences)
            case Resumed():
                self.differing += bool(moment.differences)
                self.gaps += moment.missed != 0
                self.missed += moment.missed or 0
            case Began():
                pass
            case _:
                assert_never(moment)
        self.first_wall = moment.wall if self.first_wall is None else self.first_wall
        self.last_wall = moment.wall

    def __str__(self) -> str:
        length_s = self.last_wall - (self.first_wall or 0.0)
        gaps = f", {count(self.gaps, 'gap')} ({self.missed} steps known to be missing)" if self.gaps else ""
        damage = f", {count(self.damage, 'unreadable place')}" if self.damage else ""
        result = f"{count(self.differing, 'difference')}" if self.differing else "no differences"
        return f"{count(self.steps, 'step')} in {length_s:.1f} s{gaps}{damage}: {result}"


def is_quiet(played: Played) -> bool:
    """Return whether a step is routine without any relevant consequence."""
    return (
        isinstance(played.event, _ROUTINE)
        and not (played.differences or played.failure)
        and not any(is_worth_reading(effect) for effect in played.effects)
        and _same_counts(played.before, played.state)
        and not any(domain_changes(played.before, played.state))
    )


def _same_counts(before: NodeState, state: NodeState) -> bool:
    if (
        before.published.device_lists is state.published.device_lists
        and before.kubelet.ledger.entries is state.kubelet.ledger.entries
        and before.kubelet.pending_allocations.keys() == state.kubelet.pending_allocations.keys()
    ):
        return True
    return before.published.device_lists == state.published.device_lists and counts_of(before) == counts_of(
        state
    )


@dataclass
class Text:
    """Lines for people. `only_differences`: nothing but what differs, and what is missing.

    The counts of a resource are shown where they change, and hold until they are shown again.
    """

    only_differences: bool = False
    began_wall: float = 0.0
    """The time of day at the beginning of the journal, from which the seconds are counted."""
    _quiet: Counter[str] = field(default_factory=Counter)
    """The number of quiet steps of each kind that have not been reported yet: a month of a quiet node has a million."""
    _quiet_from: float = 0.0
    _quiet_to: float = 0.0

    def lines(self, moment: Moment) -> Iterator[str]:
        """Yield the lines of one moment, and of the quiet ones before it."""
        if isinstance(moment, Played) and self.only_differences and not moment.differences:
            return
        if isinstance(moment, Played) and is_quiet(moment):
            self._quiet_from = self._quiet_from if self._quiet else moment.wall
            self._quiet_to = moment.wall
            self._quiet[_kind(moment)] += 1
            return
        yield from self.quiet_lines()
        match moment:
            case Began(wall, header, _):
                yield (
                    f"{day(wall)} UTC  {process(header)}"
                    + (f", part {header.part} of its journal" if header.part > 1 else "")
                    + (f", boot {header.boot}" if header.boot else "")
                )
            case Resumed(wall, missed, _, differences):
                if missed != 0:
                    steps = "steps are missing" if missed is None else f"{count(missed, 'step')} missing"
                    yield f"{self._time(wall)}  -- {steps} here; going on from a state in the journal"
                for difference in differences:
                    yield f"{self._time(wall)}  DIFFERS: {difference}"
            case Damage():
                yield f"-- {moment}"
            case Played():
                yield from self._step(moment)
            case _:
                assert_never(moment)

    def quiet_lines(self) -> Iterator[str]:
        """Yield a line about the quiet steps that have not been reported yet."""
        if not self._quiet:
            return
        counted = ", ".join(count(n, kind) for kind, n in self._quiet.most_common())
        lasted_s = self._quiet_to - self._quiet_from
        yield f"{self._time(self._quiet_from)}  … nothing new in {lasted_s:.1f} s: {counted}"
        self._quiet.clear()

    def _step(self, played: Played) -> Iterator[str]:
        yield f"{self._time(played.wall)}  #{played.number} {event_words(played.event)}"
        indent = " " * 30
        for effect in played.effects:
            if is_worth_reading(effect):
                yield f"{indent}{effect_words(effect)}"
        if played.failure:
            yield f"{indent}RAISES {played.failure}"
        before = counts_of(played.before)
        for resource, counts in counts_of(played.state).items():
            old, new = (
                played.before.published.device_lists.get(resource, ()),
                played.state.published.device_lists[resource],
            )
            if old != new:
                yield f"{indent}list    {resource}: {list_changes(old, new)}"
            if counts != before.get(resource):
                yield f"{indent}counts  {resource}: {counts}"
        for what, words in domain_changes(played.before, played.state):
            yield f"{indent}{what:<7} {words}"
        for difference in played.differences:
            yield f"{indent}DIFFERS: {difference}"

    def _time(self, wall: float) -> str:
        return f"{clock(wall)} {f'+{wall - self.began_wall:.3f} s':>14}"


def _kind(played: Played) -> str:
    match played.event:
        case events.daemon.Ticked():
            return "tick"
        case events.host.GroupsObserved() | events.host.SomeGroupsObserved():
            return "poll"
        case events.host.HostScanned():
            return "scan"
        case domain_events.LabelRead() | domain_events.DomainRead() | domain_events.ImexRead():
            return "domain read"
        case domain_events.NodeTouched() | domain_events.DomainsTouched():
            return "Node change"
        case _:
            return "ledger read"


def domain_changes(before: NodeState, state: NodeState) -> Iterator[tuple[str, str]]:
    """Yield the changes of the label (`label`) and of compute domains (`domain`) in a step, in words."""
    if before.domains is state.domains or state.domains.settings is None:
        return
    was_label, label = label_report(before.domains), label_report(state.domains)
    if label != was_label:
        yield "label", str(label) + (f": {label.problem}" if label.problem else "")
    was = {report.uid: report for report in domain_reports(before.domains)}
    now = {report.uid: report for report in domain_reports(state.domains)}
    for uid, report in now.items():
        if uid not in was or domain_words(report) != domain_words(was[uid]):
            yield "domain", f"{report}: {domain_words(report)}"
    for uid, report in was.items():
        if uid not in now:
            yield "domain", f"{report}: no claim of it is left"


def list_changes(old: DeviceList, new: DeviceList) -> str:
    """Return the changes between a device list and the one before it."""
    was, now = {a.id: a for a in old}, {a.id: a for a in new}
    changed = [
        f"{i} {a.health}"
        for i, a in now.items()
        if i not in was or (was[i].health, was[i].reason) != (a.health, a.reason)
    ]
    gone = [f"{i} gone" for i in was if i not in now]
    healthy = sum(1 for a in new if a.health is Health.HEALTHY)
    changes = [*changed, *gone]
    more = f" and {len(changes) - 8} more" if len(changes) > 8 else ""
    return f"{count(len(new), 'device')}, {healthy} Healthy ({', '.join(changes[:8])}{more})"


def as_json(moment: Moment, first_wall: float) -> str:
    """Return one moment as one line of JSON."""
    match moment:
        case Damage(path, line, skipped, reason):
            return _line({"damage": reason, "file": path, "line": line, "bytes": skipped})
        case Began(wall, header, _):
            return _line({"began": day(wall), "t_s": _s(wall - first_wall), **msgspec.structs.asdict(header)})
        case Resumed(wall, missed, _, differences):
            return _line({"resumed": missed, "t_s": _s(wall - first_wall), "differences": differences})
        case Played():
            device_lists = {
                resource: {
                    a.id: {"health": a.health, "cause": a.cause, "reason": a.reason} for a in device_list
                }
                for resource, device_list in moment.state.published.device_lists.items()
                if moment.before.published.device_lists.get(resource) != device_list
            }
            return _line(
                {
                    "step": moment.number,
                    "t_s": _s(moment.wall - first_wall),
                    "at": moment.at,
                    "event": type(moment.event).__name__,
                    "words": event_words(moment.event),
                    "effects": json.loads(encoded_effects(moment.effects)),
                    "device_lists": device_lists,
                    "resources": {
                        resource: {**msgspec.structs.asdict(counts), "free": counts.free}
                        for resource, counts in counts_of(moment.state).items()
                    },
                    "compute_domains": _domains(moment.state),
                    "raises": moment.failure or None,
                    "differences": moment.differences,
                }
            )
        case _:
            assert_never(moment)


def _domains(state: NodeState) -> dict[str, object] | None:
    """Return the label and each domain; None while compute domains are off."""
    if state.domains.settings is None:
        return None
    label = label_report(state.domains)
    return {
        "label": {"status": label.status, "value": label.value},
        "domains": {
            r.uid: {"name": r.name or None, "status": r.status, "missing": r.missing or None}
            for r in domain_reports(state.domains)
        },
    }


def _line(value: dict[str, object]) -> str:
    return printable_json(json.dumps(value, ensure_ascii=False))


def _s(seconds: float) -> float:
    return round(seconds, 6)
