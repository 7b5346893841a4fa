"""The daemon's own DRA plugin and a fake kubelet that prepares claims for it, in memory on the mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.claim import ClaimName, DeviceHealth, Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.effects import Refusal, Refused
from gpuactors.kubelet.dra.plugin import UnixClaimsEndpoint
from gpuactors.ports.claims import PluginStatus
from gpuactors_simulation.kubelet.dra.values import (
    KUBELET_1_37,
    ApiAwayError,
    ClaimObject,
    DraCall,
    Release,
    Surroundings,
)
from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import MemoryTransport
from gpuactors_simulation.kubelet.values import Phase
from tests.memory.kubelet import memory_claims

DRIVER: Final = "gpu.nvidia.com"
WITHIN_S: Final = 3600.0
"""On the mock clock."""


def device_of(uid: str) -> PreparedDevice:
    return PreparedDevice(("gpu",), "node-1", f"gpu-of-{uid}", (f"k8s.{DRIVER}/claim={uid}-gpu",))


def refused(reason: str) -> Refused:
    return Refused(Refusal.FAILED_PRECONDITION, reason, ())


@dataclass
class Core:
    """A driver's answers: done at once, unless a test has said otherwise. Implements `ports.claims.ClaimCaller`."""

    prepare_errors: list[str] = field(default_factory=list)
    unprepare_errors: list[str] = field(default_factory=list)
    prepare_s: float = 0.0
    unprepare_s: float = 0.0
    calls: list[tuple[float, str, str]] = field(default_factory=list)
    """When, which call, the claim's UID."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused:
        self.calls.append((trio.current_time(), "prepare", claim.uid))
        await trio.sleep(self.prepare_s)
        return (
            refused(self.prepare_errors.pop(0)) if self.prepare_errors else Prepared((device_of(claim.uid),))
        )

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused:
        self.calls.append((trio.current_time(), "unprepare", claim.uid))
        await trio.sleep(self.unprepare_s)
        return refused(self.unprepare_errors.pop(0)) if self.unprepare_errors else Unprepared()

    def times(self, call: str) -> list[float]:
        return [at for at, name, _ in self.calls if name == call]

    @property
    def order(self) -> list[tuple[str, str]]:
        return [(call, uid) for _, call, uid in self.calls]


@dataclass
class Node:
    """What is around kubelet, and what it did to it."""

    objects: dict[tuple[str, str], ClaimObject] = field(default_factory=dict)
    api_is_away: bool = False
    wiped: list[tuple[float, str | None]] = field(default_factory=list)
    cdi_files: set[str] | None = None
    """The CDI ids that the runtime finds; None: every one."""

    def claim(self, namespace: str, name: str) -> ClaimObject | None:
        if self.api_is_away:
            raise ApiAwayError
        return self.objects.get((namespace, name))

    def wipe(self, driver: str | None) -> None:
        if self.api_is_away:
            raise ApiAwayError
        self.wiped.append((trio.current_time(), driver))

    def nodes(self, cdi_ids: Sequence[str]) -> Sequence[str]:
        for cdi_id in cdi_ids:
            if self.cdi_files is not None and cdi_id not in self.cdi_files:
                raise LookupError(cdi_id)
        return tuple(f"/dev/vfio/{cdi_id}" for cdi_id in cdi_ids)

    def add(self, name: str, uid: str, *drivers: str) -> None:
        self.objects["default", name] = ClaimObject("default", name, uid, drivers or (DRIVER,))


@dataclass
class Rig:
    kubelet: FakeKubelet
    transport: MemoryTransport
    node: Node

    @asynccontextmanager
    async def plugin(
        self, core: Core, instance: str | None = None, driver: str = DRIVER
    ) -> AsyncIterator[Served]:
        """The daemon's plugin, serving; kubelet may not have seen it yet."""
        told: list[PluginStatus] = []
        health: Latest[tuple[DeviceHealth, ...]] = Latest(())
        failures: list[Exception] = []
        claims = memory_claims(self.transport, driver, lambda _, exc: failures.append(exc), instance=instance)
        async with claims.serve_claims(core, health.subscribe(), told.append) as endpoint:
            yield Served(core, told, health, endpoint)
        assert not failures

    async def registered(self, *endpoints: str) -> None:
        """Kubelet is connected to exactly these, in this order."""
        with trio.fail_after(WITHIN_S):
            await self.kubelet.until(
                lambda view: tuple(i.endpoint for i in view.dra.instances if i.connected) == endpoints
            )

    def submit(self, name: str) -> None:
        """There is a claim of the driver's, and a pod that uses it."""
        self.node.add("a", "uid-a")
        self.kubelet.submit(name, {}, uses=("a",))

    async def runs_with_claim(self, name: str) -> float:
        """When a new pod with a claim ran, at the latest."""
        self.submit(name)
        return await self.runs(name)

    async def runs(self, name: str) -> float:
        """When the pod ran, at the latest."""
        with trio.fail_after(WITHIN_S):
            await self.kubelet.until(lambda view: view.pods[name].phase is Phase.RUNNING)
        return trio.current_time()

    async def gone(self, name: str) -> float:
        """When the pod was gone."""
        with trio.fail_after(WITHIN_S):
            await self.kubelet.until(lambda view: name not in view.pods)
        return trio.current_time()

    async def message(self, name: str, word: str) -> str:
        """The pod's message, once the word is in it."""
        with trio.fail_after(WITHIN_S):
            view = await self.kubelet.until(lambda view: word in view.pods[name].message)
        return view.pods[name].message

    async def calls(self, count: int) -> Sequence[DraCall]:
        """Once so many are over."""
        with trio.fail_after(WITHIN_S):
            await self.kubelet.until(lambda view: view.dra.calls >= count)
        return self.kubelet.dra_calls


@dataclass
class Served:
    core: Core
    told: list[PluginStatus]
    health: Latest[tuple[DeviceHealth, ...]]
    endpoint: UnixClaimsEndpoint

    @property
    def path(self) -> str:
        return self.endpoint.names[0]


@asynccontextmanager
async def rig(*, seed: int = 1, release: Release = KUBELET_1_37, start: bool = True) -> AsyncIterator[Rig]:
    """A fake kubelet, started."""
    transport, node = MemoryTransport(), Node()
    dra = Surroundings(node.claim, node.wipe, node.nodes, release)
    async with open_fake_kubelet(transport, seed=seed, dra=dra) as kubelet:
        if start:
            await kubelet.start()
        yield Rig(kubelet, transport, node)


@asynccontextmanager
async def registered(
    core: Core | None = None, *, seed: int = 1, release: Release = KUBELET_1_37
) -> AsyncIterator[tuple[Rig, Served]]:
    """A rig with a plugin that kubelet is connected to."""
    async with rig(seed=seed, release=release) as r, r.plugin(core or Core()) as served:
        await r.registered(served.path)
        yield r, served
