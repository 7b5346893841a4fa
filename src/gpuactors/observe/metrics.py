"""The metrics as a page, in Prometheus' text format: what is counted (`counts.py`), and what is read off the state.

Imported with the first scrape. In a registry of its own; a page is rendered in place, without a thread. It only looks:
nothing in the daemon depends on a metric. The names and what they mean are in `docs/reference.md#metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from typing import Final, final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpuactors import limits
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import HEALTHY, MEANINGS
from gpuactors.observe.counts import BUCKETS_S, COUNTED_EVENTS, METHODS, OUTCOMES, Counts
from gpuactors.observe.metrics_of_state import GAUGES, Moment

_CALLS: Final = dict.fromkeys(product(METHODS, OUTCOMES), 0)
_REFUSALS: Final = {str(cause): 0 for cause, meaning in MEANINGS.items() if meaning.health != HEALTHY}
_BOUNDS: Final = (*map(str, BUCKETS_S), "+Inf")


@final
class Metrics(Collector):
    """All metrics of one daemon. `now`: the time of day in seconds since 1970."""

    def __init__(
        self,
        version: str,
        counts: Counts,
        *,
        journal: Callable[[], tuple[int, float]] | None = None,
        now: Callable[[], float] = time.time,
        process: bool = True,
    ) -> None:
        """`journal`: as `JournalFiles.kept`. `process`: with the figures of the process itself."""
        self._version = version
        self._counts = counts
        self._now = now
        self._journal = journal
        self._inbox = 0
        self._shown: tuple[NodeState, Moment] | None = None
        self._registry: Final = CollectorRegistry()
        self._registry.register(self)
        if process:
            ProcessCollector(registry=self._registry)

    def page(self, state: NodeState, at: float, inbox: int) -> bytes:
        """Render every metric at `at`, in seconds of the clock of the state's events, in Prometheus' text format.
        `inbox`: how many events wait for the registry."""
        self._inbox = inbox
        self._shown = (state, Moment(at, self._now()))
        try:
            return generate_latest(self._registry)
        finally:
            self._shown = None

    def describe(self) -> Iterable[Metric]:
        """Return the metrics' names, so that no other metric can take one."""
        return [family for family, _ in self.families()]

    def collect(self) -> Iterable[Metric]:
        """Return every sample."""
        return self.describe()

    def families(self) -> Iterator[tuple[Metric, tuple[str, ...]]]:
        """Yield every metric with the names of its labels; one of the state has samples while a page is made."""
        counts = self._counts
        kept, since = self._journal() if self._journal is not None else (0, 0.0)
        yield _gauge("gpuactors_build_info", "1, with the version.", {self._version: 1}, "version")
        yield _gauge("gpuactors_inbox_events", "Events that wait for the registry.", self._inbox)
        yield _gauge(
            "gpuactors_inbox_capacity_events",
            "Events for which the registry's inbox has room.",
            limits.INBOX_EVENTS,
        )
        yield _gauge("gpuactors_journal_bytes", "Bytes of the journal's files; 0 if it is off.", kept)
        yield _gauge(
            "gpuactors_journal_since_timestamp_seconds",
            "Since when at the latest the journal has every event, in seconds since 1970; 0 if there is none.",
            since,
        )
        yield self._durations()
        yield self._calls()
        yield _counter(
            "gpuactors_refusals_total",
            "Refused calls, once for each cause.",
            {**_REFUSALS, **counts.refusals},
            "cause",
        )
        yield _counter("gpuactors_events_total", "Events that the registry has taken.", counts.steps)
        yield _counter(
            "gpuactors_actor_restarts_total",
            "How often an actor failed and was started again.",
            counts.restarts,
            "actor",
        )
        yield _counter(
            "gpuactors_http_connections_turned_away_total",
            "Connections to the HTTP endpoints that were closed without an answer, as there were too many.",
            counts.connections_turned_away,
        )
        for line, (name, text) in COUNTED_EVENTS.items():
            yield _counter(name, text, counts.lines[line])
        for gauge in GAUGES:
            samples = gauge.samples(*self._shown) if self._shown is not None else ()
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family, gauge.labels

    def _calls(self) -> tuple[Metric, tuple[str, ...]]:
        labels = ("method", "outcome")
        family = CounterMetricFamily(
            "gpuactors_calls_total", "Kubelet's calls, by their outcome.", labels=labels
        )
        for values, times in {**_CALLS, **self._counts.calls}.items():
            family.add_metric(values, times)
        return family, labels

    def _durations(self) -> tuple[Metric, tuple[str, ...]]:
        labels = ("method",)
        family = HistogramMetricFamily(
            "gpuactors_call_duration_seconds",
            "Duration of kubelet's calls, from the call to the answer.",
            labels=labels,
        )
        for method, times in self._counts.seconds.items():
            family.add_metric((method,), [*zip(_BOUNDS, accumulate(times.buckets), strict=True)], times.sum_s)
        return family, labels


def _gauge(
    name: str, text: str, value: float | Mapping[str, float], *label: str
) -> tuple[Metric, tuple[str, ...]]:
    return _filled(GaugeMetricFamily(name, text, labels=label), value, label)


def _counter(
    name: str, text: str, value: float | Mapping[str, float], *label: str
) -> tuple[Metric, tuple[str, ...]]:
    return _filled(CounterMetricFamily(name, text, labels=label), value, label)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    value: float | Mapping[str, float],
    labels: tuple[str, ...],
) -> tuple[Metric, tuple[str, ...]]:
    """Fill a metric with one value, or with one for each value of its label."""
    if isinstance(value, Mapping):
        for label, number in value.items():
            family.add_metric((label,), number)
    else:
        family.add_metric((), value)
    return family, labels
