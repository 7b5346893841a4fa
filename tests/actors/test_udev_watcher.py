"""The udev watcher: what was said together of one place is one event; a loss is one too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gpuactors.actors import udev_watcher
from gpuactors.core.events import Event
from gpuactors.core.events.host import HostChanged, UeventsLost, UeventsOpened, UeventsUnavailable
from gpuactors.core.values.model import PciAddress
from gpuactors.ports.errors import HostError, UeventsOverflowError
from gpuactors.ports.node import Hint, UeventSource
from tests.support.patience import patient

GPU: Final = PciAddress("0000:23:00.0")
OTHER: Final = PciAddress("0000:24:00.0")
PATIENCE_S: Final = patient(10.0)


def _no_egm() -> None:
    raise AssertionError("no uevent was of an EGM")


class FakeSource:
    """A source with these batches in it; None is an overflow."""

    def __init__(self, batches: Sequence[Sequence[Hint] | None]) -> None:
        self._batches = list(batches)

    async def receive(self) -> Sequence[Hint]:
        await trio.lowlevel.checkpoint()
        if not self._batches:
            await trio.sleep_forever()
        batch = self._batches.pop(0)
        if batch is None:
            raise UeventsOverflowError("full")
        return batch


async def heard(events: int, *batches: Sequence[Hint] | None) -> list[Event]:
    """So many events that follow from these batches; there must be no more of them."""

    @asynccontextmanager
    async def open_uevents() -> AsyncIterator[UeventSource]:
        yield FakeSource(batches)

    post, inbox = trio.open_memory_channel[Event](16)
    scans = trio.Event()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(udev_watcher.run, open_uevents, post, scans, _no_egm)
            found = [await inbox.receive() for _ in range(events + 1)]
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.WouldBlock):
                inbox.receive_nowait()
            nursery.cancel_scope.cancel()
    assert found.pop(0) == UeventsOpened(scan_begun=False)
    assert scans.is_set()
    return found


@pytest.mark.trio
async def test_one_event_for_each_place_of_a_batch() -> None:
    said = [
        Hint(GPU, None, "add pci"),
        Hint(OTHER, None, "add pci"),
        Hint(None, 51, "add vfio"),
        Hint(GPU, None, "add vfio-dev"),
        Hint(GPU, None, "bind pci"),
        Hint(None, 51, "change vfio"),
    ]
    assert await heard(3, said) == [
        HostChanged(GPU, None, "bind pci"),
        HostChanged(OTHER, None, "add pci"),
        HostChanged(None, 51, "change vfio"),
    ]


@pytest.mark.trio
async def test_what_is_said_later_is_another_event() -> None:
    again = [Hint(GPU, None, "bind pci")]
    assert await heard(2, again, again) == 2 * [HostChanged(GPU, None, "bind pci")]


@pytest.mark.trio
async def test_a_loss_is_an_event_and_what_follows_is_heard() -> None:
    assert await heard(2, None, [Hint(GPU, None, "bind pci")]) == [
        UeventsLost("full"),
        HostChanged(GPU, None, "bind pci"),
    ]


@pytest.mark.trio
@pytest.mark.parametrize("error", [HostError("EPERM"), RuntimeError("a bug")])
async def test_scans_begin_where_uevents_cannot_be_received(
    error: Exception, autojump_clock: MockClock
) -> None:
    @asynccontextmanager
    async def open_uevents() -> AsyncIterator[UeventSource]:
        if not scans.is_set():
            raise error
        yield FakeSource([])

    post, inbox = trio.open_memory_channel[Event](16)
    scans = trio.Event()
    with trio.fail_after(60):
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError):
                await udev_watcher.run(open_uevents, post, scans, _no_egm)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(udev_watcher.run, open_uevents, post, scans, _no_egm)
            await scans.wait()
            if isinstance(error, HostError):
                assert await inbox.receive() == UeventsUnavailable("EPERM", scan_begun=False)
            assert await inbox.receive() == UeventsOpened(scan_begun=True)
            nursery.cancel_scope.cancel()


async def test_a_uevent_of_an_egm_has_the_egms_read_and_is_no_event(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def open_uevents() -> AsyncIterator[UeventSource]:
        yield FakeSource([[Hint(None, None, "add egm", egm=True), Hint(GPU, None, "bind pci")]])

    changed = trio.Event()
    post, inbox = trio.open_memory_channel[Event](16)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(udev_watcher.run, open_uevents, post, trio.Event(), changed.set)
            await changed.wait()
            assert await inbox.receive() == UeventsOpened(scan_begun=False)
            assert await inbox.receive() == HostChanged(GPU, None, "bind pci")
            nursery.cancel_scope.cancel()
