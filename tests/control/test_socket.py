"""The control socket between two daemons of one node: real sockets, both sides in this process."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from gpuactors import VERSION
from gpuactors.concurrency.latest import Latest
from gpuactors.control import server
from gpuactors.control.client import read_status
from gpuactors.control.hand_over import HandedOver, NotRunning, Unanswered, ask_to_hand_over
from gpuactors.control.lines import Lines, NoLineError
from gpuactors.control.messages import (
    ANSWER_MAX_BYTES,
    BUSY,
    HAND_OVER,
    STATUS,
    UNKNOWN,
    WATCH,
    Answer,
    Request,
    answer_of,
    line_of,
)
from gpuactors.control.path import path_problem, socket_path
from gpuactors.control.server import UnixHeldControl
from gpuactors.control.unix import UnixControl
from gpuactors.core.state import NodeState
from gpuactors.grpc_trio import (
    Owner,
    Server,
    SocketInUseError,
    bind_unix,
    connect_unix,
    owner_of,
)
from gpuactors.limits import SOCKET_PATH_MAX_BYTES
from gpuactors.ports.errors import ControlError, ControlTakenError
from tests.core.builders import Core, gpu
from tests.support.patience import patient

WITHIN_S = patient(10.0)
PATIENCE_S = 0.3
"""How long a successor waits here for a daemon that hangs."""


class Side:
    """One daemon's side of the socket."""

    def __init__(self, state_dir: Path) -> None:
        self.hanging: Latest[frozenset[Owner]] = Latest(frozenset())
        self.control = UnixControl(str(state_dir), self.hanging, deadline_s=PATIENCE_S)
        self.core = Core(gpu("23:00.0"))
        self.state: Latest[NodeState] = Latest(self.core.state)

    @asynccontextmanager
    async def holds(self) -> AsyncIterator[UnixHeldControl]:
        async with self.control.hold(self.state.subscribe()) as held:
            yield held


async def asked(path: str, ask: str) -> Answer:
    """The answer of the daemon behind the socket."""
    async with await connect_unix(path, deadline_s=trio.current_time() + 1) as stream:
        await stream.send_all(line_of(Request(ask)))
        return answer_of(await Lines(stream).next(ANSWER_MAX_BYTES))


@asynccontextmanager
async def listening(path: str, speak: bytes | None = None) -> AsyncIterator[None]:
    """Somebody listens at `path` who is no daemon: says nothing, or something that is no JSON."""

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await talk(stream)

    async def talk(stream: trio.SocketStream) -> None:
        async with stream:
            if speak is not None:
                await stream.send_all(speak)
            while await stream.receive_some():
                pass

    async with bind_unix(path) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield
        nursery.cancel_scope.cancel()


# --- handing over -----------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_nobody_to_ask(tmp_path: Path) -> None:
    with trio.fail_after(WITHIN_S):
        assert await ask_to_hand_over(socket_path(str(tmp_path)), within_s=5) == NotRunning()
        side = Side(tmp_path)
        assert await side.control.ask() == "none"
        assert not await side.control.is_held()


@pytest.mark.trio
async def test_the_socket_of_a_crashed_daemon_is_nobody(tmp_path: Path) -> None:
    listener = bind_unix(socket_path(str(tmp_path)))
    await listener._listener.aclose()  # as the kernel does it: the file stays
    side = Side(tmp_path)
    with trio.fail_after(WITHIN_S):
        assert await side.control.ask() == "none"
        async with side.holds() as held:
            assert held.still_ours()


@pytest.mark.trio
async def test_only_its_owner_may_talk_to_the_daemon(tmp_path: Path) -> None:
    async with Side(tmp_path).holds():
        assert stat.S_IMODE(os.lstat(socket_path(str(tmp_path))).st_mode) == 0o600


@pytest.mark.trio
async def test_the_answer_comes_when_the_socket_is_free(tmp_path: Path) -> None:
    old, new = Side(tmp_path), Side(tmp_path)
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await new.control.ask())

    with trio.fail_after(WITHIN_S):
        async with old.holds() as held, trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await held.asked()
            assert await new.control.is_held()
            await trio.sleep(0.05)
            assert answers == []
            await held.give_up()
            await _until(lambda: bool(answers))
            assert answers == [f"process {os.getpid()} has handed over"]
            async with new.holds() as taken:  # while the old one is still about
                assert taken.still_ours()
                assert not held.still_ours()
                assert await old.control.is_held()
        assert new.hanging.value == frozenset()


@pytest.mark.trio
async def test_one_of_two_successors_is_answered_and_the_other_asks_that_one(tmp_path: Path) -> None:
    old, path = Side(tmp_path), socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with (
            old.holds() as held,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_ask, path)
            await held.asked()
            assert await asked(path, HAND_OVER) == Answer(error=BUSY)
            nursery.start_soon(held.give_up)
        assert await ask_to_hand_over(path, within_s=1) == NotRunning()


@pytest.mark.trio
async def test_a_successor_that_goes_away_changes_nothing_for_the_others(tmp_path: Path) -> None:
    old, path = Side(tmp_path), socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with old.holds() as held:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask, path)
                await held.asked()
                nursery.cancel_scope.cancel()
            assert (await trio.to_thread.run_sync(read_status, path)).view.devices
            await held.give_up()
        assert not await old.control.is_held()


@pytest.mark.trio
async def test_an_asker_waits_out_another_hand_over(tmp_path: Path) -> None:
    """BUSY is no refusal: the one who was quicker is to be asked in a moment."""
    old, path = Side(tmp_path), socket_path(str(tmp_path))
    outcomes: list[object] = []

    async def ask() -> None:
        outcomes.append(await ask_to_hand_over(path, within_s=5))

    with trio.fail_after(WITHIN_S):
        async with old.holds() as held, trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await held.asked()
            await trio.sleep(0.2)
            assert outcomes == []
            await held.give_up()
    assert sorted(map(repr, outcomes)) == sorted([repr(HandedOver(os.getpid())), repr(NotRunning())])


# --- those who do not hand over ---------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_live_daemon_keeps_its_socket(tmp_path: Path) -> None:
    old, new = Side(tmp_path), Side(tmp_path)
    async with old.holds() as held:
        with pytest.raises(ControlTakenError):
            async with new.holds():
                pass
        assert held.still_ours()


@pytest.mark.trio
async def test_a_daemon_that_hangs_is_taken_over_anyway(tmp_path: Path) -> None:
    new, path = Side(tmp_path), socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with listening(path):
            how = await new.control.ask()
            assert how.startswith("did not hand over, taken over anyway: no answer within 0.3 s")
            assert new.hanging.value == {Owner(os.getpid())}
            async with new.holds() as held:
                assert held.still_ours()
                assert (await trio.to_thread.run_sync(read_status, path)).view.role == "serving"


@pytest.mark.trio
async def test_a_daemon_that_never_ends_its_streams_is_taken_over_anyway(tmp_path: Path) -> None:
    old, new = Side(tmp_path), Side(tmp_path)
    with trio.fail_after(WITHIN_S):
        async with old.holds() as held:
            assert (await new.control.ask()).startswith("did not hand over")
            async with new.holds() as taken:
                assert taken.still_ours()
                assert not held.still_ours()


@pytest.mark.trio
@pytest.mark.parametrize("speak", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64], ids=["http1", "zeros"])
async def test_garbage_on_the_socket(tmp_path: Path, speak: bytes) -> None:
    new, path = Side(tmp_path), socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with listening(path, speak):
            with pytest.raises(ControlError):
                await trio.to_thread.run_sync(read_status, path)
            assert isinstance(await ask_to_hand_over(path, within_s=PATIENCE_S), Unanswered)
            await new.control.ask()
            async with new.holds() as held:
                assert held.still_ours()


@pytest.mark.trio
async def test_a_daemon_that_knows_no_hand_over_is_taken_over_at_once(tmp_path: Path) -> None:
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(Server([], drain_s=0.1).serve, bind_unix(path))
            outcome = await ask_to_hand_over(path, within_s=60)
            assert isinstance(outcome, Unanswered)
            assert "UNIMPLEMENTED" in outcome.reason
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_who_hung_before_is_not_evicted_for_ever(tmp_path: Path) -> None:
    new, path = Side(tmp_path), socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with listening(path):
            await new.control.ask()
        assert new.hanging.value
        await new.control.ask()
        assert new.hanging.value == frozenset()


@pytest.mark.trio
async def test_only_the_evicted_one_loses_a_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "plugin.sock")
    async with listening(path):
        assert owner_of(path) == Owner(os.getpid())
        for others in (frozenset({Owner(0)}), frozenset({Owner(None)}), frozenset({Owner(1)})):
            with pytest.raises(SocketInUseError):
                bind_unix(path, evict=others)
        async with bind_unix(path, evict={Owner(os.getpid())}) as ours:
            assert ours.still_there()


@pytest.mark.trio
async def test_something_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = trio.Path(socket_path(str(tmp_path)))
    await path.write_text("precious")
    side = Side(tmp_path)
    with trio.fail_after(WITHIN_S):
        await side.control.ask()
        with pytest.raises(ControlError, match="is not a socket"):
            async with side.holds():
                pass
    assert await path.read_text() == "precious"


@pytest.mark.trio
async def test_closing_twice_leaves_a_successor_its_socket(tmp_path: Path) -> None:
    """The inode number of a removed socket goes to the next file that is made, as a rule."""
    path = str(tmp_path / "s.sock")
    old = bind_unix(path)
    await old.aclose()
    async with bind_unix(path) as new:
        assert not old.still_there()
        await old.aclose()
        assert new.still_there()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("missing", "does not exist: make it"),
        ("file", "is not a directory"),
        ("below a file", "is not a directory"),
        ("long", "use a shorter"),
    ],
)
def test_where_no_socket_can_be(tmp_path: Path, trouble: str, said: str) -> None:
    assert path_problem(str(tmp_path)) is None
    state_dir = tmp_path / "state"
    if trouble == "file":
        state_dir.touch()
    if trouble == "below a file":
        state_dir.touch()
        state_dir /= "below"
    if trouble == "long":
        state_dir = tmp_path / ("x" * SOCKET_PATH_MAX_BYTES)
        state_dir.mkdir()
    reason = path_problem(str(state_dir))
    assert reason is not None
    assert str(state_dir) in reason
    assert said in reason
    assert "--state-dir" in reason


# --- telling ----------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_status_is_what_the_daemon_knows_now(tmp_path: Path) -> None:
    side, path = Side(tmp_path), socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with side.holds():
            running = await trio.to_thread.run_sync(read_status, path)
            assert running.pid == os.getpid()
            (device,) = running.view.devices
            assert (device.address, device.health) == ("0000:23:00.0", "Healthy")
            side.core.enabled["0000:23:00.0"] = 1
            side.core.pass_time(10)
            side.state.set(side.core.state)
            (device,) = (await trio.to_thread.run_sync(read_status, path)).view.devices
            assert (device.health, device.history[-1].health) == ("Unhealthy", "Unhealthy")


@pytest.mark.trio
async def test_a_request_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with Side(tmp_path).holds():
            assert await asked(path, "anything") == Answer(version=VERSION, error=UNKNOWN)


@pytest.mark.trio
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"hello\n",
        b"PRI * HTTP/1.0\r\n\r\n",
        b"\0" * 64,
        b"{" * 100_000,
        b'{"ask": 1}\n',
        b"[" * 1000 + b"\n",
    ],
    ids=["nothing", "half", "text", "preface", "zeros", "long", "number", "deep"],
)  # fmt: skip
async def test_garbage_from_a_client_costs_only_its_connection(tmp_path: Path, said: bytes) -> None:
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with Side(tmp_path).holds():
            async with await connect_unix(path, deadline_s=trio.current_time() + 1) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(said)
                assert (await asked(path, STATUS)).pid == os.getpid()
            assert (await asked(path, STATUS)).pid == os.getpid()


@pytest.mark.trio
async def test_one_connection_too_many_is_closed_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with Side(tmp_path).holds(), AsyncExitStack() as stack:
            watchers = []
            for _ in range(2):
                stream = await connect_unix(path, deadline_s=trio.current_time() + 1)
                await stack.enter_async_context(stream)
                await stream.send_all(line_of(Request(WATCH)))
                watchers.append(stream)
                assert answer_of(await Lines(stream).next(ANSWER_MAX_BYTES)).status
            with pytest.raises((NoLineError, trio.BrokenResourceError)):
                await asked(path, STATUS)
            await watchers.pop().aclose()
            await _until_answered(path)


@pytest.mark.trio
async def test_who_asks_nothing_loses_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    path = socket_path(str(tmp_path))
    with trio.fail_after(WITHIN_S):
        async with (
            Side(tmp_path).holds(),
            await connect_unix(path, deadline_s=trio.current_time() + 1) as stream,
        ):
            assert await stream.receive_some() == b""


@pytest.mark.trio
async def test_no_daemon_to_read_from(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="no daemon runs"):
        await trio.to_thread.run_sync(read_status, socket_path(str(tmp_path)))


async def _ask(path: str) -> None:
    await ask_to_hand_over(path, within_s=WITHIN_S)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - fail_after is around it
        await trio.sleep(0.005)


async def _until_answered(path: str) -> None:
    while True:
        with suppress(NoLineError, trio.BrokenResourceError):
            await asked(path, STATUS)
            return
        await trio.sleep(0.005)
