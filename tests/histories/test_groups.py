"""Histories of what else is in a card's IOMMU group, and of another driver's claims beside ours."""

from __future__ import annotations

from typing import Final

import pytest

from tests.histories.claims import CLAIMS
from tests.histories.group_events import COMES
from tests.histories.play import play
from tests.histories.script import parse_script
from tests.histories.world import PLATFORM_COMES, PLATFORM_IS_BOUND, RESERVED

DRIVER_PREPARES: Final = "another driver prepares a card for a claim"

HISTORIES: Final = {
    "a claim of a card beside a disk of the host": f"{COMES}@3+3; a pod with a claim comes@3+70",
    "a claim of a card beside a platform device, which the host takes": (
        f"{PLATFORM_COMES}@3+3; {PLATFORM_IS_BOUND}@3; a pod with a claim comes@3+70"
    ),
    "a claim of a card beside a platform device without a driver": (
        f"{PLATFORM_COMES}@3+3; a pod with a claim comes@3+70"
    ),
    "a claim of a card whose group has memory that firmware reserves": (
        f"{RESERVED}@3; a pod with a claim comes@3+70"
    ),
    "a claim of a card that another driver's claim has": (
        f"{DRIVER_PREPARES}@13+0.3; a pod with a claim comes@1+11; another driver unprepares its claim+70"
    ),
    "a claim, while nothing says which card another driver's claim has": (
        f"{DRIVER_PREPARES}@1+0.3; a pod with a claim comes+70"
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_claim_gets_no_card_that_the_host_or_another_driver_has(name: str) -> None:
    script = parse_script(HISTORIES[name])
    played = play(script, CLAIMS)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


@pytest.mark.parametrize("event", [f"{PLATFORM_COMES}; {PLATFORM_IS_BOUND}", RESERVED])
def test_the_device_plugin_gives_no_card_away_whose_group_is_not_viable(event: str) -> None:
    played = play(parse_script(f"{event}; pods come in a burst+3"), 0)
    assert played.failure is None, played.failure
