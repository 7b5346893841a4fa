"""The partitions of the NVLink fabric, as the state carries them: data only. `partitions/machine.py` changes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.partition import Goal, PartitionId, PartitionState, ShownPartition


class PartitionOwner(Struct, frozen=True, gc=False):
    """An owner of devices: a waiting Allocate, a grant that kubelet's ledger does not list yet, a pod by that ledger,
    or a claim from Reserved until its functions have been returned."""

    devices: frozenset[DeviceKey]
    """All its devices that are in any partition."""
    asks: int = 0
    """The number of its call that waits for the partition: an Allocate, a PreStartContainer or a prepare. 0 without."""


class Users(Struct, frozen=True, gc=False):
    """The users of the devices, derived from the rest of the state."""

    owners: Mapping[str, PartitionOwner]
    """By a name that stays the same while the owner lives."""
    held: frozenset[DeviceKey]
    """The devices whose groups a process has open, or of which that is not known."""


class PartitionRecord(Struct, frozen=True, gc=False):
    """A partition that gpuactors is to activate, or has an intent for."""

    id: PartitionId
    devices: frozenset[DeviceKey]
    state: PartitionState
    owners: frozenset[str] = frozenset()
    """The owners that had exactly its devices, and have one of them still."""
    intent: int = 0
    """The number of the content of the file that has its intent."""
    act_due: bool = False
    """True if its act is to be done."""
    since: int = 0
    """The first query that counts: it was requested after the last act had ended."""
    seen: bool | None = None
    """The last query that counts has shown this: active, while Checking also one that overlaps it; None before."""
    seen_by: int = 0
    """The number of that query."""
    seen_before: int = 0
    """The number of the query before it, if that has shown the same; 0 otherwise."""
    votes: int = 0
    """How many queries in a row have shown that. The exit of an act that reached its goal counts as one."""
    succeeded: Goal | None = None
    """The goal of the last act, if its command exited with 0."""
    retry_at: float = -math.inf
    """No act, and while Checking no query, before this time."""
    problem: str = ""
    """The problem of the last act, as a sentence; empty without one."""


class Partitions(Struct, frozen=True, gc=False):
    """The partitions of the node. Without the intents on disk nothing is done."""

    is_loaded: bool = False
    records: Mapping[PartitionId, PartitionRecord] = field(default_factory=dict)
    """By id, in the order in which they were wanted."""
    users: Users | None = None
    """None until kubelet's ledger, the claims' checkpoint and the use of the groups have been read."""
    asked: Mapping[int, int] = field(default_factory=dict)
    """The first query that counts for each waiting call, by the call's number."""
    shown: Mapping[PartitionId, ShownPartition] | None = None
    """The last list; None before the first."""
    query: int = 0
    """The number of the last requested query."""
    answered: int = 0
    """The number of the last query that came back."""
    query_at: float = -math.inf
    """When the partitions are queried by the clock."""
    query_problem: str = ""
    act: tuple[int, PartitionId, Goal] | None = None
    """The number of the act that is being done, its partition and its goal. One at a time: the fabric manager is
    one."""
    acts: int = 0
    intents: int = 0
    """The number of the present content of the file."""
    durable: int = 0
    """The number of the content on disk."""
    file_problem: str = ""


NO_PARTITIONS: Final = Partitions()
"""The partitions before the intents have been read, and of a daemon that does not serve."""
