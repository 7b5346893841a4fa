"""Feeds a journal's events to the core, and compares the results with the recorded ones.

In the version that wrote the journal nothing may differ. Each state in the journal is a new start: a gap before it is
reported, and the computed state is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from gpuactors.core.events import Event
from gpuactors.core.reports.snapshot import project
from gpuactors.core.state import PARTS, NodeState
from gpuactors.core.step import step
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.quote import quoted
from gpuactors.observe.journal_format import (
    NUMBERED,
    AgainLine,
    Digests,
    Header,
    StateLine,
    StepLine,
    encoded_effects,
    outstanding,
)
from gpuactors.replay.journal_lines import UNREADABLE, EventReader, FormatError, read_state
from gpuactors.replay.reading import Damage, File, JournalError, Meter, entries


class Began(Struct, frozen=True):
    """The first state of a process that wrote this journal, or of the first of its files that is there."""

    wall: float
    header: Header
    state: NodeState


class Resumed(Struct, frozen=True):
    """A state in the middle: a new file, or steps that are missing."""

    wall: float
    missed: int | None
    """The number of steps that are not in the journal; None if unknown (files are missing, lines could not be read)."""
    state: NodeState
    differences: tuple[str, ...]
    """The differences between this state and the one that was computed, if nothing is missing in between."""


class Played(Struct, frozen=True):
    """One step."""

    number: int
    """The number of the step, from 1, in the order of the journal."""
    wall: float
    """The time of day, seconds since 1970."""
    at: float
    """The time by the daemon's own clock."""
    event: Event
    before: NodeState
    state: NodeState
    effects: Sequence[Effect]
    failure: str
    """The exception of the step, a bug; empty if it raised none."""
    differences: tuple[str, ...]
    """The differences between the computed and the recorded results."""


Moment = Began | Resumed | Played | Damage


def play(files: Iterable[File], meter: Meter | None = None, *, end: float = math.inf) -> Iterator[Moment]:
    """Play all that is in the files, in order, and of each no more than is needed up to `end` (time of day). Raises
    `JournalError` for contents that this version does not know."""
    player = _Player()
    for file, file_entries in entries(files, meter or Meter()):
        player.begin_file(file)
        try:
            for entry in file_entries:
                if not isinstance(entry, File | Damage) and player.time_of_day(entry.at) > end:
                    break
                match entry:
                    case StateLine():
                        yield player.take_state(entry)
                    case StepLine():
                        yield player.play_step(entry)
                    case AgainLine():
                        yield from player.play_repeats(entry)
                    case Damage():
                        player.mark_gap()
                        yield entry
        except FormatError as exc:
            raise JournalError(
                f"{file.path} cannot be replayed: {exc}; it was written by gpuactors {file.header.version}: "
                "replay it with that version"
            ) from None


def wall_seconds(header: Header) -> float:
    """Return the time of day of a header, as seconds since 1970."""
    return datetime.fromisoformat(header.wall).timestamp()


class _Player:
    """The state of the replay between two lines of the journal."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._wall = 0.0
        self._number = 0
        self._state: NodeState | None = None
        self._whole = False
        """True if nothing is missing since the state that was computed last."""
        self._events = EventReader()
        self._digests = Digests()

    def begin_file(self, file: File) -> None:
        """Begin a file."""
        before, self._header = self._header, file.header
        self._wall = wall_seconds(file.header) - file.header.at
        if before is None or before.run != file.header.run:
            self._state = None
        elif before.part + 1 != file.header.part:
            self._whole = False

    def time_of_day(self, at: float) -> float:
        """Return a time of the daemon's clock as seconds since 1970."""
        return self._wall + at

    def mark_gap(self) -> None:
        """Record that lines could not be read."""
        self._whole = False

    def take_state(self, line: StateLine) -> Began | Resumed:
        """Go on from a state in the journal, and compare it with the computed one."""
        assert self._header is not None
        state, computed = read_state(line), self._state
        missed = line.missed if self._whole else None
        compared = _state_differences(state, computed) if computed is not None and missed == 0 else ()
        self._state, self._events = state, EventReader()
        self._whole = True
        if computed is None:
            return Began(self._wall + line.at, self._header, state)
        return Resumed(self._wall + line.at, missed, state, compared)

    def play_step(self, line: StepLine) -> Played:
        """Play a step of the journal."""
        event, before = self._events.event(line), self._now()
        effects, failure = self._step(event, line.at)
        digest, raises = self._digest()
        failure = failure or raises
        differences: tuple[str, ...] = ()
        if failure or line.failed:
            self._state = before if failure else self._state
            if failure != line.failed:
                differences = (
                    f"it raised {line.failed or 'nothing'}, and raises {failure or 'nothing'} now",
                )
        else:
            differences = (*_effect_differences(line.effects, effects), *_changed_digest(line.digest, digest))
        return self._played(line.at, event, before, () if failure else effects, failure, differences)

    def play_repeats(self, line: AgainLine) -> Iterator[Played]:
        """Play steps like those before them. The snapshot is compared after the last one."""
        remaining = len(line.again)
        for letter, at in zip(line.again, line.times(), strict=True):
            before = self._now()
            event, recorded = self._events.again(letter, before)
            effects, failure = self._step(event, at)
            remaining -= 1
            if failure:
                differences: tuple[str, ...] = (f"it raised nothing, and raises {failure} now",)
            else:
                differences = _effect_differences(recorded, effects)
                if letter in NUMBERED and outstanding(before, letter) is None:
                    differences += ("this was requested, and is not now",)
                if not remaining:
                    differences += _changed_digest(line.digest, self._digest()[0])
            yield self._played(at, event, before, effects, failure, differences)

    def _now(self) -> NodeState:
        if self._state is None:
            raise FormatError("a step comes before any state")
        return self._state

    def _step(self, event: Event, at: float) -> tuple[Sequence[Effect], str]:
        """Make a step; return its effects, and what it raises."""
        try:
            self._state, effects = step(self._now(), event, at)
        except Exception as exc:  # the core's exceptions are part of the result
            return (), repr(exc)
        return effects, ""

    def _digest(self) -> tuple[str, str]:
        """Return the digest of the snapshot, and what making it raises."""
        try:
            return self._digests.of(project(self._now())), ""
        except Exception as exc:  # as above: the registry makes it in the same step
            return "", repr(exc)

    def _played(
        self,
        at: float,
        event: Event,
        before: NodeState,
        effects: Sequence[Effect],
        failure: str,
        differences: tuple[str, ...],
    ) -> Played:
        self._number += 1
        wall, state = self._wall + at, self._now()
        return Played(self._number, wall, at, event, before, state, effects, failure, differences)


def _changed_digest(recorded: str, computed: str) -> tuple[str, ...]:
    return (f"the snapshot was {recorded}, and is {computed} now",) if computed != recorded else ()


def _effect_differences(recorded: msgspec.Raw, effects: Sequence[Effect]) -> tuple[str, ...]:
    now = encoded_effects(effects)
    then = bytes(recorded)
    if then == now:
        return ()
    was, are = _effects(then), _effects(now)
    if was == are:
        return ()
    lost = [f"no longer: {_shown(effect)}" for effect in was if effect not in are]
    new = [f"new: {_shown(effect)}" for effect in are if effect not in was]
    return (*lost, *new) or ("the same effects in another order",)


def _effects(text: bytes) -> list[Mapping[str, Any]]:
    try:
        return msgspec.json.decode(text, type=list[Mapping[str, Any]])
    except UNREADABLE as exc:
        raise FormatError(f"its effects cannot be read: {quoted(str(exc))}") from None


def _shown(effect: Mapping[str, Any]) -> str:
    return msgspec.json.encode(effect).decode()


def _state_differences(recorded: NodeState, computed: NodeState) -> tuple[str, ...]:
    """Return the differences between two states, by part and name. An order within a mapping is no difference."""
    if recorded == computed:
        return ()
    pairs = [(name, getattr(recorded, name), getattr(computed, name)) for name in PARTS]
    differ = [
        f"{name}.{value.name}"
        for name, was, now in pairs
        if was is not None and now is not None
        for value in fields(was)
        if getattr(was, value.name) != getattr(now, value.name)
    ]
    differ += [name for name, was, now in pairs if (was is None) is not (now is None)]
    return (f"the state in the journal has other {', '.join(differ)} than was computed",)


def until(moments: Iterable[Moment], end: float | None) -> Iterator[Moment]:
    """Yield the moments up to a time of day, of every process; damage has none, and is reported as far as it was
    met."""
    for moment in moments:
        if end is None or isinstance(moment, Damage) or moment.wall <= end:
            yield moment
