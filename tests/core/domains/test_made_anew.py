"""A ComputeDomain that is deleted and made anew under its name is another domain: it has another UID."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.events.domains import DomainsTouched
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid
from tests.core.domains.domain_core import (
    BLUE,
    DAEMON,
    DOMAIN_SETTINGS,
    NAMESPACE,
    NODE,
    RED,
    DomainCore,
    channel,
    daemon,
    name,
    with_daemon,
)

ONE, TWO = name("one"), name("two")
BLUE_DAEMON = name("blue-daemon", NAMESPACE)
GREEN = DomainUid("44444444-4444-4444-4444-444444444444")
GONE = "there is no ComputeDomain with the UID"


def core_with_one(device: str = "channel-0") -> DomainCore:
    """ONE has a channel of RED, whose daemon runs. TWO is for BLUE."""
    core = with_daemon(
        channel(ONE),
        channel(TWO, BLUE, device),
        daemon(BLUE_DAEMON, BLUE),
        settings=replace(DOMAIN_SETTINGS, channels=2),
    )
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    return core


def made_anew(core: DomainCore, uid: DomainUid) -> None:
    """The domain is deleted, and made anew under its name; its daemon is Ready on this node at once."""
    core.domains = {uid: ComputeDomain(uid, "red", "default")}
    core.cliques = {uid: Clique(frozenset({NODE}))}
    core.feed(DomainsTouched())


def test_a_claim_of_the_old_one_keeps_its_channel_and_the_label_and_the_new_one_follows_it() -> None:
    core = core_with_one()
    made_anew(core, BLUE)
    token = core.prepare(TWO)
    assert (core.claim_state(ONE), core.label) == (ClaimState.PREPARED, RED)
    assert core.problem(TWO) == "channel-0: it belongs to the claim default/one"
    core.unprepare(ONE)
    assert core.history == [None, RED, None, BLUE]
    assert "no prepared claim on this node yet" in core.problem(TWO), (
        "the old one's daemon is none of the new one's"
    )
    core.unprepare(DAEMON)
    core.prepare(BLUE_DAEMON)
    assert isinstance(core.answer(token), Prepared)
    assert core.history == [None, RED, None, BLUE]


def test_the_claim_that_waits_is_told_which_of_the_two_has_the_node() -> None:
    core = core_with_one("channel-1")
    made_anew(core, BLUE)
    core.prepare(TWO)
    assert core.problem(TWO) == (
        f"the node takes part in another ComputeDomain, default/red with the UID {RED}: one of its channels belongs to "
        "the claim default/one"
    )


def test_a_claim_that_waits_for_the_old_one_s_channel_is_refused_at_once() -> None:
    core = core_with_one()
    core.domains[BLUE] = ComputeDomain(BLUE, "red", "default")
    token = core.prepare(TWO)
    assert core.answer(token) is None
    made_anew(core, GREEN)
    assert f"{GONE} {BLUE}" in core.refusal(token)
    assert core.entry(TWO) is None
    assert core.label == RED


def test_the_new_one_s_readiness_makes_no_channel_of_the_old_one_usable() -> None:
    core = core_with_one()
    core.unprepare(ONE)
    core.cliques[RED] = Clique()
    token = core.prepare(ONE)
    assert "does not say yet" in core.problem(ONE)
    made_anew(core, GREEN)
    assert f"{GONE} {RED}" in core.refusal(token), "at once"
    core.unprepare(ONE)
    core.lingered()
    assert core.history == [None, RED, None]


def test_a_repeated_prepare_of_the_old_one_s_claim_is_refused_and_costs_it_nothing() -> None:
    core = core_with_one()
    files = dict(core.files)
    made_anew(core, BLUE)
    assert f"{GONE} {RED}" in core.refusal(core.prepare(ONE))
    assert (core.claim_state(ONE), core.label, core.files) == (ClaimState.PREPARED, RED, files)
    core.unprepare(ONE)
    core.lingered()
    assert core.label is None
    assert ONE.uid not in core.files
