"""The watcher of the configuration file: has it looked at again and again, and posts what its changes mean.

Must not decide anything: the adaptor compares the file with the settings in use.
"""

from __future__ import annotations

from typing import Final

import trio

from gpuactors.concurrency.post import post
from gpuactors.core.events import Event
from gpuactors.ports.node import ConfigSource

CONFIG_LOOK_S: Final = 10.0
"""The interval between two looks at the file, in seconds. Kubelet takes up to two minutes to bring a changed ConfigMap
to the node."""


async def run(source: ConfigSource, inbox: trio.MemorySendChannel[Event]) -> None:
    """Run for ever."""
    while True:
        await trio.sleep(CONFIG_LOOK_S)
        if (event := await source.look()) is not None:
            await post(inbox, event)
