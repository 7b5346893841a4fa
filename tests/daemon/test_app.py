"""The daemon as it is put together: what its supervisors are told."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.model import GroupUse, InspectedKey, PciFunction
from gpuactors.daemon.app import RESTART_MAX_FAILURES, Daemon, Outside, run_daemon
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports.node import (
    InspectionResults,
    LedgerContents,
    LedgerQuestion,
    Observation,
    Selectors,
    UeventSource,
)
from tests.core.builders import SETTINGS

PATIENCE_S = 1000.0


class EmptyHost:
    """Implements `ports.node.HostReader` and `ports.node.UseReader`."""

    async def scan(
        self,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        await trio.lowlevel.checkpoint()
        return ()

    async def inspect(
        self,
        address: InspectedKey,
        given: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[PciFunction, ...]:
        await trio.lowlevel.checkpoint()
        return ()

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        given: Collection[InspectedKey] = (),
        beside: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        await trio.lowlevel.checkpoint()
        return dict.fromkeys(addresses, ())

    async def observe(self, targets: Sequence[PollTarget], *, whole: bool) -> tuple[GroupUse, ...]:
        await trio.lowlevel.checkpoint()
        return ()

    def begin(self, targets: tuple[PollTarget, ...]) -> Observation:
        raise NotImplementedError("no call comes here")

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        raise NotImplementedError


class FailingLedger:
    """Implements `ports.node.LedgerReader`: raises what no port may, as often as it is told."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures = failures
        self.error = error

    async def read(self, question: LedgerQuestion) -> LedgerContents:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise self.error
        return LedgerContents()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), RecursionError("deep"), KeyError("x")],
    ids=repr,
)
async def test_requests_that_fail_take_no_daemon_with_them(
    autojump_clock: trio.testing.MockClock, tmp_path: Path, error: Exception
) -> None:
    """Issue 10, 4: six failures of pod_resources were the end of the process, and these are more."""
    ledger = FailingLedger(3 * RESTART_MAX_FAILURES, error)
    outside = Outside(EmptyHost(), EmptyHost(), ledger, None, UnixKubelet(str(tmp_path / "k/device-plugins")))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            daemon: Daemon = await nursery.start(run_daemon, SETTINGS, outside)
            while ledger.failures or not daemon.state.value.kubelet.ledger.tried:
                await daemon.state.receive()
            nursery.cancel_scope.cancel()


async def test_an_actor_that_fails_for_ever_takes_no_daemon_with_it(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    """Issue 24, 1: outside a request too, an actor without which the state can be trusted ends itself only."""
    opened = trio.Event()
    left = 3 * RESTART_MAX_FAILURES

    @asynccontextmanager
    async def uevents() -> AsyncIterator[UeventSource]:
        nonlocal left
        left -= 1
        if left:
            raise RecursionError("deep")
        opened.set()
        await trio.sleep(PATIENCE_S)
        yield NotImplemented

    ledger = FailingLedger(0, KeyError("x"))
    outside = Outside(
        EmptyHost(), EmptyHost(), ledger, uevents, UnixKubelet(str(tmp_path / "k/device-plugins"))
    )
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(run_daemon, SETTINGS, outside)
            await opened.wait()
            nursery.cancel_scope.cancel()
