"""Events at a fake API server, by the daemon's own client: made once, renewed by their identity, and refused in
sentences."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.kube.client import Call
from gpuactors.kube.events import EVENT_MESSAGE_MAX_BYTES
from gpuactors.ports.kube import ApiRefused, EventNote, ObjectRef
from gpuactors_simulation.kube.server import ApiFault
from gpuactors_simulation.kube.status import EVENTS
from tests.kube.cluster import NODE, Cluster, cluster

POD = ObjectRef("Pod", "default", "vm", "d3f0c9f4-4f6e-4f0e-8f4b-7f9c0a4b8e11")
NOON = 1_795_348_800.0


@pytest.fixture
async def at(autojump_clock: MockClock) -> AsyncIterator[Cluster]:
    async with cluster() as found:
        yield found


def note(about: ObjectRef, count: int = 1, message: str = "held") -> EventNote:
    return EventNote(about, "HeldByOther", message, count, NOON, NOON + 60.0 * (count - 1))


async def test_an_event_about_the_node_is_as_kubelets_own(at: Cluster) -> None:
    assert await at.events.tell(note(at.events.node)) == 1
    (made,) = at.server.events()
    assert made["metadata"]["namespace"] == "default"
    assert made["metadata"]["name"].startswith(f"{NODE}.")
    # `kubectl describe node` looks for the node's name as its UID.
    assert made["involvedObject"] == {"kind": "Node", "name": NODE, "uid": NODE}
    assert (made["reason"], made["message"], made["type"], made["count"]) == (
        "HeldByOther",
        "held",
        "Warning",
        1,
    )
    assert made["source"] == {"component": "gpuactors", "host": NODE}
    assert made["firstTimestamp"] == made["lastTimestamp"] == "2026-11-22T12:00:00Z"


async def test_an_event_about_a_pod_is_in_its_namespace_with_its_uid(at: Cluster) -> None:
    await at.events.tell(note(POD))
    (made,) = at.server.events()
    assert made["metadata"]["namespace"] == "default"
    assert made["involvedObject"] == {
        "kind": "Pod", "namespace": "default", "name": "vm", "uid": POD.uid, "apiVersion": "v1",
    }  # fmt: skip


async def test_a_repeat_counts_on_the_same_one(at: Cluster) -> None:
    assert [await at.events.tell(note(POD, count)) for count in (1, 2, 3)] == [1, 2, 3]
    (found,) = at.server.events()
    assert (found["count"], found["firstTimestamp"]) == (3, "2026-11-22T12:00:00Z")
    assert found["lastTimestamp"] == "2026-11-22T12:02:00Z"
    await at.events.tell(note(POD, message="held by another"))
    assert len(at.server.events()) == 2


async def test_a_daemon_that_has_restarted_finds_its_event_and_its_count(at: Cluster) -> None:
    for count in (1, 2, 3):
        await at.events.tell(note(POD, count))
    again = replace(note(POD), last_at=NOON + 3600.0)
    assert await at.events.tell(again) == 3
    (found,) = at.server.events()
    assert (found["count"], found["lastTimestamp"]) == (3, "2026-11-22T13:00:00Z")
    assert [method for method, _ in at.server.requests][-2:] == ["POST", "PATCH"]


async def test_one_that_the_server_has_forgotten_is_made_anew(at: Cluster) -> None:
    await at.events.tell(note(POD))
    (made,) = at.server.events()
    at.server.store.delete(EVENTS, "default", made["metadata"]["name"])
    assert await at.events.tell(note(POD, 2)) == 1
    assert [e["count"] for e in at.server.events()] == [1]


async def test_a_long_message_is_cut_at_a_whole_character(at: Cluster) -> None:
    await at.events.tell(note(POD, message="ä" * 2000))
    (made,) = at.server.events()
    assert made["message"].endswith("ä…")
    assert len(made["message"].encode()) <= EVENT_MESSAGE_MAX_BYTES


async def test_a_name_is_one_that_the_server_takes(at: Cluster) -> None:
    long = replace(POD, name="a." * 126 + "b")
    await at.events.tell(note(long))
    (made,) = at.server.events()
    assert len(made["metadata"]["name"]) <= 253
    assert ".." not in made["metadata"]["name"]


async def test_what_is_not_allowed_is_a_sentence(at: Cluster) -> None:
    at.server.order(ApiFault.FORBIDDEN, method="POST")
    with pytest.raises(ApiRefused) as caught:
        await at.events.tell(note(at.events.node))
    said = str(caught.value)
    assert said.startswith(f"could not create an event about the node {NODE}: ")
    assert "Grant its service account this verb" in said
    assert "`events` and `fleet` have the rules" in said


async def test_the_fake_refuses_what_the_server_refuses(at: Cluster) -> None:
    about_a_node = {"metadata": {"name": "x"}, "involvedObject": {"kind": "Node", "name": NODE}}
    body = json.dumps(about_a_node).encode()
    with pytest.raises(ApiRefused) as caught:
        await at.client.ask(Call("try", "POST", "/api/v1/namespaces/kube-system/events", body=body))
    assert caught.value.code == 422
    assert "does not match event.namespace" in caught.value.refusal.message
    call = Call("try", "POST", "/api/v1/namespaces/default/events", body=body)
    await at.client.ask(call)
    with pytest.raises(ApiRefused) as caught:
        await at.client.ask(call)
    assert (caught.value.code, caught.value.refusal.reason) == (409, "AlreadyExists")


async def test_the_pods_of_a_claim_are_those_it_is_reserved_for(at: Cluster) -> None:
    made = at.server.add_claim({"metadata": {"namespace": "default", "name": "one"}, "spec": {}})
    claim = ClaimName("default", "one", ClaimUid(made["metadata"]["uid"]))
    assert await at.claims.reserved_for(claim) == ()
    at.server.reserve_claim("default", "one", "vm-a", "vm-b")
    found = await at.claims.reserved_for(claim)
    assert [(pod.kind, pod.namespace, pod.name, bool(pod.uid)) for pod in found] == [
        ("Pod", "default", "vm-a", True),
        ("Pod", "default", "vm-b", True),
    ]
    assert await at.claims.reserved_for(replace(claim, uid=ClaimUid("another"))) == ()
    assert await at.claims.reserved_for(replace(claim, name="gone")) == ()
