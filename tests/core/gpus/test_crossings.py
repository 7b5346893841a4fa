"""A device and its parts exclude each other, over both APIs: whoever has one, in whatever state, nobody gets the other.

Each crossing has a holder, then one who asks for the other device, then the holder's end, after which the other device
is given. They are played for every kind of part (`cards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreferenceRequest
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.effects import Granted, Preferred, Refused
from gpuactors.core.values.mediated import functions_of
from gpuactors.core.values.model import DeviceId, DeviceKey, ResourceName, device_key
from gpuactors.core.values.slices import BlockKind, BlockReason
from tests.core.builders import gpu
from tests.core.gpus.cards import CARDS, SRIOV, Card
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.core.kinds.toy import registered


@pytest.fixture(params=[*CARDS.values()], ids=[*CARDS])
def of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with registered(monkeypatch):
        yield request.param


def allocate(core: ClaimCore, resource: ResourceName, *devices: DeviceKey) -> object:
    (answer,) = core.answers(AllocateAsked(core.token(), resource, (tuple(map(DeviceId, devices)),)))
    return answer


def cause_of(core: ClaimCore, key: DeviceKey) -> Cause:
    return core.state.assessments[key].status.cause


# --- the holders of a part, and their ends ----------------------------------------------------------------------------


def granted(core: ClaimCore, of: Card) -> None:
    assert isinstance(allocate(core, of.of_parts, of.one), Granted)


def pod(core: ClaimCore, of: Card) -> None:
    core.others[of.of_parts, of.one] = "vm-1"
    core.pass_time(limits.LEDGER_QUIET_S)


def pod_of_another_plugin(core: ClaimCore, of: Card) -> None:
    core.others["example.com/part", of.one] = "vm-1"
    core.pass_time(limits.LEDGER_QUIET_S)


def prepared(core: ClaimCore, of: Card) -> None:
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def reserved(core: ClaimCore, of: Card) -> None:
    core.held_back = {"checkpoint"}
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.RESERVED


def being_prepared(core: ClaimCore, of: Card) -> None:
    core.held_back = {"files"}
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.WRITING


def being_released(core: ClaimCore, of: Card) -> None:
    core.prepare(name("one"))
    core.held_back = {"files"}
    core.unprepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.RELEASING


def ended(core: ClaimCore, of: Card) -> None:
    """Whoever has the part is gone, and that is known."""
    core.held_back = set()
    core.feed_answers()
    core.others.clear()
    if core.claim_state(name("one")) in OWNING - {ClaimState.RELEASING}:
        core.unprepare(name("one"))
    core.pass_time(limits.GRANT_GRACE_S + limits.LEDGER_S + POLL_S + CLAIM_TOMBSTONE_S)


Holder = Callable[[ClaimCore, Card], None]

OF_A_PART: Final[dict[Holder, str]] = {
    granted: "is just allocated",
    pod: "is allocated to pod default/vm-1",
    pod_of_another_plugin: "is allocated to pod default/vm-1",
    reserved: "belongs to the claim default/one",
    being_prepared: "belongs to the claim default/one",
    prepared: "belongs to the claim default/one",
    being_released: "is being released from the claim default/one",
}
"""The holders of a part, with what a claim for the card is told of it."""


@pytest.mark.parametrize("holder", OF_A_PART, ids=lambda holder: holder.__name__)
def test_while_a_part_has_an_owner_the_card_is_held_and_the_other_part_is_free(
    of: Card, holder: Holder
) -> None:
    core = of.core(parted=True)
    holder(core, of)
    assert core.state.offered.devices[of.whole].blocked == BlockReason(BlockKind.HELD, "CardInUse")
    assert core.refused(core.prepare(name("whole"))).causes == (of.cause,)
    assert cause_of(core, of.parts[1]) is Cause.FREE
    assert isinstance(allocate(core, of.of_parts, of.parts[1]), Granted)


@pytest.mark.parametrize("holder", OF_A_PART, ids=lambda holder: holder.__name__)
def test_while_a_part_has_an_owner_no_other_claim_or_pod_gets_it(of: Card, holder: Holder) -> None:
    core = of.core(parted=True)
    holder(core, of)
    if holder not in (granted, pod):  # else kubelet itself gives it to no other pod
        refused = allocate(core, of.of_parts, of.one)
        assert isinstance(refused, Refused)
        assert refused.causes == (Cause.CLAIMED_ELSEWHERE,)
    waiting = core.prepare(allocated(name("another"), of.one))
    assert core.answer(waiting) is None
    assert OF_A_PART[holder].removeprefix("is ") in core.problem(name("another"))
    ended(core, of)
    assert isinstance(core.answer(waiting), Prepared)
    assert [claimed.claim for claimed in core.state.gpus.reserved.values()] == ["default/another"]


@pytest.mark.parametrize("holder", OF_A_PART, ids=lambda holder: holder.__name__)
def test_a_part_that_was_removed_under_its_owner_keeps_the_card_until_that_one_ends(
    of: Card, holder: Holder
) -> None:
    core = of.core(parted=True)
    holder(core, of)
    of.now(core, "vfio-pci", parted=False)
    assert core.device_list(of.of_whole) == {of.whole: "Unhealthy"}
    assert cause_of(core, of.whole) is Cause.CARD_IN_USE
    assert f"its {of.part} {of.one} is " in core.reason(of.whole, of.of_whole)
    waiting = core.prepare(name("whole"))
    assert core.answer(waiting) is None
    assert core.claim_state(name("whole")) is ClaimState.WAITING
    assert f"{of.whole}: its {of.part} {of.one} {OF_A_PART[holder]}" in core.problem(name("whole"))
    if holder is granted:  # else the grant is over: kubelet's ledger does not confirm it
        core.others[of.of_parts, of.one] = "vm-1"
    refused = allocate(core, of.of_whole, of.whole)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.CARD_IN_USE,)
    ended(core, of)
    assert core.state.kubelet.ancestors == {}
    assert isinstance(core.answer(core.prepare(name("whole"))), Prepared)


# --- the holders of a card, and their ends ----------------------------------------------------------------------------


def pod_of_the_hosts_driver(core: ClaimCore, of: Card) -> None:
    core.others["example.com/card", of.whole] = "container"
    core.pass_time(limits.LEDGER_QUIET_S)


def card_reserved(core: ClaimCore, of: Card) -> None:
    core.held_back = {"checkpoint"}
    core.prepare(name("whole"))
    assert core.claim_state(name("whole")) is ClaimState.RESERVED


def card_being_bound(core: ClaimCore, of: Card) -> None:
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
def test_while_a_card_has_an_owner_a_part_that_is_made_is_not_given(of: Card, holder: Holder) -> None:
    core = of.core(parted=False)
    holder(core, of)
    of.now(core, of.driver, parted=True)
    in_list, in_claim = OF_A_CARD[holder]
    assert core.device_list(of.of_parts) == dict.fromkeys(sorted(of.parts), "Unhealthy")
    assert core.reason(of.one, of.of_parts) == f"its {of.parent} {of.whole} {in_list}"
    refused = allocate(core, of.of_parts, of.one)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.CARD_IN_USE,)
    assert core.state.offered.devices[of.one].blocked == BlockReason(BlockKind.HELD, "CardInUse")
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.WAITING
    assert f"{of.one}: its {of.parent} {of.whole} {in_claim}" in core.problem(name("one"))


def test_a_part_is_given_when_the_pod_of_its_card_has_ended(of: Card) -> None:
    core = of.core(parted=True)
    pod_of_the_hosts_driver(core, of)
    waiting = core.prepare(name("one"))
    assert core.answer(waiting) is None
    core.others.clear()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert isinstance(core.answer(waiting), Prepared)
    assert core.device_list(of.of_parts)[of.parts[1]] == "Healthy"


# --- who asks at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["whole", "one"])
def test_of_two_claims_that_are_read_at_once_one_gets_the_card(of: Card, first: str) -> None:
    core = of.core(parted=False)
    core.held_back = {"read", "checkpoint"}
    second = "one" if first == "whole" else "whole"
    tokens = [core.prepare(name(first))]
    of.now(core, of.driver, parted=True)
    tokens.append(core.prepare(name(second)))
    core.release("read")
    states = {claim: core.claim_state(name(claim)) for claim in ("whole", "one")}
    assert [*states.values()].count(ClaimState.RESERVED) == 1, states
    assert sum(core.answer(token) is not None for token in tokens) <= 1


def test_an_allocate_that_waits_for_its_facts_is_refused_once_a_claim_has_reserved_the_card(of: Card) -> None:
    core = of.core(parted=False)
    card_reserved(core, of)
    of.now(core, of.driver, parted=True)
    core.silent = True
    token = core.token()
    core.feed(AllocateAsked(token, of.of_parts, ((DeviceId(of.one),),)))
    assert core.allocation(token) is None
    core.silent = False
    core.feed()
    core.feed_answers()
    refused = core.allocation(token)
    assert isinstance(refused, Refused)
    assert f"its {of.parent} {of.whole} is in use by the claim default/whole" in refused.reason


def test_no_claim_has_a_card_and_a_part_of_it(of: Card) -> None:
    core = of.core(parted=True)
    relatives = core.state.index.relatives
    assert relatives(of.one) - of.others == {of.whole}
    assert relatives(of.whole) - of.others == {of.one, of.parts[1]}
    assert all(of.whole in relatives(other) for other in of.others)
    refused = core.refused(core.prepare(allocated(name("both"), of.one, of.whole)))
    assert refused.causes == (of.cause,)


def test_a_preference_names_the_parts_of_a_card_that_another_pod_has_last() -> None:
    """Kubelet has not received the list yet in which they are Unhealthy."""
    other, of_other = gpu("0000:04:00.0", 4, driver="xe"), gpu("0000:04:00.1", 5)
    functions = (*functions_of(tuple(SRIOV.host("xe", True))), replace(other, has_virtual_functions=True))
    core = ClaimCore(*functions, replace(of_other, physical=other.address))
    pod_of_the_hosts_driver(core, SRIOV)
    ids = tuple(DeviceId(key) for key in (*SRIOV.parts, of_other.address))
    asked = PreferenceAsked(core.token(), SRIOV.of_parts, (PreferenceRequest(ids, (), 1),))
    assert core.answers(asked) == [Preferred(((ids[2],),))]


def test_a_container_that_may_have_any_gpu_has_no_part_of_one(of: Card) -> None:
    """The ID of a MIG device names no GPU; it is of one that is on NVIDIA's driver."""
    core = of.core(parted=True)
    on_nvidia = gpu("0000:06:00.0", 6, driver="nvidia")
    vgpu = replace(gpu("0000:06:00.4", 7, driver="nvidia"), physical=on_nvidia.address)
    core.changed(on_nvidia, vgpu)
    core.others["nvidia.com/mig-1g.10gb", "MIG-0a1b2c3d-0000-4000-8000-000000000001"] = "container"
    core.pass_time(limits.LEDGER_QUIET_S)
    may_be_its = {device_key(on_nvidia.address)} | ({of.whole} if of.driver == "nvidia" else set())
    assert core.state.index.possible_owners.keys() == may_be_its
    assert core.device_list(of.of_parts) == dict.fromkeys(sorted(of.parts), "Healthy")
