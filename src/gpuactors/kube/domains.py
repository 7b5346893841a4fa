"""NVIDIA's ComputeDomains and ComputeDomainCliques, reduced to what one node needs. Implements `ports.kube.DomainApi`.

A ComputeDomain is known by its UID alone, and the server finds objects by name: all are listed. Either kind says that a
node is ready (`status.nodes[]` and `daemons[]`); which counts is not decided here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Final, final
from urllib.parse import quote

import msgspec

from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, clique_name
from gpuactors.core.values.quote import quoted_name
from gpuactors.kube import errors, objects
from gpuactors.kube.client import METADATA_ONLY, ApiClient, Call
from gpuactors.kube.watch import Watch
from gpuactors.ports.kube import ApiRefused

_API: Final = "/apis/resource.nvidia.com/v1beta1"
_DOMAINS: Final = f"{_API}/computedomains"
_CLIQUES: Final = "computedomaincliques"
_READY: Final = "Ready"


class _Node(msgspec.Struct):
    name: str
    status: str = ""


class _Status(msgspec.Struct):
    nodes: list[_Node] | None = None


class _Domain(msgspec.Struct):
    metadata: objects.Meta
    status: _Status | None = None


class _Domains(msgspec.Struct):
    items: list[_Domain]


class _Daemon(msgspec.Struct, rename="camel"):
    node_name: str
    status: str = ""


class _Clique(msgspec.Struct):
    daemons: list[_Daemon] | None = None


@final
class KubeDomains:
    """The compute domains of a cluster, and their cliques."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._watch = Watch(client, "watch the ComputeDomains", _DOMAINS, accept=METADATA_ONLY)

    async def find_domain(self, uid: DomainUid) -> ComputeDomain | None:
        """Implement `DomainApi.find_domain`."""
        call = Call(f"look for the ComputeDomain with UID {quoted_name(uid)}", "GET", _DOMAINS)
        body = await self._client.ask(call)
        found = errors.answered(call.what, self._client.server, body, _Domains).items
        return next((_domain(one) for one in found if one.metadata.uid == uid), None)

    async def read_clique(self, uid: DomainUid, clique_id: str, namespace: str) -> Clique | None:
        """Implement `DomainApi.read_clique`."""
        name = clique_name(uid, clique_id)
        what = f"read the ComputeDomainClique {quoted_name(namespace)}/{quoted_name(name)}"
        path = f"{_API}/namespaces/{quote(namespace, safe='')}/{_CLIQUES}/{quote(name, safe='')}"
        try:
            body = await self._client.ask(Call(what, "GET", path))
        except ApiRefused as exc:
            # A server that does not know cliques answers 404 as well, and names none.
            said = exc.refusal
            if (said.code, said.kind, said.name) == (404, _CLIQUES, name):
                return None
            raise
        daemons = errors.answered(what, self._client.server, body, _Clique).daemons or ()
        return Clique(frozenset(daemon.node_name for daemon in daemons if daemon.status == _READY))

    @asynccontextmanager
    async def watch_domains(self) -> AsyncIterator[AsyncIterator[DomainUid]]:
        """Implement `DomainApi.watch_domains`."""
        async with aclosing(self._changed()) as changed:
            yield changed

    async def _changed(self) -> AsyncGenerator[DomainUid]:
        while True:
            async with aclosing(self._watch.changes()) as changes:
                async for change in changes:
                    found = errors.answered(
                        self._watch.what, self._client.server, change.object, objects.PartialObject
                    )
                    yield DomainUid(found.metadata.uid)


def _domain(found: _Domain) -> ComputeDomain:
    nodes = (found.status.nodes if found.status is not None else None) or ()
    meta = found.metadata
    ready = frozenset(node.name for node in nodes if node.status == _READY)
    is_deleted = bool(meta.deletion_timestamp)
    return ComputeDomain(DomainUid(meta.uid), meta.name, meta.namespace, ready, is_deleted)
