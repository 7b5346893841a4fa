"""The journal's lines, read back: to events and states, without loss (`observe/journal_format.py`).

A file of its own: the daemon writes lines and reads none, and the decoders know every event and all of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final, get_args

import msgspec
from msgspec.structs import replace

from gpuactors.core.events import Event
from gpuactors.core.state import Calls, Daemon, Host, Kubelet, NodeState, Published
from gpuactors.core.state.domains import Domains
from gpuactors.core.state.gpus import Gpus
from gpuactors.core.state.partitions import Partitions
from gpuactors.core.values.quote import quoted, quoted_id
from gpuactors.observe.journal_format import (
    FORMAT,
    NO_EFFECTS,
    ROUTINE,
    AgainLine,
    Header,
    Line,
    StateLine,
    StepLine,
    outstanding,
)

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder for bytes that are no value of its type, or nest too deep."""


class FormatError(ValueError):
    """A line that is none of a journal's, or of another version; the text names which."""


EVENTS: Final[Mapping[str, type[Any]]] = {kind.__name__: kind for kind in get_args(Event)}
"""Every kind of event, by its name."""

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: kind.__struct_fields__ for name, kind in EVENTS.items()
}

_STATE: Final[Mapping[str, type[Any]]] = {
    "host": Host,
    "kubelet": Kubelet,
    "calls": Calls,
    "published": Published,
    "daemon": Daemon,
    "gpus": Gpus,
    "domains": Domains,
    "partitions": Partitions,
}
"""The parts of a state, and their types: derived values are computed again."""

_as_header = msgspec.json.Decoder(Header)
_as_state = msgspec.json.Decoder(StateLine)
_as_step = msgspec.json.Decoder(StepLine)
_as_again = msgspec.json.Decoder(AgainLine)


class _Kind(msgspec.Struct):
    """Enough of a line to identify its kind."""

    journal: int | msgspec.UnsetType = msgspec.UNSET
    missed: int | msgspec.UnsetType = msgspec.UNSET
    again: str | msgspec.UnsetType = msgspec.UNSET


_as_kind = msgspec.json.Decoder(_Kind)


def read_line(line: bytes) -> Line:
    """Decode the line as far as a step needs no other. Raises `FormatError`."""
    try:
        kind = _as_kind.decode(line)
        if kind.journal is not msgspec.UNSET:
            if kind.journal != FORMAT:
                raise FormatError(
                    f"it is a journal of format {kind.journal}, and this gpuactors reads format {FORMAT}; "
                    "replay it with the version that wrote it"
                )
            return _as_header.decode(line)
        if kind.missed is not msgspec.UNSET:
            return _as_state.decode(line)
        return _as_step.decode(line) if kind.again is msgspec.UNSET else _read_again(line)
    except UNREADABLE as exc:
        raise FormatError(f"it is no line of a journal: {quoted(str(exc))}") from None


def _read_again(line: bytes) -> AgainLine:
    again = _as_again.decode(line)
    if not again.again or len(again.after) != len(again.again) - 1:
        raise FormatError("its steps are not as many as their times")
    return again


def read_state(line: StateLine) -> NodeState:
    """Decode the state of a line. Raises `FormatError` if it is not a state as this version knows it."""
    try:
        parts = _unwrapped(line.state)
        return NodeState(
            **{name: msgspec.convert(value, _STATE[name]) for name, value in parts.items()},
        )
    except (*UNREADABLE, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise FormatError(f"its state is not one of this version's: {quoted(str(exc))}") from None


@final
class EventReader:
    """Rebuilds events from the written fields. A new one is needed after each state."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Any]] = {}
        self._events: dict[str, tuple[Event, msgspec.Raw]] = {}
        """The last event of each kind that has a line of its own, and the effects of its step."""

    def event(self, line: StepLine) -> Event:
        """Return the event of a step. Raises `FormatError` if this version has none like it."""
        kind = EVENTS.get(line.event)
        if kind is None:
            raise FormatError(f"this version knows no event {quoted_id(line.event)}")
        try:
            fields = self._last.setdefault(line.event, {})
            fields.update(msgspec.json.decode(line.fields, type=dict[str, Any]))
            if unknown := fields.keys() - set(_FIELDS[line.event]):
                raise FormatError(f"this version's {line.event} has no {quoted_id(min(unknown))}")
            # The keys of a mapping are text in JSON, whatever they are in the event.
            event: Event = msgspec.convert(fields, kind, str_keys=True)
        except UNREADABLE as exc:
            raise FormatError(f"its {line.event} is not one of this version's: {quoted(str(exc))}") from None
        self._events[line.event] = event, line.effects
        return event

    def again(self, letter: str, before: NodeState) -> tuple[Event, msgspec.Raw]:
        """Return the event of a folded step after this state, and the effects that it had. Raises `FormatError`."""
        kind, number = ROUTINE.get(letter, ("", ""))
        event, effects = self._events.get(kind, (None, NO_EFFECTS))
        if event is None:
            raise FormatError(f"a step is as one before it ({letter}), and there is none")
        if not number:
            return event, effects
        request = outstanding(before, letter)
        # A core of another version may request something else; then there is no answer.
        changes: dict[str, Any] = {number: request if request is not None else 0}
        return replace(event, **changes), effects


def _unwrapped(value: Any) -> Any:
    match value:
        case {"$float": str(text)}:
            return float(text)
        case {"$map": list(pairs)}:
            return {_key(key): _unwrapped(inner) for key, inner in pairs}
        case dict():
            return {key: _unwrapped(inner) for key, inner in value.items()}
        case list():
            return [_unwrapped(inner) for inner in value]
        case _:
            return value


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
