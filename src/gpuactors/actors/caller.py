"""How a gRPC handler reaches the core: it posts an event with a token and waits for the answer.

A handler keeps no state of its own and decides nothing; its interface is `ports.node.Caller`, implemented here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Final, TypeAlias, final

import trio

from gpuactors.concurrency.post import post
from gpuactors.concurrency.replies import Replies
from gpuactors.core.events import Event, deviceplugin
from gpuactors.core.values.effects import Answer
from gpuactors.core.values.model import DeviceId, ResourceName, Token

STREAM_END_POST_S: Final = 1.0
"""How long a cancelled handler may still try to post that its stream or call is over."""

OnAnswer: TypeAlias = "Callable[[str, float, Answer | None], None]"
"""See `ports.http.Meter.called`."""


@final
class InboxCaller:
    """Posts calls and streams into the registry's inbox. Implements `ports.node.Caller`."""

    def __init__(
        self,
        inbox: trio.MemorySendChannel[Event],
        replies: Replies[Answer],
        ended: OnAnswer | None = None,
    ) -> None:
        """`ended` is called at the end of each call."""
        self._inbox = inbox
        self._replies = replies
        self._ended = ended
        self._streams = count(1)

    async def allocate(self, resource: ResourceName, requests: tuple[tuple[DeviceId, ...], ...]) -> Answer:
        return await self.ask("Allocate", lambda token: deviceplugin.AllocateAsked(token, resource, requests))

    async def pre_start(self, resource: ResourceName, devices: tuple[DeviceId, ...]) -> Answer:
        return await self.ask(
            "PreStartContainer", lambda token: deviceplugin.PreStartAsked(token, resource, devices)
        )

    async def prefer(
        self, resource: ResourceName, requests: tuple[deviceplugin.PreferenceRequest, ...]
    ) -> Answer:
        return await self.ask(
            "GetPreferredAllocation",
            lambda token: deviceplugin.PreferenceAsked(token, resource, requests),
        )

    @asynccontextmanager
    async def stream(self, resource: ResourceName) -> AsyncIterator[None]:
        number = next(self._streams)
        await self._inbox.send(deviceplugin.StreamOpened(resource, number))
        try:
            yield
        finally:
            await self._post(deviceplugin.StreamEnded(resource, number))

    async def ask(self, method: str, event: Callable[[Token], Event]) -> Answer:
        """Post one call of kubelet's as this event; return the core's answer."""
        began, answer = trio.current_time(), None
        try:
            with self._replies.ask() as pending:
                token = Token(pending.token)
                await post(self._inbox, event(token))
                try:
                    answer = await pending.answer()
                except trio.Cancelled:
                    await self._post(deviceplugin.CallAbandoned(token))
                    raise
                return answer
        finally:
            if self._ended is not None:
                self._ended(method, trio.current_time() - began, answer)

    async def _post(self, event: Event) -> None:
        """Post an event even while this task is being cancelled; at most for STREAM_END_POST_S, if the registry does
        not take it."""
        with trio.move_on_after(STREAM_END_POST_S, shield=True):
            try:
                await self._inbox.send(event)
            except (trio.BrokenResourceError, trio.ClosedResourceError):  # the daemon is ending
                return
