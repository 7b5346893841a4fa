"""Required parts of the node that have been missing since the start: after a bound the daemon exits, so that the
failure is seen.

A daemon that waits for ever for a directory with a mistyped name looks healthy from outside. A part that has existed
before is waited for without a bound: an unmounted /sys or a kubelet that is being replaced comes back, and meanwhile
the daemon logs what is missing.
"""

from __future__ import annotations

from typing import Final

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.state import NodeState
from gpuactors.host.mdev import PartsReader
from gpuactors.host.reader import ThreadedReader
from gpuactors.ports.errors import HostError

HOST_ABSENT_S: Final = 120.0
"""How long a start waits for a host that can be scanned, before the process ends with 69. /sys and a container's mounts
exist before the process starts; the time is for a slow machine."""

KUBELET_DIR_ABSENT_S: Final = 600.0
"""The same for kubelet's `device-plugins` directory, which kubelet makes when it first starts: a node that is being set
up may run this daemon some minutes before its kubelet. The supervisor restarts the daemon."""


class AbsentError(HostError):
    """A required part of the node was missing for its bound; the text names it and the remedy."""


async def await_host(reader: PartsReader, state: LatestReader[NodeState]) -> None:
    """Wait until the host has been scanned. Raises `AbsentError` if it cannot be after HOST_ABSENT_S."""
    with trio.move_on_after(HOST_ABSENT_S):
        while not state.value.host.scanned:
            await state.receive()
        return
    with trio.move_on_after(limits.SCAN_DEADLINE_S):  # if the scan hangs, the bus is there
        try:
            await ThreadedReader(reader).scan()
        except HostError as exc:
            raise AbsentError(f"{exc}; given up after {HOST_ABSENT_S:g} s") from exc


async def await_kubelet_directory(directory: str) -> None:
    """Wait until kubelet's directory exists. Raises `AbsentError` if it does not after KUBELET_DIR_ABSENT_S."""
    with trio.move_on_after(KUBELET_DIR_ABSENT_S):
        while not await trio.Path(directory).is_dir():  # noqa: ASYNC110 - no event for a new directory
            await trio.sleep(limits.KUBELET_DIR_RETRY_S)
        return
    raise AbsentError(
        f"kubelet's directory {directory} does not exist: is kubelet installed, and is --device-plugin-dir its "
        f"directory? Given up after {KUBELET_DIR_ABSENT_S:g} s"
    )
