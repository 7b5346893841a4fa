"""A fake API server in memory with the daemon's own client on it, for tests on the mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from gpuactors.core.values.slices import Attribute, SliceDevice, SliceSpec
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.client import ApiClient
from gpuactors.kube.device_classes import KubeDeviceClasses
from gpuactors.kube.domains import KubeDomains
from gpuactors.kube.events import KubeEvents
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors_simulation.kube.server import FakeApiServer
from tests.memory.kube import MemoryApiServer
from tests.support.patience import patient

DRIVER, NODE, NAMESPACE = "gpu.nvidia.com", "node-1", "dra-driver-nvidia-gpu"

MOCK_S = 100_000.0
"""Of the mock clock: a test that needs more than a day has a loop."""


@dataclass(frozen=True)
class Cluster:
    """A server with our node, and what reaches it."""

    api: MemoryApiServer
    client: ApiClient
    node_uid: str

    @property
    def server(self) -> FakeApiServer:
        return self.api.server

    @property
    def slices(self) -> KubeSlices:
        return KubeSlices(self.client, DRIVER, NODE)

    @property
    def claims(self) -> KubeClaims:
        return KubeClaims(self.client, DRIVER, NODE)

    @property
    def node(self) -> KubeNode:
        return KubeNode(self.client, NODE)

    @property
    def domains(self) -> KubeDomains:
        return KubeDomains(self.client)

    @property
    def classes(self) -> KubeDeviceClasses:
        return KubeDeviceClasses(self.client)

    @property
    def events(self) -> KubeEvents:
        return KubeEvents(self.client, NODE)

    def asked(self) -> list[str]:
        """The methods and paths of all requests until now, with WATCH for a watch and DRY-RUN; then forgets them."""
        found = [*map(_named, self.server.requests)]
        self.server.requests.clear()
        return found


def _named(request: tuple[str, str]) -> str:
    method, target = request
    path, _, query = target.partition("?")
    method = "WATCH" if "watch=true" in query else "DRY-RUN" if "dryRun" in query else method
    what = path.partition("/v1beta1/" if "/v1beta1/" in path else "/v1/")[2].split("/")
    return f"{method} {what[-2] if len(what) % 2 == 0 else what[-1]}"


@asynccontextmanager
async def cluster(server: FakeApiServer | None = None) -> AsyncIterator[Cluster]:
    api = MemoryApiServer(server or FakeApiServer())
    uid = api.server.add_node(NODE)["metadata"]["uid"]
    with trio.fail_after(patient(MOCK_S)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.run)
            yield Cluster(api, api.client(), uid)
            nursery.cancel_scope.cancel()


def device(name: str) -> SliceDevice:
    return SliceDevice(name, {"type": Attribute("string", "vfio"), "iommuGroup": Attribute("int", 0)})


def spec(*names: str, generation: int = 1) -> SliceSpec:
    return SliceSpec(DRIVER, NODE, NODE, generation, 1, tuple(map(device, names)))
