"""One-shot answers to numbered questions.

A task asks by posting a message that carries a token, and waits here for the answer; the answering side knows only the
token. So no message has to carry a channel, and an answer to a caller that is gone is dropped.
"""

from __future__ import annotations

from itertools import count
from typing import Generic, TypeVar, final

import trio

T = TypeVar("T")


@final
class Pending(Generic[T]):
    """A question that waits for its answer, open as long as its context is."""

    def __init__(self, token: int, open_ones: dict[int, Pending[T]]) -> None:
        self.token = token
        self._open = open_ones
        self._answered = trio.Event()
        self._answer: list[T] = []

    def __enter__(self) -> Pending[T]:
        self._open[self.token] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._open[self.token]

    async def answer(self) -> T:
        """Return the answer, once it is there."""
        await self._answered.wait()
        return self._answer[0]

    def _set(self, value: T) -> None:
        if not self._answer:
            self._answer.append(value)
            self._answered.set()


@final
class Replies(Generic[T]):
    """The questions that are open."""

    def __init__(self) -> None:
        self._tokens = count(1)
        self._open: dict[int, Pending[T]] = {}

    def ask(self) -> Pending[T]:
        """Make a new question, to be opened as a context."""
        return Pending(next(self._tokens), self._open)

    def reply(self, token: int, value: T) -> bool:
        """Answer the question; return False if no task waits for it any more."""
        pending = self._open.get(token)
        if pending is None:
            return False
        pending._set(value)
        return True
