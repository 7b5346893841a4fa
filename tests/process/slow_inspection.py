"""An inspection of a device that hangs, as in the kernel while a driver is stuck, until a test ends it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, final

from gpuactors_simulation.host.tree import HostTree
from tests.process.daemon import eventually
from tests.process.node import Node
from tests.support.kubelet_seen import Allocated

ATTRIBUTE: Final = "numa_node"


@final
class SlowInspection:
    """Every inspection of the device hangs; made by `slow_inspection`."""

    def __init__(self, tree: HostTree, address: str) -> None:
        self._tree = tree
        self._address = address
        self._writer: int | None = None
        self._hangs_for_new_readers = True
        tree.make_hang(address, ATTRIBUTE)

    def wait_until_hanging(self) -> None:
        """Until a reader is in the file. From then on it hangs in read() instead of open()."""
        eventually(self._reader_is_in, "an inspection of the device")

    def _reader_is_in(self) -> bool:
        fifo = self._tree.device_dir(self._address) / ATTRIBUTE
        try:
            self._writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nobody reads yet
                return False
            raise
        return True

    def let_others_look(self) -> None:
        """From now on nobody else hangs; who hangs already (`wait_until_hanging`) goes on."""
        if self._hangs_for_new_readers:
            self._hangs_for_new_readers = False
            self._tree.end_hang(self._address, ATTRIBUTE, b"-1\n")

    def end(self) -> None:
        """Every inspection returns."""
        self.let_others_look()
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None


@contextmanager
def slow_inspection(tree: HostTree, address: str) -> Iterator[SlowInspection]:
    """From now on an inspection of the device hangs, until it is ended or the context is left."""
    inspection = SlowInspection(tree, address)
    try:
        yield inspection
    finally:
        inspection.end()


@contextmanager
def allocate_in_flight(
    node: Node, resource: str, device: str
) -> Iterator[tuple[Future[Allocated], SlowInspection]]:
    """Kubelet's Allocate of one device, which has reached the daemon and waits for its inspection; and that
    inspection."""
    with ThreadPoolExecutor() as calls, slow_inspection(node.tree, device) as inspection:
        call = calls.submit(node.kubelet.allocate, resource, [device])
        inspection.wait_until_hanging()
        yield call, inspection
