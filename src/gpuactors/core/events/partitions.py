"""Partitions of an NVLink fabric: the answers of the operator's command, and the file of intents."""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.values.partition import Intent


class PartitionIntentsRead(Struct, frozen=True, gc=False):
    """The file of intents was read. It has none where it is missing or of another boot."""

    intents: tuple[Intent, ...]


class PartitionIntentsWritten(Struct, frozen=True, gc=False):
    """The content number `number` is on disk."""

    number: int


class PartitionIntentsUnwritten(Struct, frozen=True, gc=False):
    """The intents cannot be written or read. The actor tries again by itself."""

    reason: str


class PartitionsQueried(Struct, frozen=True, gc=False):
    """Query number `query` came back with this list of the fabric manager."""

    query: int
    known: KnownSets


class PartitionQueryFailed(Struct, frozen=True, gc=False):
    """Query number `query` failed, did not end in time, or printed what cannot be read."""

    query: int
    reason: str


class PartitionActDone(Struct, frozen=True, gc=False):
    """Act number `act` ended. Only a query shows what it has changed."""

    act: int
    problem: str
    """Why it failed or was killed at its deadline, as a sentence; empty if the command exited with 0."""


PartitionEvent = (
    PartitionIntentsRead
    | PartitionIntentsWritten
    | PartitionIntentsUnwritten
    | PartitionsQueried
    | PartitionQueryFailed
    | PartitionActDone
)
