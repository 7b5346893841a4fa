"""The udev watcher: kernel uevents become hints.

A hint only requests a new inspection; a lost, doubled or late one affects only the delay. Without uevents the periodic
scan finds every change, later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.host import HostChanged, UeventsLost, UeventsOpened, UeventsUnavailable
from gpuactors.ports.errors import HostError, UeventsOverflowError
from gpuactors.ports.node import Hint, OpenUevents, UeventSource


async def run(open_uevents: OpenUevents, inbox: trio.MemorySendChannel[Event]) -> None:
    """Runs for ever. Changes before the source was open may have been missed, so it begins with a scan."""
    while True:
        try:
            async with open_uevents() as source:
                await inbox.send(UeventsOpened())
                await _forward(source, inbox)
        except HostError as exc:
            await inbox.send(UeventsUnavailable(str(exc)))
        await trio.sleep(limits.UEVENTS_RETRY_S)


async def _forward(source: UeventSource, inbox: trio.MemorySendChannel[Event]) -> None:
    while True:
        try:
            hints = await source.receive()
        except UeventsOverflowError as exc:
            await inbox.send(UeventsLost(str(exc)))
            continue
        for hint in _one_each(hints):
            await inbox.send(HostChanged(hint.address, hint.iommu_group, hint.cause))


def _one_each(hints: Sequence[Hint]) -> Iterable[Hint]:
    """The last hint of each place, in the order of the places' first ones."""
    return {(hint.address, hint.iommu_group): hint for hint in hints}.values()
