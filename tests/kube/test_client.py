"""The client of the API server: what it asks, how it fails, and with which sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from gpuactors.core.claims.opaque_config import API_VERSION
from gpuactors.core.domains import config as domain_config
from gpuactors.core.gpus import config as gpu_config
from gpuactors.core.gpus.config import KIND
from gpuactors.core.values.claim import (
    PARAMETER_FIELDS,
    AllocatedDevice,
    Claim,
    ClaimAbsent,
    ClaimName,
    ClaimReplaced,
    ClaimUid,
    OpaqueConfig,
)
from gpuactors.kube import client as kube_client
from gpuactors.kube import errors
from gpuactors.kube.client import API_REQUEST_S, ApiClient, Call
from gpuactors.kube.config import FileAccess, Server
from gpuactors.ports.kube import ApiAway, ApiMalformed, ApiRefused
from gpuactors_simulation.kube.http import serve_loopback
from gpuactors_simulation.kube.server import ApiAnswer, ApiFault, ApiRequest, FakeApiServer
from gpuactors_simulation.kube.status import NODES, SLICES, Object
from tests.kube.cluster import DRIVER, NODE, Cluster, cluster, spec
from tests.support.patience import patient

WITHIN_S = patient(10.0)

ALLOCATION = {
    "devices": {
        "results": [
            {"request": "gpu/any", "driver": DRIVER, "pool": NODE, "device": "gpu-0000-23-00-0", "new": [1]},
            {"request": "gpu", "driver": DRIVER, "pool": "node-2", "device": "gpu-0000-23-00-0"},
            {"request": "nic", "driver": "nic.example.com", "pool": NODE, "device": "nic-0"},
            {
                "request": "look", "driver": DRIVER, "pool": NODE, "device": "gpu-0000-24-00-0",
                "adminAccess": True, "shareID": "s-1",
            },
        ],
        "config": [
            {"source": "FromClass", "opaque": {"driver": DRIVER, "parameters": {"kind": "A", "x": [1, {"y": None}]}}},
            {"source": "FromClaim", "requests": ["nic"], "opaque": {"driver": "nic.example.com", "parameters": {}}},
            {"source": "FromClaim", "requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": {"kind": "B"}}},
        ],
    }
}  # fmt: skip


def claim_object(name: str = "vm", annotations: dict[str, str] | None = None) -> Object:
    return {"metadata": {"name": name, "namespace": "default", "annotations": annotations or {}}, "spec": {}}


def claim_name(found: Object, uid: str | None = None) -> ClaimName:
    meta = found["metadata"]
    return ClaimName(meta["namespace"], meta["name"], ClaimUid(uid or meta["uid"]))


@pytest.fixture
async def at() -> AsyncIterator[Cluster]:
    async with cluster() as found:
        yield found


# --- claims -----------------------------------------------------------------------------------------------


async def test_an_allocated_claim_has_our_part_of_its_allocation(at: Cluster) -> None:
    found = at.server.add_claim(claim_object(annotations={"resource.kubernetes.io/pod-claim-name": "c"}))
    at.server.set_claim_status("default", "vm", {"allocation": ALLOCATION})
    assert await at.claims.read(claim_name(found)) == Claim(
        claim_name(found),
        pod_claim_name="c",
        generation=0,
        results=(
            AllocatedDevice("gpu/any", NODE, "gpu-0000-23-00-0"),
            AllocatedDevice("look", NODE, "gpu-0000-24-00-0", "s-1", admin_access=True),
        ),
        configs=(
            OpaqueConfig(True, (), {"kind": "A", "x": None}),
            OpaqueConfig(False, ("gpu",), {"kind": "B"}),
        ),
    )


async def test_of_what_no_configuration_of_ours_has_only_the_name_is_kept(at: Cluster) -> None:
    """What a user put there by mistake may be a secret, and what is read is in the journal."""
    found = at.server.add_claim(claim_object())
    odd = {"kind": KIND, "password": "hunter2", "iommu": {"token": "hunter2", "backendPolicy": ["hunter2"]}}
    config = [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": odd}}]
    devices = {**ALLOCATION["devices"], "config": config}
    at.server.set_claim_status("default", "vm", {"allocation": {"devices": devices}})
    answer = await at.claims.read(claim_name(found))
    assert isinstance(answer, Claim)
    assert b"hunter2" not in msgspec.json.encode(answer)
    kept = answer.configs[0].parameters
    assert isinstance(kept, dict)
    fault = gpu_config.decoded({**kept, "apiVersion": API_VERSION})
    assert "unknown field password" in str(fault), "the sentence names it all the same"


def test_the_fields_whose_values_are_kept_are_those_of_our_configurations() -> None:
    own = {"apiVersion", "kind", "iommu", "backendPolicy", "enableAPIDevice"}
    assert own.union(*domain_config._FIELDS.values()) == PARAMETER_FIELDS
    for field in own - {"apiVersion", "kind", "iommu"}:
        fault = gpu_config.decoded({"apiVersion": API_VERSION, "kind": KIND, "iommu": {field: 1}})
        assert f"iommu.{field} is" in str(fault)


async def test_parameters_of_another_driver_that_nest_without_end_cost_the_claim_nothing(
    at: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = at.server.add_claim(claim_object())
    at.server.set_claim_status("default", "vm", {"allocation": ALLOCATION})
    ask = at.client.ask

    async def deep(_: ApiClient, call: Call) -> bytes:
        return (await ask(call)).replace(
            b'"parameters": {}', b'"parameters":{"a":%s}' % (b"[" * 5000 + b"]" * 5000)
        )

    monkeypatch.setattr(ApiClient, "ask", deep)
    answer = await at.claims.read(claim_name(found))
    assert isinstance(answer, Claim)
    assert answer.results is not None
    assert [config.parameters for config in answer.configs] == [
        {"kind": "A", "x": None},
        {"kind": "B"},
    ]


async def test_an_unallocated_claim_is_an_answer(at: Cluster) -> None:
    """So it is again when its pod has gone (claim-after-its-pod)."""
    found = at.server.add_claim(claim_object())
    answer = await at.claims.read(claim_name(found))
    assert isinstance(answer, Claim)
    assert answer.results is None


async def test_a_claim_that_is_allocated_elsewhere_has_no_result_of_ours(at: Cluster) -> None:
    found = at.server.add_claim(claim_object())
    at.server.set_claim_status("default", "vm", {"allocation": {}})
    answer = await at.claims.read(claim_name(found))
    assert isinstance(answer, Claim)
    assert answer.results == ()


async def test_a_claim_of_another_uid_is_an_answer(at: Cluster) -> None:
    found = at.server.add_claim(claim_object())
    replaced = ClaimReplaced(ClaimUid(found["metadata"]["uid"]))
    assert await at.claims.read(claim_name(found, uid="another")) == replaced


async def test_a_claim_that_is_absent_is_an_answer(at: Cluster) -> None:
    assert await at.claims.read(ClaimName("default", "nope", ClaimUid("x"))) == ClaimAbsent()


async def test_a_404_that_is_not_of_the_claim_is_no_absence(at: Cluster) -> None:
    """A server that does not serve claims answers 404 (not-served-version); nothing is released for that."""
    at.server.kinds = (NODES, SLICES)
    with pytest.raises(ApiRefused) as refused:
        await at.claims.read(ClaimName("default", "vm", ClaimUid("x")))
    assert refused.value.code == 404


async def test_an_answer_about_another_object_is_no_answer(at: Cluster) -> None:
    """A claim without a name: the server lists all."""
    at.server.add_claim(claim_object())
    with pytest.raises(ApiMalformed, match="another object"):
        await at.claims.read(ClaimName("default", "", ClaimUid("x")))


@pytest.mark.parametrize("namespace", ["default/resourceclaims/vm?x=", "..", "a b", "ä"])
async def test_a_name_of_kubelet_is_one_part_of_the_path(at: Cluster, namespace: str) -> None:
    at.server.add_claim(claim_object())
    assert await at.claims.read(ClaimName(namespace, "vm", ClaimUid("x"))) == ClaimAbsent()


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "named"),
    [
        (ApiFault.FORBIDDEN, 403, ("cannot get resource", "RBAC")),
        (ApiFault.OVERLOADED, 429, ("TooManyRequests", "overloaded")),
        (ApiFault.BROKEN, 500, ("InternalError", "log")),
        (ApiFault.UNAVAILABLE, 503, ("upstream connect error",)),
    ],
)
async def test_a_refusal_says_what_where_and_the_remedy(
    at: Cluster, fault: ApiFault, code: int, named: tuple[str, ...]
) -> None:
    at.server.order(fault)
    with pytest.raises(ApiRefused) as refused:
        await at.claims.read(ClaimName("default", "vm", ClaimUid("x")))
    assert refused.value.code == code
    for words in ("could not read the claim default/vm", "http://kube-apiserver:80", str(code), *named):
        assert words in str(refused.value)


@pytest.mark.parametrize("fault", [ApiFault.OVERLOADED, ApiFault.THROTTLED])
async def test_a_wait_that_the_server_asks_for_is_known(at: Cluster, fault: ApiFault) -> None:
    """In the body, or as priority and fairness has it, in the header beside a plain text."""
    at.server.order(fault)
    with pytest.raises(ApiRefused) as refused:
        await at.node.read()
    assert refused.value.refusal.retry_after_s == 1


@pytest.mark.parametrize(
    ("header", "asked_s"),
    [(b"7", 7), (b"", None), (b"Wed, 21 Oct 2026 07:28:00 GMT", None), (b"-1", None), (b"9" * 5000, None)],
)
def test_the_header_retry_after_is_a_number_of_seconds_or_nothing(header: bytes, asked_s: int | None) -> None:
    assert errors.refusal(429, b"too many", header).retry_after_s == asked_s


def test_a_reason_of_70_kb_is_not_repeated_whole() -> None:
    said = errors.refusal(500, b'{"reason": "' + b"x" * 70_000 + b'"}')
    assert len(str(errors.refused("read", "server", said))) < 1000


async def test_a_server_that_is_away_is_named(at: Cluster) -> None:
    at.server.go_away()
    with pytest.raises(
        ApiAway, match="read the node node-1: the API server http://kube-apiserver:80 cannot be"
    ):
        await at.node.read()


async def test_a_shortage_of_our_own_is_no_fault_of_the_server(at: Cluster) -> None:
    async def no_descriptor(_: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    at.api.connect = no_descriptor  # type: ignore[assignment, method-assign]
    with pytest.raises(ApiAway, match=r"no file descriptors left \(EMFILE\)"):
        await at.node.read()


async def test_a_request_that_is_never_answered_ends_at_its_deadline(
    at: Cluster, autojump_clock: trio.testing.MockClock
) -> None:
    at.server.order(ApiFault.HANGS)
    began = trio.current_time()
    with pytest.raises(ApiAway, match="did not answer in 10 s"):
        await at.node.read()
    assert trio.current_time() - began == pytest.approx(API_REQUEST_S)


async def test_a_connection_that_breaks_before_the_answer_is_told(at: Cluster) -> None:
    at.server.order(ApiFault.ANSWER_LOST)
    with pytest.raises(ApiAway):
        await at.node.read()


async def test_a_cancelled_request_leaves_no_connection(
    at: Cluster, autojump_clock: trio.testing.MockClock
) -> None:
    at.server.order(ApiFault.HANGS)
    with trio.move_on_after(1.0):
        await at.node.read()
    await trio.testing.wait_all_tasks_blocked()
    assert at.api.connections == 0


async def test_an_answered_request_leaves_no_connection(at: Cluster) -> None:
    await at.node.read()
    at.server.order(ApiFault.BROKEN)
    with pytest.raises(ApiRefused):
        await at.node.read()
    assert at.api.connections == 0


async def test_an_answer_that_trickles_for_ever_ends_at_the_deadline(
    at: Cluster, autojump_clock: trio.testing.MockClock
) -> None:
    async def trickle() -> AsyncIterator[Object]:
        while True:
            await trio.sleep(1.0)
            yield {}

    async def answer(_: ApiRequest) -> ApiAnswer:
        return ApiAnswer(200, lines=trickle())

    at.server.answer = answer  # type: ignore[assignment, method-assign]
    with trio.fail_after(2 * API_REQUEST_S), pytest.raises(ApiAway, match="did not answer in 10 s"):
        await at.node.read()


async def test_an_answer_of_another_shape_is_malformed(at: Cluster) -> None:
    at.server.add_claim(claim_object())
    found = at.server.set_claim_status("default", "vm", {"allocation": {"devices": {"results": "none"}}})
    with pytest.raises(ApiMalformed, match=r"results.*1\.34 or newer"):
        await at.claims.read(claim_name(found))


# --- over a socket ----------------------------------------------------------------------------------------


@asynccontextmanager
async def on_loopback(server: FakeApiServer, token: str | None = None) -> AsyncIterator[ApiClient]:
    with trio.fail_after(WITHIN_S):
        async with serve_loopback(server) as port:
            yield ApiClient(FileAccess(Server("http", "127.0.0.1", port), token=token))


GROUP = Call("read the group", "GET", "/apis/resource.k8s.io")


async def test_over_a_socket_it_is_asked_and_answers() -> None:
    async with on_loopback(FakeApiServer(tokens=frozenset({"good"})), "good") as client:
        assert b"APIGroup" in await client.ask(GROUP)


async def test_a_bad_token_is_refused_with_its_remedy() -> None:
    async with on_loopback(FakeApiServer(tokens=frozenset({"good"})), "bad") as client:
        with pytest.raises(ApiRefused, match=r"401 Unauthorized.*check that the token"):
            await client.ask(GROUP)


async def test_a_port_that_refuses_is_told_in_the_kernels_word() -> None:
    async with on_loopback(FakeApiServer()) as client:
        pass
    with trio.fail_after(WITHIN_S), pytest.raises(ApiAway, match="ECONNREFUSED"):
        await client.ask(GROUP)


# --- bounds -----------------------------------------------------------------------------------------------


async def test_an_answer_without_end_is_malformed(at: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_client, "API_BODY_MAX_BYTES", 100)
    with pytest.raises(ApiMalformed, match="more than 100 bytes"):
        await at.node.read()


async def test_a_line_without_end_is_malformed(at: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_client, "API_LINE_MAX_BYTES", 100)

    async def long() -> AsyncIterator[Object]:
        yield {"x": "y" * 50}
        yield {"x": "y" * 200_000}

    async def answer(_: ApiRequest) -> ApiAnswer:
        return ApiAnswer(200, lines=long())

    at.server.answer = answer  # type: ignore[assignment, method-assign]
    with trio.fail_after(WITHIN_S):
        async with at.client.lines(GROUP, 10.0) as lines:
            assert len(await anext(lines)) == 59
            with pytest.raises(ApiMalformed, match="a line of it has more than 100 bytes"):
                await anext(lines)


async def test_a_watch_that_is_left_closes_its_connection(at: Cluster) -> None:
    async with at.slices.follow() as events:
        await anext(events)
        await at.slices.create(spec("gpu-a"), 0, at.node_uid)
        await anext(events)
        assert at.api.connections == 1
    assert at.api.connections == 0
