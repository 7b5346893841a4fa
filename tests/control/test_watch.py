"""A command that watches the daemon over its control socket: real sockets, both sides in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import final

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.control import node_view, service
from gpuactors.control.about import About
from gpuactors.control.client import NoDaemonError, OtherVersionError, Running, read_status
from gpuactors.control.node_view import view_of
from gpuactors.control.path import socket_path
from gpuactors.control.service import ControlService
from gpuactors.control.view import NodeView
from gpuactors.control.watch import watch
from gpuactors.core.events.kubelet import KubeletGone
from gpuactors.core.state import NodeState
from gpuactors.grpc_trio import Server, bind_unix
from gpuactors.ports.errors import ControlError
from tests.control.test_socket import Side
from tests.core.builders import Core, gpu
from tests.support.patience import patient

WITHIN_S = patient(10.0)


@final
class Watcher:
    """What a command was told, and why that ended."""

    def __init__(self, state_dir: Path) -> None:
        self._path = socket_path(str(state_dir))
        self._told, self._heard = trio.open_memory_channel[Running](limits.CALL_DEVICES_MAX)
        self.ended: str | None = None

    async def run(self) -> None:
        try:
            await watch(self._path, self._told.send_nowait)
        except ControlError as exc:
            self.ended = str(exc)

    async def next(self) -> Running:
        return await self._heard.receive()

    def is_told_nothing(self) -> bool:
        return self._heard.statistics().current_buffer_used == 0


@asynccontextmanager
async def watching(state_dir: Path) -> AsyncIterator[Watcher]:
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            watcher = Watcher(state_dir)
            nursery.start_soon(watcher.run)
            yield watcher


def step(side: Side, reason: str) -> None:
    side.core.feed(KubeletGone(reason))
    side.state.set(side.core.state)


@pytest.mark.trio
async def test_each_change_is_told_and_what_only_grows_older_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WATCH_PAUSE_S", 0.01)
    side = Side(tmp_path)
    side.core.pass_time(60)  # all that is read at the start has been read
    side.state.set(side.core.state)
    async with side.holds() as held, watching(tmp_path) as watcher:
        assert (await watcher.next()).view.kubelet_problem == ""
        step(side, "no socket")
        assert (await watcher.next()).view.kubelet_problem == "no socket"
        side.core.pass_time(60)  # polls and reads that find what is known
        side.state.set(side.core.state)
        await trio.sleep(0.2)  # many pauses: it would have been told
        assert watcher.is_told_nothing()
        step(side, "another reason")
        assert (await watcher.next()).view.kubelet_problem == "another reason"
        assert watcher.is_told_nothing()
        await held.give_up()
    assert watcher.ended is not None
    assert watcher.ended.endswith("is ending")


@pytest.mark.trio
async def test_a_daemon_without_a_change_says_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_BEAT_S", 0.05)
    monkeypatch.setattr(service, "WATCH_PAUSE_S", 0.01)
    monkeypatch.setattr(limits, "CONTROL_CALL_S", patient(0.2))
    side = Side(tmp_path)
    async with side.holds(), watching(tmp_path) as watcher:
        await watcher.next()
        await trio.sleep(2 * patient(0.2))  # longer than a silent daemon has
        assert watcher.ended is None
        assert watcher.is_told_nothing()
        monkeypatch.setattr(limits, "WATCH_BEAT_S", 3600.0)
        side.state.close()


@pytest.mark.trio
async def test_a_daemon_that_says_nothing_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONTROL_CALL_S", 0.2 - limits.WATCH_BEAT_S)
    async with Side(tmp_path).holds(), watching(tmp_path) as watcher:
        await watcher.next()
    assert watcher.ended is not None
    assert watcher.ended.endswith("did not say anything within 0.2 s; does it hang?")


@pytest.mark.trio
async def test_without_a_daemon_there_is_nothing_to_watch(tmp_path: Path) -> None:
    with trio.fail_after(WITHIN_S), pytest.raises(NoDaemonError, match="no daemon runs"):
        await watch(socket_path(str(tmp_path)), lambda running: None)


@pytest.mark.trio
async def test_a_daemon_that_speaks_grpc_is_reported_as_of_another_version(tmp_path: Path) -> None:
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with bind_unix(path) as listener, trio.open_nursery() as nursery:
            await nursery.start(Server([], drain_s=1).serve, listener)
            with pytest.raises(
                OtherVersionError, match="of another version than this command: run the command of"
            ):
                await watch(path, lambda running: None)
            with pytest.raises(
                OtherVersionError, match="of another version than this command: run the command of"
            ):
                await trio.to_thread.run_sync(read_status, path)
            nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("watchers", [1, 16])
async def test_who_watches_costs_the_same_however_often_the_state_changes(
    watchers: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A view of 256 GPUs takes milliseconds, in which no call of kubelet's is answered: one for all, once a pause."""
    derived = 0

    def counted(state: NodeState, at: float) -> NodeView:
        nonlocal derived
        derived += 1
        return view_of(state, at)

    core = Core(gpu("01:00.0"))
    core.pass_time(60)
    cell = Latest(core.state)
    reports = ControlService(cell.subscribe(), About, 1)
    async with trio.open_nursery() as nursery:
        for _ in range(watchers):
            answers = reports.changes()
            assert (await anext(answers)).status
            nursery.start_soon(anext, answers)
        await trio.sleep(service.WATCH_PAUSE_S)
        monkeypatch.setattr(node_view, "view_of", counted)
        for number in range(500):  # in two seconds
            host = replace(
                core.state.host, inspections=replace(core.state.host.inspections, last=1000 + number)
            )
            cell.set(replace(core.state, host=host))
            await trio.sleep(2.0 / 500)
        nursery.cancel_scope.cancel()
    assert 0 < derived <= 2.0 / service.WATCH_PAUSE_S + 1
