"""The caller: what a handler posts, and what it posts still when kubelet has cancelled it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors.actors.caller import STREAM_END_POST_S, InboxCaller
from gpuactors.concurrency.replies import Replies
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import AllocateAsked, CallAbandoned, StreamEnded, StreamOpened
from gpuactors.core.values.effects import Answer
from gpuactors.core.values.model import DeviceId, ResourceName, Token

RESOURCE: Final = ResourceName("nvidia.com/H100")
REQUESTS: Final = ((DeviceId("0000:01:00.0"),),)
STREAM, ALLOCATE = StreamOpened(RESOURCE, 1), AllocateAsked(Token(1), RESOURCE, REQUESTS)
PATIENCE_S: Final = 30.0

Handler = Callable[[InboxCaller], Awaitable[object]]


async def a_stream(caller: InboxCaller) -> None:
    async with caller.stream(RESOURCE):
        await trio.sleep_forever()


async def an_allocate(caller: InboxCaller) -> Answer:
    return await caller.allocate(RESOURCE, REQUESTS)


def inbox() -> tuple[InboxCaller, trio.MemoryReceiveChannel[Event]]:
    """A caller, and the end of its inbox that the registry has. Nothing is taken from it unless a test does."""
    post, taken = trio.open_memory_channel[Event](0)
    return InboxCaller(post, Replies()), taken


@pytest.mark.parametrize(
    ("handler", "first", "last"),
    [(a_stream, STREAM, StreamEnded(RESOURCE, 1)), (an_allocate, ALLOCATE, CallAbandoned(Token(1)))],
)
async def test_the_end_of_a_cancelled_handler_is_posted(
    handler: Handler, first: Event, last: Event, autojump_clock: MockClock
) -> None:
    """Kubelet hung up, or the endpoint is closing. A stream that ended unknown would count as open for ever, and no
    Register would follow."""
    caller, taken = inbox()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handler, caller)
            assert await taken.receive() == first
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True), trio.fail_after(PATIENCE_S):
                assert await taken.receive() == last


@pytest.mark.parametrize("handler", [a_stream, an_allocate])
async def test_a_cancelled_handler_ends_where_the_registry_takes_nothing(
    handler: Handler, autojump_clock: MockClock
) -> None:
    """A registry that is stuck must not keep a shutdown waiting."""
    caller, taken = inbox()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            with taken:  # closed at the end, so that a handler that still waits fails rather than hangs
                nursery.start_soon(handler, caller)
                await taken.receive()
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.sleep(2 * STREAM_END_POST_S)
                assert not nursery.child_tasks


@pytest.mark.parametrize("handler", [a_stream, an_allocate])
async def test_a_cancelled_handler_ends_quietly_with_the_daemon(
    handler: Handler, autojump_clock: MockClock
) -> None:
    """The registry has ended before the last stream: nobody needs to know any more."""
    caller, taken = inbox()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handler, caller)
            await taken.receive()
            await wait_all_tasks_blocked()
            taken.close()
            nursery.cancel_scope.cancel()
