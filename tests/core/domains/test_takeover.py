"""Claims of compute domains that NVIDIA's driver has prepared: their channel, the label, and what kubelet lists."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.domains import label
from gpuactors.core.state.claims import DomainReservation, StoredEntry
from gpuactors.core.values.claim import (
    AllocatedDevice,
    Claim,
    ClaimName,
    Prepared,
    PreparedDevice,
    Unprepared,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import ClaimedDomain, DomainDevice, device_of
from gpuactors.core.values.effects import Refused
from tests.core.domains.domain_core import BLUE, DAEMON, NODE, RED, DomainCore, channel, daemon, name

OLD, NEW = name("old"), name("new")


def theirs(claim: ClaimName, device: str = "channel-0", *, named: bool = False) -> StoredEntry:
    """A claim as it is in NVIDIA's checkpoint, mostly without its name."""
    known = claim if named else ClaimName("", "", claim.uid)
    given = PreparedDevice(
        ("r",), NODE, device, (f"k8s.compute-domain.nvidia.com/claim={claim.uid}-{device}",)
    )
    own: DomainDevice | None = device_of(device)
    assert own is not None
    return StoredEntry(
        known,
        ClaimState.TAKEN_OVER,
        Claim(known, None, 0, (AllocatedDevice("r", NODE, device),)),
        DomainReservation(domain=ClaimedDomain(RED, "", "", (own,), None)),
        given=(given,),
    )


def taken_over(*entries: StoredEntry, listed: bool = True) -> DomainCore:
    """A daemon starts where NVIDIA's driver has prepared these, and has set the label."""
    core = DomainCore()
    core.disk = CheckpointWanted(1, entries, ())
    core.set_label(RED)
    core.ready()
    core.listed = {OLD} if listed else set()
    core = core.restarted()
    core.feed()
    return core


def test_the_label_of_a_live_domain_stays_and_goes_with_its_claim() -> None:
    core = taken_over(theirs(OLD))
    core.pass_time(600)
    assert core.history == [None, RED]
    assert core.answer(core.unprepare(OLD)) == Unprepared()
    core.listed = set()
    core.pass_time(600)
    assert core.history == [None, RED, None]
    assert core.claim_state(OLD) in (ClaimState.TOMBSTONE, ClaimState.ABSENT)


def test_a_channel_is_given_to_nobody_else_and_to_the_next_one_when_its_claim_is_unprepared() -> None:
    core = taken_over(theirs(OLD), theirs(DAEMON, "daemon-0", named=True))
    token = core.prepare(channel(NEW))
    core.pass_time(10)
    assert core.answer(token) is None
    assert core.problem(NEW) == "channel-0: it belongs, by NVIDIA's driver, to the claim default/old"
    core.unprepare(OLD)
    core.listed = set()
    assert isinstance(core.answer(token), Prepared), "and the daemon that NVIDIA's driver has prepared counts"
    assert core.history == [None, RED]


def test_a_repeated_prepare_is_answered_as_nvidias_driver_did_and_writes_nothing() -> None:
    core = taken_over(theirs(OLD))
    assert core.answer(core.prepare(OLD)) == Prepared(theirs(OLD).given)
    assert core.claim_state(OLD) is ClaimState.TAKEN_OVER
    assert not core.files


def test_after_a_restart_it_is_still_taken_over() -> None:
    core = taken_over(theirs(OLD))
    core.created(channel(name("other"), RED, "channel-0"))
    core = core.restarted()
    core.pass_time(600)
    assert core.claim_state(OLD) is ClaimState.TAKEN_OVER
    assert core.history == [None, RED]


def test_another_domain_gets_no_channel_while_it_lives() -> None:
    core = taken_over(theirs(OLD))
    core.created(channel(NEW, BLUE, "channel-1"))
    core.domain_settings = replace(core.domain_settings, channels=2)
    token = core.prepare(NEW)
    core.pass_time(10)
    assert not isinstance(core.answer(token), Prepared)
    assert core.label == RED


# --- what kubelet lists counts, whatever is known ---------------------------------------------------------------------


def test_a_channel_that_kubelet_lists_for_an_unknown_claim_is_not_given_away_and_its_label_stays() -> None:
    """NVIDIA's checkpoint is gone, or was never read."""
    core = taken_over()
    token = core.prepare(channel(NEW))
    core.pass_time(10)
    assert core.answer(token) is None
    assert "kubelet lists it for the claim default/old" in core.problem(NEW)
    assert core.history == [None, RED]
    # Its pod ends: kubelet unprepares what we have never prepared.
    assert core.answer(core.unprepare(OLD)) == Unprepared()
    core.pass_time(1)
    assert "kubelet lists" not in core.problem(NEW)
    assert core.history == [None, RED], "the new claim is of the same domain"


def test_a_label_that_was_found_is_stale_only_once_kubelet_lists_no_channel() -> None:
    core = taken_over()
    core.pass_time(600)
    assert core.history == [None, RED]
    assert not label.held(replace(core.state.domains, strangers=None)).is_complete, (
        "nor before it has been asked"
    )
    core.listed = set()
    core.pass_time(600)
    assert core.history == [None, RED, None]


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_claim_without_a_name_gets_it_from_kubelet_or_ends_when_nobody_lists_it(is_listed: bool) -> None:
    core = taken_over(theirs(OLD), listed=is_listed)
    core.pass_time(30)
    entry = core.entry(OLD)
    assert entry is not None
    assert (str(entry.name) == "default/old") is is_listed
    core.created(channel(OLD))
    core.pass_time(3600)
    assert (core.claim_state(OLD) is ClaimState.TAKEN_OVER) is is_listed
    assert (core.label == RED) is is_listed
    assert bool(core.logged("claim.collected")) is not is_listed


def test_of_an_unknown_domain_the_label_stays_and_nothing_is_given_away() -> None:
    """A device of a compute domain whose configuration cannot be read."""
    core = taken_over(replace(theirs(OLD, named=True), reservation=None))
    token = core.prepare(channel(NEW))
    core.pass_time(10)
    assert core.answer(token) is None
    core.pass_time(600)
    assert core.history == [None, RED]


def released_beside(old: Claim) -> DomainCore:
    """A claim of BLUE was prepared and released, while kubelet lists and asks for another one that is refused."""
    core = DomainCore(old, channel(NEW, BLUE, "channel-1"), daemon(DAEMON, BLUE))
    core.domain_settings = replace(core.domain_settings, channels=2)
    core.listed = {old.name}
    core = core.restarted()
    core.feed()
    core.ready(domain=BLUE)
    del core.domains[RED]
    assert isinstance(core.answer(core.prepare(old.name)), Refused)
    token = core.prepare(NEW)
    core.prepare(DAEMON)
    core.settled()
    assert isinstance(core.answer(token), Prepared)
    core.unprepare(NEW)
    core.pass_time(600)
    return core


def test_a_claim_that_kubelet_lists_from_an_earlier_boot_keeps_no_label_of_another_domain() -> None:
    """Its domain was deleted before the node was up again: kubelet asks for it until its pod is deleted."""
    assert released_beside(channel(OLD, RED)).history == [None, BLUE, None]


def test_a_claim_that_kubelet_lists_keeps_the_label_of_its_own_domain_also_where_it_is_refused() -> None:
    """Another program may have prepared it for a container that runs."""
    assert released_beside(channel(name("old", "elsewhere"), BLUE)).history == [None, BLUE]
