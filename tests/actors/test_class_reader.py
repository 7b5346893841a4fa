"""The class reader: one answer, asked for a bounded number of times, and each class of ours told once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.actors import class_reader
from gpuactors.actors.class_reader import CLASSES_TRIES
from gpuactors.concurrency.latest import Latest
from gpuactors.core.gpus.device_classes import DeviceClass
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Role
from gpuactors.daemon import claims
from gpuactors.ports.kube import ApiAway
from gpuactors_simulation.kube.server import ApiAnswer, ApiRequest
from gpuactors_simulation.kube.status import CLASSES, forbidden
from tests.core.builders import Core, gpu
from tests.kube.cluster import Cluster, cluster
from tests.support.log_lines import Logged, logged

SERVING = Core(gpu("01:00.0")).state
OURS = DeviceClass("ours", "nvidia.com/GH100_H100_SXM5_80GB")
HOUR_S = 3600.0


@dataclass
class Asked:
    """A reader that runs. Implements `ports.kube.DeviceClassApi`."""

    state: Latest[NodeState]
    failures: int = 0
    """So many times the server does not answer."""
    asked: int = 0
    told: list[DeviceClass] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def list_classes(self) -> tuple[DeviceClass, ...]:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        if self.asked <= self.failures:
            raise ApiAway("the server is away")
        return (DeviceClass("another", None), OURS, DeviceClass("a third", "example.com/gpu"))


@asynccontextmanager
async def reader(state: NodeState, failures: int = 0) -> AsyncIterator[Asked]:
    asked = Asked(Latest(state), failures)
    ports = class_reader.ClassPorts(asked, asked.told.append, asked.problems.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(class_reader.run, asked.state.subscribe(), ports)
        yield asked
        nursery.cancel_scope.cancel()


async def test_a_class_of_ours_is_told_once_whatever_changes(autojump_clock: MockClock) -> None:
    async with reader(SERVING) as at:
        await trio.sleep(1.0)
        assert (at.told, at.asked) == ([OURS], 1)
        at.state.set(replace(SERVING, kubelet=replace(SERVING.kubelet, missing="else")))
        await trio.sleep(HOUR_S)
        assert (at.told, at.asked, at.problems) == ([OURS], 1, [])


async def test_a_daemon_that_does_not_serve_asks_nothing_until_it_does(autojump_clock: MockClock) -> None:
    waiting = replace(SERVING, daemon=replace(SERVING.daemon, role=Role.TAKING_OVER))
    async with reader(waiting) as at:
        await trio.sleep(HOUR_S)
        assert at.asked == 0
        at.state.set(SERVING)
        await trio.sleep(1.0)
        assert at.told == [OURS]


async def test_a_server_that_comes_back_is_asked_again(autojump_clock: MockClock) -> None:
    async with reader(SERVING, failures=CLASSES_TRIES - 1) as at:
        await trio.sleep(HOUR_S)
        assert (at.told, at.problems) == ([OURS], [])


async def test_one_that_never_answers_is_given_up_and_that_is_said_once(autojump_clock: MockClock) -> None:
    async with reader(SERVING, failures=1000) as at:
        await trio.sleep(HOUR_S)
        assert (at.told, at.problems, at.asked) == ([], ["the server is away"], CLASSES_TRIES)


@pytest.fixture
def lines() -> Iterator[list[Logged]]:
    """What the daemon logs."""
    with logged() as lines:
        yield lines


async def read(at: Cluster) -> None:
    """As the daemon wires it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(claims.read_classes, at.classes, Latest(SERVING).subscribe())
        await trio.sleep(HOUR_S)
        nursery.cancel_scope.cancel()


async def test_a_class_of_ours_is_a_warning_with_what_to_do(
    lines: list[Logged], autojump_clock: MockClock
) -> None:
    async with cluster() as at:
        at.server.add_class(OURS.name, OURS.extended_resource)
        await read(at)
    (line,) = lines
    assert (line.level, line.event) == ("warning", "resource.contested")
    assert (line.fields["resource"], line.fields["device_class"]) == (OURS.extended_resource, OURS.name)
    assert "--resource-name" in str(line.fields["reason"])


@pytest.mark.parametrize("answer", ["forbidden", "deep"])
async def test_whatever_else_is_answered_costs_one_line_at_info(
    answer: str, lines: list[Logged], autojump_clock: MockClock
) -> None:
    """A role of before has no right to list classes."""
    deep = b'{"items": [{"metadata": {}, "spec": {"config": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}"

    async def answering(request: ApiRequest) -> ApiAnswer:
        if answer == "deep":
            return ApiAnswer(200, deep)
        failure = forbidden(CLASSES, "list", "system:serviceaccount:test")
        return ApiAnswer(failure.code, json.dumps(failure.status).encode())

    async with cluster() as at:
        at.server.answer = answering  # type: ignore[method-assign]
        await read(at)
    (line,) = lines
    assert (line.level, line.event) == ("info", "classes.unread")
    assert "list the DeviceClasses" in str(line.fields["reason"])
    assert len(str(line.fields["reason"])) < 1000
