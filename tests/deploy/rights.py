"""The rights that the client's requests need, by asking a fake API server, and those that a role grants."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final
from urllib.parse import urlsplit

import trio

from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.core.values.domain import LABEL, DomainUid
from gpuactors.ports.kube import (
    ClaimApi,
    DeviceClassApi,
    DomainApi,
    EventApi,
    EventNote,
    NodeApi,
    SliceApi,
)
from tests.deploy.manifests import ROOT, Manifest
from tests.kube.cluster import NAMESPACE, Cluster, cluster, spec

UID: Final = "8f0e2c1a-5d3b-4a77-9c61-0b1f2d3e4a5b"

Right = tuple[str, str, str]
"""API group, resource, verb."""

Method = tuple[type, str]
"""A port of the API server, and one of its methods."""


async def _claim_read(at: Cluster) -> None:
    await at.claims.read(ClaimName("default", "one", ClaimUid(UID)))


async def _claim_pods_read(at: Cluster) -> None:
    await at.claims.reserved_for(ClaimName("default", "one", ClaimUid(UID)))


async def _event_told(at: Cluster) -> None:
    for count in (1, 2):
        await at.events.tell(EventNote(at.events.node, "HeldByOther", "held", count, 0.0, 0.0))


async def _node_read(at: Cluster) -> None:
    await at.node.read()


async def _slices_followed(at: Cluster) -> None:
    with trio.move_on_after(10):
        async with at.slices.follow() as events:
            async for _ in events:
                pass


async def _slice_created(at: Cluster) -> None:
    await at.slices.create(spec("a"), 0, at.node_uid)
    await at.slices.create(spec("probe"), 0, at.node_uid, dry_run=True)


async def _slice_updated(at: Cluster) -> None:
    stored = await at.slices.create(spec("a"), 0, at.node_uid)
    at.server.requests.clear()
    await at.slices.update(stored, spec("a", "b"), at.node_uid)


async def _slice_deleted(at: Cluster) -> None:
    stored = await at.slices.create(spec("a"), 0, at.node_uid)
    at.server.requests.clear()
    await at.slices.delete(stored)


async def _label_set(at: Cluster) -> None:
    await at.node.set_label(LABEL, expected=None, value=UID)
    await at.node.set_label(LABEL, expected=UID, value=None)


async def _node_watched(at: Cluster) -> None:
    with trio.move_on_after(10):
        async with at.node.watch_node() as found:
            async for _ in found:
                pass


async def _domain_found(at: Cluster) -> None:
    made = at.server.add_domain("team-a", "training")
    await at.domains.find_domain(DomainUid(made["metadata"]["uid"]))


async def _clique_read(at: Cluster) -> None:
    await at.domains.read_clique(DomainUid(UID), "c.1", NAMESPACE)


async def _domain_watched(at: Cluster) -> None:
    made = at.server.add_domain("team-a", "training")
    with trio.move_on_after(10):
        async with at.domains.watch_domain(DomainUid(made["metadata"]["uid"])) as changed:
            async for _ in changed:
                pass


async def _classes_listed(at: Cluster) -> None:
    await at.classes.list_classes()


MADE_BY: Final[dict[Method, Callable[[Cluster], Awaitable[None]]]] = {
    (ClaimApi, "read"): _claim_read,
    (ClaimApi, "reserved_for"): _claim_pods_read,
    (EventApi, "tell"): _event_told,
    (NodeApi, "read"): _node_read,
    (NodeApi, "set_label"): _label_set,
    (NodeApi, "watch_node"): _node_watched,
    (SliceApi, "follow"): _slices_followed,
    (SliceApi, "create"): _slice_created,
    (SliceApi, "update"): _slice_updated,
    (SliceApi, "delete"): _slice_deleted,
    (DomainApi, "find_domain"): _domain_found,
    (DomainApi, "read_clique"): _clique_read,
    (DomainApi, "watch_domain"): _domain_watched,
    (DeviceClassApi, "list_classes"): _classes_listed,
}
"""The requests of each method of the API's ports that an actor calls."""

OF_CLAIMS: Final = frozenset(
    {
        (ClaimApi, "read"),
        (ClaimApi, "reserved_for"),
        (NodeApi, "read"),
        (DeviceClassApi, "list_classes"),
        *((SliceApi, name) for name in ("follow", "create", "update", "delete")),
    }
)
"""Those that claims of GPUs need."""

OF_FLEET: Final = frozenset({(NodeApi, "read")})
"""Those that entries of a configuration file need which match by labels."""

OF_EVENTS: Final = frozenset({(EventApi, "tell")})
"""Those that Kubernetes Events need; the pods of a claim are read with the right that claims have."""


def called_by_actors() -> set[Method]:
    """The methods that any actor calls."""
    sources = "".join(p.read_text() for p in sorted((ROOT / "src/gpuactors/actors").glob("*.py")))
    return {
        (port, name)
        for port in (ClaimApi, DeviceClassApi, EventApi, NodeApi, SliceApi, DomainApi)
        for name in vars(port)
        if not name.startswith("_") and callable(getattr(port, name)) and re.search(rf"\.{name}\(", sources)
    }


async def used_by(methods: Collection[Method]) -> set[tuple[str, Right]]:
    """The rights that these need, each with its namespace; `` for all."""
    used: set[tuple[str, Right]] = set()
    for method in methods:
        async with cluster() as at:
            await MADE_BY[method](at)
            found = [*at.server.requests]
        assert found, method
        used |= {right_of(*request) for request in found}
    return used


def right_of(method: str, target: str) -> tuple[str, Right]:
    """As the API server derives it (apiserver/pkg/endpoints/request, RequestInfoFactory). Claims are of any namespace,
    and cliques of that of NVIDIA's driver, whichever it is: no namespace counts."""
    url = urlsplit(target)
    _, prefix, *parts = url.path.split("/")
    group = parts.pop(0) if prefix == "apis" else ""
    _version, *parts = parts
    if parts[0] == "namespaces":
        parts = parts[2:]
    resource, *name = parts
    match method:
        case "GET" if name:
            verb = "get"
        case "GET":
            verb = "watch" if "watch=true" in url.query else "list"
        case "DELETE":
            verb = "delete" if name else "deletecollection"
        case _:
            verb = {"POST": "create", "PUT": "update", "PATCH": "patch"}[method]
    return "", (group, resource, verb)


def rights_of(roles: Iterable[Manifest]) -> list[tuple[str, Right]]:
    """What these grant, each right with its namespace; one that is granted twice is there twice."""
    return [
        (role["metadata"].get("namespace", ""), (group, resource, verb))
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]
