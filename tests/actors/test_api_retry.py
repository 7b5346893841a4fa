"""What fails at the API server is tried again, after waits that grow, and that begin anew after a calm."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.actors.api_retry import (
    API_BACKOFF_JITTER,
    API_BACKOFF_S,
    API_CALM_S,
    API_LOST_S,
    API_READS_AT_ONCE,
    SharedReads,
    backoff_s,
    for_ever,
)
from gpuactors.ports.kube import ApiAway, ApiError, ApiMalformed, ApiRefused, Refusal


def shortest_s(plain_s: float) -> float:
    return plain_s * (1 - API_BACKOFF_JITTER)


def test_a_wait_grows_to_the_last_one_and_a_part_of_it_is_random() -> None:
    for failures, plain_s in enumerate((*API_BACKOFF_S, *API_BACKOFF_S[-1:] * 3), start=1):
        waits = {backoff_s(failures, ApiAway("away")) for _ in range(50)}
        assert all(shortest_s(plain_s) <= wait_s <= plain_s for wait_s in waits)
        assert len(waits) > 1


@pytest.mark.parametrize(("asked_s", "least_s"), [(None, 0.0), (7.0, 7.0), (1e6, API_BACKOFF_S[-1])])
def test_a_wait_that_the_server_asks_for_is_kept_within_reason(asked_s: float | None, least_s: float) -> None:
    refused = ApiRefused("overloaded", Refusal(429, retry_after_s=asked_s))
    waits = {backoff_s(1, refused) for _ in range(50)}
    longest_s = max(API_BACKOFF_S[0], least_s * (1 + API_BACKOFF_JITTER))
    assert all(least_s <= wait_s <= longest_s for wait_s in waits)
    assert len(waits) > 1, "those that were refused together come back one by one"


async def test_it_is_followed_again_after_each_failure_and_each_end(autojump_clock: MockClock) -> None:
    began: list[float] = []
    told: list[str] = []

    async def follow() -> None:
        began.append(trio.current_time())
        match len(began):
            case 1 | 2:
                raise ApiAway(f"away {len(began)}")
            case 3:
                await trio.sleep(API_CALM_S + 1.0)
                raise ApiAway("away after a calm")
            case 4:
                return
            case _:
                await trio.sleep_forever()

    async def failed(error: ApiError) -> None:
        await trio.lowlevel.checkpoint()
        told.append(str(error))

    with trio.move_on_after(1000.0):
        await for_ever("reader", follow, failed)
    assert told == ["away 1", "away 2", "away after a calm"]
    first_s, second_s, _, _, _ = API_BACKOFF_S[:5]
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert shortest_s(first_s) <= pauses[0] <= API_LOST_S
    assert shortest_s(second_s) <= pauses[1] <= second_s
    assert pauses[2] - API_CALM_S - 1.0 <= API_LOST_S, "after a calm the waits begin anew"
    assert pauses[3] == 0.0


async def test_watches_that_break_at_one_moment_begin_again_seconds_apart(autojump_clock: MockClock) -> None:
    """A server stops with the watches of all nodes, and another one is there at once."""
    nodes, again = 500, list[float]()

    async def node() -> None:
        broken = False

        async def follow() -> None:
            nonlocal broken
            if not broken:
                broken = True
                raise ApiAway("the connection broke")
            again.append(trio.current_time() - began)
            await trio.sleep_forever()

        async def failed(_: ApiError) -> None:
            await trio.lowlevel.checkpoint()

        await for_ever("reader", follow, failed)

    began = trio.current_time()
    with trio.move_on_after(60.0):
        async with trio.open_nursery() as nursery:
            for _ in range(nodes):
                nursery.start_soon(node)
    assert len(again) == nodes
    most = max(sum(second <= at_s < second + 1.0 for at_s in again) for second in range(60))
    assert most <= nodes / API_LOST_S * 1.5, "no second has many more of them than another"


class Server:
    """Counts the reads that reach it, and fails them while `error` is set."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.error: ApiError | None = None
        self.at_once = self.most_at_once = 0

    async def read(self) -> str:
        self.asked.append(trio.current_time())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await trio.sleep(0.1)
        self.at_once -= 1
        if self.error is not None:
            raise self.error
        return "found"


async def many(reads: SharedReads, server: Server, count: int) -> list[str]:
    """What becomes of so many reads at once."""
    found: list[str] = []

    async def one() -> None:
        try:
            found.append(await reads.ask(server.read))
        except ApiError as exc:
            found.append(str(exc))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)
    return found


OVERLOADED = ApiRefused("overloaded", Refusal(429, retry_after_s=7.0))


async def test_of_many_reads_a_few_are_under_way_at_once(autojump_clock: MockClock) -> None:
    reads, server = SharedReads(), Server()
    assert await many(reads, server, 100) == ["found"] * 100
    assert server.most_at_once == API_READS_AT_ONCE


async def test_an_overloaded_server_is_asked_by_one_read_after_each_wait(autojump_clock: MockClock) -> None:
    reads, server = SharedReads(), Server()
    server.error = OVERLOADED
    found = await many(reads, server, 100)
    assert len(server.asked) == API_READS_AT_ONCE, "those that were under way"
    assert found.count("overloaded") == len(server.asked)
    assert set(found) == {"overloaded", "the API server is asked again later: overloaded"}
    assert reads.retry_in_s() > 7.0
    assert reads.retry_in_s() != reads.retry_in_s(), "no two at one time"
    server.asked.clear()
    for _ in range(60):  # as often as once a second
        await many(reads, server, 50)
        await trio.sleep(1.0)
    assert 60 / 10.5 - 2 <= len(server.asked) <= 60 / 7.0
    assert min(b - a for a, b in pairwise(server.asked)) >= 7.0
    server.error = None
    await trio.sleep(API_BACKOFF_S[-1])
    assert await many(reads, server, 100) == ["found"] * 100


async def test_a_server_that_stays_away_is_asked_less_often_and_in_time_for_a_prepare(
    autojump_clock: MockClock,
) -> None:
    reads, server = SharedReads(), Server()
    server.error = ApiAway("away")
    with trio.move_on_after(300.0):
        while True:
            await many(reads, server, 5)
            await trio.sleep(0.2)
    waits = [b - a for a, b in pairwise(server.asked) if b - a > 0.1]
    assert waits[0] < 1.0
    assert max(waits) < limits.CLAIM_ANSWER_S / 3


@pytest.mark.parametrize(
    "error", [ApiRefused("forbidden", Refusal(403)), ApiMalformed("it makes no sense")], ids=str
)
async def test_what_is_about_one_object_holds_up_no_other(error: ApiError, autojump_clock: MockClock) -> None:
    reads, server = SharedReads(), Server()
    server.error = error
    await many(reads, server, 20)
    assert len(server.asked) == 20
    assert reads.retry_in_s() < 2 * limits.CLAIM_READ_RETRY_S
