"""The ends of a command that watches: a signal, or the first of its jobs that ends or fails. Must not print.

A file of its own: a screen and a stream end so.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from gpuactors.cli.ending import first
from gpuactors.observe.stdout import StdoutError
from gpuactors.ports.errors import ControlError

_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


async def until_ended(*jobs: Callable[[], Awaitable[object]]) -> None:
    """Run the jobs beside each other until a signal comes or one of them ends. Raise what ended it otherwise, not in a
    group."""
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:

        async def end_at_signals() -> None:
            with trio.open_signal_receiver(*_ENDS) as numbers:
                for job in jobs:
                    nursery.start_soon(run, job)
                await anext(numbers)

        async def run(job: Callable[[], Awaitable[object]]) -> None:
            nonlocal failure
            try:
                await job()
            except* (ControlError, StdoutError, OSError) as group:
                failure = failure or first(group)
            nursery.cancel_scope.cancel()

        nursery.start_soon(run, end_at_signals)
    if failure is not None:
        raise failure
