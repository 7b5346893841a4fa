"""NVIDIA's controller of compute domains, as far as one node sees it, and its daemons.

Where the node has the label of a domain there is a pod of the domain's daemon, with a claim of its own; while its
container runs the domain's status says Ready of the node. When the label goes, or the domain, so does the pod. That is
what made NVIDIA issue 641 fatal: a label that was away for a moment ended the daemon under a job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, final

import trio

from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors_simulation.host.imex import CLIQUE
from gpuactors_simulation.kube.domain_objects import NAMESPACE, add_daemon, domain_by_uid, label_of
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import CLAIMS, DOMAINS, Object
from gpuactors_simulation.kubelet.fake import FakeKubelet
from gpuactors_simulation.kubelet.values import Phase, Pod

READY: Final = "Ready"
NOT_READY: Final = "NotReady"


@final
class DomainController:
    """For the one node of a fake kubelet."""

    def __init__(self, server: FakeApiServer, node: str) -> None:
        self._server = server
        self._node = node
        self._started = 0
        self._domains: dict[str, str] = {}
        """The UID of the domain of each daemon pod that was started, by the pod's name."""
        self._orders = Latest(0)
        self.is_held = False
        """It does nothing."""
        self.is_ill = False
        """The daemons run and are not ready."""
        self.was_ready: set[str] = set()
        """The UIDs of the domains that ever said Ready of the node."""

    def hold(self) -> None:
        """Do nothing until `go_on`: the controller may be slow, or its own node may be gone."""
        self.is_held = True

    def go_on(self) -> None:
        """End `hold`, and catch up."""
        self.is_held = False
        self._orders.set(self._orders.value + 1)

    def say(self, *, ready: bool) -> None:
        """Set whether running daemons are ready."""
        self.is_ill = not ready
        self._orders.set(self._orders.value + 1)

    @property
    def pods(self) -> frozenset[str]:
        """The names of the daemons' pods, also of those that are gone."""
        return frozenset(self._domains)

    async def run(self, kubelet: FakeKubelet) -> None:
        """Run for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_server, kubelet)
            nursery.start_soon(self._follow, kubelet, self._orders.subscribe())
            nursery.start_soon(self._follow, kubelet, kubelet.changes())

    async def _follow(self, kubelet: FakeKubelet, changes: LatestReader[Any]) -> None:
        async for _ in changes:
            self._settle(kubelet)

    async def _follow_server(self, kubelet: FakeKubelet) -> None:
        while True:
            changed = self._server.store.changed
            self._settle(kubelet)
            await changed.wait()

    def _settle(self, kubelet: FakeKubelet) -> None:
        """Everything is as it should be by the label and the domains, as far as kubelet has followed."""
        if self.is_held:
            return
        pods = {pod.name: pod for pod in kubelet.view.pods.values() if pod.name in self._domains}
        domain = domain_by_uid(self._server, label_of(self._server, self._node))
        wanted_uid = domain["metadata"]["uid"] if domain is not None else None
        for name, pod in pods.items():
            if self._domains[name] != wanted_uid and pod.phase is not Phase.TERMINATING:
                kubelet.delete(name)
        self._collect(pods)
        has_pod = any(self._domains[name] == wanted_uid for name in pods)
        if domain is not None and not has_pod and not self._claims():  # the node has one daemon device
            self._start(kubelet, domain)
        self._say(pods)

    def _claims(self) -> list[str]:
        names = (o["metadata"]["name"] for o in self._server.store.objects(CLAIMS, NAMESPACE))
        return [name for name in names if name in self._domains]

    def _collect(self, pods: Collection[str]) -> None:
        """Delete the claims of pods that are gone."""
        for name in self._claims():
            if name not in pods:
                self._server.delete_claim(NAMESPACE, name)

    def _start(self, kubelet: FakeKubelet, domain: Object) -> None:
        """Make the domain's daemon pod for this node, as its DaemonSet does."""
        self._started += 1
        name = f"{domain['metadata']['name']}-daemon-{self._started}"
        self._domains[name] = domain["metadata"]["uid"]
        add_daemon(self._server, self._node, name, domain["metadata"]["uid"])
        kubelet.submit(name, {}, uses=(name,), namespace=NAMESPACE)

    def _say(self, pods: Mapping[str, Pod]) -> None:
        """Each domain's status has the nodes that have its daemon, and so has its clique, which the daemons write."""
        for domain in self._server.store.objects(DOMAINS):
            meta = domain["metadata"]
            phases = [pod.phase for name, pod in pods.items() if self._domains[name] == meta["uid"]]
            readiness = READY if Phase.RUNNING in phases and not self.is_ill else NOT_READY
            if readiness == READY:
                self.was_ready.add(meta["uid"])
            if phases or domain.get("status"):
                nodes = {self._node: readiness} if phases else {}
                self._server.set_clique(NAMESPACE, meta["uid"], CLIQUE, nodes)
                self._server.set_domain_nodes(meta["namespace"], meta["name"], nodes)
