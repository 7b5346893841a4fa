"""What is loaded at its first use: in a thread, once, and again where that failed."""

from __future__ import annotations

import threading

import pytest
import trio

from gpuactors.concurrency.first_use import FirstUse


class Load:
    """Notes by which threads it is called; fails so often first."""

    def __init__(self, failures: int = 0) -> None:
        self.threads: list[threading.Thread] = []
        self._failures = failures

    def __call__(self) -> str:
        self.threads.append(threading.current_thread())
        if len(self.threads) <= self._failures:
            raise ImportError("the file is gone")
        return "loaded"


async def test_it_is_loaded_once_and_not_in_the_thread_of_the_tasks() -> None:
    load = Load()
    used = FirstUse(load)
    assert [await used.get(), await used.get()] == ["loaded", "loaded"]
    (thread,) = load.threads
    assert thread is not threading.current_thread()


async def test_what_failed_is_tried_again_at_the_next_use() -> None:
    used = FirstUse(Load(failures=1))
    with pytest.raises(ImportError, match="the file is gone"):
        await used.get()
    assert await used.get() == "loaded"


async def test_where_no_thread_can_be_started_it_is_loaded_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trio._threads.start_thread_soon", none_left)
    load = Load()
    assert await FirstUse(load).get() == "loaded"
    assert load.threads == [threading.current_thread()]


async def test_who_is_cancelled_does_not_wait_for_it() -> None:
    hangs, begun = threading.Event(), threading.Event()

    def load() -> str:
        begun.set()
        hangs.wait()
        return "loaded"

    used = FirstUse(load)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(used.get)
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
    finally:
        hangs.set()
    assert await used.get() == "loaded"
