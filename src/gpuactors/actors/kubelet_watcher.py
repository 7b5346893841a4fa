"""The kubelet watcher: kubelet.sock appears, disappears, is replaced."""

from __future__ import annotations

import trio

from gpuactors import limits
from gpuactors.core.events import Event, KubeletAppeared, KubeletGone
from gpuactors.ports import Kubelet, KubeletError


async def run(kubelet: Kubelet, inbox: trio.MemorySendChannel[Event]) -> None:
    """Runs for ever; while kubelet's directory does not exist it is looked for again and again."""
    while True:
        try:
            async with kubelet.sockets() as sockets:
                async for socket in sockets:
                    await inbox.send(
                        KubeletGone(kubelet.absence) if socket is None else KubeletAppeared(socket)
                    )
        except KubeletError as exc:
            await inbox.send(KubeletGone(str(exc)))
        await trio.sleep(limits.KUBELET_DIR_RETRY_S)
