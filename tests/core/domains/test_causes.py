"""Each reason for which a prepare of a compute domain's claim is refused has its own cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, Claim, Unprepared
from gpuactors.core.values.domain import DomainMode, ImexFacts
from tests.core.domains.domain_core import (
    BLUE,
    DAEMON,
    DOMAIN_SETTINGS,
    NODE,
    DomainCore,
    channel,
    daemon,
    found_by_files,
    name,
)
from tests.core.domains.test_prepare import ONE, TWO, core_with_daemon

STRANGER = "99999999-9999-9999-9999-999999999999"


def of_content(claim: Claim) -> Cause:
    core = DomainCore(claim)
    return core.cause_of(claim.name)


def without_answer(*held_back: str, away: bool = False) -> Cause:
    core = core_with_daemon()
    core.held_back, core.away = {*held_back}, away
    return core.cause_of(ONE, late=True)


def without_daemon() -> Cause:
    core = core_with_daemon()
    core.unprepare(DAEMON)
    return core.cause_of(ONE, late=True)


def ready_elsewhere() -> Cause:
    core = core_with_daemon()
    core.ready("node-2")
    return core.cause_of(ONE, late=True)


def labelled(value: str) -> Cause:
    core = core_with_daemon()
    core.labelled(value)
    return core.cause_of(ONE, late=True)


def host_managed() -> Cause:
    core = DomainCore(settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    core.imex = replace(core.imex, host_problem="nvidia-imex-ctl -q says INITIALIZING, and not READY")
    core.created(channel(ONE))
    return core.cause_of(ONE, late=True)


def daemon_of_the_host() -> Cause:
    core = DomainCore(daemon(DAEMON), settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    return core.cause_of(DAEMON)


def with_imex(imex: ImexFacts) -> Cause:
    core = DomainCore()
    core.imex = imex
    core.created(channel(ONE))
    return core.cause_of(ONE)


def another_claim_has(domain: str, device: str) -> Cause:
    core = DomainCore(
        channel(ONE, domain, device),
        channel(TWO),
        daemon(DAEMON),
        settings=replace(DOMAIN_SETTINGS, channels=2),
    )
    core.ready()
    core.prepare(DAEMON)
    core.prepare(TWO)
    return core.cause_of(ONE, late=True)


def of_a_lost_checkpoint() -> Cause:
    core = core_with_daemon()
    core.prepare(TWO)
    core.disk = found_by_files(DAEMON, TWO)
    core = core.restarted()
    del core.api[str(TWO)]
    return core.cause_of(ONE, late=True)


def directory_left() -> Cause:
    """Of the claim that is released: its unprepare succeeds."""
    core = core_with_daemon()
    core.stuck = True
    token = core.unprepare(DAEMON)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert isinstance(core.answer(token), Unprepared)
    entry = core.entry(DAEMON)
    assert entry is not None
    assert entry.why is not None
    return entry.why.cause


DOMAINS: Final[dict[str, tuple[Cause, Callable[[], Cause]]]] = {
    "its configuration is unknown": (
        Cause.INVALID_CONFIGURATION,
        lambda: of_content(channel(ONE, colour="red")),
    ),
    "it asks for admin access": (
        Cause.INVALID_CONFIGURATION,
        lambda: of_content(
            replace(
                channel(ONE),
                results=(AllocatedDevice("channel", NODE, "channel-0", admin_access=True),),
            )
        ),
    ),
    "its domain is in another namespace": (
        Cause.INVALID_CONFIGURATION,
        lambda: of_content(channel(name("one", "elsewhere"))),
    ),
    "a daemon's is in another namespace": (
        Cause.INVALID_CONFIGURATION,
        lambda: of_content(replace(daemon(DAEMON), name=name("daemon"))),
    ),
    "the node has fewer channels": (
        Cause.NOT_OFFERED,
        lambda: of_content(channel(ONE, device="channel-1")),
    ),
    "the host manages the daemon": (Cause.NOT_OFFERED, daemon_of_the_host),
    "it is a GPU": (
        Cause.INVALID_CONFIGURATION,
        lambda: of_content(channel(ONE, device="gpu-0000-23-00-0")),
    ),
    "it is not allocated": (
        Cause.CLAIM_NOT_ALLOCATED,
        lambda: of_content(replace(channel(ONE), results=None)),
    ),
    "there is no such domain": (
        Cause.DOMAIN_NOT_FOUND,
        lambda: of_content(channel(ONE, "33333333-3333-3333-3333-333333333333")),
    ),
    "the node has no IMEX": (Cause.IMEX_MISSING, lambda: with_imex(ImexFacts("no driver"))),
    "its driver is too old": (
        Cause.IMEX_MISSING,
        lambda: with_imex(ImexFacts(caps_major=238, mgmt_minor=7, clique_id="cluster.1")),
    ),
    "IMEX is not read": (Cause.IMEX_MISSING, lambda: without_answer("imex")),
    "the domain is not read": (Cause.API_SERVER_FAILED, lambda: without_answer("domain")),
    "the API server is away": (Cause.API_SERVER_FAILED, lambda: without_answer(away=True)),
    "the label is not patched": (Cause.DOMAIN_NOT_READY, lambda: without_answer("label-patch")),
    "its daemon has no claim": (Cause.DOMAIN_NOT_READY, without_daemon),
    "its daemon is not Ready": (Cause.DOMAIN_NOT_READY, ready_elsewhere),
    "the host's daemon is not ready": (Cause.DOMAIN_NOT_READY, host_managed),
    "another claim has the channel": (
        Cause.CLAIMED_ELSEWHERE,
        lambda: another_claim_has("11111111-1111-1111-1111-111111111111", "channel-0"),
    ),
    "what another claim has is not known": (Cause.CLAIMED_ELSEWHERE, of_a_lost_checkpoint),
    "the node takes part in another domain": (
        Cause.OTHER_DOMAIN,
        lambda: another_claim_has(BLUE, "channel-1"),
    ),
    "somebody else's label": (Cause.FOREIGN_LABEL, lambda: labelled(STRANGER)),
    "the disk is silent": (Cause.CHECKPOINT_UNWRITTEN, lambda: without_answer("checkpoint")),
    "its files do not come": (Cause.FILES_UNWRITTEN, lambda: without_answer("files")),
    "its directory cannot be removed": (Cause.DIRECTORY_LEFT, directory_left),
}
"""What is wrong, and the one cause that its call, or the claim, has for it."""


@pytest.mark.parametrize("wrong", DOMAINS)
def test_what_is_wrong_with_a_claim_has_its_one_cause(wrong: str) -> None:
    cause, refused = DOMAINS[wrong]
    assert refused() is cause


def test_a_channel_that_waits_is_logged_with_its_cause() -> None:
    core = core_with_daemon()
    core.ready("node-2")
    core.prepare(ONE)
    waits = core.logged("claim.waiting")[-1]
    entry = core.entry(ONE)
    assert entry is not None
    assert (waits.fields["cause"], waits.fields["reason"]) == (str(Cause.DOMAIN_NOT_READY), entry.problem)
