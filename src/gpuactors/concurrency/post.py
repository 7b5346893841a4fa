"""A value into a channel, in one turn where there is room.

`send` of trio's channels gives other tasks a turn after each value, whoever waits: in a call that is a turn of the loop
for each of its events. A file of its own: actors and `each_once` use it, and it needs neither.
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
