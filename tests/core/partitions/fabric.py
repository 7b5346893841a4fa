"""A world of one fabric manager, two partitions that overlap, and two owners: what can happen, and what must hold.

What the machine asks for is answered one thing at a time. The world knows what is true, and who made it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Self

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.events.partitions import (
    PartitionActDone,
    PartitionIntentsRead,
    PartitionIntentsWritten,
    PartitionQueryFailed,
)
from gpuactors.core.partitions import machine
from gpuactors.core.partitions.outputs import conflict, partitions_wanted
from gpuactors.core.state.partitions import NO_PARTITIONS, PartitionOwner, Partitions, Users
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.partition import (
    INTENTS,
    Goal,
    Intent,
    PartitionId,
    PartitionState,
    ShownPartition,
)

A, B, C = (DeviceKey(f"0000:0{n}:00.0") for n in (1, 2, 3))
P1, P2 = PartitionId("1"), PartitionId("2")
DEVICES: Final = {P1: frozenset({A, B}), P2: frozenset({B, C})}
US, THEM = "gpuactors", "an administrator"


class Owner(Struct, frozen=True):
    """The owner of all devices of a partition."""

    asks: int = 1
    """Its call that waits; 0 if it has been answered."""


class Fabric(Struct, frozen=True):
    """The world and the machine's state."""

    partitions: Partitions
    active: Mapping[PartitionId, str] = field(default_factory=dict)
    """What is active, and by whom."""
    disk: tuple[Intent, ...] = ()
    owners: Mapping[PartitionId, Owner] = field(default_factory=dict)
    held: frozenset[PartitionId] = frozenset()
    """The partitions whose devices a virtual machine has open."""
    at: float = 0.0
    calls: int = 1
    lies: int = 0
    restarts: int = 0

    @property
    def users(self) -> Users:
        """What the node says of them."""
        owners = {f"owner of {key}": PartitionOwner(DEVICES[key], o.asks) for key, o in self.owners.items()}
        return Users(owners, frozenset(device for key in self.held for device in DEVICES[key]))

    def shown(self, lie: PartitionId | None = None) -> dict[PartitionId, ShownPartition]:
        """The list of the fabric manager, wrong about one partition if it lies."""
        return {k: ShownPartition(k, d, (k in self.active) is not (k == lie)) for k, d in DEVICES.items()}

    def stepped(self, event: machine.Applied) -> Self:
        """The world after an event of the machine."""
        return self.after(machine.stepped(self.partitions, event, self.at))

    def listed(self, query: int, shown: Mapping[PartitionId, ShownPartition]) -> Self:
        """The world after a query came back."""
        return self.after(machine.queried(self.partitions, query, shown, self.at))

    def changed(self, **changes: object) -> Self:
        """The world after a change of its users."""
        world = replace(self, **changes)
        return world.after(machine.users_changed(world.partitions, world.users, world.at))

    def after(self, partitions: Partitions) -> Self:
        """The world with this state of the machine; whoever may be answered is answered."""
        before, world = self.partitions, replace(self, partitions=partitions)
        if partitions.act is not None and partitions.act != before.act:
            world.check_begun(*partitions.act[1:])
        for key, owner in world.owners.items():
            if owner.asks and conflict(world.partitions, f"owner of {key}") is None:
                assert key in world.active, f"{key} was answered and is not active"
                return world.changed(owners={**world.owners, key: Owner(0)})
        return world

    def check_begun(self, key: PartitionId, goal: Goal) -> None:
        """Nothing is done without its intent on disk, under a virtual machine, or to an owner that was answered."""
        assert Intent(key, DEVICES[key], goal) in self.disk, f"{key}: {goal} without an intent on disk"
        assert not any(DEVICES[k] & DEVICES[key] for k in self.held), f"{key}: {goal} under a virtual machine"
        if goal is Goal.DEACTIVATE:
            assert key not in self.owners or self.owners[key].asks, f"{key} was taken from its owner"
            assert self.active.get(key) != THEM, f"{key} is not ours to deactivate"
        else:
            ours = [k for k, by in self.active.items() if by == US and k != key]
            assert not any(DEVICES[k] & DEVICES[key] for k in ours), f"{key} overlaps one of ours"

    def acted(self) -> tuple[Self, bool]:
        """The world after the command has done what it was called for, and whether it could. An active partition
        cannot be activated, nor can one that overlaps it."""
        assert self.partitions.act is not None
        _, key, goal = self.partitions.act
        if goal is Goal.DEACTIVATE:
            left = {k: by for k, by in self.active.items() if k != key}
            return replace(self, active=left), key in self.active
        if any(DEVICES[k] & DEVICES[key] for k in self.active):
            return self, False
        return replace(self, active={**self.active, key: US}), True


def fabric(disk: tuple[Intent, ...] = (), **begun: object) -> Fabric:
    """A world in which the daemon has just started."""
    world = replace(Fabric(NO_PARTITIONS, disk=disk), **begun)
    return world.stepped(PartitionIntentsRead(disk)).changed()


# --- what the machine asks for ----------------------------------------------------------------------------------------


def written(world: Fabric) -> Fabric:
    wanted = partitions_wanted(world.partitions).file
    assert wanted is not None
    return replace(world, disk=wanted.intents).stepped(PartitionIntentsWritten(wanted.number))


def queried(world: Fabric, lie: PartitionId | None = None) -> Fabric:
    return world.listed(world.partitions.query, world.shown(lie))


def done(world: Fabric) -> Fabric:
    """The command does it, and exits as it should."""
    assert world.partitions.act is not None
    number = world.partitions.act[0]
    world, could = world.acted()
    return world.stepped(PartitionActDone(number, "" if could else "it exited with 1"))


def failed(world: Fabric, *, acts: bool) -> Fabric:
    """The command is killed at its deadline, and has done it or not."""
    assert world.partitions.act is not None
    number = world.partitions.act[0]
    world = world.acted()[0] if acts else world
    return world.stepped(PartitionActDone(number, "it did not end within 30 s"))


def pretended(world: Fabric) -> Fabric:
    """The command exits with 0, and has done nothing."""
    assert world.partitions.act is not None
    return replace(world, lies=world.lies + 1).stepped(PartitionActDone(world.partitions.act[0], ""))


def ticked(world: Fabric) -> Fabric:
    at = machine.deadline(world.partitions)
    return replace(world, at=at).after(machine.ticked(world.partitions, at))


def is_written(world: Fabric) -> bool:
    return partitions_wanted(world.partitions).file is not None


def is_acting(world: Fabric) -> bool:
    return world.partitions.act is not None


def is_querying(world: Fabric) -> bool:
    return partitions_wanted(world.partitions).query is not None


HONEST: Final[tuple[tuple[Callable[[Fabric], bool], Callable[[Fabric], Fabric]], ...]] = (
    (is_written, written),
    (is_acting, done),
    (is_querying, queried),
)
"""When each kind of request can be answered, and the world after it."""


def settled(world: Fabric, ticks: int = 0) -> Fabric:
    """The world when nothing is asked for any more, after so many ticks of the clock."""
    for _ in range(200):
        for enabled, answer in HONEST:
            if enabled(world):
                world = answer(world)
                break
        else:
            if ticks == 0:
                return world
            world, ticks = ticked(world), ticks - 1
    raise AssertionError("the machine asks without end")


# --- what happens -----------------------------------------------------------------------------------------------------


def comes(world: Fabric, key: PartitionId) -> Fabric:
    call = world.calls + 1
    return replace(world, calls=call).changed(owners={**world.owners, key: Owner(call)})


def may_come(world: Fabric, key: PartitionId) -> bool:
    """Its devices are nobody's."""
    taken = [*world.owners, *world.held]
    return not any(DEVICES[k] & DEVICES[key] for k in taken)


def starts_again(world: Fabric, key: PartitionId) -> Fabric:
    return comes(world, key)


def leaves(world: Fabric, key: PartitionId) -> Fabric:
    return world.changed(owners={k: o for k, o in world.owners.items() if k != key})


def opens(world: Fabric, key: PartitionId) -> Fabric:
    return world.changed(held=world.held | {key})


def closes(world: Fabric, key: PartitionId) -> Fabric:
    return world.changed(held=world.held - {key})


def crashes(world: Fabric, *, acts: bool) -> Fabric:
    """The daemon is killed, and its command has done it or not. Calls come again."""
    if is_acting(world):
        world = world.acted()[0] if acts else world
    again = fabric(world.disk, active=world.active, owners=world.owners, held=world.held, at=world.at)
    return replace(again, calls=world.calls, lies=world.lies, restarts=world.restarts)


def fabric_manager_restarts(world: Fabric) -> Fabric:
    return replace(world, active={}, restarts=world.restarts + 1)


def is_clear_of_ours(world: Fabric, key: PartitionId) -> bool:
    """Nothing that overlaps is active, and gpuactors has no intent for it, in memory or on disk."""
    ours = {i.id for i in world.disk} | {k for k, r in world.partitions.records.items() if r.state in INTENTS}
    return key not in ours and not any(DEVICES[k] & DEVICES[key] for k in world.active)


def is_outdated(world: Fabric, key: PartitionId) -> bool:
    """The last query was before others activated it: with a lie now, both witnesses would be wrong."""
    records = world.partitions.records.values()
    return world.active.get(key) == THEM and any(r.seen is False for r in records)


def others_activate(world: Fabric, key: PartitionId) -> Fabric:
    return replace(world, active={**world.active, key: THEM})


FAULTS: Final[tuple[tuple[str, Callable[[Fabric], bool], Callable[[Fabric], Fabric]], ...]] = (
    ("killed, and it acted", is_acting, lambda w: failed(w, acts=True)),
    ("killed, and it did not act", is_acting, lambda w: failed(w, acts=False)),
    ("exit 0 without an act", lambda w: is_acting(w) and not w.lies, pretended),
    (
        "the query fails",
        is_querying,
        lambda w: w.stepped(PartitionQueryFailed(w.partitions.query, "it exited with 1")),
    ),
    *(
        (
            f"the query lies about {key}",
            lambda w, key=key: is_querying(w) and not w.lies and not w.restarts and not is_outdated(w, key),
            lambda w, key=key: queried(replace(w, lies=1), key),
        )
        for key in DEVICES
    ),
    ("crash, and the command acted", lambda _: True, lambda w: crashes(w, acts=True)),
    ("crash", lambda _: True, lambda w: crashes(w, acts=False)),
    ("the fabric manager restarts", lambda w: bool(w.active) and not w.lies, fabric_manager_restarts),
    ("others activate 2", lambda w: is_clear_of_ours(w, P2), lambda w: others_activate(w, P2)),
)
"""What goes wrong: a name, when it can, and the world after it."""

USES: Final[tuple[tuple[str, Callable[[Fabric], bool], Callable[[Fabric], Fabric]], ...]] = tuple(
    use
    for key in DEVICES
    for use in (
        (f"{key} is wanted", lambda w, key=key: may_come(w, key), lambda w, key=key: comes(w, key)),
        (f"the owner of {key} leaves", lambda w, key=key: key in w.owners, lambda w, key=key: leaves(w, key)),
        (
            f"a VM opens {key}",
            lambda w, key=key: key in w.owners and not w.owners[key].asks and key not in w.held,
            lambda w, key=key: opens(w, key),
        ),
        (f"the VM of {key} ends", lambda w, key=key: key in w.held, lambda w, key=key: closes(w, key)),
        (
            f"a container of {key} starts again",
            lambda w, key=key: key in w.owners and not w.owners[key].asks and key not in w.held,
            lambda w, key=key: starts_again(w, key),
        ),
    )
)
"""What the owners do: a name, when they can, and the world after it."""


def check_end(world: Fabric) -> None:
    """When all owners and virtual machines have gone, nothing is left active by gpuactors, and no intent."""
    for key in DEVICES:
        world = closes(world, key) if key in world.held else world
        world = leaves(world, key) if key in world.owners else world
    world = settled(world, ticks=6)
    assert US not in world.active.values(), f"{world.active} is left active"
    assert world.disk == (), f"{world.disk} is left on disk"
    assert not world.partitions.records


def state_of(world: Fabric, key: PartitionId) -> PartitionState:
    """The state of a partition."""
    record = world.partitions.records.get(key)
    return record.state if record is not None else PartitionState.ABSENT
