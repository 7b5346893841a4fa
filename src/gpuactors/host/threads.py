"""A blocking call in a thread of its own, which the waiting task may give up: a read of sysfs or /proc may hang.

Must not know what is read, set deadlines or limit how many calls there are: its callers do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar, final

import trio

from gpuactors.concurrency.patience import Patience
from gpuactors.ports.errors import HostShortError
from gpuactors.process.resource_exhaustion import shortage

if TYPE_CHECKING:
    import outcome

T = TypeVar("T")


async def in_thread(call: Callable[[], T], *, name: str) -> T:
    """Return or raise what `call` does. When cancelled it stops waiting; the thread cannot be ended and runs on.

    Raises `HostShortError` if no thread can be started.
    """
    running = Running(call, name=name, ended=lambda: None)
    await running.over.wait()
    return running.result()


@final
class Running(Generic[T]):
    """A call in a thread of its own. It is a daemon thread, so it does not keep the process from ending.

    Not trio.to_thread: there the thread of a call that was given up keeps its place in the limiter, and whether a
    cancelled call had started its thread cannot be known.
    """

    def __init__(self, call: Callable[[], T], *, name: str, ended: Callable[[], None]) -> None:
        """Start the thread.

        `ended` is called once, in the trio run, as soon as the thread is over, whether or not a task still waits; not
        at all if the run is over by then. Raises `HostShortError` if no thread can be started; `ended` has been called
        then.
        """
        self.over = trio.Event()
        self._name = name
        self._began = trio.Event()
        self._results: list[outcome.Outcome[T]] = []
        run = trio.lowlevel.current_trio_token()

        def begins() -> T:
            with suppress(trio.RunFinishedError):
                run.run_sync_soon(self._began.set)
            return call()

        def end(result: outcome.Outcome[T]) -> None:
            self._results.append(result)
            ended()
            self.over.set()

        try:
            start_thread(begins, end, name=name)
        except HostShortError:
            ended()
            raise

    async def ends_within(self, seconds: float, patience: Patience | None = None) -> bool:
        """Return whether the call ends in this time, which begins when the thread does (`Patience`). `patience`: what
        is left of that time. Raises `HostShortError` where as long no thread begins with it."""
        if not await Patience(seconds).ends(self._began):
            raise HostShortError(
                f"{self._name}: its thread has not begun within {seconds:g} s, as this machine has no processor time "
                "for it; see the load of the node and the CPU limit of the daemon's container"
            )
        return await (patience or Patience(seconds)).ends(self.over)

    def result(self) -> T:
        """Return or raise what the call did, once it is over."""
        return self._results[0].unwrap()


def start_thread(call: Callable[[], T], end: Callable[[outcome.Outcome[T]], None], *, name: str) -> None:
    """Start `call` in a thread, without waiting. `end` is called as `ended` of `Running`, with what it returned or
    raised.

    Raises `HostShortError` if no thread can be started; `end` is not called then.
    """
    run = trio.lowlevel.current_trio_token()

    def deliver(result: outcome.Outcome[T]) -> None:
        # Called in the thread.
        with suppress(trio.RunFinishedError):
            run.run_sync_soon(end, result)

    def named() -> T:
        # By itself: trio names the system's thread as well, which takes as long as the read of a function.
        thread = threading.current_thread()
        unnamed, thread.name = thread.name, name
        try:
            return call()
        finally:
            thread.name = unnamed

    try:
        trio.lowlevel.start_thread_soon(named, deliver)
    except RuntimeError as error:
        raise HostShortError(f"{name}: {shortage(error) or error}") from error


@final
class OneByOne:
    """Blocking calls in threads, never two at once and in the order in which they came: a call that was given up goes
    on, and the next one waits for its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_free = True
        self._waiting: deque[trio.Event] = deque()
        self.ended = 0
        """The number of calls that have ended."""

    async def __call__(self, call: Callable[[], T]) -> T:
        """Implement `in_thread`. Cancelled while it waits for an earlier call, it does not make its own."""
        turn = self.queue()
        try:
            await turn.wait()
        except BaseException:
            self.leave(turn)
            raise
        running = self.begin(call)
        await running.over.wait()
        return running.result()

    async def in_time(self, call: Callable[[], T], seconds: float) -> Running[T] | None:
        """Return the call once it is over; None if it does not end in this time (`Running.ends_within`), or an earlier
        one hangs. Raises `HostShortError`."""
        if not await self.comes(seconds):
            return None
        running = self.begin(call)
        return running if await running.ends_within(seconds) else None

    async def comes(self, seconds: float) -> bool:
        """Wait for its turn, as long as calls end; return False if none has ended for `seconds`. Then, or when
        cancelled, it has left the queue. Whoever gets the turn calls `begin`."""
        turn = self.queue()
        try:
            while not turn.is_set():
                ended = self.ended
                if not await Patience(seconds).ends(turn) and self.ended == ended:
                    self.leave(turn)
                    return False
        except BaseException:
            self.leave(turn)
            raise
        return True

    def queue(self) -> trio.Event:
        """Return a place in the queue, set when its turn comes. Its holder calls `begin` then, or `leave` at any
        time."""
        turn = trio.Event()
        if self._is_free:
            self._is_free = False
            turn.set()
        else:
            self._waiting.append(turn)
        return turn

    def leave(self, turn: trio.Event) -> None:
        """Give up a place in the queue."""
        if turn.is_set():
            self._pass_on()
        else:
            self._waiting.remove(turn)

    def begin(self, call: Callable[[], T]) -> Running[T]:
        """Start the call whose turn it is. Raises `HostShortError`."""

        def ended() -> None:
            self.ended += 1
            self._pass_on()

        return Running(call, name=self._name, ended=ended)

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._is_free = True
