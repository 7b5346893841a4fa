"""The kubelet watcher: kubelet.sock appears, disappears, is replaced; so do other plugins' sockets beside it."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.kubelet import ForeignSocketsSeen, KubeletAppeared, KubeletGone
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import Kubelet, Sockets


async def run(kubelet: Kubelet, inbox: trio.MemorySendChannel[Event]) -> None:
    """Run for ever; while kubelet's directory does not exist, check it every KUBELET_DIR_RETRY_S."""
    while True:
        try:
            async with kubelet.sockets() as sockets:
                before: Sockets | None = None
                async for now in sockets:
                    for event in _changes(before, now, kubelet.absence):
                        await inbox.send(event)
                    before = now
        except KubeletError as exc:
            await inbox.send(KubeletGone(str(exc)))
        await trio.sleep(limits.KUBELET_DIR_RETRY_S)


def _changes(before: Sockets | None, now: Sockets, absence: str) -> Iterator[Event]:
    same = before is not None and before.kubelet == now.kubelet
    if not same:
        yield KubeletGone(absence) if now.kubelet is None else KubeletAppeared(now.kubelet)
    # A socket may have been replaced under the same name; otherwise there would be no report.
    if same or now.others != (before.others if before is not None else ()):
        yield ForeignSocketsSeen(now.others)
