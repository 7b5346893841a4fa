"""Events of vGPUs: mediated devices are made and removed, virtual functions get and lose a vGPU type, pods get both.

Only on a node with vGPUs (`World.has_vgpus`), beside the events of virtual functions (`part_events.py`) and what these
have beside them. What happens to the card alone (its driver is unbound, it is unplugged, SR-IOV is switched off) is in
`host_events.py` and `part_events.py`. Some of these nodes serve claims, for parts of cards as well; a claim whose part
is changed or taken away under it may have lost it. Nothing tells of a new vGPU type of a virtual function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuactors_simulation.host.kernel import NVIDIA
from gpuactors_simulation.kubelet.values import Phase
from tests.histories import vgpus
from tests.histories.claim_events import CLAIM_POD
from tests.histories.kinds import Kind, card_of, detail_of
from tests.histories.kubelet_events import PODS_MAX
from tests.histories.vgpus import MDEV_TYPES, PARENT_CARD, UUIDS, VGPU_CARD, VGPU_TYPES
from tests.histories.world import PART_PID, PARTS_OF_CARD, World

OFFERED: Final = "the driver of a card offers mediated devices"
MADE: Final = "a mediated device is made"
REMOVED: Final = "a mediated device is removed"
MADE_ANEW: Final = "a mediated device is removed and made anew with another type"
MDEV_OPENED: Final = "an external process opens a mediated device"
VGPU_OPENED: Final = "an external process opens a vGPU"
ON: Final = "SR-IOV is switched on for vGPUs"
TYPED: Final = "a virtual function gets a vGPU type"
UNTYPED: Final = "a virtual function loses its vGPU type"

CHANGED_BY: Final = (REMOVED, MADE_ANEW, TYPED, UNTYPED)
"""After these a vGPU is not what it was."""

OPENED_BY: Final = (MDEV_OPENED, VGPU_OPENED)


def _kind(
    name: str,
    act: Callable[[World, int], None],
    enabled: Callable[[World, int], bool],
    place: int | None = None,
) -> Kind:
    """`place`: that of the only card that it can happen to."""

    def can(world: World, slot: int) -> bool:
        return world.has_vgpus and place in (None, card_of(slot)) and enabled(world, slot)

    return Kind(name, can, act)


# --- mediated devices -------------------------------------------------------------------------------------


def _uuid(slot: int) -> str:
    """The mediated device that a step is about."""
    return UUIDS[detail_of(slot) % len(UUIDS)]


def _type(slot: int) -> str:
    return MDEV_TYPES[detail_of(slot) // len(UUIDS) % len(MDEV_TYPES)].id


def _other_type(mdev_type: str) -> str:
    return next(t.id for t in MDEV_TYPES if t.id != mdev_type)


def _can_offer(world: World, slot: int) -> bool:
    address = world.address(slot)
    is_ready = world.is_plugged(slot) and world.driver(slot) == NVIDIA
    return is_ready and not world.tree.mediated.is_parent(address)


def _can_make(world: World, slot: int) -> bool:
    """One whose removal waits keeps its UUID (EEXIST)."""
    is_parent = world.tree.mediated.is_parent(world.address(slot))
    return world.is_plugged(slot) and is_parent and _uuid(slot) not in world.tree.mediated.types


def _make(world: World, slot: int) -> None:
    world.tell(world.tree.mediated.create(_uuid(slot), world.address(slot), _type(slot)))


def _make_slowly(world: World, slot: int) -> None:
    steps = world.tree.mediated.create_steps(_uuid(slot), world.address(slot), _type(slot))
    world.change_slowly(slot, steps)


def _is_made(world: World, slot: int) -> bool:
    return world.is_plugged(slot) and _uuid(slot) in vgpus.mediated(world.tree)


def _remove(world: World, slot: int) -> None:
    """One that is open waits for its holder, and is on no bus meanwhile."""
    world.disturb_parts(slot)
    world.tell(world.tree.mediated.remove(_uuid(slot)))


def _can_make_anew(world: World, slot: int) -> bool:
    return _is_made(world, slot) and not world.tree.is_open(_uuid(slot))


def _make_anew(world: World, slot: int) -> None:
    world.disturb_parts(slot)
    uuid = _uuid(slot)
    mdev_type = _other_type(world.tree.mediated.types[uuid])
    removed = world.tree.mediated.remove(uuid)
    world.tell((*removed, *world.tree.mediated.create(uuid, world.address(slot), mdev_type)))


# --- virtual functions ------------------------------------------------------------------------------------


def _can_switch_on(world: World, slot: int) -> bool:
    address = world.address(slot)
    return (
        world.is_plugged(slot)
        and world.driver(slot) == NVIDIA
        and not world.tree.virtual_functions(address)
        and not world.tree.has_stale_links(address)
    )


def _switch_on(world: World, slot: int) -> None:
    """NVIDIA's driver takes the virtual functions as well."""
    world.tell(world.tree.virtualize(world.address(slot), PARTS_OF_CARD, NVIDIA))


def _part(world: World, slot: int) -> str:
    parts = world.parts_of(slot)
    return parts[detail_of(slot) % len(parts)]


def _number(slot: int) -> int:
    return VGPU_TYPES[detail_of(slot) // PARTS_OF_CARD % len(VGPU_TYPES)].number


def _can_be_typed(world: World, slot: int) -> bool:
    """NVIDIA's driver has it, and no process has it open (EBUSY)."""
    if not world.is_plugged(slot) or not world.parts_of(slot):
        return False
    part = _part(world, slot)
    is_vgpus = world.tree.has_vgpus(part, world.tree.driver_of(part))
    return is_vgpus and not world.tree.is_waiting(part) and not world.tree.is_open(part)


def _set_type(world: World, slot: int) -> None:
    world.disturb_parts(slot)
    world.tree.set_vgpu_type(_part(world, slot), _number(slot))


def _is_typed(world: World, slot: int) -> bool:
    return _can_be_typed(world, slot) and world.tree.vgpu_type(_part(world, slot)) != 0


def _clear_type(world: World, slot: int) -> None:
    world.disturb_parts(slot)
    world.tree.set_vgpu_type(_part(world, slot), 0)


# --- who has it -------------------------------------------------------------------------------------------


def _has_room(world: World, _slot: int) -> bool:
    return world.pods < PODS_MAX


def _submit(resources: tuple[str, ...]) -> Callable[[World, int], None]:
    def act(world: World, slot: int) -> None:
        world.pods += 1
        world.kubelet.submit(f"vm-{world.pods}", {resources[detail_of(slot) % len(resources)]: 1})

    return act


def _can_be_opened(world: World, slot: int, key: str) -> bool:
    """As `host_events.py` has it of a card: no pod has it, or may be about to."""
    group = world.group_of(key)
    return (
        group is not None
        and world.is_bound(key)
        and world.can_be_opened(key)
        and card_of(slot) not in world.part_holders
        and world.tree.holder_of(group) is None
        and world.is_viable(group)
        and world.given().keys().isdisjoint(world.tree.group_members(group))
        and not any(pod.phase is Phase.ADMITTING for pod in world.kubelet.view.pods.values())
    )


def _open(world: World, slot: int, key: str) -> None:
    group = world.group_of(key)
    assert group is not None
    world.part_holders.add(card_of(slot))
    world.tree.open_group(group, PART_PID + card_of(slot), "python3")


# --- claims -----------------------------------------------------------------------------------------------


def _free_parts(world: World) -> list[str]:
    """The parts of cards that the scheduler may give to a claim."""
    claims = world.claims
    if claims is None or world.pods >= PODS_MAX:
        return []
    parts = [*vgpus.mediated(world.tree), *world.parts_of(VGPU_CARD)]
    return [key for key in parts if key not in claims.allocated() and world.can_be_given(key)]


def _claim_comes(world: World, slot: int) -> None:
    claims, parts = world.claims, _free_parts(world)
    assert claims is not None
    world.pods += 1
    name = f"{CLAIM_POD}{world.pods}"
    claims.allocate(name, [parts[detail_of(slot) % len(parts)]])
    world.kubelet.submit(name, {}, uses=(name,))


OF_PARTS_CLAIMED: Final = _kind(
    "a pod with a claim for a part of a card comes", _claim_comes, lambda w, _s: bool(_free_parts(w))
)
"""Only on a node that serves claims besides."""

VGPU_KINDS: Final = (
    _kind(OFFERED, lambda w, s: w.tell(vgpus.offer(w.tree, w.address(s))), _can_offer, PARENT_CARD),
    _kind(MADE, _make, _can_make, PARENT_CARD),
    _kind("a mediated device is made slowly", _make_slowly, _can_make, PARENT_CARD),
    _kind(REMOVED, _remove, _is_made, PARENT_CARD),
    _kind(MADE_ANEW, _make_anew, _can_make_anew, PARENT_CARD),
    _kind(
        MDEV_OPENED,
        lambda w, s: _open(w, s, _uuid(s)),
        lambda w, s: _is_made(w, s) and _can_be_opened(w, s, _uuid(s)),
        PARENT_CARD,
    ),
    _kind("a pod for a mediated device comes", _submit(vgpus.MDEV_RESOURCES), _has_room),
    _kind(ON, _switch_on, _can_switch_on, VGPU_CARD),
    _kind(TYPED, _set_type, _can_be_typed, VGPU_CARD),
    _kind(UNTYPED, _clear_type, _is_typed, VGPU_CARD),
    _kind(
        VGPU_OPENED,
        lambda w, s: _open(w, s, _part(w, s)),
        lambda w, s: _is_typed(w, s) and _can_be_opened(w, s, _part(w, s)),
        VGPU_CARD,
    ),
    _kind("a pod for a vGPU comes", _submit(vgpus.VGPU_RESOURCES), _has_room),
)
"""Every kind of event of vGPUs."""
