"""The writes that give the API server the wanted pool, by what it has stored.

The scheduler takes of a pool only the slices of the highest generation, and only if there are as many as each of them
says (seen: one too many, and it ignores the whole pool). So a change of one slice keeps the generation; any other
change is written as a new generation, which is valid when its last slice is there.

Must not lead to a loop of writes: the server's answer to our write is treated as equal to what was written, even if the
server has changed it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Set

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.claims.pool import Pool
from gpuactors.core.values.slices import SliceDevice, SliceSpec, StoredSlice, Taint

_INDEX = re.compile(r"([0-9a-f]{5})-")


class Create(Struct, frozen=True, gc=False):
    """Create the slice with this place in the pool."""

    index: int
    spec: SliceSpec


class Update(Struct, frozen=True, gc=False):
    """Give a stored slice another content."""

    stored: StoredSlice
    spec: SliceSpec


class Delete(Struct, frozen=True, gc=False):
    """Delete a stored slice."""

    stored: StoredSlice


Write = Create | Update | Delete


class Answered(Struct, frozen=True, gc=False):
    """The last write of a slice, and what the server made of it."""

    asked: SliceSpec
    stored: SliceSpec


def name_prefix(index: int, driver: str, node: str) -> str:
    """Return the `generateName` of a slice: its place in the pool comes first, as the names order the slices (the
    naming of Kubernetes' helper from 1.36 on)."""
    return f"{index:05x}-{driver}-{node}-"


def writes(
    pool: Pool,
    owner: str,
    stored: Collection[StoredSlice],
    answers: Mapping[str, Answered],
    generation_seen: int = 0,
) -> tuple[Write, ...]:
    """Return the writes, in the order in which they are to be done; none if the server has the wanted pool.

    `owner` is the UID of the Node object; `stored` all slices of the driver on this node; `answers` what the server
    made of our last writes, by slice name; `generation_seen` the highest generation that any slice had.
    """
    kept = _kept(pool, stored)
    generation = max((s.spec.generation for s in kept.values()), default=0)
    wanted = _specs(pool, generation)
    changed = [i for i, spec in enumerate(wanted) if not _is(kept.get(i), spec, owner, answers)]
    mine = {s.name for s in kept.values()}
    if not kept or len(changed) + _too_many(pool, stored, mine, generation) > 1:
        # Higher than any there was: a slice that is deleted may still be in the scheduler's cache.
        seen = max([generation_seen, *(s.spec.generation for s in stored)])
        wanted = _specs(pool, seen + 1)
        changed = list(range(len(wanted)))
    times = _times_added(stored)
    ordered: list[Write] = []
    for index in changed:
        spec = _with_times(wanted[index], times)
        ordered.append(Update(kept[index], spec) if index in kept else Create(index, spec))
    # The last ones, so that there is always a slice.
    ordered += [Delete(s) for s in sorted(stored, key=lambda s: s.name) if s.name not in mine]
    return tuple(ordered)


def _too_many(pool: Pool, stored: Collection[StoredSlice], mine: Set[str], generation: int) -> int:
    """Return the number of slices of this generation that are to be deleted: the scheduler ignores the whole pool as
    long as there is one more than the others say, and a delete may fail."""
    return sum(
        s.name not in mine and s.spec.pool == pool.node and s.spec.generation >= generation for s in stored
    )


def _kept(pool: Pool, stored: Collection[StoredSlice]) -> dict[int, StoredSlice]:
    """Return the stored slices that stay, by their place in the pool. Of two with one place (a create that was carried
    out and not answered) it is the one of the higher generation; one of another naming or pool is foreign."""
    kept: dict[int, StoredSlice] = {}
    for candidate in sorted(stored, key=lambda s: (-s.spec.generation, s.name)):
        place = _INDEX.match(candidate.name)
        if place is None or candidate.spec.pool != pool.node:
            continue
        index = int(place[1], 16)
        if index < len(pool.slices) + len(pool.counter_sets):
            kept.setdefault(index, candidate)
    return kept


def _specs(pool: Pool, generation: int) -> list[SliceSpec]:
    count = len(pool.slices) + len(pool.counter_sets)
    common = pool.driver, pool.node, pool.node, generation, count
    # The sets come last: the order by name is the scheduler's preference for devices.
    return [
        *(SliceSpec(*common, devices) for devices in pool.slices),
        *(SliceSpec(*common, (), counter_sets=sets) for sets in pool.counter_sets),
    ]


def _is(stored: StoredSlice | None, wanted: SliceSpec, owner: str, answers: Mapping[str, Answered]) -> bool:
    if stored is None or stored.owner != owner:
        return False
    return stored.spec == wanted or answers.get(stored.name) == Answered(wanted, stored.spec)


_Times = Mapping[tuple[str, Taint], str]


def _times_added(stored: Iterable[StoredSlice]) -> _Times:
    """Return when each taint of each device was added, by the server's clock."""
    return {
        (device.name, taint): taint.time_added
        for slice_ in stored
        for device in slice_.spec.devices
        for taint in device.taints
        if taint.time_added is not None
    }


def _with_times(spec: SliceSpec, times: _Times) -> SliceSpec:
    return replace(spec, devices=tuple(_device_with_times(d, times) for d in spec.devices))


def _device_with_times(device: SliceDevice, times: _Times) -> SliceDevice:
    if not device.taints:
        return device
    taints = (replace(t, time_added=times.get((device.name, t), t.time_added)) for t in device.taints)
    return replace(device, taints=tuple(taints))
