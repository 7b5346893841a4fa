"""The served keeper: what this daemon serves is written once per change, and again after a failure."""

from __future__ import annotations

from collections.abc import Mapping

import trio
import trio.testing

from gpuactors.actors import served_keeper
from gpuactors.actors.served_keeper import SERVED_RETRY_S
from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.model import ResourceName
from gpuactors.ports.errors import StateFileError

H100, A100 = ResourceName("nvidia.com/H100"), ResourceName("nvidia.com/A100")
ONE = {H100: frozenset({"10de:2330"})}
PATIENCE_S = 100.0


class FakeFile:
    """Implements `ports.node.ServedResources`; fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.written: list[Mapping[ResourceName, frozenset[str]]] = []
        self._failures = failures

    async def read(self) -> Mapping[ResourceName, frozenset[str]]:
        return {}

    async def write(self, served: Mapping[ResourceName, frozenset[str]]) -> None:
        await trio.lowlevel.checkpoint()
        if self._failures:
            self._failures -= 1
            raise StateFileError("the disk is full")
        self.written.append(served)


Served = Mapping[ResourceName, frozenset[str]] | None


async def kept(file: FakeFile, *served: Served, apart_s: float = 1.0) -> list[str]:
    """The problems that are said while these are served, one after the other; None: another daemon serves."""
    problems: list[str] = []
    cell = Latest(served[0])
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served_keeper.run, cell.subscribe(), file, problems.append)
            for now in served[1:]:
                await trio.sleep(apart_s)
                cell.set(now)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    return problems


async def test_each_change_is_written_once(autojump_clock: trio.testing.MockClock) -> None:
    file = FakeFile()
    two = {**ONE, A100: frozenset({"10de:20b0"})}
    assert await kept(file, ONE, ONE, two, two) == []
    assert file.written == [ONE, two]


async def test_a_new_model_under_a_name_that_is_served_is_written(
    autojump_clock: trio.testing.MockClock,
) -> None:
    file = FakeFile()
    more = {H100: frozenset({"10de:2330", "10de:2331"})}
    assert await kept(file, ONE, more) == []
    assert file.written == [ONE, more]


async def test_who_does_not_serve_writes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    file = FakeFile()
    await kept(file, None, None)
    assert file.written == []


async def test_a_failure_is_said_once_and_the_write_is_tried_again_without_a_change(
    autojump_clock: trio.testing.MockClock,
) -> None:
    file = FakeFile(failures=2)
    assert await kept(file, *[ONE] * 4, apart_s=SERVED_RETRY_S + 1) == ["the disk is full"]
    assert file.written == [ONE]


async def test_who_serves_again_writes_over_what_a_successor_wrote(
    autojump_clock: trio.testing.MockClock,
) -> None:
    file = FakeFile()
    await kept(file, ONE, None, ONE)
    assert file.written == [ONE, ONE]
