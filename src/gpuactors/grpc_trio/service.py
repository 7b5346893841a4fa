"""Base of the services that stream answers: their generators are closed when the call ends, not when garbage is
collected. Must not know any particular service.

A file of its own: it belongs to gRPC, and no service does.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from typing import Any

import grpclib.server
from betterproto2.grpclib import ServiceBase


class TrioService(ServiceBase):
    """Put it first: `class Plugin(TrioService, DevicePluginBase)`.

    betterproto2's own helper does not close an answer generator when the peer disconnects: it stays subscribed to its
    source until the garbage collector finds it.
    """

    async def _call_rpc_handler_server_stream(
        self,
        handler: Callable[[Any], Any],
        stream: grpclib.server.Stream[Any, Any],
        request: Any,
    ) -> None:
        """`handler` is an async generator function, or a coroutine function whose result, if any, is iterated."""
        answers = handler(request)
        if inspect.iscoroutine(answers):
            answers = await answers
        if isinstance(answers, AsyncGenerator):
            async with aclosing(answers):
                async for answer in answers:
                    await stream.send_message(answer)
        elif isinstance(answers, AsyncIterable):
            async for answer in answers:
                await stream.send_message(answer)
