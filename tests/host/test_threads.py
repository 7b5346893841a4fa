"""A call in a thread: its result, and what becomes of it when nobody waits any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from gpuactors.host.threads import OneByOne, Running
from gpuactors.ports.errors import HostError
from tests.support.patience import patient

PATIENCE_S = patient(10.0)


class Call:
    """A call that hangs until it is let go, and then returns or raises; counts how often its end was told."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.error: Exception | None = None
        self.over = trio.Event()
        self.ends = 0

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return threading.current_thread().name

    def ended(self) -> None:
        self.ends += 1
        self.over.set()


@pytest.fixture
def call() -> Iterator[Call]:
    call = Call()
    yield call
    call.go.set()


async def wait_for(call: Call) -> str:
    with trio.fail_after(PATIENCE_S):
        running = Running(call, name="a read", ended=call.ended)
        await running.over.wait()
        return running.result()


@pytest.mark.trio
async def test_the_result_comes_from_a_named_thread(call: Call) -> None:
    call.go.set()
    assert await wait_for(call) == "a read"
    assert call.ends == 1


@pytest.mark.trio
async def test_what_it_raises_is_raised(call: Call) -> None:
    call.go.set()
    call.error = OSError("no such device")
    with pytest.raises(OSError, match="no such device"):
        await wait_for(call)
    assert call.ends == 1


@pytest.mark.trio
@pytest.mark.parametrize("error", [None, OSError("too late")])
async def test_its_end_is_told_although_it_was_given_up(call: Call, error: OSError | None) -> None:
    call.error = error
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, call)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert call.ends == 0
        call.go.set()
        await call.over.wait()
    assert call.ends == 1


def test_the_run_can_end_before_it(call: Call) -> None:
    async def give_up() -> None:
        with trio.move_on_after(0):
            await wait_for(call)
        assert call.began.wait(PATIENCE_S)

    trio.run(give_up)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "a read")
    assert thread.daemon
    call.go.set()


@pytest.mark.trio
async def test_where_there_is_no_thread_its_end_is_told_at_once(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader would wait for ever for a thread that never was."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", refuse)
    with pytest.raises(HostError, match=r"no thread can be started.*TasksMax"):
        await wait_for(call)
    assert call.ends == 1


@pytest.mark.trio
async def test_a_call_in_a_queue_is_in_time_though_the_loop_is_late(call: Call) -> None:
    one_by_one, results = OneByOne("reads"), list[str]()

    async def read() -> None:
        running = await one_by_one.in_time(call, 0.2)
        assert running is not None
        results.append(running.result())

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            call.go.set()
            time.sleep(0.4)  # noqa: ASYNC251 -- it holds up the loop
    assert results == ["reads", "reads"]


@pytest.mark.trio
async def test_a_call_that_hangs_and_one_behind_it_are_not_in_time(call: Call) -> None:
    one_by_one = OneByOne("reads")
    with trio.fail_after(PATIENCE_S):
        assert await one_by_one.in_time(call, 0.05) is None
        assert await one_by_one.in_time(lambda: "not begun", 0.05) is None
        call.go.set()
        last = await one_by_one.in_time(lambda: "the last", PATIENCE_S)
    assert last is not None
    assert (last.result(), one_by_one.ended) == ("the last", 2)
