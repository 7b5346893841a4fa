"""The sets reader posts each change of the sets, and that they cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gpuactors.actors import sets_reader
from gpuactors.actors.sets_reader import EGM_REREAD_S, SETS_REREAD_S, EgmReads
from gpuactors.core.events import Event
from gpuactors.core.events.host import SetsObserved
from gpuactors.core.kinds.sets import NO_SETS, KnownSets, SetSource
from gpuactors.daemon.app import Daemon, Outside, run_daemon
from gpuactors.host.sets_file import SetsFile
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports.errors import HostError
from tests.core.builders import SETTINGS
from tests.core.kinds.boards import board, egm, partition
from tests.daemon.test_app import EmptyHost, FailingLedger

PAIR = KnownSets((partition(1, 1, 2),))
BOARD = KnownSets(board(4))


class Listed:
    """Implements `ports.node.SetsReader`: what each read finds, the last one for ever."""

    def __init__(self, *found: KnownSets | str) -> None:
        self.found: Sequence[KnownSets | str] = found
        self.reads = 0

    async def read(self) -> KnownSets:
        await trio.lowlevel.checkpoint()
        found = self.found[min(self.reads, len(self.found) - 1)]
        self.reads += 1
        if isinstance(found, str):
            raise HostError(found)
        return found


@pytest.mark.parametrize("source", SETS_REREAD_S)
async def test_what_has_changed_is_posted_at_the_next_read(
    autojump_clock: MockClock, source: SetSource
) -> None:
    reader = Listed(PAIR, PAIR, "gone", "gone", PAIR, BOARD)
    post, inbox = trio.open_memory_channel[Event](10)
    first = await sets_reader.observed(source, reader)
    assert first == SetsObserved(source, PAIR)
    interval_s = SETS_REREAD_S[source]
    seen: list[tuple[float, Event]] = []
    begun_at = trio.current_time()
    with trio.move_on_after(10.5 * interval_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sets_reader.run, reader, first, post)
            while True:
                event = await inbox.receive()
                seen.append(((trio.current_time() - begun_at) / interval_s, event))
    assert seen == [
        (2, SetsObserved(source, "gone")),
        (4, SetsObserved(source, PAIR)),
        (5, SetsObserved(source, BOARD)),
    ]


async def test_an_error_that_no_port_raises_is_one_of_the_reader(autojump_clock: MockClock) -> None:
    class Broken:
        async def read(self) -> KnownSets:
            await trio.lowlevel.checkpoint()
            raise KeyError("x")

    observed = await sets_reader.observed(SetSource.OPERATOR, Broken())
    assert isinstance(observed.known, str)


async def test_the_daemon_knows_the_sets_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "sets.json"
    path.write_text('{"sets": {"1": [["0000:01:00.0"]]}}')
    outside = Outside(
        EmptyHost(),
        EmptyHost(),
        FailingLedger(0, KeyError("x")),
        None,
        UnixKubelet(str(tmp_path / "k/device-plugins")),
        sets={SetSource.OPERATOR: SetsFile(path)},
    )
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            daemon: Daemon = await nursery.start(run_daemon, SETTINGS, outside)
            while not daemon.state.value.host.scanned:
                before = daemon.state.value
                assert before.host.sets or before.host.uevents == "not received yet"
                await daemon.state.receive()
            assert [s.size for s in daemon.state.value.known_sets.sets] == [1]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("missing", ["sets.json", "no/sets.json"])
async def test_the_daemon_serves_without_a_file_and_says_so(tmp_path: Path, missing: str) -> None:
    observed = await sets_reader.observed(SetSource.OPERATOR, SetsFile(tmp_path / missing))
    assert isinstance(observed.known, str)
    assert str(tmp_path / missing) in observed.known


# --- EGMs -------------------------------------------------------------------------------------------------

ONE_EGM = KnownSets((egm("egm4", 1),))
GROWN = KnownSets((egm("egm4", 1, 2),))


async def test_egms_are_posted_when_they_change_by_whatever_read(autojump_clock: MockClock) -> None:
    reader = Listed(NO_SETS, ONE_EGM, ONE_EGM, GROWN, "hangs", GROWN, NO_SETS)
    post, inbox = trio.open_memory_channel[Event](10)
    egms = EgmReads(reader, post)
    await egms.read()
    assert inbox.statistics().current_buffer_used == 0, "a host without EGM"
    begun_at, seen = trio.current_time(), list[tuple[float, Event]]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(egms.run)
        await trio.testing.wait_all_tasks_blocked()
        egms.changed()
        for _ in range(5):
            event = await inbox.receive()
            seen.append(((trio.current_time() - begun_at) / EGM_REREAD_S, event))
        nursery.cancel_scope.cancel()
    changes: tuple[KnownSets | str, ...] = (ONE_EGM, GROWN, "hangs", GROWN, NO_SETS)
    assert seen == [
        (at, SetsObserved(SetSource.EGM, known)) for at, known in zip((0, 2, 3, 4, 5), changes, strict=True)
    ]


async def test_a_read_of_the_egms_is_posted_before_it_ends() -> None:
    post, inbox = trio.open_memory_channel[Event](1)
    await EgmReads(Listed(ONE_EGM), post).read()
    assert inbox.receive_nowait() == SetsObserved(SetSource.EGM, ONE_EGM)


async def test_without_a_reader_nothing_is_read() -> None:
    post, inbox = trio.open_memory_channel[Event](1)
    await EgmReads(None, post).read()
    assert inbox.statistics().current_buffer_used == 0
