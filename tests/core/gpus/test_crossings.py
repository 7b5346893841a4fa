"""A device and its parts exclude each other, over both APIs: whoever has one, in whatever state, nobody gets the other.

Each crossing has a holder, then one who asks for the other device, then the holder's end, after which the other device
is given. The toy kind stands for the parts that are usable as they are: a card has two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events.deviceplugin import AllocateAsked
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Refused
from gpuactors.core.values.inventory import named
from gpuactors.core.values.model import DeviceId, DeviceKey, ResourceName, device_key
from gpuactors.core.values.selector import parse_selector
from gpuactors.core.values.slices import BlockKind, BlockReason
from tests.core.builders import SETTINGS
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.core.kinds.toy import CARD, RESOURCE, card, half, registered

WHOLE, ONE, OTHER = device_key(CARD), half(0), half(1)
OF_WHOLE: Final = named(card(halved=False))

SELECTING: Final = replace(SETTINGS, selectors=(*SETTINGS.selectors, parse_selector("vendor=f00d")))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with registered(monkeypatch):
        yield


def core_of(driver: str = "toy-halves", *, halved: bool) -> ClaimCore:
    core = ClaimCore(card(driver, halved=halved), settings=SELECTING)
    core.created(allocated(name("whole"), WHOLE), allocated(name("one"), ONE))
    return core


def allocate(core: ClaimCore, resource: ResourceName, *devices: DeviceKey) -> object:
    (answer,) = core.answers(AllocateAsked(core.token(), resource, (tuple(map(DeviceId, devices)),)))
    return answer


def cause_of(core: ClaimCore, key: DeviceKey) -> Cause:
    return core.state.assessments[key].status.cause


# --- the holders of a half, and their ends ----------------------------------------------------------------------------


def granted(core: ClaimCore) -> None:
    assert isinstance(allocate(core, RESOURCE, ONE), Granted)


def pod(core: ClaimCore) -> None:
    core.others[RESOURCE, ONE] = "vm-1"
    core.pass_time(limits.LEDGER_QUIET_S)


def pod_of_another_plugin(core: ClaimCore) -> None:
    core.others["example.com/half", ONE] = "vm-1"
    core.pass_time(limits.LEDGER_QUIET_S)


def prepared(core: ClaimCore) -> None:
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def reserved(core: ClaimCore) -> None:
    core.held_back = {"checkpoint"}
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.RESERVED


def being_prepared(core: ClaimCore) -> None:
    core.held_back = {"files"}
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.WRITING


def being_released(core: ClaimCore) -> None:
    core.prepare(name("one"))
    core.held_back = {"files"}
    core.unprepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.RELEASING


def ended(core: ClaimCore) -> None:
    """Whoever has the half is gone, and that is known."""
    core.held_back = set()
    core.feed_answers()
    core.others.clear()
    if core.claim_state(name("one")) in (ClaimState.PREPARED, ClaimState.DRIFTED):
        core.unprepare(name("one"))
    core.pass_time(limits.GRANT_GRACE_S + limits.LEDGER_S + POLL_S + CLAIM_TOMBSTONE_S)


Holder = Callable[[ClaimCore], None]

OF_A_HALF: Final[dict[Holder, str]] = {
    granted: "is just allocated",
    pod: "is allocated to pod default/vm-1",
    pod_of_another_plugin: "is allocated to pod default/vm-1",
    reserved: "belongs to the claim default/one",
    being_prepared: "belongs to the claim default/one",
    prepared: "belongs to the claim default/one",
    being_released: "is being released from the claim default/one",
}
"""The holders of a half, with what a claim for the card is told of it."""


@pytest.mark.parametrize("holder", OF_A_HALF, ids=lambda holder: holder.__name__)
def test_while_a_half_has_an_owner_the_card_is_held_and_the_other_half_is_free(holder: Holder) -> None:
    core = core_of(halved=True)
    holder(core)
    assert core.state.offered.devices[WHOLE].blocked == BlockReason(BlockKind.HELD, "CardInUse")
    assert core.refused(core.prepare(name("whole"))).causes == (Cause.MEDIATED_DEVICES,)
    assert cause_of(core, OTHER) is Cause.FREE
    assert isinstance(allocate(core, RESOURCE, OTHER), Granted)


@pytest.mark.parametrize("holder", OF_A_HALF, ids=lambda holder: holder.__name__)
def test_a_half_that_was_removed_under_its_owner_keeps_the_card_until_that_one_ends(holder: Holder) -> None:
    core = core_of(halved=True)
    holder(core)
    core.changed(card("vfio-pci", halved=False))
    assert core.device_list(OF_WHOLE) == {WHOLE: "Unhealthy"}
    assert cause_of(core, WHOLE) is Cause.CARD_IN_USE
    assert f"its part {ONE} is " in core.reason(WHOLE, OF_WHOLE)
    waiting = core.prepare(name("whole"))
    assert core.answer(waiting) is None
    assert core.claim_state(name("whole")) is ClaimState.WAITING
    assert f"{WHOLE}: its part {ONE} {OF_A_HALF[holder]}" in core.problem(name("whole"))
    if holder is granted:  # else the grant is over: kubelet's ledger does not confirm it
        core.others[RESOURCE, ONE] = "vm-1"
    refused = allocate(core, OF_WHOLE, WHOLE)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.CARD_IN_USE,)
    ended(core)
    assert core.state.kubelet.ancestors == {}
    assert isinstance(core.answer(core.prepare(name("whole"))), Prepared)


# --- the holders of a card, and their ends ----------------------------------------------------------------------------


def pod_of_the_hosts_driver(core: ClaimCore) -> None:
    core.others["example.com/card", WHOLE] = "container"
    core.pass_time(limits.LEDGER_QUIET_S)


def card_reserved(core: ClaimCore) -> None:
    core.held_back = {"checkpoint"}
    core.prepare(name("whole"))
    assert core.claim_state(name("whole")) is ClaimState.RESERVED


def card_being_bound(core: ClaimCore) -> None:
    core.held_back = {"device"}
    core.prepare(name("whole"))
    assert core.claim_state(name("whole")) is ClaimState.BINDING


OF_A_CARD: Final[dict[Holder, tuple[str, str]]] = {
    pod_of_the_hosts_driver: (
        "is allocated to pod default/container as example.com/card",
        "is allocated to pod default/container as example.com/card",
    ),
    card_reserved: ("is in use by the claim default/whole", "belongs to the claim default/whole"),
    card_being_bound: ("is in use by the claim default/whole", "belongs to the claim default/whole"),
}
"""The holders of a card, with what a list says of them for its halves, and what a claim for one is told."""


@pytest.mark.parametrize("holder", OF_A_CARD, ids=lambda holder: holder.__name__)
def test_while_a_card_has_an_owner_a_half_that_is_made_is_not_given(holder: Holder) -> None:
    core = core_of(halved=False)
    holder(core)
    core.changed(card())
    in_list, in_claim = OF_A_CARD[holder]
    assert core.device_list(RESOURCE) == dict.fromkeys(sorted((ONE, OTHER)), "Unhealthy")
    assert core.reason(ONE, RESOURCE) == f"its parent {WHOLE} {in_list}"
    refused = allocate(core, RESOURCE, ONE)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.CARD_IN_USE,)
    assert core.state.offered.devices[ONE].blocked == BlockReason(BlockKind.HELD, "CardInUse")
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.WAITING
    assert f"{ONE}: its parent {WHOLE} {in_claim}" in core.problem(name("one"))


def test_a_half_is_given_when_the_pod_of_its_card_has_ended() -> None:
    core = core_of(halved=True)
    pod_of_the_hosts_driver(core)
    waiting = core.prepare(name("one"))
    assert core.answer(waiting) is None
    core.others.clear()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert isinstance(core.answer(waiting), Prepared)
    assert core.device_list(RESOURCE)[OTHER] == "Healthy"


# --- who asks at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["whole", "one"])
def test_of_two_claims_that_are_read_at_once_one_gets_the_card(first: str) -> None:
    core = core_of(halved=False)
    core.held_back = {"read", "checkpoint"}
    second = "one" if first == "whole" else "whole"
    tokens = [core.prepare(name(first))]
    core.changed(card())
    tokens.append(core.prepare(name(second)))
    core.release("read")
    states = {claim: core.claim_state(name(claim)) for claim in ("whole", "one")}
    assert [*states.values()].count(ClaimState.RESERVED) == 1, states
    assert sum(core.answer(token) is not None for token in tokens) <= 1


def test_an_allocate_that_waits_for_its_facts_is_refused_once_a_claim_has_reserved_the_card() -> None:
    core = core_of(halved=False)
    card_reserved(core)
    core.changed(card())
    core.silent = True
    token = core.token()
    core.feed(AllocateAsked(token, RESOURCE, ((DeviceId(ONE),),)))
    assert core.allocation(token) is None
    core.silent = False
    core.feed()
    core.feed_answers()
    refused = core.allocation(token)
    assert isinstance(refused, Refused)
    assert f"its parent {WHOLE} is in use by the claim default/whole" in refused.reason


def test_no_claim_has_a_card_and_a_half_of_it() -> None:
    core = core_of(halved=True)
    assert core.state.index.relatives(ONE) == {WHOLE}
    assert core.state.index.relatives(WHOLE) == {ONE, OTHER}
    refused = core.refused(core.prepare(allocated(name("both"), ONE, WHOLE)))
    assert refused.causes == (Cause.MEDIATED_DEVICES,)
