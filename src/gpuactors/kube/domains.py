"""NVIDIA's ComputeDomains and ComputeDomainCliques, reduced to what one node needs. Implements `ports.kube.DomainApi`.

A ComputeDomain is known by its UID alone, and the server finds objects by name: the metadata of all are listed once,
and the place of the one is remembered, which it has as long as it is there. From then on that one alone is read and
watched: while a domain of n nodes becomes ready, its status changes n times, and n nodes read it after each change.
Either kind says that a node is ready (`status.nodes[]` and `daemons[]`); which counts is not decided here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Final, final
from urllib.parse import quote

import msgspec
import trio

from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, clique_name
from gpuactors.core.values.quote import quoted_name
from gpuactors.kube import errors, objects
from gpuactors.kube.client import METADATA_OF_LIST, METADATA_ONLY, ApiClient, Call
from gpuactors.kube.watch import Watch
from gpuactors.ports.kube import ApiRefused

DOMAINS_FOUND_MAX: Final = 64
"""Limit on the ComputeDomains whose namespace and name are remembered: as many as LABELS_KEPT."""

_API: Final = "/apis/resource.nvidia.com/v1beta1"
_DOMAINS: Final = f"{_API}/computedomains"
_CLIQUES: Final = "computedomaincliques"
_READY: Final = "Ready"

_OLDER: Final = (
    "has no ComputeDomainCliques. NVIDIA's DRA driver in this cluster is older than 25.12, or NVIDIA's "
    "CustomResourceDefinitions are missing: gpuactors serves the controller of 25.12 and newer, so upgrade it."
)


class _Node(msgspec.Struct):
    name: str
    status: str = ""


class _Status(msgspec.Struct):
    nodes: list[_Node] | None = None


class _Domain(msgspec.Struct):
    metadata: objects.Meta
    status: _Status | None = None


class _Daemon(msgspec.Struct, rename="camel"):
    node_name: str
    status: str = ""


class _Clique(msgspec.Struct):
    daemons: list[_Daemon] | None = None


class _Place(msgspec.Struct, frozen=True):
    """The place of an object at the server."""

    path: str
    """The list that it is in."""
    selector: str
    """The field selector of the object in the list: it needs no right to `get`."""


class _Lookup(msgspec.Struct):
    """The place of the domain with one UID."""

    place: _Place | None = None
    under_way: trio.Event | None = None
    """Set when the search in progress ends; None if there is none."""


@final
class KubeDomains:
    """The compute domains of a cluster, and their cliques."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._lookups: dict[DomainUid, _Lookup] = {}
        """The last DOMAINS_FOUND_MAX domains that were looked for."""

    async def find_domain(self, uid: DomainUid) -> ComputeDomain | None:
        if (place := await self._place(uid)) is None:
            return None
        what = f"read the ComputeDomain with UID {quoted_name(uid)}"
        call = Call(what, "GET", place.path, {"fieldSelector": place.selector})
        listed = await self._client.decoded(call, objects.ListOf[_Domain])
        return next((_domain(item) for item in listed.items or () if item.metadata.uid == uid), None)

    async def _place(self, uid: DomainUid) -> _Place | None:
        """Find the domain's place; None if the server has no such domain. Raises `ApiError`."""
        lookup = self._lookups.pop(uid, None) or _Lookup()
        self._lookups[uid] = lookup
        while len(self._lookups) > DOMAINS_FOUND_MAX:
            del self._lookups[next(iter(self._lookups))]
        while lookup.under_way is not None:
            await lookup.under_way.wait()
        if lookup.place is None:
            lookup.under_way = search = trio.Event()
            try:
                lookup.place = await self._find_place(uid)
            finally:
                lookup.under_way = None
                search.set()
        return lookup.place

    async def _find_place(self, uid: DomainUid) -> _Place | None:
        what = f"look for the ComputeDomain with UID {quoted_name(uid)}"
        call = Call(what, "GET", _DOMAINS, accept=METADATA_OF_LIST)
        listed = await self._client.decoded(call, objects.ListOf[objects.PartialObject])
        for item in listed.items or ():
            if item.metadata.uid == uid:
                path = f"{_API}/namespaces/{quote(item.metadata.namespace, safe='')}/computedomains"
                return _Place(path, f"metadata.name={item.metadata.name}")
        return None

    async def read_clique(self, uid: DomainUid, clique_id: str, namespace: str) -> Clique | None:
        name = clique_name(uid, clique_id)
        what = f"read the ComputeDomainClique {quoted_name(namespace)}/{quoted_name(name)}"
        path = f"{_API}/namespaces/{quote(namespace, safe='')}/{_CLIQUES}/{quote(name, safe='')}"
        try:
            daemons = (await self._client.decoded(Call(what, "GET", path), _Clique)).daemons or ()
        except ApiRefused as exc:
            # A server that does not know cliques answers 404 as well, and names none.
            refusal = exc.refusal
            if (refusal.code, refusal.kind, refusal.name) == (404, _CLIQUES, name):
                return None
            if refusal.code == 404:
                raise ApiRefused(f"could not {what}: {self._client.server} {_OLDER}", refusal) from exc
            raise
        return Clique(frozenset(daemon.node_name for daemon in daemons if daemon.status == _READY))

    def watch_domain(self, uid: DomainUid) -> AbstractAsyncContextManager[AsyncIterator[None]]:
        return aclosing(self._changed(uid))

    async def _changed(self, uid: DomainUid) -> AsyncGenerator[None]:
        if (place := await self._place(uid)) is None:
            await trio.sleep_forever()
        what = f"watch the ComputeDomain with UID {quoted_name(uid)}"
        watch = Watch(self._client, what, place.path, selector=place.selector, accept=METADATA_ONLY)
        while True:
            async with aclosing(watch.changes()) as changes:
                async for change in changes:
                    domain = errors.answered(what, self._client.server, change.object, objects.PartialObject)
                    if domain.metadata.uid == uid:  # else it was made anew by this name
                        yield


def _domain(stored: _Domain) -> ComputeDomain:
    nodes = (stored.status.nodes if stored.status is not None else None) or ()
    meta = stored.metadata
    ready = frozenset(node.name for node in nodes if node.status == _READY)
    is_deleted = bool(meta.deletion_timestamp)
    return ComputeDomain(DomainUid(meta.uid), meta.name, meta.namespace, ready, is_deleted)
