"""The choice of IOMMU groups for a container: whole groups, on the fewest NUMA nodes and PCIe roots.

Theory of operation. The numbers of devices that some groups can add up to are one integer: bit n is set if some of the
groups have n devices together. A group of size s adds `sums << s`. Groups are counted by place (NUMA node, then PCIe
root) and size, so that a set of places is tried in a few shifts. The number of sets grows without bound, so a `Search`
counts the shifts of one whole call; when they are used up, the fullest places are taken first. Must not know kubelet's
requests: that is `allocation.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, Generic, TypeVar, final

from msgspec import Struct

from gpuactors.core.values.model import DeviceId

PREFERENCE_STEPS_MAX: Final = 20_000
"""The maximum number of steps of the search for the fewest NUMA nodes and PCIe roots, over all containers of one
GetPreferredAllocation: about 10 ms, in which kubelet's other calls wait. A node with 16 GPUs takes tens of them, the
worst one of 32 some thousands; after that the fullest NUMA nodes and roots are taken."""

Place = TypeVar("Place", int, str)
"""A NUMA node or a PCIe root."""

_PLACES_MAX: Final = 32
"""The largest set of places that is searched for, more than any node has; a larger one is filled with the fullest
places."""


class Group(Struct, frozen=True, gc=False):
    """The available devices of one IOMMU group: best allocated together."""

    ids: tuple[DeviceId, ...]
    numa_node: int
    pcie_root: str

    @property
    def key(self) -> tuple[int, str, tuple[DeviceId, ...]]:
        """The order where no other rule decides."""
        return (self.numa_node, self.pcie_root, self.ids)


@final
class Search:
    """The remaining work of one call, over all its containers."""

    def __init__(self, steps_max: int = PREFERENCE_STEPS_MAX) -> None:
        self.steps = 0
        """Sets of places tried, and shifts done for them."""
        self._steps_max = steps_max

    def has(self, steps: int) -> bool:
        """Return whether so many steps are left; if so, use them up."""
        if self.steps + steps > self._steps_max:
            return False
        self.steps += steps
        return True


def choose(
    groups: Sequence[Group], need: int, anchors: Collection[tuple[int, str]], search: Search
) -> list[DeviceId]:
    """Return `need` devices out of `groups`, which are sorted by `key`, from the NUMA nodes and roots in `anchors`
    where possible."""
    if need <= 0:
        return []
    groups = _narrow(groups, need, lambda g: g.numa_node, {n for n, _ in anchors}, search)
    groups = _narrow(groups, need, lambda g: g.pcie_root, {r for _, r in anchors}, search)
    exact = _exact(groups, need)
    return [i for g in exact for i in g.ids] if exact is not None else _greedy(groups, need)


# --- the fewest places ------------------------------------------------------------------------------------


class _Sums(Struct, frozen=True, gc=False):
    """The devices of a set of places."""

    devices: int
    """The number of devices."""
    whole: int
    """The possible sums, as bits: bit n is set if some of their groups together have n devices."""

    def has(self, need: int, *, whole: bool) -> bool:
        return self.devices >= need and (not whole or bool(self.whole >> need & 1))


class _Offer(Struct, Generic[Place], frozen=True, gc=False):
    """The devices that one place adds."""

    place: Place
    devices: int
    shifts: tuple[int, ...]

    def added_to(self, sums: _Sums, need: int) -> _Sums:
        whole, wanted = sums.whole, (1 << need + 1) - 1
        for shift in self.shifts:
            whole |= whole << shift & wanted
        return _Sums(sums.devices + self.devices, whole)


def _narrow(
    groups: Sequence[Group],
    need: int,
    place: Callable[[Group], Place],
    anchors: Collection[Place],
    search: Search,
) -> Sequence[Group]:
    """Return the groups of the fewest places that hold `need` devices, in whole groups if any set of places does;
    places in `anchors` cost nothing. Of several such sets take the first in order, or, where the search has no steps
    left, one of the fullest places."""
    offers = _offers(groups, place)
    anchored = _Sums(0, 1)
    for offer in (o for o in offers if o.place in anchors):
        anchored = offer.added_to(anchored, need)
    others = [o for o in offers if o.place not in anchors]
    everything = anchored
    for offer in others:
        everything = offer.added_to(everything, need)
    whole = everything.has(need, whole=True)
    if anchored.has(need, whole=whole):
        extra: Collection[Place] = ()
    elif len(others) < 2:
        return groups
    else:
        extra = _fewest(others, anchored, need, search, whole=whole)
    return [g for g in groups if place(g) in anchors or place(g) in extra]


def _offers(groups: Sequence[Group], place: Callable[[Group], Place]) -> list[_Offer[Place]]:
    """Return the devices of each place, sorted by place."""
    sizes: dict[Place, Counter[int]] = {}
    for group in groups:
        sizes.setdefault(place(group), Counter())[len(group.ids)] += 1
    return [
        _Offer(
            where,
            devices=sum(size * count for size, count in counts.items()),
            shifts=tuple(s for size, count in sorted(counts.items()) for s in _shifts(size, count)),
        )
        for where, counts in sorted(sizes.items())
    ]


def _shifts(size: int, count: int) -> list[int]:
    """Return shifts that add any number of `count` groups of one size: 1, 2, 4 … of them at a time, and the rest."""
    shifts, at_once = [], 1
    while count > 0:
        at_once = min(at_once, count)
        shifts.append(size * at_once)
        count -= at_once
        at_once *= 2
    return shifts


def _fewest(
    others: Sequence[_Offer[Place]], anchored: _Sums, need: int, search: Search, *, whole: bool
) -> set[Place]:
    """Return the smallest set of places with enough devices. All of them together have enough."""
    most = [0] * (len(others) + 1)  # the largest offer from each place on
    for index in reversed(range(len(others))):
        most[index] = max(most[index + 1], others[index].devices)

    def first(begin: int, count: int, sums: _Sums) -> list[int] | None:
        """Return the first `count` places from `begin` on that complete `sums`. Raises `_NoStepsLeft`."""
        if count == 0:
            return [] if sums.has(need, whole=whole) else None
        for index in range(begin, len(others) - count + 1):
            if sums.devices + count * most[index] < need:
                return None
            offer = others[index]
            if not search.has(1 + len(offer.shifts)):
                raise _NoStepsLeft
            more: list[int] | None = first(index + 1, count - 1, offer.added_to(sums, need))
            if more is not None:
                more.insert(0, index)
                return more
        return None

    try:
        for size in range(1, min(len(others), _PLACES_MAX) + 1):
            indexes = first(0, size, anchored)
            if indexes is not None:
                return {others[index].place for index in indexes}
    except _NoStepsLeft:
        pass
    return _fullest(others, anchored, need, whole=whole)


class _NoStepsLeft(Exception):
    """The call has used up its steps."""


def _fullest(others: Sequence[_Offer[Place]], sums: _Sums, need: int, *, whole: bool) -> set[Place]:
    """Return the fullest places, as many as are needed."""
    taken: set[Place] = set()
    for offer in sorted(others, key=lambda o: -o.devices):
        if sums.has(need, whole=whole):
            break
        taken.add(offer.place)
        sums = offer.added_to(sums, need)
    return taken


# --- the groups -------------------------------------------------------------------------------------------


def _exact(groups: Sequence[Group], need: int) -> list[Group] | None:
    """Return whole groups with exactly `need` devices together, the earliest such choice; None if there is none."""
    wanted = (1 << need + 1) - 1
    rest = [1]  # what the groups from each one to the last can add up to, the last one's first
    for group in reversed(groups):
        rest.append(rest[-1] | rest[-1] << len(group.ids) & wanted)
    if not rest.pop() >> need & 1:
        return None
    taken: list[Group] = []
    for group in groups:
        if need == 0:
            break
        sums, remaining = rest.pop(), need - len(group.ids)
        if remaining >= 0 and sums >> remaining & 1:
            taken.append(group)
            need = remaining
    return taken


def _greedy(groups: Sequence[Group], need: int) -> list[DeviceId]:
    """Return as many whole groups as fit, the largest first, and a part of the smallest one that is large enough for
    the rest."""
    taken: list[DeviceId] = []
    too_large: list[Group] = []
    for group in sorted(groups, key=lambda g: (-len(g.ids), g.key)):
        if len(group.ids) > need:
            too_large.append(group)
        else:
            taken.extend(group.ids)
            need -= len(group.ids)
    if need > 0 and too_large:
        taken.extend(min(too_large, key=lambda g: (len(g.ids), g.key)).ids[:need])
    return taken
