"""The daemon as it is put together: what its supervisors are told."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import trio
import trio.testing

from gpuactors import limits
from gpuactors.app import Daemon, Outside, run_daemon
from gpuactors.core.model import GroupUse, PciAddress, PciFunction, ResourceName
from gpuactors.core.snapshot import PollTarget
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports import LedgerContents
from tests.core.builders import SETTINGS

PATIENCE_S = 1000.0


class EmptyHost:
    """Implements `ports.HostReader` and `ports.UseReader`."""

    async def scan(self, given: Collection[PciAddress] = ()) -> tuple[PciFunction, ...]:
        await trio.lowlevel.checkpoint()
        return ()

    async def inspect(
        self, address: PciAddress, given: Collection[PciAddress] = ()
    ) -> tuple[PciFunction, ...]:
        await trio.lowlevel.checkpoint()
        return ()

    async def observe(self, targets: Sequence[PollTarget], *, whole: bool) -> tuple[GroupUse, ...]:
        await trio.lowlevel.checkpoint()
        return ()


class ShortLedger:
    """Implements `ports.LedgerReader`: no descriptor is left, as often as it is told."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def read(self, resources: Collection[ResourceName] = ()) -> LedgerContents:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return LedgerContents()


async def test_an_actor_that_is_short_of_descriptors_takes_no_daemon_with_it(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    """Issue 10, 4: six failures of pod_resources were the end of the process, and these are more."""
    ledger = ShortLedger(3 * limits.RESTART_MAX_FAILURES)
    outside = Outside(EmptyHost(), EmptyHost(), ledger, None, UnixKubelet(str(tmp_path / "k")))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            daemon: Daemon = await nursery.start(run_daemon, SETTINGS, outside)
            while not daemon.state.value.kubelet.ledger.tried:
                await daemon.state.receive()
            nursery.cancel_scope.cancel()
    assert ledger.failures == 0
