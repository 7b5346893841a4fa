"""A replay as one HTML page: the timeline of every device, for people.

The page is self-contained: style, script and data are in it (`page.html` is the template). Without the script its
tables still show everything.
"""

from __future__ import annotations

import html
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple, assert_never

from gpuactors.core.domains.report import devices_of as devices_of_domains
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreStartAsked
from gpuactors.core.gpus.report import devices_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimCall, ClaimRecord
from gpuactors.core.values import effects
from gpuactors.core.values.cause import MEANINGS
from gpuactors.core.values.model import DeviceKey, DeviceList, ResourceName, Token
from gpuactors.replay.choice import Device
from gpuactors.replay.domain_choice import Chosen, DeviceOfDomains
from gpuactors.replay.play import Began, Moment, Played, Resumed
from gpuactors.replay.reading import Damage
from gpuactors.replay.text import Tally, is_quiet, list_changes
from gpuactors.replay.words import clock, count, day, effect_words, event_words, is_worth_reading, process
from gpuactors_simulation.replay_page.domain_lanes import DomainLanes, order
from gpuactors_simulation.replay_page.lane import Lane, Mark
from gpuactors_simulation.replay_page.lanes import Lanes

EVENTS_MAX: Final = 20_000
"""Of more events the last ones are shown: a browser still draws so many at once."""

ROWS_MAX: Final = 2_000
"""Of each table, the last ones; the picture has all."""

DAMAGE_MAX: Final = 20
"""Unreadable places that are named, the last ones."""

DOMAIN_DEVICES_MAX: Final = 32
"""Lanes of channels: a claim of mode All has every channel of the node, thousands of them if the operator says so."""

KINDS: Final = {
    "free": "free",
    "allocated": "allocated to a pod",
    "offered": "offered to claims, not on a vfio driver",
    "claimed": "allocated by a claim, or under another name",
    "group-in-use": "its IOMMU group is in use",
    "card-in-use": "its card, or a part of it, is in use",
    "orphaned": "held by a pod that is gone",
    "external": "held by another process",
    "unhealthy": "unhealthy otherwise",
    "set-up": "unhealthy, as it is set up",
    "unknown": "in use, owner unknown",
    "not-offered": "not on a vfio driver",
}
"""The kinds of a device's bands, in the words of the legend."""

DOMAIN_KINDS: Final = {
    "ready": "compute domain: ready",
    "not-ready": "compute domain: something is missing",
    "unread": "compute domain: readiness not read",
    "unused": "compute domain: no channel of it is claimed",
}
"""The same of compute domains."""

MARKS: Final = {
    "granted": "call granted",
    "refused": "call refused",
    "list": "device list sent",
    "event": "event",
    "call": "call of kubelet",
    "warning": "warning or error",
    "bug": "bug of gpuactors",
    "differs": "differs from the journal",
}
"""The kinds of marks, in the words of the legend."""

SHAPES: Final = {
    "list": ("m-list", "M6 3 9.5 6.5 6 10 2.5 6.5Z"),
    "granted": ("m-granted", "M6 2 10 10H2Z"),
    "refused": ("m-refused over", "M2 2 10 10M10 2 2 10"),
}
"""Class and path of a mark that is no tick."""

NEEDS_ATTENTION: Final = {
    "orphaned": "held by a pod that is gone",
    "external": "held by another process",
    "unhealthy": "unhealthy",
}
"""The kinds of bands of a GPU for which an operator has something to do, as the headline has them."""

AS_EXPECTED: Final = {
    "free": "free",
    "allocated": "allocated to pods",
    "claimed": "allocated by claims",
    "group-in-use": "in an IOMMU group that is in use",
    "card-in-use": "of a card that is in use",
    "offered": "offered to claims",
    "not-offered": "not on a vfio driver",
    "set-up": "unhealthy as they are set up",
    "unknown": "in use by an owner that is not known yet",
}
"""The other kinds."""

OF_RESOURCES: Final = {
    "negative": "Pods have lost GPUs, or another plugin served the resource: see its GPUs.",
    "unregistered": "Start kubelet, or remove the other plugin that serves the resource.",
}
"""The remedies of a resource, by the kinds of its bands that need it."""


class Problem(NamedTuple):
    """Something that needs attention at the end of the replay."""

    name: str
    since: float
    """When it began, in seconds since the beginning; 0: then or earlier."""
    why: str
    """The reason, with the holder if there is one."""
    remedy: str


@dataclass
class Page:
    """Collects what is shown. `only`: restricted to this device, if given."""

    only: Chosen | None = None
    lanes: Lanes = field(default_factory=Lanes)
    _events: deque[Mark] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    _happened: int = 0
    _quiet: int = 0
    _gaps: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=ROWS_MAX))
    _differences: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=ROWS_MAX))
    _damage: deque[str] = field(default_factory=lambda: deque(maxlen=DAMAGE_MAX))
    _runs: list[str] = field(default_factory=list)
    _node: str = ""
    _began: float | None = None
    _last: float = 0.0
    _run_last: float = 0.0
    """Of the process that is being replayed."""
    _hidden: int = 0
    """Devices of compute domains whose lanes are not shown."""
    _asked: dict[Token, tuple[float, str, ResourceName, tuple[str, ...]]] = field(default_factory=dict)

    def add(self, moment: Moment) -> None:
        """The next moment of the replay."""
        concerned = self.only is None or self.only.concerns(moment)
        match moment:
            case Damage():
                self._damage.append(str(moment))
                return
            case Began(wall, header, state):
                if self._began is None:
                    self._began = wall
                self.lanes.ends(self._run_last)
                self._runs.append(f"{process(header)} from {day(wall)} UTC")
                self._node = header.node or self._node
                self._asked.clear()
                at = wall - self._began
                self.lanes.begins(at)
                self._notable(at, "event", f"{process(header)}: its journal begins")
                self.lanes.sees(state, at)
            case Resumed(wall, missed, state, differences):
                at = wall - (self._began or 0.0)
                if missed != 0:
                    steps = "steps are missing" if missed is None else f"{count(missed, 'step')} missing"
                    self._gaps.append((self._run_last, at, f"{steps} in the journal"))
                    self.lanes.ends(self._run_last)
                self._differs(at, differences)
                self.lanes.sees(state, at)
            case Played():
                at = moment.wall - (self._began or 0.0)
                self._step(moment, at, concerned)
                self.lanes.sees(moment.state, at)
            case _:
                assert_never(moment)
        self._run_last, self._last = at, max(self._last, at)

    def _step(self, played: Played, at: float, concerned: bool) -> None:
        if not concerned or is_quiet(played):
            self._quiet += 1
        else:
            lines = [event_words(played.event), *map(effect_words, filter(is_worth_reading, played.effects))]
            if played.failure:
                lines.append(f"the step raises {played.failure}")
            self._notable(at, _kind(played), "\n".join(lines))
        self._differs(at, played.differences)
        self._calls(played, at)
        for resource in played.state.published.plugins:
            old_list = (
                played.before.published.device_lists[resource]
                if resource in played.before.published.plugins
                else None
            )
            new_list = played.state.published.device_lists[resource]
            if old_list != new_list:
                self._device_list(resource, old_list or (), new_list, at)

    def _calls(self, played: Played, at: float) -> None:
        match played.event:
            case AllocateAsked(token, resource, requests):
                self._asked[token] = (at, "Allocate", resource, tuple(i for ids in requests for i in ids))
            case PreStartAsked(token, resource, devices):
                self._asked[token] = (at, "PreStartContainer", resource, devices)
            case _:
                pass
        for effect in played.effects:
            if (
                isinstance(effect, effects.Reply)
                and (asked := self._asked.pop(effect.token, None)) is not None
            ):
                self._answered(effect, asked, played, at)
        self._claim_calls(played, at)

    def _claim_calls(self, played: Played, at: float) -> None:
        """Marks on the lanes of the claim's devices, for each answer about it."""
        gpus, of_domains = played.before.gpus.claims, played.before.domains.claims
        for effect in played.effects:
            if not isinstance(effect, effects.Reply):
                continue
            for claims in (gpus, of_domains):
                call = claims.calls.get(effect.token)
                entry = claims.entries.get(call.uid) if call is not None else None
                if call is not None and entry is not None:
                    mark = _claim_mark(at, call, entry, effect.answer)
                    for lane in self._lanes_of(played.before, entry):
                        lane.marks.append(mark)

    def _lanes_of(self, state: NodeState, entry: ClaimRecord) -> Iterator[Lane]:
        """Those of the claim's devices, as far as they have one."""
        for address in devices_of(entry):
            if (lane := self.lanes.devices.get(address)) is not None:
                yield lane
        for device in devices_of_domains(state.domains, entry):
            if (lane := self.lanes.of_domains.devices.get(device)) is not None:
                yield lane

    def _answered(
        self,
        reply: effects.Reply,
        asked: tuple[float, str, ResourceName, tuple[str, ...]],
        played: Played,
        at: float,
    ) -> None:
        since, call, resource, ids = asked
        took = f"after {1000 * (at - since):.1f} ms"
        match reply.answer:
            case effects.Granted():
                kind, text = "granted", f"{call} granted {took}"
            case effects.Ready():
                kind, text = "granted", f"{call} may go on {took}"
            case effects.Refused(status, reason):
                kind, text = "refused", f"{call} refused {took}, {status}: {reason}"
            case _:
                return
        by_id = {a.id: a.key for a in played.before.published.device_lists.get(resource, ())}
        for device in ids:
            address = next((a for i, a in by_id.items() if i == device), DeviceKey(device))
            lane = self.lanes.devices.get(address)
            if lane is not None:
                lane.marks.append(Mark(at, kind, text))

    def _device_list(self, resource: ResourceName, old: DeviceList, new: DeviceList, at: float) -> None:
        lane = self.lanes.resources.setdefault(resource, Lane(resource, "resource"))
        lane.marks.append(Mark(at, "list", f"list: {list_changes(old, new)}"))

    def _notable(self, at: float, kind: str, text: str) -> None:
        self._happened += 1
        self._events.append(Mark(at, kind, text))

    def _differs(self, at: float, differences: Iterable[str]) -> None:
        self._differences += [(at, difference) for difference in differences]

    # --- the page -----------------------------------------------------------------------------------------

    def _narrow(self) -> None:
        """Only the lanes of the one device that is to be shown, and what it depends on."""
        match self.only:
            case Device(address):
                self.lanes.devices = {a: lane for a, lane in self.lanes.devices.items() if a == address}
                self.lanes.of_domains = DomainLanes()
            case DeviceOfDomains(device):
                of_domains = self.lanes.of_domains
                self.lanes.devices = {}
                of_domains.devices = {d: lane for d, lane in of_domains.devices.items() if d == device}
            case None:
                of_domains = self.lanes.of_domains
                shown = sorted(of_domains.devices, key=order)[:DOMAIN_DEVICES_MAX]
                self._hidden = len(of_domains.devices) - len(shown)
                of_domains.devices = {device: of_domains.devices[device] for device in shown}

    def _kinds(self) -> dict[str, str]:
        """Those that occur."""
        of_domains = self.lanes.of_domains
        lanes = (*self.lanes.devices.values(), *of_domains.domains.values(), *of_domains.devices.values())
        occur = {band.kind for lane in lanes for band in lane.bands}
        return {kind: words for kind, words in (KINDS | DOMAIN_KINDS).items() if kind in occur}

    def _marks(self) -> dict[str, str]:
        """Those that occur."""
        of_domains = self.lanes.of_domains
        lanes = (*self.lanes.devices.values(), *of_domains.all(), *self.lanes.resources.values())
        occur = {mark.kind for lane in lanes if lane is not None for mark in lane.marks}
        occur |= {mark.kind for mark in self._events} | ({"differs"} if self._differences else set())
        return {kind: words for kind, words in MARKS.items() if kind in occur}

    def _legend(self) -> Iterator[str]:
        for kind, words in self._kinds().items():
            yield f'<i class="swatch k-{kind}"></i>{html.escape(words)}'
        for kind, words in self._marks().items():
            if shape := SHAPES.get(kind):
                name, path = shape
                drawn = f'<path class="{name}" d="{path}"></path>'
                yield f'<svg width="12" height="12" aria-hidden="true">{drawn}</svg>{words}'
            else:
                yield f'<i class="tick t-{kind}"></i>{words}'
        if self._gaps:
            yield '<i class="swatch k-gap"></i>missing in the journal'

    def _headline(self) -> tuple[str, bool]:
        """Return the GPUs at the end as a sentence, and whether an operator must act on one."""
        shown = [
            lane.bands[-1].kind
            for lane in self.lanes.devices.values()
            if lane.bands and lane.bands[-1].ended >= self._run_last
        ]
        if not shown:
            return "At the end no GPU is known.", False

        def listed(words: Mapping[str, str]) -> list[str]:
            return [f"{shown.count(kind)} {text}" for kind, text in words.items() if kind in shown]

        wrong = listed(NEEDS_ATTENTION)
        number = sum(shown.count(kind) for kind in NEEDS_ATTENTION)
        ok = ", ".join(listed(AS_EXPECTED))
        if not wrong:
            return f"At the end no GPU of {len(shown)} needs attention: {ok}.", False
        need = "needs" if number == 1 else "need"
        return f"At the end {number} of {count(len(shown), 'GPU')} {need} attention: {', '.join(wrong)}." + (
            f" The others: {ok}." if ok else ""
        ), True

    def _problems(self) -> Iterator[Problem]:
        """Yield what needs attention at the end: GPUs, in the order of the headline's words, then resources."""
        worst = list(NEEDS_ATTENTION)
        found = {
            a: p for a, lane in self.lanes.devices.items() if (p := self._problem(lane, NEEDS_ATTENTION))
        }
        for address, (_, since, why) in sorted(found.items(), key=lambda item: worst.index(item[1][0])):
            cause = self.lanes.cause_of.get(address)
            yield Problem(address, since, why, MEANINGS[cause].remedy if cause is not None else "")
        for resource, lane in sorted(self.lanes.resources.items()):
            if problem := self._problem(lane, OF_RESOURCES):
                kind, since, why = problem
                yield Problem(resource, since, why, OF_RESOURCES[kind])

    def _problem(self, lane: Lane, kinds: Collection[str]) -> tuple[str, float, str] | None:
        """Return kind, beginning and reason of what a lane has been to the end, if it is of these kinds."""
        if not lane.bands or lane.bands[-1].ended < self._run_last or lane.bands[-1].kind not in kinds:
            return None
        last = lane.bands[-1]
        since = list(takewhile(lambda band: band.kind == last.kind, reversed(lane.bands)))
        return last.kind, since[-1].began, last.text

    def _problem_rows(self, began: float) -> str:
        return "".join(
            f"<tr><td>{html.escape(one.name)}</td>"
            f"<td>{'' if one.since else 'before '}{_time(began, one.since)}</td>"
            f"<td>{html.escape(one.why).replace(chr(10), '<br>')}</td><td>{_marked(one.remedy)}</td></tr>"
            for one in self._problems()
        )

    def html(self, tally: Tally) -> str:
        """Return the whole page."""
        self.lanes.ends(self._run_last)
        self._narrow()
        began = self._began or 0.0
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        headline, attention = self._headline()
        node = f"node {self._node}" if self._node else "a node without a name"
        parts = {
            "TITLE": html.escape(f"gpuactors on {node}"),
            "HEADLINE": html.escape(headline),
            "URGENCY": "attention" if attention else "",
            "WHEN": html.escape(f"{day(began)} to {clock(began + self._last)} UTC"),
            "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in self._notes(tally)),
            "RESULT": "differs" if tally.differing else "same",
            "TALLY": html.escape(str(tally)),
            "LEGEND": "".join(f"<li>{entry}</li>" for entry in self._legend()),
            "PROBLEMS": self._problem_rows(began),
            "DEVICES": self._device_rows(began),
            "EVENTS": self._event_rows(began),
            "DIFFERENCES": "".join(
                f"<tr><td>{_time(began, at)}</td><td>{html.escape(text)}</td></tr>"
                for at, text in self._differences
            ),
            # In a script element nothing is an entity, and only `</` ends it.
            "DATA": json.dumps(self._data(began), ensure_ascii=False, separators=(",", ":")).replace(
                "<", "\\u003c"
            ),
        }
        for name, text in parts.items():
            page = page.replace(f"<!--{name}-->", text)
        return page

    def _notes(self, tally: Tally) -> Iterator[str]:
        yield from self._runs
        yield f"{count(self._quiet, 'step')} of routine (polls, ticks, reads) without news are not shown"
        if self._happened > len(self._events):
            shown = f"of {self._happened} events the last {len(self._events)} are shown"
            yield f"{shown}; --since T and --until T choose others"
        if self._hidden:
            shown = (
                f"{DOMAIN_DEVICES_MAX} lanes of devices of compute domains are shown, {self._hidden} are not"
            )
            yield f"{shown}; --device NAME chooses one"
        yield from (f"unreadable: {damage}" for damage in self._damage)
        if tally.missed or tally.gaps:
            yield f"{count(tally.gaps, 'gap')} in the journal, hatched below"

    def _data(self, began: float) -> dict[str, object]:
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        def row(lane: Lane, kind: str) -> dict[str, object]:
            return {
                "kind": kind,
                "name": lane.name,
                "about": lane.about,
                "bands": [[_s(b.began), _s(b.ended), b.kind, number(b.text)] for b in lane.bands],
                "marks": [[_s(m.at), m.kind, number(m.text)] for m in lane.marks],
            }

        happened = Lane("events")
        differ = [Mark(at, "differs", f"differs: {text}") for at, text in self._differences]
        happened.marks = deque(sorted([*self._events, *differ], key=lambda mark: mark.at))
        rows = [
            *(row(lane, "lane") for lane in self.lanes.daemons),
            row(self.lanes.kubelet, "lane"),
            row(happened, "events"),
        ]
        for resource in sorted({*self.lanes.resources, *self.lanes.resource_of.values()}):
            rows.append(row(self.lanes.resources.get(resource, Lane(resource, "resource")), "resource"))
            rows += [
                row(lane, "device")
                for address, lane in sorted(self.lanes.devices.items())
                if self.lanes.resource_of[address] == resource
            ]
        if (head := self.lanes.of_domains.label) is not None:
            rows.append(row(head, "resource"))
            rows += [row(lane, "device") for lane in self.lanes.of_domains.all() if lane is not head]
        return {
            "began": began,
            "ended": _s(self._last),
            "kinds": self._kinds(),
            "rows": rows,
            "gaps": [[_s(a), _s(b), number(text)] for a, b, text in self._gaps],
            "texts": list(texts),
        }

    def _device_rows(self, began: float) -> str:
        of_domains = self.lanes.of_domains
        lanes = (*self.lanes.devices.values(), *of_domains.domains.values(), *of_domains.devices.values())
        rows, kinds = [(band.began, lane.name, band) for lane in lanes for band in lane.bands], self._kinds()
        return "".join(
            f"<tr><td>{html.escape(name)}</td><td>{_time(began, band.began)}</td><td>{_time(began, band.ended)}</td>"
            f'<td><i class="swatch k-{band.kind}"></i>{html.escape(kinds[band.kind])}</td>'
            f"<td>{html.escape(band.text)}</td></tr>"
            for _, name, band in sorted(rows, key=lambda row: row[:2])[-ROWS_MAX:]
        )

    def _event_rows(self, began: float) -> str:
        return "".join(
            f'<tr class="e-{event.kind}"><td>{_time(began, event.at)}</td>'
            f"<td>{html.escape(event.text).replace(chr(10), '<br>')}</td></tr>"
            for event in list(self._events)[-ROWS_MAX:]
        )


def _claim_mark(at: float, call: ClaimCall, entry: ClaimRecord, answer: effects.Answer) -> Mark:
    """Return an answer to a call about a claim."""
    method = "NodePrepareResources" if call.prepares else "NodeUnprepareResources"
    match answer:
        case effects.Refused(status, reason):
            return Mark(at, "refused", f"{method} of claim {entry.name} refused, {status}: {reason}")
        case effects.Elsewhere():
            return Mark(at, "granted", f"{method} of claim {entry.name} passed on to the successor")
        case _:
            return Mark(at, "granted", f"{method} of claim {entry.name} done")


def _kind(played: Played) -> str:
    """Return how an event's tick is coloured: by the worst that came of it."""
    if played.failure:
        return "bug"
    levels = {effect.level for effect in played.effects if isinstance(effect, effects.Log)}
    if levels & {effects.Level.WARNING, effects.Level.ERROR}:
        return "warning"
    return "call" if isinstance(played.event, AllocateAsked | PreStartAsked | PreferenceAsked) else "event"


def _marked(text: str) -> str:
    """Return a text of the documents as HTML: what stands in backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _time(began: float, at: float) -> str:
    return f"{clock(began + at)} <small>+{at:.3f} s</small>"


def _s(seconds: float) -> float:
    return round(seconds, 4)
