"""The fake API server answers as a real one was recorded to answer: status, reason, and the shape of the answer.

`recorded/` has one exchange with Kubernetes 1.35.3 a file. Before each request the fake has the objects that the real
one had; what is compared is the status, the `reason` and `code` of a failure, and the keys and types of all there is.
Names, times and sentences are those of that day.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from gpuactors_simulation.kube.http import serve_stream
from gpuactors_simulation.kube.server import ApiRequest, FakeApiServer
from gpuactors_simulation.kube.status import CLAIMS, NODES, SLICES, Kind, Object
from tests.support.patience import patient

RECORDED = Path(__file__).parent / "recorded"
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))
LABEL = "resource.nvidia.com/computeDomain"


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def body(name: str) -> Object:
    found: Object = recorded(name)["response"]["body"]
    return found


def lines(name: str) -> list[Object]:
    found: list[Object] = recorded(name)["response"]["lines"]
    return found


@dataclass
class Given:
    """What the real server had before the request, and what happened during a watch."""

    objects: list[tuple[Kind, Object]] = field(default_factory=list)
    gate: bool = False
    anonymous: bool = False
    forgotten: bool = False
    meanwhile: Callable[[FakeApiServer], None] | None = None


def slice_of(name: str) -> tuple[Kind, Object]:
    return SLICES, body(name)


def node(label: str | None = None) -> tuple[Kind, Object]:
    found = body("node-get")
    if label is not None:
        found["metadata"]["labels"][LABEL] = label
    return NODES, found


def claim_of(name: str) -> tuple[Kind, Object]:
    return CLAIMS, body(name)


def listed(name: str) -> tuple[Kind, Object]:
    (item,) = body(name)["items"]
    return SLICES, {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"} | item


def changed_slice() -> tuple[Kind, Object]:
    return slice_of("slice-put-changed")


def to_be_deleted() -> tuple[Kind, Object]:
    kind, found = slice_of("slice-delete")  # answered with the version of the deletion
    conditions = recorded("slice-delete")["request"]["body"]["preconditions"]
    found["metadata"]["resourceVersion"] = conditions["resourceVersion"]
    return kind, found


def give_spec(spec: Object, found: Object) -> None:
    found["spec"] = spec


def edit_and_delete(server: FakeApiServer) -> None:
    for event in lines("watch-edit-and-delete")[:2]:
        server.edit_slice(event["object"]["metadata"]["name"], partial(give_spec, event["object"]["spec"]))
    server.delete_slices()


def take_label_away(server: FakeApiServer) -> None:
    server.label_node("node-1", LABEL, None)


UID = "11111111-2222-3333-4444-555555555555"

GIVEN = {
    "claim-after-its-pod": Given([claim_of("claim-after-its-pod")]),
    "claim-allocated": Given([claim_of("claim-allocated")]),
    "claim-from-template": Given([claim_of("claim-from-template")]),
    "claim-prioritized-allocated": Given([claim_of("claim-prioritized-allocated")]),
    "claim-unallocated": Given([claim_of("claim-unallocated")]),
    "forbidden-anonymous": Given(anonymous=True),
    "forbidden-anonymous-create": Given(anonymous=True),
    "gate-on-slice-put-same": Given([slice_of("gate-on-slice-create-tainted")], gate=True),
    "gate-on-slice-put-without-time-added": Given([slice_of("gate-on-slice-create-tainted")], gate=True),
    "label-add-when-absent": Given([node()]),
    "label-add-when-present": Given([node(UID)]),
    "label-patch-resource-version-conflict": Given([node()]),
    "label-remove": Given([node(UID)]),
    "label-remove-other-value": Given([node(UID)]),
    "label-remove-when-absent": Given([node()]),
    "node-get": Given([node()]),
    "node-get-metadata-only": Given([node()]),
    "slice-delete": Given([to_be_deleted()]),
    "slice-delete-wrong-uid": Given([to_be_deleted()]),
    "slice-delete-wrong-version": Given([to_be_deleted()]),
    "slice-put-changed": Given([slice_of("slice-create")]),
    "slice-put-other-driver": Given([changed_slice()]),
    "slice-put-other-node": Given([changed_slice()]),
    "slice-put-other-pool": Given([changed_slice()]),
    "slice-put-same": Given([slice_of("slice-create")]),
    "slice-put-stale": Given([changed_slice()]),
    "slices-list": Given([listed("slices-list")]),
    "slices-list-two-selectors": Given([listed("slices-list-two-selectors")]),
    "unauthorized-bad-token": Given(anonymous=True),
    "watch-edit-and-delete": Given([slice_of("slice-create")], meanwhile=edit_and_delete),
    "watch-from-nothing": Given([changed_slice()]),
    "watch-initial-events": Given([changed_slice()]),
    "watch-node-metadata-only": Given([node(UID)], meanwhile=take_label_away),
    "watch-too-old": Given([changed_slice()], forgotten=True),
}
"""By recording; one that is not here was asked of a server without any of these objects."""


def server_of(name: str) -> FakeApiServer:
    given = GIVEN.get(name, Given())
    tokens = frozenset({"good"}) if given.anonymous else None
    server = FakeApiServer(device_taints=given.gate or name.startswith("gate-on"), tokens=tokens)
    server.store.version = 1
    for kind, found in given.objects:
        server.store.seed(kind, found)
    if given.forgotten:
        server.store.forget()
    return server


def request_of(name: str) -> ApiRequest:
    asked = recorded(name)["request"]
    content = b"" if asked["body"] is None else json.dumps(asked["body"]).encode()
    return ApiRequest(
        asked["method"], asked["path"], {k.lower(): v for k, v in asked["headers"].items()}, content
    )


@dataclass
class Seen:
    status: int = 0
    content_type: str = ""
    body: Object | None = None
    lines: list[Object] | None = None


async def asked(server: FakeApiServer, name: str) -> Seen:
    answer = await server.answer(request_of(name))
    if answer.lines is None:
        return Seen(answer.status, answer.content_type, json.loads(answer.body))
    found: list[Object] = []
    async with trio.open_nursery() as nursery:

        async def meanwhile() -> None:
            await trio.testing.wait_all_tasks_blocked()
            if (act := GIVEN.get(name, Given()).meanwhile) is not None:
                act(server)

        nursery.start_soon(meanwhile)
        async for event in answer.lines:
            found.append(event)  # noqa: PERF401  # a failure is to show those that came
    return Seen(answer.status, answer.content_type, lines=found)


def differences(real: Any, fake: Any, path: str = "") -> Iterator[str]:
    """Where the keys or types differ."""
    if type(real) is not type(fake):
        yield f"{path}: {type(real).__name__} is {type(fake).__name__}"
    elif isinstance(real, dict):
        for key in sorted(real.keys() ^ fake.keys()):
            yield f"{path}.{key}: only in the {'real' if key in real else 'fake'} one"
        for key in sorted(real.keys() & fake.keys()):
            yield from differences(real[key], fake[key], f"{path}.{key}")
    elif isinstance(real, list):
        if len(real) != len(fake):
            yield f"{path}: {len(real)} items are {len(fake)}"
        for index, (one, other) in enumerate(zip(real, fake, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")


EXACT = frozenset({"kind", "apiVersion", "reason", "code", "status", "field", "type", "effect", "generation"})
"""Keys whose values are compared as well."""


def values(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict):
        for key, value in sorted(found.items()):
            if key in EXACT and not isinstance(value, dict | list):
                yield f"{path}.{key}", value
            yield from values(value, f"{path}.{key}")
    elif isinstance(found, list):
        for index, value in enumerate(found):
            yield from values(value, f"{path}[{index}]")


@pytest.mark.parametrize("name", NAMES)
async def test_the_fake_server_answers_as_the_real_one(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    real = recorded(name)["response"]
    with trio.fail_after(patient(30.0)):
        seen = await asked(server_of(name), name)
    assert (seen.status, seen.content_type) == (real["status"], real["content_type"])
    for key, fake in (("body", seen.body), ("lines", seen.lines)):
        assert [*differences(real.get(key), fake)] == []
        assert [*values(fake)] == [*values(real.get(key))]


def test_all_recordings_are_replayed() -> None:
    assert len(NAMES) == 60
    assert set(GIVEN) <= set(NAMES)


@pytest.mark.parametrize("name", ["slices-list", "slice-create", "watch-edit-and-delete", "claim-missing"])
async def test_over_http_it_answers_the_same(name: str, autojump_clock: trio.testing.MockClock) -> None:
    import h11

    client, served = trio.testing.memory_stream_pair()
    server, asking = server_of(name), request_of(name)
    http = h11.Connection(h11.CLIENT)
    content = bytearray()
    with trio.fail_after(patient(30.0)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_stream, server, served)
            headers = [("Host", "x"), ("Content-Length", str(len(asking.body))), *asking.headers.items()]
            head = h11.Request(method=asking.method, target=asking.target, headers=headers)
            for part in (head, h11.Data(data=asking.body), h11.EndOfMessage()):
                await client.send_all(http.send(part) or b"")
            status = 0
            await trio.testing.wait_all_tasks_blocked()
            if (act := GIVEN.get(name, Given()).meanwhile) is not None:
                act(server)
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(bytes(await client.receive_some(65536)))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    content += event.data
                else:
                    break
            await client.aclose()
    real = recorded(name)["response"]
    assert status == real["status"]
    if "lines" in real:
        assert [*differences(real["lines"], [json.loads(line) for line in content.splitlines()])] == []
    else:
        assert [*differences(real["body"], json.loads(content))] == []
