"""Events of cards that are pulled and rescanned on a node with claims of GPUs: their IOMMU groups get other numbers.

The kernel gives a number that was freed to the next group (drivers/iommu/iommu.c, ida_alloc), and nobody tells the
container runtime: the CDI files of a claim give its containers nodes by number. What must hold then is in
`answer_check.py`. Only where there is no second administrator.
"""

from __future__ import annotations

from typing import Final

from tests.histories.claims import ClaimsNode
from tests.histories.dra_node import CDI_DIR
from tests.histories.kinds import Flag, Kind, KindsOn, card_of, detail_of
from tests.histories.world import CARDS, MODEL, World

SWAPPED: Final = "two cards are rescanned and swap their group numbers"
PULLED: Final = "a card is pulled"
COMES_WITH_FREED: Final = "a card comes with the group number of one that was pulled"
COMES_BACK: Final = "a card that was pulled comes back with another group number"
STAY: Final = "the CDI files can not be removed"
CAN_GO: Final = "the CDI files can be removed again"

NEW_PLACE: Final = CARDS - 1
"""The place where no card is at first."""


def _node(world: World) -> ClaimsNode | None:
    claims = world.claims
    return claims if claims is not None and claims.administrator is None else None


_kind: Final[KindsOn[ClaimsNode]] = KindsOn(_node)


def can_be_pulled(world: World, claims: ClaimsNode, slot: int) -> bool:
    """Nothing of it waits or sleeps, and no process uses it but virtual machines, which let go."""
    address = world.address(slot)
    functions = [a for a in world.tree.functions if a.startswith(address[:-1])]
    return (
        world.is_plugged(slot)
        and address in claims.home
        and address not in claims.users
        and card_of(slot) not in world.external
        and world.disk(slot) not in world.tree.functions
        and all(claim.group != world.group(slot) for claim in world.other_driver.claims.values())
        and not any(map(claims.kernel.sleeps, functions))
    )


def _other(slot: int) -> int:
    """The card that a swap is with, by the detail."""
    return (card_of(slot) + 1 + detail_of(slot) % (CARDS - 1)) % CARDS


def _swap(world: World, _claims: ClaimsNode, slot: int) -> None:
    """They are found again in the other order."""
    slots = (card_of(slot), _other(slot))
    first, second = (world.group(one) for one in slots)
    for one in slots:
        world.pull(world.address(one))
    world.bring_back(world.address(slots[1]), first)
    world.bring_back(world.address(slots[0]), second)


def _pull(world: World, claims: ClaimsNode, slot: int) -> None:
    claims.freed.append(world.group(slot))
    world.pull(world.address(slot))
    world.groups[card_of(slot)] = world.new_group()


def _is_free(world: World, claims: ClaimsNode, slot: int) -> bool:
    """The place is, and a number."""
    is_new = card_of(slot) == NEW_PLACE and world.address(slot) not in claims.home
    return bool(claims.freed) and (is_new or world.address(slot) in claims.pulled)


def _comes_with_freed(world: World, claims: ClaimsNode, slot: int) -> None:
    address, number = world.address(slot), claims.freed.pop(0)
    if address not in claims.pulled:
        driver = "vfio-pci" if detail_of(slot) % 2 else "nvidia"
        card = world.card(slot, MODEL, driver)
        claims.home[address] = driver
        claims.pulled[address] = [card]
    world.bring_back(address, number)


MOVE_KINDS: Final[tuple[Kind, ...]] = (
    _kind(
        SWAPPED,
        _swap,
        lambda w, c, s: can_be_pulled(w, c, s) and can_be_pulled(w, c, _other(s)),
    ),
    _kind(PULLED, _pull, can_be_pulled),
    _kind(COMES_WITH_FREED, _comes_with_freed, _is_free),
    _kind(
        COMES_BACK,
        lambda w, _c, s: w.bring_back(w.address(s), w.new_group()),
        lambda w, c, s: w.address(s) in c.pulled,
    ),
    _kind(
        STAY,
        lambda _w, c, _s: setattr(c.disk, "keeps", CDI_DIR),
        lambda _w, c, _s: not c.disk.keeps,
        needs={Flag.CDI_FILES_STAY: False},
        leaves={Flag.CDI_FILES_STAY: True},
    ),
    _kind(
        CAN_GO,
        lambda _w, c, _s: setattr(c.disk, "keeps", ""),
        lambda _w, c, _s: bool(c.disk.keeps),
        needs={Flag.CDI_FILES_STAY: True},
        leaves={Flag.CDI_FILES_STAY: False},
    ),
)
"""Every kind of event of cards that move under claims."""
