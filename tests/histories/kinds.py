"""The form of a kind of event: when it can happen, what happens, and what the node is like right after it.

The table is in `events.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar, final

from tests.histories.world import CARDS, World
from tests.memory.faults import Fault

SLOTS: Final = 100 * CARDS
"""The slot of a step is a card's place and a detail of 0 to 99 (how many bytes, which attribute) in one number."""

CRASHES_MAX: Final = 4
"""One actor crashes at most so often: a daemon whose actor fails more often within a minute ends, as it should."""

Enabled = Callable[[World, int], bool]
Act = Callable[[World, int], Awaitable[None] | None]


class Flag(StrEnum):
    """A property of the node for all cards, by which one kind of event can rule out the next."""

    KUBELET_RUNS = "kubelet runs"
    ONE_SERVES = "a daemon runs that was not asked to end"
    TWO_SERVE = "two such daemons run"
    UEVENTS_ARE_LATE = "uevents are held back"
    MODE_IS_SET = "the next uevents will not come as they should"
    ATTRIBUTES_ARE_BROKEN = "attributes cannot be read"
    SECOND_PLUGIN = "a second plugin serves our resource"
    API_SERVER_IS_AWAY = "the API server is away"
    CLAIMS_DISK_IS_FULL = "the disk where claims are kept is full"
    CDI_FILES_STAY = "no CDI file can be removed or replaced"
    CONTROLLER_STOPS = "NVIDIA's controller does nothing"
    DOMAINS_ARE_NOT_READY = "the daemons of compute domains are not ready"
    IMEX_IS_MISSING = "the host has no IMEX"
    FILE_IS_DAMAGED = "kubelet's ledger file is damaged"
    NVIDIA_IS_UNLOADED = "NVIDIA's driver is not loaded"
    VFIO_IS_UNLOADED = "vfio-pci is not loaded"
    EGMS_ARE_UNREADABLE = "the EGMs cannot be read"
    SPECS_ARE_UNWRITABLE = "the CDI files of the device plugin cannot be written"
    ANOTHER_HAS_A_SPEC = "another program has a file in the CDI directory of the device plugin"


AT_FIRST: Final = dict.fromkeys(Flag, False) | {Flag.KUBELET_RUNS: True, Flag.ONE_SERVES: True}
"""The properties at the start of a history (`world.open_world`)."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event."""

    name: str
    """Its name in scripts, in plain words."""
    enabled: Enabled
    act: Act
    needs: Mapping[Flag, bool] = field(default_factory=dict)
    """The properties of the whole node that `enabled` requires. It stays so, unless `leaves` or `may_bring` has another
    value."""
    leaves: Mapping[Flag, bool] = field(default_factory=dict)
    """The properties of the node right after it."""
    may_bring: Mapping[Flag, bool] = field(default_factory=dict)
    """The properties that the node may get besides, then or later."""


N = TypeVar("N")


@final
@dataclass(frozen=True, slots=True)
class KindsOn(Generic[N]):
    """Makes the kinds of events of a part of the node that some nodes do not have: claims, compute domains."""

    part: Callable[[World], N | None]

    def __call__(
        self,
        name: str,
        act: Callable[[World, N, int], object],
        enabled: Callable[[World, N, int], bool] = lambda _w, _n, _s: True,
        **flags: Any,
    ) -> Kind:
        """One that cannot happen on a node without that part."""

        def do(world: World, slot: int) -> None:
            part = self.part(world)
            assert part is not None
            act(world, part, slot)

        def can(world: World, slot: int) -> bool:
            part = self.part(world)
            return part is not None and enabled(world, part, slot)

        return Kind(name, can, do, **flags)


def card_of(slot: int) -> int:
    """The place of the card that a step is about."""
    return slot % CARDS


def detail_of(slot: int) -> int:
    """0 to 99."""
    return slot // CARDS % 100


def can_follow(before: Kind, after: Kind) -> bool:
    """Whether `after` can be the very next event: nothing that it needs is ruled out by what `before` needs or leaves.

    All other requirements of a kind are about one card or one pod, of which there are several. That kubelet crashes,
    which only a second plugin can cause, is not taken into account.
    """
    known = {**before.needs, **before.leaves}
    return all(
        wanted in (known.get(flag, wanted), before.may_bring.get(flag))
        for flag, wanted in after.needs.items()
    )


def that_can_happen(kinds: Iterable[Kind]) -> list[Kind]:
    """Those of `kinds` that need nothing to have happened but others of `kinds`, in their order."""
    kinds, known = tuple(kinds), set(AT_FIRST.items())
    while True:
        possible = [kind for kind in kinds if known.issuperset(kind.needs.items())]
        brought = {item for kind in possible for item in (*kind.leaves.items(), *kind.may_bring.items())}
        if brought <= known:
            return possible
        known |= brought


def always(_world: World, _slot: int) -> bool:
    """It can happen at any time."""
    return True


def fault(which: Fault, times: int) -> Act:
    """A fault that strikes at its next occasions."""
    return lambda w, _s: w.order(which, times)


def crash(name: str, which: Fault) -> Kind:
    """An actor raises an unexpected exception."""
    return Kind(name, lambda w, _s: w.counts[name] < CRASHES_MAX, lambda w, _s: w.order(which))
