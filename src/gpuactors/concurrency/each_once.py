"""The loop of an actor that carries out numbered requests, which stay in a cell until they are answered.

A number is carried out once. Requests with one key run one after the other, those with different keys at the same time,
so that a hanging request delays no other key. If several arrive for a busy key, only the newest follows. A request that
has left the cell is not begun; one that has begun is not stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Protocol, TypeVar

import trio

from gpuactors.concurrency.latest import LatestReader
from gpuactors.concurrency.post import post


class Numbered(Protocol):
    """A request. The numbers of one key only grow."""

    @property
    def number(self) -> int:
        """The request's number, from 1."""


W = TypeVar("W")
K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Numbered | int)
E = TypeVar("E")


async def each_once(
    wanted: LatestReader[W],
    requests_of: Callable[[W], Mapping[K, R]],
    carry_out: Callable[[K, R], Awaitable[E]],
    answers: trio.MemorySendChannel[E],
) -> None:
    """Carry out the requests in the values of `wanted` until the cell is closed, and send the answer to each.

    `carry_out` raises nothing that is expected: a failure is an answer as well.
    """
    done: dict[K, int] = {}
    """The number of the last request carried out, by the keys still in the cell."""
    busy: set[K] = set()

    async def all_of(key: K) -> None:
        while (request := requests_of(wanted.value).get(key)) is not None:
            if (number := _number(request)) <= done.get(key, 0):
                break
            answer = await carry_out(key, request)
            done[key] = number
            await post(answers, answer)
        busy.remove(key)  # since the last look at the cell nothing can have come in

    async with trio.open_nursery() as nursery:
        async for value in wanted:
            requests = requests_of(value)
            for key, request in requests.items():
                if key not in busy and _number(request) > done.get(key, 0):
                    busy.add(key)
                    nursery.start_soon(all_of, key)
            for key in done.keys() - requests.keys() - busy:
                del done[key]


def only(request: R | None) -> Mapping[None, R]:
    """Return the requests of a kind with at most one outstanding; None and 0 stand for none."""
    return {None: request} if request else {}


def _number(request: Numbered | int) -> int:
    return request if isinstance(request, int) else request.number
