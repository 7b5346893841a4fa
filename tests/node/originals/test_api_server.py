"""The fake API server answers as the original: one script of calls, step by step.

The script is played against both at once. What an answer has beside times, UIDs and versions must be the same; what
differs on purpose is in `KNOWN_DIFFERENCES`, and must differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest
import trio

from tests.deploy.rights import MADE_BY, right_of, used_by
from tests.node import versions
from tests.node.cluster import component
from tests.node.originals import api_script, api_servers
from tests.node.originals.api_player import Observation, Player, is_periodic
from tests.node.originals.api_steps import Step
from tests.support.patience import patient

WITHIN_S: Final = 90.0
"""The deadline of a whole script."""

RECORDED: Final = api_servers.ROOT.parent / "shared" / "evidence" / "api"


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs on purpose."""

    paths: tuple[str, ...]
    reason: str
    since: versions.Version = (0, 0)
    """The first release that answers so."""


KNOWN_DIFFERENCES: Final[Mapping[str, Difference]] = {
    "label-bad-value": Difference(
        ("body.details.causes",),
        "the original validates a Node's labels twice and lists each cause twice; the daemon reads no cause",
    ),
    "event-in-missing-namespace": Difference(
        ("status",),
        "the fake has no namespaces, so each one exists; to the daemon this 404 is a refusal like any other",
    ),
    "slice-create-two-values": Difference(
        ("body.details.causes.0.message", "body.message"),
        "the original prints its value, which has lists as well; the daemon reads no such text",
        since=(1, 36),
    ),
    "slice-create-list-attribute": Difference(
        ("warning",),
        "the original knows lists, and drops them by a gate without a word; the daemon writes none",
        since=(1, 36),
    ),
}
"""By step."""

Observations = Mapping[str, Observation]


async def _play(script: tuple[Step, ...], gate: bool) -> tuple[Observations, Observations]:
    original = api_servers.Original()
    try:
        with trio.fail_after(patient(WITHIN_S)):
            await original.prepare(api_script.LEFTOVERS)
            async with api_servers.fake(gates=gate) as fake, trio.open_nursery() as nursery:
                players = Player(original), Player(fake)
                for player in players:
                    nursery.start_soon(player.play, script)
    finally:
        # Also of a script that failed: the next scenario waits for the end of all claims.
        with trio.fail_after(patient(WITHIN_S)):
            await original.remove(Player(original), api_script.LEFTOVERS)
    return players[0].observations, players[1].observations


def _played(script: tuple[Step, ...], gate: bool) -> tuple[Observations, Observations]:
    if "K8S_DIR" not in os.environ:
        pytest.skip("there is no node: run this inside the node's namespaces, with its env.sh")
    return trio.run(partial(_play, script, gate))


@pytest.fixture(scope="module")
def gate_off() -> tuple[Observations, Observations]:
    """What the original and the fake answered without the gates of DRA."""
    with _without_dra_gates():
        return _played(api_script.GATE_OFF, gate=False)


@contextmanager
def _without_dra_gates() -> Iterator[None]:
    """The API server has none of the gates of DRA while the context is open, whatever its defaults are."""
    if "K8S_DIR" not in os.environ or not versions.of_node().dra_by_default:
        yield
        return
    try:
        _restart_api_server({"K8S_FEATURE_GATES": versions.WITHOUT_DRA_GATES})
        yield
    finally:
        _restart_api_server({})
        # Their clients, which have lost it twice, ask again up to half a minute later: until then no pod is made,
        # scheduled or started, and the node becomes NotReady.
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet"):
            component("down.sh", name)
            component("up.sh", name)


def _restart_api_server(environment: Mapping[str, str]) -> None:
    component("down.sh", "kube-apiserver")
    component("up.sh", "kube-apiserver", environment=environment)


@pytest.fixture(scope="module")
def gate_on() -> tuple[Observations, Observations]:
    """The same with the gates of DRA."""
    return _played(api_script.GATE_ON, gate=True)


def differences(original: Any, fake: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each path where the observations differ, and how."""
    match original, fake:
        case dict(), dict():
            for key in sorted(original.keys() | fake.keys()):
                yield from differences(original.get(key), fake.get(key), f"{path}.{key}".lstrip("."))
        case list(), list() if len(original) == len(fake):
            for index, (one, other) in enumerate(zip(original, fake, strict=True)):
                yield from differences(one, other, f"{path}.{index}")
        case _:
            if original != fake:
                yield path, f"{path}: the original has {original!r}, the fake {fake!r}"


def compared(original: Observation, fake: Observation) -> list[tuple[str, str]]:
    """Where the answers differ, and how; of answers with another status only that."""
    if original["status"] != fake["status"]:
        return [("status", f"the original answers {original}, the fake {fake}")]
    return [*differences(original, fake)]


def compare(name: str, seen: tuple[Observations, Observations]) -> None:
    original, fake = (observations[name] for observations in seen)
    found = compared(original, fake)
    known = KNOWN_DIFFERENCES.get(name)
    if known is None or versions.version() < known.since:
        assert not found, "\n".join(said for _, said in found)
    else:
        assert {path for path, _ in found} == set(known.paths), f"{known.reason}; found: {found}"


@pytest.mark.parametrize("name", api_script.played(api_script.GATE_OFF))
def test_the_fake_answers_as_the_original(name: str, gate_off: tuple[Observations, Observations]) -> None:
    compare(name, gate_off)


@pytest.mark.node_set("B")
@pytest.mark.parametrize("name", api_script.played(api_script.GATE_ON))
def test_with_taints_the_fake_answers_as_the_original(
    name: str, gate_on: tuple[Observations, Observations]
) -> None:
    compare(name, gate_on)


def test_each_recorded_exchange_is_a_step() -> None:
    """The recordings are a subset of the script."""
    if not RECORDED.is_dir():
        pytest.skip("there are no recordings here")
    recorded = {path.stem for path in RECORDED.glob("*.json")}
    assert (
        recorded - {*api_script.played(api_script.GATE_OFF), *api_script.played(api_script.GATE_ON)} == set()
    )


RECORDINGS: Final = {path.stem: path for path in sorted(RECORDED.glob("*.json"))}

RECORDED_OTHERWISE: Final[Mapping[str, str]] = {
    "label-add-when-absent": "recorded for a whole Node; the daemon and the script ask for its metadata only",
    "label-remove": "recorded for a whole Node; the daemon and the script ask for its metadata only",
    "watch-edit-and-delete": "recorded until the slice was deleted; the script's watch sees another slice added",
}
"""Recordings of a request that is not quite the step's, with what differs."""


def recordings(script: tuple[Step, ...]) -> list[str]:
    """The names of those that are steps of a script."""
    return [name for name in api_script.played(script) if name in RECORDINGS]


@pytest.mark.parametrize("name", recordings(api_script.GATE_OFF))
def test_what_was_recorded_is_what_the_original_answers(
    name: str, gate_off: tuple[Observations, Observations]
) -> None:
    compare_recording(name, gate_off[0])


@pytest.mark.node_set("B")
@pytest.mark.parametrize("name", recordings(api_script.GATE_ON))
def test_what_was_recorded_with_taints_is_what_the_original_answers(
    name: str, gate_on: tuple[Observations, Observations]
) -> None:
    compare_recording(name, gate_on[0])


def compare_recording(name: str, original: Observations) -> None:
    recorded, answered = of_the_recording(name), said(original[name])
    if name in RECORDED_OTHERWISE:
        assert recorded != answered, f"it is no difference any more: {RECORDED_OTHERWISE[name]}"
    else:
        assert recorded == answered


def of_the_recording(name: str) -> Any:
    """`said` of a recorded answer."""
    response = json.loads(RECORDINGS[name].read_text())["response"]
    found = {"status": response["status"], "content-type": response["content_type"]}
    if "lines" in response:
        return said({**found, "events": [event for event in response["lines"] if not is_periodic(event)]})
    return said({**found, "body": response["body"]})


def said(answer: Mapping[str, Any]) -> Any:
    """What is the same in each run of a script: the status, and of each object its kind and what a Status says to a
    program. The recordings' objects have other names."""
    events = [(event["type"], _kind(event["object"])) for event in answer.get("events", ())]
    return answer["status"], answer["content-type"], _kind(answer.get("body")), events


def _kind(found: Any) -> Any:
    if not isinstance(found, dict):
        return type(found).__name__
    return {key: found[key] for key in ("apiVersion", "kind", "reason", "code") if key in found}


async def test_each_request_of_the_daemon_is_a_step() -> None:
    """By the right that it needs: group, resource and verb."""
    asked = {right for _, right in await used_by(MADE_BY)}
    objects = [
        (method, path) for method, path in api_script.requests(api_script.GATE_OFF) if _of_objects(path)
    ]
    assert asked - {right_of(method, path)[1] for method, path in objects} == set()


def _of_objects(path: str) -> bool:
    return path.startswith(("/api/v1/", "/apis/")) and path.count("/") >= 4 - path.startswith("/api/v1/")


def test_each_known_difference_is_of_a_step() -> None:
    steps = {*api_script.played(api_script.GATE_OFF), *api_script.played(api_script.GATE_ON)}
    assert {*KNOWN_DIFFERENCES, *RECORDED_OTHERWISE} <= steps
    assert all(known.reason and known.paths for known in KNOWN_DIFFERENCES.values())
