"""The udev watcher: kernel uevents become hints.

A hint only requests a new inspection; a lost, doubled or late one affects only the delay. Without uevents the periodic
scan finds every change, later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from gpuactors.core.events import Event
from gpuactors.core.events.host import HostChanged, UeventsLost, UeventsOpened, UeventsUnavailable
from gpuactors.ports.errors import HostError, UeventsOverflowError
from gpuactors.ports.node import Hint, OpenUevents, UeventSource

UEVENTS_RETRY_S: Final = 10.0
"""The wait before uevents are tried again if they are unavailable (no netlink socket allowed), in seconds; the periodic
scan works meanwhile."""


async def run(
    open_uevents: OpenUevents,
    inbox: trio.MemorySendChannel[Event],
    scans: trio.Event,
    egm_changed: Callable[[], None],
) -> None:
    """Run for ever. Changes before the source was open were missed, so a scan follows. `scans`: set when scans may
    begin, which is after the first try, so that the first one misses no change and no second one is wanted.
    `egm_changed` is called at each uevent of an EGM."""
    while True:
        try:
            async with open_uevents() as source:
                await inbox.send(UeventsOpened(scan_begun=scans.is_set()))
                scans.set()
                await _forward(source, inbox, egm_changed)
        except HostError as exc:
            await inbox.send(UeventsUnavailable(str(exc), scan_begun=scans.is_set()))
        finally:
            scans.set()
        await trio.sleep(UEVENTS_RETRY_S)


async def _forward(
    source: UeventSource, inbox: trio.MemorySendChannel[Event], egm_changed: Callable[[], None]
) -> None:
    while True:
        try:
            hints = await source.receive()
        except UeventsOverflowError as exc:
            await inbox.send(UeventsLost(str(exc)))
            continue
        for hint in _one_each(hints):
            if hint.egm:
                egm_changed()
                continue
            await inbox.send(HostChanged(hint.address, hint.iommu_group, hint.cause, hint.mediated))


def _one_each(hints: Sequence[Hint]) -> Iterable[Hint]:
    """Return the last hint of each place, in the order of the places' first hints."""
    return {(hint.address, hint.iommu_group, hint.mediated, hint.egm): hint for hint in hints}.values()
