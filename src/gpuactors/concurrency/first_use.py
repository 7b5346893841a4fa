"""Imports when something is first needed, in a thread: kubelet's calls are answered meanwhile.

A file of its own: the server and the metrics of the HTTP endpoints both need it. Must not know what is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

import trio

T = TypeVar("T")


@final
class FirstUse(Generic[T]):
    """The result of `load`, which imports it. A `load` that fails is called again at the next use.

    A thread may hold the interpreter for 5 ms before another one goes on (`sys.getswitchinterval`), and an import here
    takes 10 to 20 ms: so a call of kubelet's waits 5 ms for it at most.
    """

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._loaded: list[T] = []
        self._thread = trio.CapacityLimiter(1)
        """A limiter of its own: hanging threads elsewhere take no place in it."""

    async def get(self) -> T:
        """Return the result, loading it at the first use. Raises as `load`. A cancelled caller does not wait for it."""
        if not self._loaded:
            try:
                loaded = await trio.to_thread.run_sync(
                    self._load, abandon_on_cancel=True, limiter=self._thread
                )
            except RuntimeError:
                # No thread can be started: a probe that is late is better than one that fails.
                loaded = self._load()
            self._loaded = self._loaded or [loaded]
        return self._loaded[0]
