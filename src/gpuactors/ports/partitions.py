"""The port of partitions of an NVLink fabric (ADR 0025): a protocol, with no code. An adaptor implements it.

A file of its own: a node that activates no partitions does not import it.
"""

from __future__ import annotations

from typing import Protocol

from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.ports.node import SetsReader


class FabricManager(SetsReader, Protocol):
    """The fabric manager of this node, by the operator's command."""

    async def act(self, goal: Goal, partition: PartitionId) -> None:
        """Activate or deactivate a partition. An error says nothing of what has been done: only a later read does.
        Raises `HostError`, also where the command does not end in time, or an earlier one has not ended."""


class PartitionIntentsFile(Protocol):
    """The intents of partitions, kept from one daemon of this boot to the next."""

    async def read(self) -> tuple[Intent, ...]:
        """Return the intents that this node's daemons have in this boot; none if there is no file. Raises
        `StateFileError`, also where the disk does not answer in time."""

    async def write(self, intents: tuple[Intent, ...], /) -> None:
        """Replace the stored intents by these. They are on disk when it returns. Raises `StateFileError`."""
