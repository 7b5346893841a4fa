"""Thousands of nodes on the mock clock, against the simulated API server.

The nodes run in groups, one after the other, each with a server of its own, and what they asked is added by the virtual
second: a node asks for its own objects only, so it makes no difference to it who else is there. The server has no
bound: what is counted is what the nodes send, not what a server would bear.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import trio
from trio.testing import MockClock

from gpuactors.core.values.domain import DomainUid
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import NODES, SLICES
from tests.kube.cluster import NAMESPACE
from tests.memory.kube import MemoryApiServer
from tests.scale.fleet import CLIQUE, Daemon, Served, node_name
from tests.scale.tally import Tally

GROUP: Final = 50
HOUR_S: Final = 3600.0
SETTLE_S: Final = 300.0
OUTAGE_S: Final = 600.0
STATUS_S: Final = 300.0
"""Kubelet's `nodeStatusReportFrequency`: how often a Node changes where nothing happens on it."""

READY_S: Final = 30
"""How long the daemons of a domain take to become ready, one after the other."""

STATUS_WRITTEN_S: Final = 2
"""NVIDIA's controller writes the status of a ComputeDomain so often at most."""


@dataclass
class Group:
    """Some nodes and their API server."""

    api: MemoryApiServer
    tally: Tally
    daemons: list[Daemon]
    nursery: trio.Nursery
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)

    @property
    def server(self) -> FakeApiServer:
        return self.api.server

    def start(self, daemon: Daemon) -> None:
        """A daemon starts."""

        async def run() -> None:
            with trio.CancelScope() as self.scopes[daemon.name]:
                await daemon.run()

        self.nursery.start_soon(run)

    def stop(self, daemon: Daemon) -> None:
        """It ends, with its connections."""
        self.scopes.pop(daemon.name).cancel()

    async def settle(self, is_settled: Callable[[Daemon], bool] = lambda d: d.settled) -> None:
        """Until every daemon is. Raises `trio.TooSlowError`."""
        with trio.fail_after(SETTLE_S):
            for daemon in self.daemons:
                while not is_settled(daemon):
                    await daemon.changed.wait()


@asynccontextmanager
async def group(numbers: range, served: Served, tally: Tally) -> AsyncIterator[Group]:
    """The nodes with these numbers; no daemon runs yet."""
    api = MemoryApiServer(FakeApiServer(device_taints=False, seed=numbers.start))
    tally.count(api)
    for number in numbers:
        api.server.add_node(node_name(number))
    for name in ("gpu.nvidia.com", "vfio.gpu.nvidia.com", "compute-domain-default-channel.nvidia.com"):
        api.server.add_class(name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.run)
        daemons = [Daemon(node_name(number), api.client(node_name(number)), served) for number in numbers]
        found = Group(api, tally, daemons, nursery)
        nursery.start_soon(_kubelets, found)
        yield found
        nursery.cancel_scope.cancel()


async def _kubelets(at: Group) -> None:
    """Each kubelet posts its node's status, at a time of its own."""
    for turn in count():
        await trio.sleep(STATUS_S / len(at.daemons))
        found = at.server.store.get(NODES, "", at.daemons[turn % len(at.daemons)].name)
        found["status"] = {"conditions": [{"type": "Ready", "lastHeartbeatTime": at.server.store.now()}]}
        at.server.store.put(NODES, found)


# --- scenarios --------------------------------------------------------------------------------------------


async def start(at: Group) -> None:
    """All daemons start at one moment, and no slice is there."""
    for daemon in at.daemons:
        at.start(daemon)
    await at.settle()
    await trio.sleep(60.0 - trio.current_time() % 60.0)


async def idle(at: Group) -> None:
    """An hour in which nothing happens, from the 24th minute on: what is asked about once an hour comes after 45 to 75
    minutes for the first time, and after 90 at the earliest for the second."""
    await start(at)
    await trio.sleep(0.4 * HOUR_S)
    at.tally.clear()
    await trio.sleep(HOUR_S)


async def kubelets_restart(at: Group) -> None:
    """One kubelet after the other restarts: it deletes the slices of its node (wipeResourceSlices in
    pkg/kubelet/cm/dra/plugin), and the daemon makes them again."""
    await start(at)
    at.tally.clear()
    for daemon in at.daemons:
        for found in at.server.store.objects(SLICES, selects=lambda s: s["spec"]["nodeName"] == daemon.name):  # noqa: B023 -- used at once
            at.server.store.delete(SLICES, "", found["metadata"]["name"])
        await trio.sleep(2.0)
    await at.settle()


async def daemons_restart(at: Group) -> None:
    """One daemon after the other restarts, as in a rolling update of the DaemonSet."""
    await start(at)
    at.tally.clear()
    for daemon in at.daemons:
        at.stop(daemon)
        await trio.sleep(1.0)
        at.start(daemon)
        await trio.sleep(1.0)
    await at.settle()


async def broken(at: Group) -> None:
    """One of several API servers stops, or the balancer before them: all watches break at one moment, and another
    server is there at once."""
    await start(at)
    at.tally.clear()
    at.server.break_connections()
    await trio.sleep(120.0)
    await at.settle()


async def outage(at: Group) -> None:
    """The API server is away for ten minutes; counted is from its return on."""
    await start(at)
    at.server.go_away()
    await trio.sleep(OUTAGE_S)
    at.tally.clear()
    at.server.away = False
    await trio.sleep(120.0)
    await at.settle()


Scenario = Callable[[Group], Awaitable[None]]
"""What happens; it clears the tally where counting begins."""

SCENARIOS: Final[dict[str, Scenario]] = {
    "start of all at once": start,
    "idle, an hour": idle,
    "rolling restart of kubelets": kubelets_restart,
    "rolling restart of the daemon": daemons_restart,
    "all watches break, a server is there": broken,
    "return of an API server after 10 minutes": outage,
}


def play(nodes: int, served: Served, scenario: str, processes: int = 1) -> Tally:
    """One of SCENARIOS with so many nodes: all groups, one after the other, in so many processes."""
    total = Tally()
    groups = [*_groups(nodes)]
    if processes == 1:
        for numbers in groups:
            total.add(play_group(numbers, served, scenario))
        return total
    with ProcessPoolExecutor(processes) as pool:
        for found in pool.map(play_group, groups, [served] * len(groups), [scenario] * len(groups)):
            total.add(found)
    return total


def play_group(numbers: range, served: Served, scenario: str) -> Tally:
    """One of SCENARIOS with these nodes."""
    return _run(numbers, served, SCENARIOS[scenario])


def _run(numbers: range, served: Served, scenario: Scenario) -> Tally:
    tally = Tally()

    async def run() -> None:
        async with group(numbers, served, tally) as at:
            await scenario(at)

    random.seed(numbers.start)
    trio.run(run, clock=MockClock(autojump_threshold=0))
    return tally


def _groups(nodes: int) -> Iterator[range]:
    for first in range(0, nodes, GROUP):
        yield range(first, min(first + GROUP, nodes))


# --- compute domains --------------------------------------------------------------------------------------


def bring_up(domains: int, nodes: int) -> Tally:
    """So many domains of so many nodes each become ready at the same time. The nodes of one of them have daemons, and
    those are counted: every other node has the same."""

    async def scenario(at: Group) -> None:
        await start(at)
        names = [[daemon.name for daemon in at.daemons]]
        names += [[f"other-{domain}-{node}" for node in range(nodes)] for domain in range(1, domains)]
        uids = [
            DomainUid(at.server.add_domain("team", f"d-{number}")["metadata"]["uid"])
            for number in range(domains)
        ]
        at.tally.clear()
        for daemon in at.daemons:
            daemon.claim(uids[0])
        for second in range(0, READY_S, STATUS_WRITTEN_S):
            await trio.sleep(STATUS_WRITTEN_S)
            ready = nodes * (second + STATUS_WRITTEN_S) // READY_S
            for number, (uid, of) in enumerate(zip(uids, names, strict=True)):
                said = {name: "Ready" if i < ready else "NotReady" for i, name in enumerate(of)}
                at.server.set_clique(NAMESPACE, uid, CLIQUE, said)
                at.server.set_domain_nodes("team", f"d-{number}", said)
        await at.settle(lambda daemon: daemon.waits_for is None)

    return _run(range(nodes), Served(domains=True), scenario)
