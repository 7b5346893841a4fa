"""The feature keeper: a file per change of the features, renewed before it expires, and tried again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.actors import feature_keeper
from gpuactors.actors.feature_keeper import (
    FEATURES_EXPIRE_S,
    FEATURES_RENEW_S,
    FEATURES_REST_S,
    FEATURES_RETRY_S,
)
from gpuactors.concurrency.latest import Latest
from gpuactors.core.reports.node_features import node_features
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Role
from gpuactors.ports.errors import StateFileError
from tests.core.builders import Core, gpu

ONE, TWO = Core(gpu("01:00.0")).state, Core(gpu("01:00.0"), gpu("02:00.0")).state


@dataclass
class Kept:
    """A keeper that runs; its file is remembered. Implements `ports.node.FeatureFile`."""

    state: Latest[NodeState]
    written: list[tuple[Mapping[str, str], float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    failure: str = ""

    async def write(self, labels: Mapping[str, str], until: float) -> None:
        await trio.lowlevel.checkpoint()
        if self.failure:
            raise StateFileError(self.failure)
        self.written.append((labels, until - trio.current_time()))


@asynccontextmanager
async def keeper(state: NodeState) -> AsyncIterator[Kept]:
    kept = Kept(Latest(state))
    ports = feature_keeper.FeaturePorts(kept, kept.problems.append, trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feature_keeper.run, kept.state.subscribe(), ports)
        yield kept
        nursery.cancel_scope.cancel()


async def test_the_file_is_written_once_per_change_and_renewed(autojump_clock: MockClock) -> None:
    async with keeper(ONE) as kept:
        await trio.sleep(1.0)
        assert kept.written == [(node_features(ONE), FEATURES_EXPIRE_S)]
        kept.state.set(replace(ONE, kubelet=replace(ONE.kubelet, missing="else")))
        await trio.sleep(60.0)
        assert len(kept.written) == 1
        kept.state.set(TWO)
        await trio.sleep(60.0)
        assert [labels for labels, _ in kept.written] == [node_features(ONE), node_features(TWO)]
        await trio.sleep(FEATURES_RENEW_S)
        assert kept.written[2:] == [(node_features(TWO), FEATURES_EXPIRE_S)]


async def test_a_daemon_that_does_not_serve_writes_nothing_and_all_when_it_does(
    autojump_clock: MockClock,
) -> None:
    waiting = replace(ONE, daemon=replace(ONE.daemon, role=Role.TAKING_OVER))
    async with keeper(waiting) as kept:
        await trio.sleep(2 * FEATURES_RENEW_S)
        assert kept.written == []
        kept.state.set(ONE)
        await trio.sleep(FEATURES_REST_S + 1.0)
        assert len(kept.written) == 1


async def test_a_daemon_that_serves_again_writes_what_it_had_written_before(
    autojump_clock: MockClock,
) -> None:
    """Its successor was lost, which may have written others; and what nobody renews expires."""
    handed_over = replace(ONE, daemon=replace(ONE.daemon, role=Role.HANDED_OVER))
    async with keeper(ONE) as kept:
        await trio.sleep(60.0)
        kept.state.set(handed_over)
        await trio.sleep(60.0)
        assert len(kept.written) == 1
        kept.state.set(ONE)
        await trio.sleep(FEATURES_REST_S + 1.0)
        assert [labels for labels, _ in kept.written] == [node_features(ONE)] * 2
        await trio.sleep(FEATURES_RENEW_S)
        assert len(kept.written) == 3


async def test_a_failure_is_said_once_and_tried_again(autojump_clock: MockClock) -> None:
    async with keeper(ONE) as kept:
        kept.failure = "the disk is full"
        await trio.sleep(10 * FEATURES_RETRY_S)
        assert (kept.written, kept.problems) == ([], ["the disk is full"])
        kept.failure = ""
        await trio.sleep(FEATURES_RETRY_S + FEATURES_REST_S)
        assert len(kept.written) == 1
