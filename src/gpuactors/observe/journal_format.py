"""The journal's lines: what the registry did, to JSON and back, without loss.

A file is one header, then a state, then one line per step; another state follows wherever steps are missing. So every
file can be replayed by itself, from its first state on:

    {"journal":1,"version":"0.1.0","run":"…","part":1,"boot":"…","pid":4711,"wall":"2026-11-21T06:15:57.1+00:00","at":12.5}
    {"at":12.5,"missed":0,"state":{…}}
    {"at":12.6,"event":"HostScanned","fields":{"look":1,"functions":[…]},"effects":[{"say":"host.scanned",…}],"digest":"…"}
    {"at":14.6,"event":"Ticked","digest":"…"}

`at` is the daemon's own clock, which is what the core was told; the header says which time of day it was. Of an event
only the fields are written that differ from the last event of its kind since the last state: a poll of a quiet node is
its number. Must not open a file: that is `journal.py` and whoever replays.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeAlias, final, get_args

import msgspec

from gpuactors.core.effects import Effect, Reply, Say
from gpuactors.core.events import Event
from gpuactors.core.model import Frame, NodeState, ResourceName
from gpuactors.core.snapshot import Outputs
from gpuactors.ports import Step

FORMAT: Final = 1
"""Raised when a reader of the last format would misread the next."""


class FormatError(ValueError):
    """A line that is none of a journal's, or of another version; the text says which."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a file."""

    journal: int
    """FORMAT."""
    version: str
    """Of gpuactors."""
    run: str
    """The same in every file of one process."""
    part: int
    """Counts the files of one process, from 1."""
    boot: str
    """The host's boot id, empty if it is not known."""
    pid: int
    wall: str
    """The time of day (ISO 8601, UTC) at `at`."""
    at: float


class StateLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole state before the step that follows."""

    at: float
    missed: int
    """Steps before this that are not in the journal: the disk was full, or too slow."""
    state: Any


# A default is left out where the very object is given.
_NO_FIELDS: Final = msgspec.Raw(b"{}")
_NO_EFFECTS: Final = msgspec.Raw(b"[]")


class StepLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step: the event that went in, the effects that came out, and what was to be seen outside then."""

    at: float
    event: str
    fields: msgspec.Raw = _NO_FIELDS
    """Of the event: those that differ from the last one of its kind."""
    effects: msgspec.Raw = _NO_EFFECTS
    digest: str = ""
    failed: str = ""
    """The step raised this: a bug. There are no effects and no digest then."""


Line: TypeAlias = Header | StateLine | StepLine


class _Say(msgspec.Struct, frozen=True, omit_defaults=True):
    say: str
    level: str
    fields: Mapping[str, Any]


class _Reply(msgspec.Struct, frozen=True):
    reply: int
    answer: str
    fields: Any


_EVENTS: Final[Mapping[str, type[Any]]] = {kind.__name__: kind for kind in get_args(Event)}
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(f.name for f in fields(kind)) for name, kind in _EVENTS.items()
}

# Mappings and sets keep the order they have: the core may have gone through them in that order.
_encoder = msgspec.json.Encoder()
_canonical = msgspec.json.Encoder(order="deterministic")


# --- writing ----------------------------------------------------------------------------------------------


def header_line(header: Header) -> bytes:
    """The first line of a file."""
    return _encoder.encode(header) + b"\n"


@final
class LineWriter:
    """Turns the steps of one file into lines; knows what it wrote of each kind of event last."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, bytes]] = {}
        self._digests = Digests()

    def state_line(self, state: NodeState, at: float, missed: int) -> bytes:
        """A line to replay from. What follows refers to nothing before it."""
        self._last.clear()
        return _encoder.encode(StateLine(at, missed, _wrapped(msgspec.to_builtins(state)))) + b"\n"

    def step_line(self, step: Step) -> bytes:
        """The line of one step."""
        kind = type(step.event).__name__
        # Compared as they are written, since equal mappings may be in another order.
        given = {name: _encoder.encode(getattr(step.event, name)) for name in _FIELDS[kind]}
        last = self._last.get(kind, {})
        self._last[kind] = given
        changed = {name: msgspec.Raw(value) for name, value in given.items() if last.get(name) != value}
        outputs = step.outputs
        line = StepLine(
            step.at,
            kind,
            msgspec.Raw(_encoder.encode(changed)) if changed else _NO_FIELDS,
            msgspec.Raw(encoded_effects(step.effects)) if step.effects else _NO_EFFECTS,
            self._digests.of(outputs) if outputs is not None else "",
            step.failure,
        )
        return _encoder.encode(line) + b"\n"


def encoded_effects(effects: Sequence[Effect]) -> bytes:
    """The effects of one step as a JSON list."""
    return _encoder.encode([_effect(effect) for effect in effects]) if effects else b"[]"


def _effect(effect: Effect) -> _Say | _Reply:
    match effect:
        case Say(level, name, said):
            return _Say(name, level, said)
        case Reply(token, answer):
            return _Reply(token, type(answer).__name__, answer)


@final
class Digests:
    """Digests of what is to be seen outside (`snapshot.project`), eight bytes as hex digits.

    A frame has a digest of its own, which is kept as long as the frame is: most steps change none.
    """

    def __init__(self) -> None:
        self._frames: dict[ResourceName, tuple[Frame, bytes]] = {}

    def of(self, outputs: Outputs) -> str:
        """The digest of all standing outputs."""
        digest = hashlib.blake2b(
            _canonical.encode(
                (
                    outputs.looks,
                    outputs.poll,
                    outputs.ledger_read,
                    {resource: view.order for resource, view in outputs.plugins.items()},
                    outputs.take_over,
                    outputs.stopping,
                )
            ),
            digest_size=8,
        )
        for resource in sorted(outputs.plugins):
            digest.update(self._of_frame(resource, outputs.plugins[resource].frame))
        if self._frames.keys() != outputs.plugins.keys():
            self._frames = {r: f for r, f in self._frames.items() if r in outputs.plugins}
        return digest.hexdigest()

    def _of_frame(self, resource: ResourceName, frame: Frame) -> bytes:
        known = self._frames.get(resource)
        if known is None or known[0] is not frame:
            known = (frame, hashlib.blake2b(_canonical.encode(frame), digest_size=8).digest())
            self._frames[resource] = known
        return known[1]


# --- reading ----------------------------------------------------------------------------------------------

_as_header = msgspec.json.Decoder(Header)
_as_state = msgspec.json.Decoder(StateLine)
_as_step = msgspec.json.Decoder(StepLine)


class _Kind(msgspec.Struct):
    """Enough of a line to tell what it is."""

    journal: int | msgspec.UnsetType = msgspec.UNSET
    missed: int | msgspec.UnsetType = msgspec.UNSET


_as_kind = msgspec.json.Decoder(_Kind)


def read_line(line: bytes) -> Line:
    """The line, decoded as far as a step needs no other. Raises `FormatError`."""
    try:
        kind = _as_kind.decode(line)
        if kind.journal is not msgspec.UNSET:
            if kind.journal != FORMAT:
                raise FormatError(
                    f"it is a journal of format {kind.journal}, and this gpuactors reads format {FORMAT}; "
                    "replay it with the version that wrote it"
                )
            return _as_header.decode(line)
        return _as_step.decode(line) if kind.missed is msgspec.UNSET else _as_state.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise FormatError(f"it is no line of a journal: {exc}") from None


def read_state(line: StateLine) -> NodeState:
    """The state of a line. Raises `FormatError` if it is not a state as this version knows it."""
    try:
        return msgspec.convert(_unwrapped(line.state), NodeState)
    except (msgspec.ValidationError, TypeError, ValueError) as exc:
        raise FormatError(f"its state is not one of this version's: {exc}") from None


@final
class EventReader:
    """Puts events together again from the fields that were written. A new one is needed after each state."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Any]] = {}

    def event(self, line: StepLine) -> Event:
        """The event of a step. Raises `FormatError` if this version has none like it."""
        kind = _EVENTS.get(line.event)
        if kind is None:
            raise FormatError(f"this version knows no event {line.event}")
        try:
            given = self._last.setdefault(line.event, {})
            given.update(msgspec.json.decode(line.fields, type=dict[str, Any]))
            if unknown := given.keys() - set(_FIELDS[line.event]):
                raise FormatError(f"this version's {line.event} has no {min(unknown)}")
            event: Event = msgspec.convert(given, kind)
        except msgspec.MsgspecError as exc:
            raise FormatError(f"its {line.event} is not one of this version's: {exc}") from None
        return event


# JSON has no infinity, and its keys are strings: these two shapes stand for what it lacks.
_FLOAT, _MAP = "$float", "$map"


def _wrapped(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return {_FLOAT: str(value)}
        case dict() if not all(isinstance(key, str) for key in value):
            return {_MAP: [[key, _wrapped(inner)] for key, inner in value.items()]}
        case dict():
            return {key: _wrapped(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_wrapped(inner) for inner in value]
        case _:
            return value


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
