"""The journal's lines: what the registry did, to JSON, without loss. `replay/journal_lines.py` reads them back.

A file is one header, then a state, then one line per step; another state follows wherever steps are missing. So every
file can be replayed by itself, from its first state on:

    {"journal":21,"version":"0.1.0","run":"…","part":1,"boot":"…","pid":4711,"wall":"2026-11-21T06:15:57.1+00:00","at":12.5,"node":"gpu-17"}
    {"at":12.5,"missed":0,"state":{…}}
    {"at":12.6,"event":"HostScanned","fields":{"inspection":1,"functions":[…]},"effects":[{"say":"host.scanned",…}],"digest":"…"}
    {"at":14.6,"event":"Ticked","digest":"…"}
    {"at":16.6,"again":"TPTPTRP","after":[0.0011,1.9994,0.0012,1.9996,0.0018,0.0003],"digest":"…"}

`at` is the daemon's own clock, as passed to the core; the header has the time of day. Of an event only the fields are
written that differ from the last event of its kind since the last state. Routine steps that repeat the last one of
their kind, with the requested number, are folded into one line: their kinds, and the seconds between them. Must not
open a file: `journal.py` and the replay do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import msgspec
from msgspec.structs import replace

from gpuactors.core.reports.snapshot import Outputs
from gpuactors.core.state import PARTS, NodeState
from gpuactors.core.values.effects import Effect, Level, Log, Reply
from gpuactors.core.values.model import DeviceList, PciAddress, ResourceName, differences
from gpuactors.ports.node import Step

FORMAT: Final = 21
"""The number of the format. It is raised when a reader of the last format would misread the next, or miss something in
it; no version reads another format than its own."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Return the first line of a file."""

    journal: int
    """The value of FORMAT."""
    version: str
    """The version of gpuactors."""
    run: str
    """The id of the process, the same in every file of one process."""
    part: int
    """The number of the file, of one process, from 1."""
    boot: str
    """The host's boot id, empty if it is not known."""
    pid: int
    wall: str
    """The time of day (ISO 8601, UTC) at `at`."""
    at: float
    node: str = ""
    """The node's name; empty if it is not known."""


class StateLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole state before the step that follows."""

    at: float
    missed: int
    """The number of steps before this that are not in the journal: the disk was full, or too slow."""
    state: Any
    """The state by part; a part that is off is left out."""


# A field whose value is the default object itself is left out.
_NO_FIELDS: Final = msgspec.Raw(b"{}")
NO_EFFECTS: Final = msgspec.Raw(b"[]")


class StepLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step: the event that went in, its effects, and the digest of the outputs after it."""

    at: float
    event: str
    fields: msgspec.Raw = _NO_FIELDS
    """The fields of the event that differ from the last one of its kind."""
    effects: msgspec.Raw = NO_EFFECTS
    digest: str = ""
    failed: str = ""
    """The exception that the step raised, a bug; there are no effects and no digest then."""


class AgainLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Steps in a row that were each like the last one of its kind, and without any consequence."""

    at: float
    """The time of the first step."""
    again: str
    """The kind of each step, a letter of `ROUTINE`."""
    after: tuple[float, ...]
    """Seconds from each step to the next; added up one by one they give exactly the `at` of each."""
    digest: str
    """The outputs' digest after the last one."""

    def times(self) -> Iterator[float]:
        """Yield the `at` of each step."""
        at = self.at
        yield at
        for seconds in self.after:
            at += seconds
            yield at


Line: TypeAlias = Header | StateLine | StepLine | AgainLine


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    say: str
    level: str
    fields: Mapping[str, Any]


class _Reply(msgspec.Struct, frozen=True):
    reply: int
    answer: str
    fields: Any


ROUTINE: Final[Mapping[str, tuple[str, str]]] = {
    "T": ("Ticked", ""),
    "P": ("GroupsObserved", "poll"),
    "R": ("LedgerRead", "read"),
    "U": ("LedgerUnreadable", "read"),
}
"""The kinds of events that happen every few seconds, by letter, with the field that is the event's number. That is the
number that was outstanding, so it follows from the state."""

NUMBERED: Final = frozenset(letter for letter, (_, number) in ROUTINE.items() if number)
"""The letters of those that answer a request."""

_LETTERS: Final = {kind: letter for letter, (kind, _) in ROUTINE.items()}


def is_routine(step: Step) -> bool:
    """Return whether the step had no consequence, and its kind happens every few seconds."""
    return type(step.event).__name__ in _LETTERS and all(
        isinstance(effect, Log) and effect.level is Level.DEBUG for effect in step.effects
    )


def outstanding(state: NodeState, letter: str) -> int | None:
    """Return the number of the next routine event of this kind; None if none was requested."""
    return state.host.polls.refresh.outstanding if letter == "P" else state.kubelet.ledger.refresh.outstanding


# Mappings and sets keep the order they have: the core may have gone through them in that order.
_encoder = msgspec.json.Encoder()
_canonical = msgspec.json.Encoder(order="deterministic")


# --- writing ----------------------------------------------------------------------------------------------


def header_line(header: Header) -> bytes:
    """Return the first line of a file."""
    return _encoder.encode(header) + b"\n"


class _Folded(msgspec.Struct, frozen=True):
    """One step of a line for several."""

    letter: str
    at: float
    after: float
    """Seconds since the step before it in the line; of the first one nothing is written."""


@final
class LineWriter:
    """Turns the steps of one file into lines; keeps the last event of each kind. A step may wait for others that
    are folded with it: `rest` must be written before anything else.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[str, bytes]] = {}
        self._effects: dict[str, bytes] = {}
        """The effects of the last event of each kind, as they were written."""
        self._digests = Digests()
        self._folded: list[_Folded] = []
        self._outputs: Outputs | None = None

    def state_line(self, state: NodeState, at: float, missed: int) -> bytes:
        """Make a line to replay from, and the waiting line before it. Later lines refer to nothing before it."""
        waiting = self.rest()
        self._last.clear()
        self._effects.clear()
        off = {name for name in ("gpus", "domains") if getattr(state, name).claims.settings is None}
        if state.partitions is None:
            off.add("partitions")
        whole = {name: msgspec.to_builtins(getattr(state, name)) for name in PARTS if name not in off}
        return waiting + _encoder.encode(StateLine(at, missed, _wrapped(whole))) + b"\n"

    def step_line(self, step: Step) -> bytes:
        """Make the line of one step, and the waiting line before it; nothing if it can be folded."""
        kind = type(step.event).__name__
        # Compared as they are written, since equal mappings may be in another order.
        fields = {
            name: _encoder.encode(getattr(step.event, name)) for name in type(step.event).__struct_fields__
        }
        effects = encoded_effects(step.effects)
        last = self._last.get(kind)
        changed = {
            name: msgspec.Raw(value)
            for name, value in fields.items()
            if last is None or last.get(name) != value
        }
        if last is not None and effects == self._effects[kind] and _is_as_asked(step, changed):
            after = _seconds(self._folded[-1].at, step.at) if self._folded else 0.0
            waiting = b"" if after is not None else self.rest()
            self._folded.append(_Folded(_LETTERS[kind], step.at, after or 0.0))
            self._outputs = step.outputs
            return waiting
        waiting = self.rest()
        self._last[kind], self._effects[kind] = fields, effects
        line = StepLine(
            step.at,
            kind,
            msgspec.Raw(_encoder.encode(changed)) if changed else _NO_FIELDS,
            msgspec.Raw(effects) if step.effects else NO_EFFECTS,
            self._digests.of(step.outputs) if step.outputs is not None else "",
            step.failure,
        )
        return waiting + _encoder.encode(line) + b"\n"

    def rest(self) -> bytes:
        """Make the line of the steps that were folded since the last line; nothing if there are none."""
        if not self._folded or self._outputs is None:
            return b""
        line = AgainLine(
            self._folded[0].at,
            "".join(step.letter for step in self._folded),
            tuple([step.after for step in self._folded[1:]]),
            self._digests.of(self._outputs),
        )
        self._folded, self._outputs = [], None
        return _encoder.encode(line) + b"\n"


def _is_as_asked(step: Step, changed: Mapping[str, object]) -> bool:
    """Return whether the step is routine, and differs from the last one only by a number that follows from the state
    before."""
    if step.outputs is None or not is_routine(step):
        return False
    letter = _LETTERS[type(step.event).__name__]
    _, number = ROUTINE[letter]
    if not number:
        return not changed
    return changed.keys() <= {number} and getattr(step.event, number) == outstanding(step.before, letter)


def _seconds(at: float, then: float) -> float | None:
    """Return the shortest decimal that leads from one moment to another to the bit, so that a replay has the same
    times. None if no number does: 2.2522926329452084 and 6.3522926329452085, as each sum is rounded to an even one."""
    exact = then - at
    return next((s for s in (*(round(exact, d) for d in range(3, 13)), exact) if at + s == then), None)


def encoded_effects(effects: Sequence[Effect]) -> bytes:
    """Encode the effects of one step as a JSON list."""
    return _encoder.encode([_effect(effect) for effect in effects]) if effects else b"[]"


def _effect(effect: Effect) -> _Line | _Reply:
    match effect:
        case Log(level, name, fields):
            return _Line(name, level, fields)
        case Reply(token, answer):
            return _Reply(token, type(answer).__name__, answer)


@final
class Digests:
    """Digests of the outputs (`snapshot.project`), eight bytes as hex digits.

    A device list, and the devices that pods have, are in it by the sum of the digests of what is in them: of hundreds,
    a step changes one.
    """

    def __init__(self) -> None:
        self._allocated: frozenset[PciAddress] = frozenset()
        self._sum_of_allocated = 0
        self._device_lists: dict[ResourceName, tuple[DeviceList, int]] = {}

    def of(self, outputs: Outputs) -> str:
        """Return the digest of the snapshot: all projected outputs."""
        inspections = outputs.inspections
        self._device_lists = {
            resource: self._of_device_list(resource, view.device_list)
            for resource, view in outputs.plugins.items()
        }
        digest = hashlib.blake2b(
            _canonical.encode(
                (
                    replace(inspections, given=_NOBODY),
                    self._of_allocated(inspections.given),
                    outputs.ledger,
                    {resource: view.order for resource, view in outputs.plugins.items()},
                    {resource: of_list for resource, (_, of_list) in self._device_lists.items()},
                    outputs.take_over,
                    outputs.stopping,
                )
            ),
            digest_size=8,
        )
        return digest.hexdigest()

    def _of_allocated(self, allocated: frozenset[PciAddress]) -> int:
        if allocated is not self._allocated:
            came, went = allocated - self._allocated, self._allocated - allocated
            self._allocated, self._sum_of_allocated = allocated, _amended(self._sum_of_allocated, went, came)
        return self._sum_of_allocated

    def _of_device_list(self, resource: ResourceName, device_list: DeviceList) -> tuple[DeviceList, int]:
        before, digest_sum = self._device_lists.get(resource, ((), 0))
        if changed := differences(before, device_list):
            were, are = zip(*changed, strict=True)
            digest_sum = _amended(digest_sum, filter(None, were), filter(None, are))
        return device_list, digest_sum


_NOBODY: Final[frozenset[PciAddress]] = frozenset()


def _amended(digest_sum: int, went: Iterable[object], came: Iterable[object]) -> int:
    """Return the sum of the digests of some values, without those that went and with those that came."""
    return (digest_sum - sum(map(_number, went)) + sum(map(_number, came))) % 2**64


def _number(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(_canonical.encode(value), digest_size=8).digest(), "big")


# JSON has no infinity, and its keys are strings: these two shapes replace them.
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
