"""What ends a command that watches, and how a failure leaves it."""

from __future__ import annotations

import errno

import pytest
import trio

from gpuactors.cli.live.ends import until_ended
from gpuactors.observe.stdout import StdoutError


async def forever() -> None:
    await trio.sleep_forever()


async def full() -> None:
    raise StdoutError(errno.ENOSPC, "No space left on device")


async def test_output_that_fails_in_any_job_is_raised_by_itself() -> None:
    async def full_in_groups() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(full)
            nursery.start_soon(full)

    for jobs in ((forever, forever, full), (full, forever), (full_in_groups, full)):
        with trio.fail_after(5), pytest.raises(StdoutError):
            await until_ended(*jobs)


async def test_the_first_job_that_ends_ends_all() -> None:
    async def at_once() -> None:
        pass

    with trio.fail_after(5):
        await until_ended(forever, forever, at_once)
