"""Sends a value into a channel without a turn of the loop if there is room, which trio's `send` always takes.

A file of its own: actors and `each_once` use it, and it needs neither.
"""

from __future__ import annotations

from typing import TypeVar

import trio

T = TypeVar("T")


async def post(channel: trio.MemorySendChannel[T], value: T) -> None:
    """Send the value; wait only while the channel is full. Raises as `send`."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        channel.send_nowait(value)
    except trio.WouldBlock:
        await channel.send(value)
