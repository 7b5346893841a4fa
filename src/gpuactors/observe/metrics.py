"""The metrics, in Prometheus' text format: what is counted and timed here, and what is read off the state.

Implements `ports.http.Meter`, in a registry of its own; a page is rendered in place, without a thread. It only looks:
nothing in the daemon depends on a metric. The names and what they mean are in `docs/metrics.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar, final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Gauge as PlainGauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpuactors import limits
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import HEALTHY, MEANINGS
from gpuactors.core.values.effects import Answer, Elsewhere, Level, Log, Refused
from gpuactors.observe.metrics_of_state import GAUGES, Moment
from gpuactors.ports.node import Step

M = TypeVar("M", bound=MetricWrapperBase)

METHODS: Final = (
    "Allocate",
    "PreStartContainer",
    "GetPreferredAllocation",
    "NodePrepareResources",
    "NodeUnprepareResources",
)
"""Kubelet's calls that are timed; a prepare and an unprepare are of one claim."""

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 12.0, 25.0, 45.0)
"""From the fastest Allocate, 2 ms, to the longest bounds: 12 s of gpuactors for an Allocate, 45 s of kubelet for a
claim."""

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
    "label.conflicted": (
        "gpuactors_label_conflicts_total",
        "How often the node's label of compute domains was not as it had been read.",
    ),
}
"""The warnings and errors of the log that have a counter of their own, whatever `--log-level` is."""

_COUNTED_LEVELS: Final = (Level.WARNING, Level.ERROR)


@final
class Metrics:
    """All metrics of one daemon. `now`: the time of day in seconds since 1970."""

    def __init__(
        self,
        version: str,
        *,
        journal: Callable[[], tuple[int, float]] | None = None,
        now: Callable[[], float] = time.time,
        process: bool = True,
    ) -> None:
        """`journal`: as `JournalFiles.kept`. `process`: with the figures of the process itself."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter with the time at which it was made
        self.registry: Final = CollectorRegistry()
        self._now = now
        self._journal = journal
        self._counted: list[MetricWrapperBase] = []
        self._of_state = _OfState()
        self.registry.register(self._of_state)
        self._build = self._gauge("gpuactors_build_info", "1, with the version.", ("version",))
        self._build.labels(version).set(1)
        self._inbox = self._gauge("gpuactors_inbox_events", "Events that wait for the registry.")
        self._capacity = self._gauge(
            "gpuactors_inbox_capacity_events", "Events for which the registry's inbox has room."
        )
        self._capacity.set(limits.INBOX_EVENTS)
        self._journal_bytes = self._gauge(
            "gpuactors_journal_bytes", "Bytes of the journal's files; 0 if it is off."
        )
        self._journal_since = self._gauge(
            "gpuactors_journal_since_timestamp_seconds",
            "Since when at the latest the journal has every event, in seconds since 1970; 0 if there is none.",
        )
        self._seconds = self._added(
            Histogram(
                "gpuactors_call_duration_seconds",
                "Duration of kubelet's calls, from the call to the answer.",
                ("method",),
                buckets=_BUCKETS_S,
                registry=self.registry,
            )
        )
        self._calls = self._counter(
            "gpuactors_calls_total", "Kubelet's calls, by their outcome.", ("method", "outcome")
        )
        self._refusals = self._counter(
            "gpuactors_refusals_total", "Refused calls, once for each cause.", ("cause",)
        )
        self._steps = self._counter("gpuactors_events_total", "Events that the registry has taken.")
        self._restarts = self._counter(
            "gpuactors_actor_restarts_total", "How often an actor failed and was started again.", ("actor",)
        )
        self._turned_away = self._counter(
            "gpuactors_http_connections_turned_away_total",
            "Connections to the HTTP endpoints that were closed without an answer, as there were too many.",
        )
        self.steps = 0
        """See `ports.http.Meter.steps`."""
        self._of_lines = {line: self._counter(name, text) for line, (name, text) in COUNTED_EVENTS.items()}
        for method in METHODS:
            self._seconds.labels(method)
            for outcome in OUTCOMES:
                self._calls.labels(method, outcome)
        for cause, meaning in MEANINGS.items():
            if meaning.health != HEALTHY:
                self._refusals.labels(cause)
        if process:
            ProcessCollector(registry=self.registry)

    def called(self, method: str, seconds: float, answer: Answer | None) -> None:
        """Implement `ports.http.Meter.called`. The time of an abandoned call is kubelet's, and is not counted."""
        match answer:
            case Elsewhere():
                return  # the successor counts it
            case None:
                outcome = "abandoned"
            case Refused():
                outcome = "refused"
                for cause in answer.causes:
                    self._refusals.labels(cause).inc()
            case _:
                outcome = "granted"
        self._calls.labels(method, outcome).inc()
        if answer is not None:
            self._seconds.labels(method).observe(seconds)

    def stepped(self, step: Step) -> None:
        """Implement `ports.http.Meter.stepped`."""
        self.steps += 1
        self._steps.inc()
        for effect in step.effects:
            if isinstance(effect, Log) and effect.level in _COUNTED_LEVELS and effect.name in self._of_lines:
                self._of_lines[effect.name].inc()

    def restarted(self, actor: str) -> None:
        """Implement `ports.http.Meter.restarted`."""
        self._restarts.labels(actor).inc()

    def turned_away(self) -> None:
        """Implement `ports.http.Meter.turned_away`."""
        self._turned_away.inc()

    def page(self, state: NodeState, at: float, inbox: int) -> bytes:
        """Implement `ports.http.Meter.page`."""
        self._inbox.set(inbox)
        if self._journal is not None:
            kept, since = self._journal()
            self._journal_bytes.set(kept)
            self._journal_since.set(since)
        self._of_state.shown = (state, Moment(at, self._now()))
        try:
            return generate_latest(self.registry)
        finally:
            self._of_state.shown = None

    def families(self) -> Iterator[tuple[Metric, tuple[str, ...]]]:
        """Every metric with the names of its labels."""
        for collector in self._counted:
            (family,) = collector.collect()
            yield family, tuple(collector._labelnames)
        yield from ((family, g.labels) for family, g in zip(self._of_state.describe(), GAUGES, strict=True))

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> PlainGauge:
        return self._added(PlainGauge(name, text, labels, registry=self.registry))

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._added(Counter(name, text, labels, registry=self.registry))

    def _added(self, metric: M) -> M:
        self._counted.append(metric)
        return metric


class _OfState(Collector):
    """The metrics of the state, while a page is made."""

    def __init__(self) -> None:
        self.shown: tuple[NodeState, Moment] | None = None

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Their names, so that no other metric can take one."""
        return [GaugeMetricFamily(g.name, g.help, labels=g.labels) for g in GAUGES]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Every sample."""
        if self.shown is None:
            return
        for gauge in GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            for labels, value in gauge.samples(*self.shown):
                family.add_metric(labels, value)
            yield family
