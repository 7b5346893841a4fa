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
"""The maximum number of requests for events in a row: 16 GPUs and their resources at once. client-go has the same bound
for one object."""

EVENT_REFILL_S: Final = 60.0
"""The time after which one more request is allowed, in seconds: 5,000 nodes that all post without pause make 83
requests a second, and the API server's default limits allow several hundred."""

EVENTS_MAX: Final = 512
"""The maximum number of facts that are posted, or were in the last hour: more than twice the functions of the largest
nodes."""


class Series(Struct, frozen=True, gc=False):
    """One fact, and how often it was posted."""

    since: float
    """When the fact last began, in seconds of the events' clock; infinite while it does not hold."""
    lasts: bool = True
    """True if the fact holds for a while; False if it happened in the moment `since`."""
    posted_at: float = -math.inf
    """When it was last posted; minus infinity before the first post."""
    first_at: float = math.inf
    """When it was first posted; infinite before."""
    count: int = 0
    """The number of its posts: the `count` of the event."""
    not_before: float = -math.inf
    """The earliest time of another try after a failed post."""

    @property
    def due_at(self) -> float:
        """When it is posted next; infinite while it does not hold."""
        if self.since <= self.posted_at:
            return max(self.not_before, self.posted_at + limits.EVENT_REPEAT_S) if self.lasts else math.inf
        settled_at = self.since + limits.EVENT_SETTLE_S if self.lasts else self.since
        return max(self.not_before, settled_at, self.posted_at + limits.EVENT_AGAIN_S)


class PostedFacts(Struct, frozen=True, gc=False):
    """The facts that are posted, or were not long ago. Frozen: each function returns the next value."""

    series: Mapping[KubeEvent, Series] = field(default_factory=dict)
    tokens: float = EVENT_BURST
    """The number of requests that are allowed now, at `filled_at`."""
    filled_at: float = -math.inf
    """When the bucket was last filled."""


NOTHING_POSTED: Final = PostedFacts()


def look(facts: PostedFacts, wanted: tuple[KubeEvent, ...], at: float) -> PostedFacts:
    """Take the facts that hold at this time, at most EVENTS_MAX. Keep an ended fact as long as the API server has its
    event."""
    holds = frozenset(wanted[:EVENTS_MAX])
    series = {
        event: fact if event in holds else replace(fact, since=math.inf)
        for event, fact in facts.series.items()
        if event in holds or fact.posted_at + limits.EVENT_TTL_S > at
    }
    for event in wanted[:EVENTS_MAX]:
        fact = series.get(event, Series(math.inf))
        if event.happened_at is None:
            series[event] = replace(fact, since=min(fact.since, at))
        else:
            series[event] = replace(fact, since=event.happened_at, lasts=False)
    past = sorted((s.posted_at, i, e) for i, (e, s) in enumerate(series.items()) if s.since == math.inf)
    for _, _, event in past[: max(0, len(series) - EVENTS_MAX)]:
        del series[event]
    return replace(facts, series=series)


def due(facts: PostedFacts, at: float) -> tuple[PostedFacts, KubeEvent | None]:
    """Return the fact to post now, the one that has been due for longest, and the bucket without its token. None if no
    fact is due, or no token is left."""
    filled = _filled(facts, at)
    event = min(facts.series, key=lambda e: facts.series[e].due_at, default=None)
    if event is None or facts.series[event].due_at > at or filled.tokens < 1.0:
        return filled, None
    return replace(filled, tokens=filled.tokens - 1.0), event


def next_at(facts: PostedFacts) -> float:
    """Return when `due` may return a fact; infinite if never."""
    first = min((series.due_at for series in facts.series.values()), default=math.inf)
    if first == math.inf or facts.tokens >= 1.0:
        return first
    return max(first, facts.filled_at + (1.0 - facts.tokens) * EVENT_REFILL_S)


def posted(facts: PostedFacts, event: KubeEvent, count: int, at: float) -> PostedFacts:
    """Record that the API server has the event, posted `count` times."""
    before = facts.series[event]
    after = replace(before, posted_at=at, count=count, first_at=min(before.first_at, at))
    return replace(facts, series={**facts.series, event: after})


def failed(facts: PostedFacts, event: KubeEvent, until: float) -> PostedFacts:
    """Record a failed post. It is repeated at `until` if the fact holds then."""
    after = replace(facts.series[event], not_before=until)
    return replace(facts, series={**facts.series, event: after})


def _filled(facts: PostedFacts, at: float) -> PostedFacts:
    passed_s = at - facts.filled_at if math.isfinite(facts.filled_at) else 0.0
    tokens = min(float(EVENT_BURST), facts.tokens + passed_s / EVENT_REFILL_S)
    return replace(facts, tokens=tokens, filled_at=at)
