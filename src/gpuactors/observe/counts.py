"""Counts and times for the metrics: plain numbers, of which `metrics.py` makes a page.

Implements `ports.http.Meter`. Must not import Prometheus' client library: it takes 20 ms and 3 MiB, which a daemon pays
with the first scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, final

from gpuactors.core.values.effects import Answer, Elsewhere, Level, Log, Refused
from gpuactors.ports.node import Step

METHODS: Final = (
    "Allocate",
    "PreStartContainer",
    "GetPreferredAllocation",
    "NodePrepareResources",
    "NodeUnprepareResources",
)
"""The calls of kubelet that are timed; a prepare and an unprepare are of one claim."""

BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 12.0, 25.0, 45.0)
"""The upper bounds of the buckets, in seconds: from the fastest Allocate, 2 ms, to the longest bounds: 12 s of
gpuactors for an Allocate, 45 s of kubelet for a claim."""

OUTCOMES: Final = ("granted", "refused", "abandoned")

COUNTED_EVENTS: Final[Mapping[str, tuple[str, str]]] = {
    "plugin.contested": (
        "gpuactors_contests_total",
        "How often kubelet had another plugin's devices under one of gpuactors' resource names.",
    ),
    "plugin.unregistered": (
        "gpuactors_unregistrations_total",
        "How often the registration of a resource with kubelet was lost.",
    ),
    "ledger.unreadable": (
        "gpuactors_ledger_failures_total",
        "How often kubelet's ledger became unreadable.",
    ),
    "ledger.damaged": (
        "gpuactors_ledger_damages_total",
        "How often a damaged checkpoint file of kubelet's was found.",
    ),
    "rule.broken": (
        "gpuactors_broken_rules_total",
        "How often a rule of the device list did not hold, which is a bug in gpuactors.",
    ),
    "claim.broken": (
        "gpuactors_broken_claims_total",
        "How often a claim was quarantined because of a bug in gpuactors.",
    ),
    "partition.lost": (
        "gpuactors_partitions_lost_total",
        "How often a partition that gpuactors had activated was not active any more.",
    ),
    "partition.failed": (
        "gpuactors_partition_failures_total",
        "How often the operator's command for partitions failed to change one, each time for another reason.",
    ),
    "label.conflicted": (
        "gpuactors_label_conflicts_total",
        "How often the node's label of compute domains was not as it had been read.",
    ),
}
"""The warnings and errors of the log that have a counter of their own, whatever `--log-level` is."""

_COUNTED_LEVELS: Final = (Level.WARNING, Level.ERROR)


@final
class Durations:
    """The durations of one method's calls: the number in each bucket, and the sum."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        """The number of calls in each bucket; the last bucket has those that took longer than every bound."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one more call."""
        self.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


@final
class Counts:
    """The counts of one daemon, each by its labels; what has not happened is absent."""

    def __init__(self) -> None:
        self.steps = 0
        """See `ports.http.Meter.steps`."""
        self.seconds = defaultdict(Durations, {method: Durations() for method in METHODS})
        """The durations of calls, by method."""
        self.calls = Counter[tuple[str, str]]()
        """The number of calls, by method and outcome."""
        self.refusals = Counter[str]()
        """The number of refusals, by cause."""
        self.restarts = Counter[str]()
        """The number of restarts, by actor."""
        self.connections_turned_away = 0
        self.lines = Counter[str]()
        """The number of log lines, by event name."""

    def called(self, method: str, seconds: float, answer: Answer | None) -> None:
        """Implement `ports.http.Meter.called`. The time of an abandoned call is kubelet's, and is not counted."""
        match answer:
            case Elsewhere():
                return  # the successor counts it
            case None:
                outcome = "abandoned"
            case Refused():
                outcome = "refused"
                self.refusals.update(answer.causes)
            case _:
                outcome = "granted"
        self.calls[method, outcome] += 1
        if answer is not None:
            self.seconds[method].add(seconds)

    def stepped(self, step: Step) -> None:
        self.steps += 1
        for effect in step.effects:
            if isinstance(effect, Log) and effect.level in _COUNTED_LEVELS and effect.name in COUNTED_EVENTS:
                self.lines[effect.name] += 1

    def restarted(self, actor: str) -> None:
        self.restarts[actor] += 1

    def turned_away(self) -> None:
        self.connections_turned_away += 1
