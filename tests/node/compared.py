"""Compute domains, served by NVIDIA's kubelet plugin or by gpuactors: what both are asked for, and how both are judged.

A `Course` is one scenario with one of them. The same history judges both: whether a workload ever ran without its
domain's label or a ready daemon, whether the label went away between two claims, and whether the daemon was replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol, final

from tests.node import domains, pods
from tests.node.claims import RETRY_S, kill, kubelet_calls
from tests.node.cluster import CLAIMS, EVENTS, eventually
from tests.node.daemonset import Daemon
from tests.node.domains import LABEL, NO_DAEMON, Seen
from tests.node.node import Node
from tests.node.nvidia.plugins import ARGUMENTS, REGISTERED, NvidiasDriver
from tests.node.tasks import container_of
from tests.node.test_domains import LABEL_S, Around, Fabric, runs

NVIDIAS: Final = "NVIDIA's"
OURS: Final = "gpuactors"

A_DAEMON: Final = "a ready daemon"
ITS_LABEL: Final = "its label"
"""What a workload can lack."""

SEEN_S: Final = 3.0
"""A workload that has begun to run is watched for so long: a daemon that is ending has ended by then."""


# --- who serves -------------------------------------------------------------------------------------------------------


class Server(Protocol):
    """A kubelet plugin for compute domains."""

    name: str

    def begin(self) -> None:
        """It serves from now on, and nothing of an earlier scenario is in its way."""

    def kill(self) -> None:
        """SIGKILL, and it is started again at once. Does not wait."""

    def serves(self) -> None:
        """Waits until it serves again."""


@final
class Nvidias:
    """NVIDIA's own over a mock of NVML, as a process of the node."""

    name = NVIDIAS

    def __init__(self, driver: NvidiasDriver) -> None:
        self._driver = driver

    def begin(self) -> None:
        self._driver.domains.stop()
        self._driver.start(self._driver.domains)

    def kill(self) -> None:
        self._driver.domains.kill()
        self._driver.domains.start(*ARGUMENTS)

    def serves(self) -> None:
        self._driver.domains.wait_said(REGISTERED)


@final
class Ours:
    """gpuactors as it is installed: kubelet starts its container again."""

    name = OURS

    def __init__(self, node: Node) -> None:
        self._node = node
        self._killed: Daemon | None = None

    def begin(self) -> None:
        if self._killed is not None:
            # Kubelet starts a container at once when it ends for the first time, and after 10 s and more later.
            self._node.changed()
            self._killed = None
        self._node.install("compute-domains")

    def kill(self) -> None:
        self._killed = self._node.daemon()
        kill(self._killed)

    def serves(self) -> None:
        assert self._killed is not None
        before = self._killed.restarts
        eventually(lambda: self._node.daemon().restarts > before, "the container's restart")


# --- one scenario with one of them ------------------------------------------------------------------------------------


@final
class Course(Fabric):
    """A node, one of both, and what happens."""

    def __init__(self, node: Node, around: Around, server: Server) -> None:
        super().__init__(node, around)
        self.server = server

    @contextmanager
    def played(self) -> Iterator[None]:
        """From an empty node to an empty node."""
        self.steering.words = ""
        self.server.begin()
        self.history.begin(self.api)
        yield
        self.node.said(f"{self.server.name}: {self.history.label(self.api)}\n{self.history.told(self.api)}")
        pods.clear(self.api)
        for claim in self.api.items(domains.TENANTS_CLAIMS):
            self.api.delete(f"{domains.TENANTS_CLAIMS}/{claim['metadata']['name']}")
        for domain in self.api.items(domains.ALL_DOMAINS):
            self.delete(domain["metadata"]["name"])
        eventually(lambda: not self.api.items(domains.DAEMON_PODS), "the end of the daemons' pods")
        eventually(lambda: not self.api.items(CLAIMS), "the end of all claims")
        eventually(lambda: self.label() is None, "the end of the label", LABEL_S)
        assert not self.steering.failed, self.steering.failed

    # --- what a scenario does ---------------------------------------------------------------------------------------

    def runs_after(self, pod: str, began: float) -> str:
        """Waits until a pod runs, and has what it needs: how long after that moment it ran."""
        pods.wait_running(self.api, pod, RETRY_S)
        self.stays_running(pod, SEEN_S)
        eventually(self._all_are_covered, "the end of a time without label or daemon")
        return self._after(began, lambda seen: _is(seen, pod) and pods.phase(seen.thing) == "Running")

    def is_gone_after(self, pod: str, began: float) -> str:
        """Waits until a pod is gone: how long after that moment."""
        pods.wait_phase(self.api, pod, "gone", RETRY_S)
        return self._after(began, lambda seen: _is(seen, pod) and seen.is_gone)

    def ends(self, pod: str) -> str:
        """Deletes a pod, and waits until it is gone: how long that took."""
        began = time.monotonic()
        pods.delete(self.api, pod)
        return self.is_gone_after(pod, began)

    def _after(self, began: float, what: Callable[[Seen], bool]) -> str:
        first = next(seen.at for seen in self.history.of("Pod", self.api) if what(seen))
        return f"{max(0.0, first - began):.1f} s"

    def _all_are_covered(self) -> bool:
        lasting = [one for one in self.history.uncovered_times(self.api) if one.lasts]
        assert not lasting, [*map(str, lasting)]
        return True

    def stays_waiting(self, pod: str, for_s: float) -> None:
        """Looks for so long whether a pod is kept waiting. Raises AssertionError."""
        self.holds(lambda: not runs(self, pod), for_s, f"{pod} waits")

    def stays_running(self, pod: str, for_s: float) -> None:
        """Looks for so long whether a pod runs on in the same container. Raises AssertionError."""
        container = self._container(pod)
        self.holds(lambda: runs(self, pod) and self._container(pod) == container, for_s, f"{pod} runs on")

    def _container(self, pod: str) -> str:
        return container_of(pods.get(self.api, pod) or {})

    @staticmethod
    def holds(look: Callable[[], bool], for_s: float, what: str) -> None:
        """Looks again and again for so long. Raises AssertionError at once where it does not hold."""
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            assert look(), f"not so: {what}"
            time.sleep(0.2)

    def restart_kubelet(self) -> None:
        """As systemd does it; the resources of the daemon go for a moment."""
        self.node.excuse_no_plugin()
        self.node.restart_kubelet()

    def daemon_runs(self, uid: str) -> None:
        """Waits until the container of a domain's daemon runs, ready or not: it can be steered from then on."""

        def look() -> bool:
            return any(pods.phase(pod) == "Running" for pod in domains.daemons(self.api, uid))

        eventually(look, "the domain's daemon to run")

    def claim_uid(self, pod: str) -> str:
        """The UID of a pod's claim."""
        return str(self.api.get(f"{domains.TENANTS_CLAIMS}/{self.claim_of(pod)}")["metadata"]["uid"])

    def came_first(self, new: str, old: str) -> bool:
        """Kubelet has called the prepare of one claim before the unprepare of another had ended. By their UIDs."""
        prepares = [call.began for call in kubelet_calls("Prepare") if call.uid == new]
        ends = [
            call.ended for call in kubelet_calls("Unprepare") if call.uid == old and call.ended is not None
        ]
        return bool(prepares and ends) and min(prepares) < min(ends)

    # --- how it is judged -------------------------------------------------------------------------------------------

    def faults(self, but: frozenset[str] = frozenset()) -> list[str]:
        """How long workloads ran without what they need, in words."""
        total: dict[tuple[str, str], float] = {}
        for one in self.history.uncovered_times(self.api):
            what = A_DAEMON if one.lacks == NO_DAEMON else ITS_LABEL
            if what not in but:
                total[one.workload, what] = total.get((one.workload, what), 0.0) + one.for_s
        return [
            f"{name} ran {seconds:.1f} s without {kind}" for (name, kind), seconds in sorted(total.items())
        ]

    def changes(self) -> list[str]:
        """What has changed between two claims of a domain, and need not, in words."""
        label = self.history.label(self.api)
        away = [
            after.at - gone.at
            for before, gone, after in zip(label, label[1:], label[2:], strict=False)
            if gone.value is None and before.value == after.value
        ]
        pods_of: dict[str, set[str]] = {}
        for seen in self.history.of("Pod", self.api):
            meta = seen.thing["metadata"]
            if meta["namespace"] == domains.NAMESPACE and LABEL in meta.get("labels", {}):
                pods_of.setdefault(meta["labels"][LABEL], set()).add(seen.uid)
        more = sum(len(uids) - 1 for uids in pods_of.values())
        said = {
            f"label away for {' + '.join(f'{seconds:.1f}' for seconds in away)} s": away,
            f"{more} more pod{'s' if more > 1 else ''} of the daemon": more,
        }
        return [words for words, is_so in said.items() if is_so]

    def refused(self) -> list[str]:
        """How often kubelet has asked for a claim sooner than the API server knew that it may, in words: it asks again
        here at once, elsewhere after 60 to 90 s."""
        mine = {seen.uid for seen in self.history.of("Pod", self.api)}
        events = self.api.items(EVENTS, fieldSelector="reason=FailedPrepareDynamicResources")
        count = sum(
            event.get("count") or 1
            for event in events
            if event["involvedObject"]["uid"] in mine and domains.NOT_SEEN_YET in event["message"]
        )
        return [f"the API server refused kubelet a claim ({count})"] if count else []


def _is(seen: Seen, pod: str) -> bool:
    meta = seen.thing["metadata"]
    return (meta["namespace"], meta["name"]) == (pods.NAMESPACE, pod)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row."""

    title: str
    play: Callable[[Course], str]
    """What it says of the course beside the judgement."""
    lacks: frozenset[str] = frozenset()
    """Whoever serves, a workload is for a time without its label or its daemon: others take it."""


@dataclass(slots=True)
class Table:
    """What came out, row by row."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, title: str, server: str, cell: str) -> None:
        """One cell."""
        self.rows.setdefault(title, {})[server] = cell

    def text(self, releases: Mapping[str, str]) -> str:
        """As Markdown, with the day and the releases."""
        played = ", ".join(f"{name} {release}" for name, release in releases.items())
        day = datetime.now(UTC).strftime("%d %B %Y").lstrip("0")
        lines = [f"Played on {day}: {played}.", "", f"| Scenario | {NVIDIAS} | {OURS} |", "|---|---|---|"]
        lines += [
            f"| {title} | {cells.get(NVIDIAS, '–')} | {cells.get(OURS, '–')} |"
            for title, cells in self.rows.items()
        ]
        return "\n".join(lines) + "\n"
