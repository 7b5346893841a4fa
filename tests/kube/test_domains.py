"""ComputeDomains and ComputeDomainCliques over the API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid
from gpuactors.kube.client import METADATA_OF_LIST, ApiClient, Call
from gpuactors.kube.config import FileAccess, Server
from gpuactors.kube.domains import DOMAINS_FOUND_MAX, KubeDomains
from gpuactors.kube.watch import WATCH_S
from gpuactors.ports.kube import ApiMalformed, ApiRefused
from gpuactors_simulation.kube.http import serve_loopback
from gpuactors_simulation.kube.server import ApiFault, FakeApiServer
from gpuactors_simulation.kube.status import CLIQUES, DOMAINS, KINDS, Object
from tests.kube.cluster import NAMESPACE, NODE, Cluster, cluster
from tests.support.patience import patient

CLIQUE = "3f1c2a10-0000-4000-8000-00000000000a.7"
NOBODYS = DomainUid("11111111-2222-4333-8444-555555555555")


@pytest.fixture
async def at() -> AsyncIterator[Cluster]:
    async with cluster() as found:
        yield found


def uid_of(found: Object) -> DomainUid:
    return DomainUid(found["metadata"]["uid"])


# --- ComputeDomains ---------------------------------------------------------------------------------------


async def test_a_domain_is_found_by_its_uid_in_every_namespace(at: Cluster) -> None:
    at.server.add_domain("team-a", "training")
    uid = uid_of(at.server.add_domain("team-b", "training"))
    assert await at.domains.find_domain(uid) == ComputeDomain(uid, "training", "team-b")


async def test_the_nodes_that_are_ready_are_those_of_its_status(at: Cluster) -> None:
    uid = uid_of(at.server.add_domain("team-a", "training"))
    at.server.set_domain_nodes("team-a", "training", {NODE: "Ready", "node-2": "NotReady", "node-3": "Ready"})
    found = await at.domains.find_domain(uid)
    assert found == ComputeDomain(uid, "training", "team-a", frozenset({NODE, "node-3"}))


async def test_a_domain_that_is_absent_or_made_anew_by_its_name_is_none(at: Cluster) -> None:
    assert await at.domains.find_domain(NOBODYS) is None
    uid = uid_of(at.server.add_domain("team-a", "training"))
    at.server.delete_domain("team-a", "training")
    at.server.add_domain("team-a", "training")
    assert await at.domains.find_domain(uid) is None


async def test_no_domain_in_the_cluster_is_an_absence(at: Cluster) -> None:
    """The server answers a list of metadata of no custom resource with `null`, and not with an empty list."""
    path = "/apis/resource.nvidia.com/v1beta1/computedomains"
    answer = await at.client.ask(Call("list", "GET", path, accept=METADATA_OF_LIST))
    assert json.loads(answer)["items"] is None
    assert await at.domains.find_domain(NOBODYS) is None


async def test_a_server_without_compute_domains_is_no_absence(at: Cluster) -> None:
    at.server.kinds = tuple(kind for kind in KINDS if kind not in (DOMAINS, CLIQUES))
    with pytest.raises(ApiRefused, match="NVIDIA's CustomResourceDefinitions"):
        await at.domains.find_domain(NOBODYS)
    with pytest.raises(ApiRefused, match="NVIDIA's CustomResourceDefinitions"):
        await at.domains.read_clique(NOBODYS, CLIQUE, NAMESPACE)


async def test_a_driver_before_cliques_is_refused_with_the_versions_that_are_served(at: Cluster) -> None:
    """NVIDIA's driver before 25.12: the definitions have domains only."""
    uid = uid_of(at.server.add_domain("team-a", "training"))
    at.server.kinds = tuple(kind for kind in KINDS if kind is not CLIQUES)
    assert await at.domains.find_domain(uid) is not None
    with pytest.raises(ApiRefused, match=r"older than 25\.12.*serves the controller of 25\.12 and newer"):
        await at.domains.read_clique(uid, CLIQUE, NAMESPACE)


@pytest.mark.parametrize(
    "status", [None, {}, {"status": "NotReady"}, {"nodes": None}, {"nodes": [{"name": "x"}]}]
)
async def test_a_status_that_says_nothing_of_a_node_says_that_none_is_ready(
    at: Cluster, status: Object | None
) -> None:
    found = at.server.add_domain("team-a", "training")
    at.server.store.put(DOMAINS, found | {"status": status})
    domain = await at.domains.find_domain(uid_of(found))
    assert domain is not None
    assert domain.ready_nodes == frozenset()


async def test_a_status_of_another_shape_is_malformed(at: Cluster) -> None:
    found = at.server.add_domain("team-a", "training")
    at.server.store.put(DOMAINS, found | {"status": {"nodes": [{"name": 7}]}})
    with pytest.raises(ApiMalformed, match="read the ComputeDomain with UID"):
        await at.domains.find_domain(uid_of(found))


# --- cliques ----------------------------------------------------------------------------------------------


async def test_a_clique_is_read_by_domain_and_fabric_in_the_drivers_namespace(at: Cluster) -> None:
    at.server.set_clique(NAMESPACE, NOBODYS, CLIQUE, {NODE: "Ready", "node-2": "NotReady"})
    assert await at.domains.read_clique(NOBODYS, CLIQUE, NAMESPACE) == Clique(frozenset({NODE}))
    at.server.set_clique(NAMESPACE, NOBODYS, CLIQUE, {NODE: "NotReady"})
    assert await at.domains.read_clique(NOBODYS, CLIQUE, NAMESPACE) == Clique()


async def test_a_clique_that_nobody_has_written_is_none(at: Cluster) -> None:
    at.server.set_clique("elsewhere", NOBODYS, CLIQUE, {NODE: "Ready"})
    assert await at.domains.read_clique(NOBODYS, CLIQUE, NAMESPACE) is None


async def test_a_clique_without_daemons_has_none_ready(at: Cluster) -> None:
    at.server.set_clique(NAMESPACE, NOBODYS, CLIQUE, {})
    assert await at.domains.read_clique(NOBODYS, CLIQUE, NAMESPACE) == Clique()


async def test_what_the_driver_says_of_the_fabric_is_one_part_of_the_path(at: Cluster) -> None:
    assert await at.domains.read_clique(NOBODYS, "../../../secrets?watch=true", NAMESPACE) is None
    ((_, target),) = at.server.requests
    assert target.endswith(f"/computedomaincliques/{NOBODYS}...%2F..%2F..%2Fsecrets%3Fwatch%3Dtrue")


async def test_a_domain_is_looked_for_once_and_read_alone_from_then_on(at: Cluster) -> None:
    """Hundreds of domains of hundreds of nodes are megabytes, and a claim that waits reads every two seconds."""
    domains = at.domains
    for number in range(20):
        at.server.add_domain("team-a", f"other-{number}")
    uid = uid_of(at.server.add_domain("team-b", "training"))
    for ready in ("NotReady", "Ready", "Ready"):
        at.server.set_domain_nodes("team-b", "training", {NODE: ready})
        found = await domains.find_domain(uid)
        assert found is not None
        assert found.ready_nodes == ({NODE} if ready == "Ready" else set())
    targets = [target.partition("/v1beta1/")[2] for _, target in at.server.requests]
    alone = "namespaces/team-b/computedomains?fieldSelector=metadata.name%3Dtraining"
    assert targets == ["computedomains", alone, alone, alone]


async def test_a_domain_that_goes_is_none_though_its_place_is_known(at: Cluster) -> None:
    domains, uid = at.domains, uid_of(at.server.add_domain("team-a", "training"))
    assert await domains.find_domain(uid) is not None
    at.server.delete_domain("team-a", "training")
    assert await domains.find_domain(uid) is None
    at.server.add_domain("team-a", "training")
    assert await domains.find_domain(uid) is None, "another one has its name"


async def test_no_more_places_are_remembered_than_are_of_use(at: Cluster) -> None:
    domains = at.domains
    uids = [
        uid_of(at.server.add_domain("team-a", f"training-{number}"))
        for number in range(DOMAINS_FOUND_MAX + 1)
    ]
    for uid in uids:
        await domains.find_domain(uid)
    at.asked()
    assert await domains.find_domain(uids[-1]) is not None
    assert at.asked() == ["GET computedomains"]
    assert await domains.find_domain(uids[0]) is not None, "the first one is looked for again"
    assert at.asked() == ["GET computedomains"] * 2


# --- the watch --------------------------------------------------------------------------------------------


async def test_each_change_of_one_domain_is_told_and_none_of_another(autojump_clock: MockClock) -> None:
    async with cluster() as at, trio.open_nursery() as nursery:
        uid = uid_of(at.server.add_domain("team-a", "training"))
        seen: list[None] = []

        async def watch() -> None:
            async with at.domains.watch_domain(uid) as changed:
                async for one in changed:
                    seen.append(one)  # noqa: PERF401 -- it is looked at meanwhile

        async def came() -> int:
            await wait_all_tasks_blocked(0.001)
            found = len(seen)
            seen.clear()
            return found

        nursery.start_soon(watch)
        assert await came() == 1, "as it is now"
        at.server.add_domain("team-b", "training")
        at.server.add_domain("team-a", "another")
        at.server.label_node(NODE, "some", "thing")
        assert await came() == 0
        at.server.set_domain_nodes("team-a", "training", {NODE: "Ready"})
        at.server.delete_domain("team-a", "training")
        assert await came() == 2
        at.server.add_domain("team-a", "training")
        assert await came() == 0, "another domain by its name"
        at.asked()
        await trio.sleep(2 * WATCH_S)
        assert {*at.asked()} == {"WATCH computedomains"}
        assert await came() == 0
        nursery.cancel_scope.cancel()


async def test_a_domain_that_is_not_there_is_not_watched(autojump_clock: MockClock) -> None:
    async with cluster() as at:
        with trio.move_on_after(WATCH_S):
            async with at.domains.watch_domain(NOBODYS) as changed:
                await anext(changed)
        assert at.asked() == ["GET computedomains"], "it is looked for once, and a read finds it if it comes"


async def test_a_watch_that_may_not_be_is_told_with_the_remedy(autojump_clock: MockClock) -> None:
    async with cluster() as at:
        domains, uid = at.domains, uid_of(at.server.add_domain("team-a", "training"))
        await domains.find_domain(uid)
        at.server.order(ApiFault.FORBIDDEN)
        with pytest.raises(ApiRefused, match=r"could not watch the ComputeDomain with.*`compute-domains`"):
            async with domains.watch_domain(uid) as changed:
                await anext(changed)


async def test_over_a_socket_a_domain_and_its_clique_are_read() -> None:
    server = FakeApiServer()
    uid = uid_of(server.add_domain("team-a", "training"))
    server.set_clique(NAMESPACE, uid, CLIQUE, {NODE: "Ready"})
    with trio.fail_after(patient(10.0)):
        async with serve_loopback(server) as port:
            domains = KubeDomains(ApiClient(FileAccess(Server("http", "127.0.0.1", port))))
            assert await domains.find_domain(uid) == ComputeDomain(uid, "training", "team-a")
            assert await domains.read_clique(uid, CLIQUE, NAMESPACE) == Clique(frozenset({NODE}))
            async with domains.watch_domain(uid) as changed:
                await anext(changed)
