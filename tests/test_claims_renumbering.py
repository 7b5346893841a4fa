"""The CDI files of prepared claims when cards are removed and rescanned, or another model is in a slot after a reboot:
the whole daemon, on a fake kernel that gives a new IOMMU group the lowest free number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from gpuactors.core.values.claim import ClaimName
from gpuactors.core.values.effects import Refused
from gpuactors_simulation.host.tree import PciSpec
from tests.claims_world import CDI_DIR, DRIVER, SETTINGS, ClaimsWorld, prepared, unprepared

A, B, C = "0000:23:00.0", "0000:41:00.0", "0000:63:00.0"

CARDS: Final = tuple(
    PciSpec(address, "10de", "2330", "030200", group, driver="vfio-pci")
    for group, address in enumerate((A, B))
)
"""vfio-pci takes them at boot and after a rescan, as by its module's ids."""


def files(world: ClaimsWorld, claims: Mapping[str, ClaimName]) -> dict[str, list[str]]:
    """The group nodes in the CDI file of each claim that has one."""
    found = {}
    for name, claim in claims.items():
        content = world.disk.files.get(f"{CDI_DIR}/k8s.{DRIVER}-claim_{claim.uid}.json")
        if content is not None:
            (device,) = json.loads(content)["devices"]
            paths = [node["path"] for node in device["containerEdits"]["deviceNodes"]]
            found[name] = sorted({*paths} - {"/dev/vfio/vfio"})
    return found


def own(world: ClaimsWorld, claims: Mapping[str, str]) -> dict[str, list[str]]:
    """The group node of the card of each claim."""
    return {name: [f"/dev/vfio/{world.tree.functions[card].group}"] for name, card in claims.items()}


@pytest.mark.parametrize("is_up", [True, False], ids=["daemon up", "daemon down"])
@pytest.mark.parametrize("comes_back", [True, False], ids=["both come back", "a new card has the number"])
def test_no_files_name_a_group_that_another_card_has_after_a_rescan(
    *, is_up: bool, comes_back: bool, tmp_path: Path
) -> None:
    world = ClaimsWorld(tmp_path, CARDS)
    claims = {"one": world.claim("one", A), "two": world.claim("two", B)}

    def rescan() -> None:
        for card in (A, B):
            world.kernel.remove(card)
        new = (CARDS[1], CARDS[0]) if comes_back else (replace(CARDS[0], address=C), CARDS[1])
        world.kernel.rescan(new)

    async def go() -> None:
        async with world.daemon() as caller:
            for claim in claims.values():
                await prepared(caller, claim)
            assert files(world, claims) == {"one": ["/dev/vfio/0"], "two": ["/dev/vfio/1"]}
            if is_up:
                rescan()
                await trio.sleep(SETTINGS.resync_interval_s + 1)
                check()
        if not is_up:
            rescan()
        async with world.daemon() as caller:
            await trio.sleep(1)
            check()
            for claim in claims.values():
                await unprepared(caller, claim)
            assert world.left_over() == []

    def check() -> None:
        there = {"one": A, "two": B} if comes_back else {"two": B}
        assert files(world, claims) == own(world, there)
        assert any(line.name == "claim.astray" for line in world.log)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_card_that_is_back_on_its_host_driver_gets_its_files_by_the_next_prepare(tmp_path: Path) -> None:
    """A rescan loses the driver_override."""
    card = replace(CARDS[0], driver="nvidia")
    world = ClaimsWorld(tmp_path, (card,))
    claims = {"one": world.claim("one", A)}

    async def go() -> None:
        async with world.daemon() as caller:
            await prepared(caller, claims["one"])
            world.kernel.remove(A)
            world.kernel.plug(replace(CARDS[1], driver=None))
            world.kernel.rescan((replace(card, driver="nvidia"), replace(CARDS[1], address=C)))
            await trio.sleep(SETTINGS.resync_interval_s + 1)
            assert files(world, claims) == {}
            assert world.drivers[A] == "nvidia"
            await prepared(caller, claims["one"])
            assert files(world, claims) == own(world, {"one": A})
            assert world.drivers[A] == "vfio-pci"

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("restarts", [0, 2])
def test_another_model_in_the_slot_after_a_reboot_is_refused(restarts: int, tmp_path: Path) -> None:
    world = ClaimsWorld(tmp_path, (replace(CARDS[0], driver="nvidia"), CARDS[1]))
    one, two = world.claim("one", A), world.claim("two", B)

    async def go() -> None:
        async with world.daemon() as caller:
            await prepared(caller, one)
            await prepared(caller, two)
        world.disk.power_cut()
        world.swap_card(replace(CARDS[0], device="20b5", driver="nvidia"))
        world.boot()
        for _ in range(restarts):
            async with world.daemon() as caller:
                await prepared(caller, two)  # what is on disk is this boot's from now on
        async with world.daemon() as caller:
            await prepared(caller, two)
            answer = await caller.prepare(one)
            assert isinstance(answer, Refused)
            assert answer.causes == ("ReplacedByAnother",)
            assert "10de:20b5, and the claim has 10de:2330" in answer.reason
            assert world.drivers[A] == "nvidia"
            await unprepared(caller, one)
            await prepared(caller, one)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))


def test_another_model_in_the_slot_after_a_second_reboot_is_refused(tmp_path: Path) -> None:
    """Its pod did not start in the boot between: another claim was prepared there."""
    world = ClaimsWorld(tmp_path, (replace(CARDS[0], driver="nvidia"), CARDS[1]))
    one, two = world.claim("one", A), world.claim("two", B)

    async def go() -> None:
        async with world.daemon() as caller:
            await prepared(caller, one)
        world.boot()
        async with world.daemon() as caller:
            await prepared(caller, two)
        world.swap_card(replace(CARDS[0], device="20b5", driver="nvidia"))
        world.boot()
        async with world.daemon() as caller:
            answer = await caller.prepare(one)
            assert isinstance(answer, Refused)
            assert answer.causes == ("ReplacedByAnother",)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
