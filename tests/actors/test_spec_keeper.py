"""The spec keeper writes the files once per order, again after a failure and a touch, and the core hears of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Set

import pytest
import trio
import trio.testing

from gpuactors.actors import spec_keeper
from gpuactors.actors.spec_keeper import SPECS_RETRY_S, SPECS_TOUCH_REST_S
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import SpecsWritten
from gpuactors.core.values.device_spec import DeviceSpecs, SpecsWanted
from gpuactors.core.values.model import DeviceId, ResourceName
from gpuactors.ports.errors import StateFileError

H100, A100 = ResourceName("nvidia.com/H100"), ResourceName("nvidia.com/A100")
ONE: DeviceSpecs = {H100: {DeviceId("0000:01:00.0"): ("/dev/vfio/vfio", "/dev/vfio/1")}}
TWO: DeviceSpecs = {**ONE, A100: {DeviceId("0000:02:00.0"): ("/dev/vfio/vfio", "/dev/vfio/2")}}
PATIENCE_S = 100.0


class FakeDirectory:
    """Implements `ports.node.SpecDirectory`."""

    def __init__(self) -> None:
        self.written: list[DeviceSpecs] = []
        self.there: set[ResourceName] = set()
        self.problems: dict[ResourceName, str] = {}
        self.error: Exception | None = None
        self.may_end = trio.Event()
        self.may_end.set()
        self._touched, self._touches = trio.open_memory_channel[None](10)

    async def write(self, specs: DeviceSpecs) -> Mapping[ResourceName, str]:
        await trio.lowlevel.checkpoint()
        self.written.append(specs)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return {r: why for r, why in self.problems.items() if r in specs}

    async def find(self, specs: DeviceSpecs) -> Set[ResourceName]:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.there & specs.keys()

    def touch(self) -> None:
        self._touched.send_nowait(None)

    async def touches(self) -> AsyncGenerator[frozenset[ResourceName] | None, None]:
        async for _ in self._touches:
            yield None


def serving(specs: DeviceSpecs | None) -> SpecsWanted | None:
    return SpecsWanted(specs, writes=True) if specs is not None else None


class Kept:
    """A keeper that runs."""

    def __init__(self, first: DeviceSpecs | None) -> None:
        self.directory = FakeDirectory()
        self.cell: Latest[SpecsWanted | None] = Latest(serving(first))
        self.post, self._inbox = trio.open_memory_channel[Event](100)

    async def settled(self) -> list[Event]:
        """What it has posted since."""
        await trio.testing.wait_all_tasks_blocked()
        events: list[Event] = []
        while True:
            try:
                events.append(self._inbox.receive_nowait())
            except trio.WouldBlock:
                return events


async def keeping(first: DeviceSpecs | None, story: Callable[[Kept], object]) -> None:
    kept = Kept(first)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spec_keeper.run, kept.cell.subscribe(), kept.directory, kept.post)
            await story(kept)  # type: ignore[misc]
            nursery.cancel_scope.cancel()


async def test_each_order_is_written_and_posted_once(autojump_clock: trio.testing.MockClock) -> None:
    async def story(kept: Kept) -> None:
        assert await kept.settled() == [SpecsWritten(ONE, {})]
        kept.cell.set(serving(TWO))
        assert await kept.settled() == [SpecsWritten(TWO, {})]
        kept.cell.set(serving({}))
        assert await kept.settled() == [SpecsWritten({}, {})]
        assert kept.directory.written == [ONE, TWO, {}]

    await keeping(ONE, story)


async def test_a_daemon_that_does_not_serve_writes_nothing_and_one_that_serves_again_posts_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def story(kept: Kept) -> None:
        kept.directory.touch()
        assert await kept.settled() == []
        assert kept.directory.written == []
        kept.cell.set(serving(ONE))
        assert await kept.settled() == [SpecsWritten(ONE, {})]
        kept.cell.set(None)
        kept.cell.set(serving(ONE))  # so soon that the keeper has not seen the None
        assert await kept.settled() == [SpecsWritten(ONE, {})], "the core has forgotten the first answer"

    await keeping(None, story)


async def test_a_file_that_cannot_be_written_is_posted_once_and_tried_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def story(kept: Kept) -> None:
        kept.directory.problems = {A100: "the disk is full"}
        kept.cell.set(serving(TWO))
        assert await kept.settled() == [SpecsWritten(ONE, {A100: "the disk is full"})]
        await trio.sleep(SPECS_RETRY_S * 2.5)
        assert await kept.settled() == []
        assert kept.directory.written == [TWO] * 3
        kept.directory.problems = {}
        await trio.sleep(SPECS_RETRY_S)
        assert await kept.settled() == [SpecsWritten(TWO, {})]
        await trio.sleep(SPECS_RETRY_S * 3)
        assert len(kept.directory.written) == 4

    await keeping(None, story)


async def test_a_write_that_a_newer_wish_overtakes_is_not_posted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The next write would undo it after the core has heard of it."""

    async def story(kept: Kept) -> None:
        kept.directory.may_end = trio.Event()
        assert await kept.settled() == []
        kept.cell.set(serving(ONE))
        assert await kept.settled() == []
        kept.directory.may_end.set()
        assert await kept.settled() == [SpecsWritten(ONE, {})]
        assert kept.directory.written == [TWO, ONE]

    await keeping(TWO, story)


@pytest.mark.parametrize("error", [StateFileError("no answer within 10 s"), RecursionError("deep")], ids=repr)
async def test_a_write_that_fails_leaves_no_file_that_counts(
    autojump_clock: trio.testing.MockClock, error: Exception
) -> None:
    async def story(kept: Kept) -> None:
        kept.directory.error = error
        kept.cell.set(serving(ONE))
        (event,) = await kept.settled()
        assert isinstance(event, SpecsWritten)
        assert event.specs == {}
        assert event.unwritten.keys() == {H100}

    await keeping(None, story)


async def test_a_touch_has_the_files_healed_and_posts_only_what_is_new(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def story(kept: Kept) -> None:
        assert await kept.settled() == [SpecsWritten(ONE, {})]
        kept.directory.touch()
        assert await kept.settled() == []
        assert kept.directory.written == [ONE, ONE]
        kept.directory.problems = {H100: "the disk is full"}
        await trio.sleep(SPECS_TOUCH_REST_S)
        kept.directory.touch()
        assert await kept.settled() == [SpecsWritten({}, {H100: "the disk is full"})]

    await keeping(ONE, story)


async def test_a_daemon_that_takes_over_looks_which_files_are_there_and_writes_when_it_serves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def story(kept: Kept) -> None:
        kept.directory.there = {H100}
        kept.cell.set(SpecsWanted(TWO, writes=False))
        assert await kept.settled() == [SpecsWritten(ONE, {})]
        kept.directory.there = {H100, A100}
        kept.directory.touch()
        assert await kept.settled() == [SpecsWritten(TWO, {})], "the daemon that serves has written it"
        assert kept.directory.written == []
        kept.directory.error = StateFileError("no answer within 10 s")
        await trio.sleep(SPECS_TOUCH_REST_S)
        kept.directory.touch()
        (event,) = await kept.settled()
        assert isinstance(event, SpecsWritten)
        assert event.specs == {}
        assert event.unwritten.keys() == {H100, A100}
        kept.directory.error = None
        kept.cell.set(serving(TWO))
        assert await kept.settled() == [SpecsWritten(TWO, {})]
        assert kept.directory.written == [TWO]

    await keeping(None, story)
