"""The readers of the host without threads and child processes, for a tree of ordinary files on the mock clock.

They use the daemon's own readers of files; a read never hangs there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import trio
from msgspec.structs import replace

from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.domain import ImexFacts
from gpuactors.core.values.mediated import HostPart
from gpuactors.core.values.model import GroupUse, InspectedKey
from gpuactors.host.imex import ImexFiles, with_clique
from gpuactors.host.mdev import PartsReader
from gpuactors.host.reader import _Batch
from gpuactors.host.root import GPU_FEATURES, HostRoot
from gpuactors.host.use import Holders, OpenNode, _Observation, open_and_close
from gpuactors.ports.node import InspectionResults, Observation, Selectors


@final
class InlineReader:
    """Implements `ports.node.HostReader`."""

    def __init__(self, sysfs: PartsReader) -> None:
        self._sysfs = sysfs

    async def scan(
        self,
        allocated: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        """Implement `ports.node.HostReader.scan`."""
        await trio.lowlevel.checkpoint()
        return self._sysfs.choosing(selectors, errors).scan(allocated)

    async def inspect(
        self,
        address: InspectedKey,
        allocated: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        """Implement `ports.node.HostReader.inspect`."""
        await trio.lowlevel.checkpoint()
        return self._sysfs.choosing(selectors, errors).inspect(address, allocated)

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        allocated: Collection[InspectedKey] = (),
        poll: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        """Implement `ports.node.HostReader.inspect_all`."""
        await trio.lowlevel.checkpoint()
        batch = _Batch(list(addresses), poll)
        batch.run(self._sysfs.choosing(selectors, errors), allocated)
        if poll is not None:
            poll.ended()
        return batch.results


@final
class InlineUse:
    """Implements `ports.node.UseReader`.

    Every observation with `proc` reads all processes, so that nothing depends on the duration of a pass.
    """

    def __init__(self, root: HostRoot, holders: Holders, *, open_node: OpenNode = open_and_close) -> None:
        self._root = root
        self._holders = holders
        self._open_node = open_node

    async def observe(self, targets: tuple[PollTarget, ...], *, whole: bool) -> tuple[GroupUse, ...]:
        """Implement `ports.node.UseReader.observe`."""
        await trio.lowlevel.checkpoint()
        return self._result(self._begin(targets, whole=whole))

    def begin(self, targets: tuple[PollTarget, ...]) -> _Observation:
        """Implement `ports.node.UseReader.begin`."""
        return self._begin(targets, whole=False)

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        """Implement `ports.node.UseReader.result`."""
        assert isinstance(observation, _Observation)
        await trio.lowlevel.checkpoint()
        return self._result(observation)

    def _begin(self, targets: tuple[PollTarget, ...], *, whole: bool) -> _Observation:
        return _Observation(
            self._root,
            self._holders,
            self._open_node,
            targets,
            whole=whole,
            skip=frozenset(),
            last_pass=None,
            rested=True,
            open_until=float("inf"),
        )

    def _result(self, observation: _Observation) -> tuple[GroupUse, ...]:
        if not observation.begun:
            observation.run()
        if observation.failure is not None:
            raise observation.failure
        return observation.uses()


@final
class InlineImex:
    """Implements `ports.claims.ImexReader`."""

    def __init__(self, root: HostRoot, clique_file: str = GPU_FEATURES) -> None:
        self._files = ImexFiles(root, clique_file)
        self.host_problem = ""
        """The answer of the host's control tool."""

    async def read(self) -> ImexFacts:
        """Implement `ports.claims.ImexReader.read`."""
        await trio.lowlevel.checkpoint()
        facts = self._files.read()
        if facts.absent:
            return facts
        return replace(with_clique(facts, [self._files.clique()]), host_problem=self.host_problem)
