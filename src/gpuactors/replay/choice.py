"""The selection of a replay: from a time on, up to a time, of one device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from gpuactors.core.claims.view import claims_of
from gpuactors.core.events.claims import ActDone, ActFailed, ClaimRead
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreStartAsked
from gpuactors.core.gpus.report import devices_of
from gpuactors.core.host.inspections import last_seen
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.effects import Reply
from gpuactors.core.values.model import AdvertisedDevice, DeviceKey, Token
from gpuactors.observe.journal_format import Header
from gpuactors.replay.play import Began, Moment, Played, Resumed, wall_seconds
from gpuactors.replay.reading import Damage, File, last_at, runs
from gpuactors.replay.words import effect_words, event_words, is_worth_reading


def files_within(files: Iterable[File], begin: float | None, end: float | None) -> list[File]:
    """Return the files that are needed for the period between two times of day: each can be replayed by itself."""
    chosen = []
    for _, run_files in runs(files):
        for file, following in zip(run_files, [*run_files[1:], None], strict=True):
            if end is not None and wall_seconds(file.header) > end:
                continue
            if begin is not None and _ends_before(begin, file, following):
                continue
            chosen.append(file)
    return chosen


def _ends_before(begin: float, file: File, following: File | None) -> bool:
    if following is not None:
        return wall_seconds(following.header) <= begin
    last = last_at(file)
    return last is not None and wall_seconds(file.header) + last - file.header.at < begin


def since(moments: Iterable[Moment], begin: float | None) -> Iterator[Moment]:
    """Yield the moments from a time of day on, of every process. Each process begins with the state that it had
    then."""
    header: Header | None = None
    for moment in moments:
        if begin is None or isinstance(moment, Damage):
            yield moment
            continue
        if isinstance(moment, Began):
            header = moment.header
        if moment.wall < begin:
            continue
        if header is not None and not isinstance(moment, Began):
            state = moment.before if isinstance(moment, Played) else moment.state
            yield Began(moment.wall, header, state)
        header = None
        yield moment


@final
@dataclass
class Device:
    """One device, and the moments that concern it."""

    key: DeviceKey
    is_in_journal: bool = False
    """True once a state of the journal had it."""
    _calls: set[Token] = field(default_factory=set)
    """The calls about it that have not been answered."""

    def __str__(self) -> str:
        return self.key

    def concerns(self, moment: Moment) -> bool:
        """Return whether a moment concerns it: its health or reason changed, or an event, an answer or a log line names
        it. A difference, an exception or a gap concerns every device."""
        if isinstance(moment, Played):
            return self._is_about(moment) or bool(moment.differences or moment.failure)
        if isinstance(moment, Began | Resumed):
            self.is_in_journal = self.is_in_journal or _is_in(moment.state, self.key)
        return True

    def _is_about(self, played: Played) -> bool:
        if not self.is_in_journal:
            self.is_in_journal = _is_in(played.state, self.key)
        now, was = self._listed(played.state), self._listed(played.before)
        answered = {e.token for e in played.effects if isinstance(e, Reply)}
        is_about = (
            now != was
            or bool(answered & self._calls)
            or is_about_claims(played, ClaimsOf.GPUS, self._claims(played.before))
        )
        self._calls -= answered
        lines = [event_words(played.event), *map(effect_words, filter(is_worth_reading, played.effects))]
        names = self._names(played.before, self._claims(played.state), now, was)
        if any(names.search(line) for line in lines):
            is_about = True
            if isinstance(played.event, AllocateAsked | PreStartAsked | PreferenceAsked):
                self._calls |= {played.event.token} - answered
        return is_about

    def _claims(self, state: NodeState) -> list[ClaimRecord]:
        """Return the claims that have it or wait for it."""
        return [entry for entry in state.gpus.claims.entries.values() if self.key in devices_of(entry)]

    def _listed(self, state: NodeState) -> dict[str, AdvertisedDevice]:
        return {
            r: a
            for r, device_list in state.published.device_lists.items()
            for a in device_list
            if a.key == self.key
        }

    def _names(
        self, state: NodeState, claims: Iterable[ClaimRecord], *lists: dict[str, AdvertisedDevice]
    ) -> re.Pattern[str]:
        """Return a pattern of its names: its address, the IDs that it is listed by, its name in a slice, a uevent's
        group; and those of the claims that have it or wait for it."""
        names = {
            self.key,
            slice_name(self.key),
            *(a.id for listed in lists for a in listed.values()),
        }
        if (group := state.index.group_number(self.key)) is not None:
            names.add(f"IOMMU group {group}")
        return naming(names, (*self._claims(state), *claims))


def _is_in(state: NodeState, device: DeviceKey) -> bool:
    """Return whether the device is there, or was looked for."""
    return device in state.index.present or last_seen(state.host, device) is not None


def is_about_claims(played: Played, kind: ClaimsOf, entries: Iterable[ClaimRecord]) -> bool:
    """Return whether a step answers a call about one of these claims, or is the result of an act or a read for one."""
    claims, by_uid = claims_of(played.before, kind), {entry.name.uid: entry for entry in entries}
    answered = {e.token for e in played.effects if isinstance(e, Reply)}
    if any(token in claims.calls and claims.calls[token].uid in by_uid for token in answered):
        return True
    match played.event:
        case ActDone(number) | ActFailed(number) if played.event.driver_kind is kind:
            return any(number in entry.acts.values() for entry in by_uid.values())
        case ClaimRead(number, str()) if played.event.driver_kind is kind:
            return any(claims.reads.get(uid) == number for uid in by_uid)
        case _:
            return False


def naming(names: Iterable[str], claims: Sequence[ClaimRecord]) -> re.Pattern[str]:
    """Return a pattern that finds these names, and those of the claims, as whole words."""
    all_names = {*names, *(str(entry.name) for entry in claims), *(entry.name.uid for entry in claims)}
    return re.compile(rf"(?<![\w:.-])(?:{'|'.join(sorted(map(re.escape, all_names)))})(?![\w:-])")
