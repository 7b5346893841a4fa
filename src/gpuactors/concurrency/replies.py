"""One-shot answers to numbered questions.

A task asks by posting a message that carries a token, and waits here for the answer; the answering side knows only the
token. So no message has to carry a channel, and an answer to a caller that is gone is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Generic, TypeVar, final

import trio

T = TypeVar("T")


@final
class Pending(Generic[T]):
    """A question that waits for its answer."""

    def __init__(self, token: int) -> None:
        self.token = token
        self._answered = trio.Event()
        self._answer: list[T] = []

    async def answer(self) -> T:
        """The answer, once it is there."""
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

    @contextmanager
    def ask(self) -> Iterator[Pending[T]]:
        """A new question, open as long as the context is."""
        pending: Pending[T] = Pending(next(self._tokens))
        self._open[pending.token] = pending
        try:
            yield pending
        finally:
            del self._open[pending.token]

    def reply(self, token: int, value: T) -> bool:
        """Answers the question; False if no task waits for it any more."""
        pending = self._open.get(token)
        if pending is None:
            return False
        pending._set(value)
        return True
