"""`claims_world.py` for compute domains: one node with IMEX, an API server with one domain, and NVIDIA's controller,
which has said Ready of the node.

The patches of the node's label are counted with the operations of the disk, each twice: before the API server has it,
and after, before the daemon knows. So the daemon can be killed at both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, cast, final

import trio
from msgspec.structs import replace

from gpuactors.acts.files import MOUNTED
from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.core.values.domain import DRIVER, DomainMode, DomainSettings, ImexFacts
from gpuactors.daemon import app
from gpuactors.daemon.domains import DomainsOutside
from gpuactors.host.imex import ImexFiles
from gpuactors.host.root import HostRoot
from gpuactors.kube.client import ApiClient
from gpuactors.kube.domains import KubeDomains
from gpuactors.ports.claims import ClaimsKubelet
from gpuactors.ports.kube import LabelConflict, NodeApi, NodeMetadata
from gpuactors_simulation.kube.domain_objects import label_of
from gpuactors_simulation.kube.server import FakeApiServer
from tests.claims_world import CDI_DIR, NODE, ClaimsWorld, plugin_dir
from tests.memory.disk import FakeDisk
from tests.support.claims import Api
from tests.support.domains import NAMESPACE, DomainObjects, with_imex

DIRECTORY: Final = f"{plugin_dir(DRIVER)}/{MOUNTED}"


@final
class DomainsWorld(ClaimsWorld):
    """One node of one compute domain, over the lives of its daemons."""

    driver = DRIVER

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ())
        objects = DomainObjects(cast(Api, _Direct(self.api)))
        self.domain = objects.domain("training")
        objects.set_nodes("training", {NODE: "Ready"})
        self.channel = ClaimName("default", "one", ClaimUid(objects.channel("one", self.domain)))
        self.daemon_s = ClaimName(NAMESPACE, "daemon", ClaimUid(objects.daemon("daemon", self.domain)))

    def boot(self) -> None:
        """As `ClaimsWorld.boot`."""
        super().boot()
        with_imex(self.tree.root)

    def with_claims(self, outside: app.Outside, client: ApiClient, kubelet: ClaimsKubelet) -> app.Outside:
        """The outside of a daemon that serves claims of compute domains only."""
        claims = self.claims_of(client, kubelet)
        domains = DomainsOutside(
            settings=DomainSettings(DomainMode.ON, NODE, (NAMESPACE,), directory=DIRECTORY),
            claims=replace(claims, node=_CountedNode(claims.node, self.disk)),
            domains=KubeDomains(client),
            imex=_InlineImex(ImexFiles(HostRoot(str(self.tree.root)))),
        )
        return replace(outside, domains=domains)

    @property
    def label(self) -> str | None:
        """The value of the label of our Node."""
        return label_of(self.api, NODE)

    def edits(self) -> list[str]:
        """The names of the CDI files."""
        return [Path(path).name for path in self.disk.files if path.startswith(f"{CDI_DIR}/")]

    def directories(self) -> tuple[str, ...]:
        """The domains' directories, and whatever else is beside them."""
        try:
            return self.disk.names(DIRECTORY)
        except FileNotFoundError:
            return ()


class _Direct:
    """An API server in the test's own thread, for `DomainObjects`."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server

    def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)


class _InlineImex:
    """Implements `ports.claims.ImexReader`."""

    def __init__(self, files: ImexFiles) -> None:
        self._files = files

    async def read(self) -> ImexFacts:
        await trio.lowlevel.checkpoint()
        return self._files.read()


class _CountedNode:
    """Implements `ports.kube.NodeApi`: the daemon can be killed before a patch, and before it knows of it."""

    def __init__(self, node: NodeApi, disk: FakeDisk) -> None:
        self._node = node
        self._disk = disk

    async def read(self) -> NodeMetadata:
        return await self._node.read()

    async def set_label(
        self, label: str, *, expected: str | None, value: str | None
    ) -> NodeMetadata | LabelConflict:
        self._disk.count(f"patch {expected} {value}")
        answer = await self._node.set_label(label, expected=expected, value=value)
        self._disk.count(f"patched {expected} {value}")
        return answer

    def watch_node(self) -> AbstractAsyncContextManager[AsyncIterator[NodeMetadata]]:
        return self._node.watch_node()
