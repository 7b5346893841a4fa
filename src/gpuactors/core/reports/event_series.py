"""When each fact is posted as a Kubernetes Event: not before it has stood for a while, again while it lasts, and all
together no more than the API server should get from one node.

Theory of operation. `look` takes the facts that hold now. A fact is due EVENT_SETTLE_S after it came, so what passes by
itself is never posted; EVENT_REPEAT_S after it was last posted, as the API server forgets an event after an hour; and
if it went and came again, not before EVENT_AGAIN_S. A momentary fact is due at once, and posted once. Each post takes a
token of one bucket. Nothing queues: a fact that ended before its turn came is not posted, so no more can wait than
holds now. Times are given; must not read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.reports.kube_events import KubeEvent

EVENT_BURST: Final = 25
"""Requests for events in a row: 16 GPUs and their resources at once. client-go's own bound for one object."""

EVENT_REFILL_S: Final = 60.0
"""One more request after each of these seconds: of 5,000 nodes that all have something to tell all the time 83 a
second, of which the API server's default limits bear several hundred."""

EVENTS_MAX: Final = 512
"""Facts that are posted, or were in the last hour: more than twice the functions of the largest nodes."""


class Series(Struct, frozen=True, gc=False):
    """One fact, and how often it was posted."""

    since: float
    """When it came, the last time; infinite while it does not hold."""
    lasts: bool = True
    """It holds for a while; else it happened in a moment, which was `since`."""
    told_at: float = -math.inf
    """When it was last told; minus infinity if it never was."""
    first_at: float = math.inf
    """When it was first told."""
    count: int = 0
    """How often it was posted: the `count` of the event."""
    not_before: float = -math.inf
    """The earliest time of another try, after a post that failed."""

    @property
    def due_at(self) -> float:
        """When it is posted next; infinite while it does not hold."""
        if self.since <= self.told_at:
            return max(self.not_before, self.told_at + limits.EVENT_REPEAT_S) if self.lasts else math.inf
        settled_at = self.since + limits.EVENT_SETTLE_S if self.lasts else self.since
        return max(self.not_before, settled_at, self.told_at + limits.EVENT_AGAIN_S)


class Told(Struct, frozen=True, gc=False):
    """The facts that are posted, or were not long ago. Frozen: each function returns the next one."""

    series: Mapping[KubeEvent, Series] = field(default_factory=dict)
    tokens: float = EVENT_BURST
    filled_at: float = -math.inf
    """When the bucket was last filled."""


NOTHING_TOLD: Final = Told()


def look(told: Told, wanted: tuple[KubeEvent, ...], at: float) -> Told:
    """Take the facts that hold at this time, EVENTS_MAX at most. A fact that no longer holds is remembered as long as
    the API server has its event."""
    holds = frozenset(wanted[:EVENTS_MAX])
    series = {
        event: known if event in holds else replace(known, since=math.inf)
        for event, known in told.series.items()
        if event in holds or known.told_at + limits.EVENT_TTL_S > at
    }
    for event in wanted[:EVENTS_MAX]:
        known = series.get(event, Series(math.inf))
        if event.happened_at is None:
            series[event] = replace(known, since=min(known.since, at))
        else:
            series[event] = replace(known, since=event.happened_at, lasts=False)
    gone = sorted((s.told_at, i, e) for i, (e, s) in enumerate(series.items()) if s.since == math.inf)
    for _, _, event in gone[: max(0, len(series) - EVENTS_MAX)]:
        del series[event]
    return replace(told, series=series)


def due(told: Told, at: float) -> tuple[Told, KubeEvent | None]:
    """The fact to post now, the one that is due for longest first, and the bucket without its token; None if none is
    due, or there is no token."""
    filled = _filled(told, at)
    event = min(told.series, key=lambda e: told.series[e].due_at, default=None)
    if event is None or told.series[event].due_at > at or filled.tokens < 1.0:
        return filled, None
    return replace(filled, tokens=filled.tokens - 1.0), event


def next_at(told: Told) -> float:
    """When `due` may return one; infinite if never."""
    first = min((series.due_at for series in told.series.values()), default=math.inf)
    if first == math.inf or told.tokens >= 1.0:
        return first
    return max(first, told.filled_at + (1.0 - told.tokens) * EVENT_REFILL_S)


def posted(told: Told, event: KubeEvent, count: int, at: float) -> Told:
    """The API server has the event, told `count` times."""
    known = told.series[event]
    after = replace(known, told_at=at, count=count, first_at=min(known.first_at, at))
    return replace(told, series={**told.series, event: after})


def failed(told: Told, event: KubeEvent, until: float) -> Told:
    """Record a failed post; it is tried again at that time if the fact holds then."""
    after = replace(told.series[event], not_before=until)
    return replace(told, series={**told.series, event: after})


def _filled(told: Told, at: float) -> Told:
    passed_s = at - told.filled_at if math.isfinite(told.filled_at) else 0.0
    tokens = min(float(EVENT_BURST), told.tokens + passed_s / EVENT_REFILL_S)
    return replace(told, tokens=tokens, filled_at=at)
