"""The spec keeper: has the CDI files of the device plugin on disk as the core wants them, and posts what is there.

It writes when the core wants other files, when somebody has touched one, and again after a failure. A write that is
overtaken by other wanted files is not posted. A daemon that does not serve yet only looks which files are there. Must
not decide which files there are, nor what a missing one means for a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from contextlib import aclosing
from typing import Final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import SpecsWritten
from gpuactors.core.values.device_spec import SpecsWanted
from gpuactors.core.values.model import ResourceName
from gpuactors.ports.errors import StateFileError
from gpuactors.ports.node import SpecDirectory

SPECS_RETRY_S: Final = 5.0
"""The wait after a failed write, in seconds."""

SPECS_TOUCH_REST_S: Final = 1.0
"""The minimum interval between two writes because somebody has touched a file, in seconds: the daemon's own writes
touch them as well."""


async def run(
    wanted: LatestReader[SpecsWanted | None],
    directory: SpecDirectory,
    inbox: trio.MemorySendChannel[Event],
) -> None:
    """Run for ever. `wanted`: the files; None while this daemon has handed over, or does not know them yet."""
    orders: Latest[int] = Latest(0)
    """How often a write was asked for: one write is enough for all that it has not seen."""

    def order() -> None:
        orders.set(orders.value + 1)

    async def hear_touches() -> None:
        async with aclosing(directory.touches()) as touches:
            async for _ in touches:
                order()
                await trio.sleep(SPECS_TOUCH_REST_S)

    async def hear_wanted() -> None:
        async for _ in wanted:
            order()

    ordered = orders.subscribe()
    await ordered.receive()  # the count of none
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear_touches)
        nursery.start_soon(hear_wanted)
        posted: tuple[int, SpecsWritten] | None = None
        retries = False
        while True:
            with trio.move_on_after(SPECS_RETRY_S if retries else math.inf):
                await ordered.receive()
            now, version = wanted.value, wanted.version
            if now is None:
                retries = False  # the serving daemon writes them
                continue
            written = await _written(now, directory)
            if wanted.version != version:
                continue  # the next write may undo this one
            # For each order of the core, as it may have forgotten the last answer; for a touch, only what is new.
            if (version, written) != posted:
                await inbox.send(written)
                posted = version, written
            retries = bool(written.unwritten)


async def _written(wanted: SpecsWanted, directory: SpecDirectory) -> SpecsWritten:
    """Write the files, or look for them. Of one that is not there, and not to be written, nothing is wrong."""
    specs = wanted.specs
    unwritten: Mapping[ResourceName, str] = {}
    try:
        with raises_only(StateFileError, "spec_keeper"):
            if wanted.writes:
                unwritten = await directory.write(specs)
                found: Set[ResourceName] = specs.keys() - unwritten.keys()
            else:
                found = await directory.find(specs)
    except StateFileError as exc:
        unwritten, found = dict.fromkeys(specs, str(exc)), frozenset()
    return SpecsWritten({r: spec for r, spec in specs.items() if r in found}, unwritten)
