"""What is said of compute domains: the words of a prepare, Ready only where no claim waits, no guess for a fact."""

from __future__ import annotations

from itertools import permutations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.report import ClaimReport
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.domains.report import (
    DomainReport,
    LabelReport,
    claim_reports,
    domain_reports,
    imex_report,
    label_report,
)
from gpuactors.core.events import Event
from gpuactors.core.values.claim import ClaimName, Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import DomainMode, DomainUid, ImexFacts
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.reported import DomainStatus, ImexReport, LabelStatus, Readiness
from tests.core.claims.calls_core import AWAY
from tests.core.domains.domain_core import (
    BLUE,
    DAEMON,
    DOMAIN_SETTINGS,
    IMEX,
    NODE,
    RED,
    DomainCore,
    channel,
    daemon,
    name,
    with_daemon,
)

ONE, TWO = name("one"), name("two")
STRANGER = "99999999-9999-9999-9999-999999999999"


def core_with(*claims: ClaimName, ready: bool = True) -> DomainCore:
    """Of RED: the daemon's claim, then these of channels, each prepared if it can be."""
    core = with_daemon(channel(ONE), channel(TWO), ready=ready)
    for claim in claims:
        core.prepare(claim)
    return core


def of_domain(core: DomainCore, uid: DomainUid = RED) -> DomainReport:
    (found,) = (report for report in domain_reports(core.state.domains) if report.uid == uid)
    return found


def of_claim(core: DomainCore, claim: ClaimName) -> ClaimReport:
    (found,) = (report for report in claim_reports(core.state.domains) if report.name == claim)
    return found


def test_a_domain_in_use() -> None:
    core = core_with(ONE)
    assert of_domain(core) == DomainReport(
        uid=RED,
        name="red",
        namespace="default",
        status=DomainStatus.READY,
        missing="",
        labelled=True,
        daemon=DAEMON.uid,
        readiness=Readiness.READY,
        problem="",
        changed_at=core.state.domains.since[RED][1],
        read_at=core.state.domains.views[RED].read_at,
    )
    assert [(r.name, r.state, r.devices, r.domain) for r in claim_reports(core.state.domains)] == [
        (DAEMON, ClaimState.PREPARED, ("daemon-0",), RED),
        (ONE, ClaimState.PREPARED, ("channel-0",), RED),
    ]


@pytest.mark.parametrize("lacks", ["domain", "imex", "label", "foreign label", "daemon", "readiness"])
def test_what_is_missing_is_said_of_domain_and_claim_in_the_words_of_the_refusal(lacks: str) -> None:
    """The call is refused after 35 s; until then the same words are shown."""
    core = core_with()
    match lacks:
        case "domain" | "imex" | "label":
            core.held_back = {"label-patch" if lacks == "label" else lacks}
        case "foreign label":
            core.labelled(STRANGER)
        case "daemon":
            core.unprepare(DAEMON)
        case _:
            core.ready("node-2")
    token = core.prepare(ONE)
    core.pass_time(limits.CLAIM_ANSWER_S - 0.1)
    shown, of_it = of_claim(core, ONE), of_domain(core)
    assert shown.waiting_calls == 1
    assert shown.devices == ("channel-0",), "also before it is its own"
    if lacks not in (
        "domain",
        "imex",
    ):  # what was read before this claim came is known of the domain, and no fact for it
        assert (of_it.status, of_it.missing) == (DomainStatus.NOT_READY, shown.problem)
    core.pass_time(0.2)
    assert core.refusal(token).endswith(f": {shown.problem}; kubelet asks again")


class Watched(DomainCore):
    """After each step: a domain of which a reserved claim still waits is not Ready, for this claim's reason."""

    waited = 0

    def _step(self, event: Event) -> list[Effect]:
        effects = super()._step(event)
        for entry in self.state.domains.claims.entries.values():
            if entry.state is ClaimState.BINDING:
                found = of_domain(self)
                assert (found.status, found.missing) == (DomainStatus.NOT_READY, entry.problem)
                self.waited += 1
        return effects


@pytest.mark.parametrize("order", [*permutations(("label-read", "label-patch", "domain", "imex"))])
def test_a_domain_is_never_shown_ready_while_a_reserved_claim_of_it_waits(order: tuple[str, ...]) -> None:
    core = Watched()
    core.created(daemon(DAEMON), channel(ONE))
    core.ready()
    core.held_back = {*order}
    token = core.prepare(ONE)
    core.prepare(DAEMON)
    for kind in order:
        core.pass_time(DOMAIN_READ_S)
        core.release(kind)
    core.pass_time(DOMAIN_READ_S)
    assert isinstance(core.answer(token), Prepared)
    assert core.waited
    assert of_domain(core).status is DomainStatus.READY


def test_a_claim_that_a_restart_has_met_waits_for_a_look_of_its_own_and_its_domain_is_not_ready() -> None:
    """Nothing else is missing here: the host's IMEX daemon is ready, and was not when the claim came."""
    core = DomainCore(channel(ONE), settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    core.imex = replace(IMEX, host_problem="the host's IMEX daemon is not ready")
    core.prepare(ONE)
    core.imex = IMEX
    after = core.restarted("domain")
    assert of_domain(after).status is DomainStatus.NOT_READY
    assert of_domain(after).missing == of_claim(after, ONE).problem
    assert "has not been read yet" in of_domain(after).missing


def test_ready_before_the_label_was_added_is_not_ready() -> None:
    core = core_with()
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    core.held_back = {"domain"}
    core.release("label-patch")
    view = core.state.domains.views[RED]
    assert view.is_ready_by_status(NODE)
    assert (of_domain(core).status, of_domain(core).readiness) == (DomainStatus.NOT_READY, Readiness.UNREAD)


def test_after_a_restart_readiness_is_unread_where_no_claim_waits_for_it() -> None:
    after = core_with(ONE).restarted()
    found = of_domain(after)
    assert (found.status, found.missing, found.readiness) == (DomainStatus.UNREAD, "", Readiness.UNREAD)
    assert (found.namespace, found.name) == ("default", "red"), "as the claims on disk have it"
    after.unprepare(DAEMON)
    found = of_domain(after)
    assert found.status is DomainStatus.NOT_READY
    assert found.missing == f"the daemon of the ComputeDomain {RED} has no prepared claim on this node yet"


def test_a_label_that_is_lost_is_missing_though_the_claim_is_prepared() -> None:
    core = core_with(ONE)
    core.held_back = {"label-patch"}
    core.labelled(None)
    assert of_claim(core, ONE).problem == ""
    assert "is not there yet" in of_domain(core).missing
    assert not of_domain(core).labelled


def test_of_a_domain_without_a_channel_here_nothing_is_missing() -> None:
    core = core_with()
    assert (of_domain(core).status, of_domain(core).missing) == (DomainStatus.UNUSED, "")
    core.prepare(ONE)
    core.unprepare(ONE)
    assert of_domain(core).status is DomainStatus.UNUSED
    core.unprepare(DAEMON)
    assert domain_reports(core.state.domains) == ()
    assert {claim.domain for claim in claim_reports(core.state.domains)} == {""}


def test_a_claim_that_waits_for_another_one_s_channel_says_so_and_the_domain_is_ready() -> None:
    core = core_with(ONE, TWO)
    assert of_claim(core, TWO).problem == "channel-0: it belongs to the claim default/one"
    assert of_domain(core).status is DomainStatus.READY


def test_a_domain_whose_claims_wait_for_another_domain_s_is_not_ready_in_their_words() -> None:
    core = core_with(ONE)
    core.prepare(channel(TWO, BLUE))
    found = of_domain(core, BLUE)
    assert (found.status, found.labelled) == (DomainStatus.NOT_READY, False)
    assert found.missing == of_claim(core, TWO).problem == "channel-0: it belongs to the claim default/one"


def test_a_domain_that_is_gone_is_said_in_the_words_of_the_refusal_and_keeps_its_name() -> None:
    core = core_with(ONE)
    del core.domains[RED]
    refused = core.refusal(core.prepare(TWO))
    found = of_domain(core)
    assert (found.status, found.missing, found.name) == (DomainStatus.NOT_READY, refused, "red")


def test_a_domain_that_cannot_be_read_has_the_reason() -> None:
    core = core_with()
    core.prepare(channel(TWO, BLUE))
    core.away = True
    core.pass_time(DOMAIN_READ_S + 0.1)
    assert of_domain(core, BLUE).problem == AWAY


# --- the label ------------------------------------------------------------------------------------------------


def test_the_label_is_said_as_it_is_known() -> None:
    core = DomainCore(daemon(DAEMON), channel(ONE))
    core.ready()
    seen = [label_report(core.state.domains)]
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    seen.append(label_report(core.state.domains))
    core.release("label-patch")
    seen.append(label_report(core.state.domains))
    core.held_back = {"label-patch"}
    core.unprepare(ONE)
    core.lingered()
    seen.append(label_report(core.state.domains))
    core.release("label-patch")
    core.labelled(STRANGER)
    seen.append(label_report(core.state.domains))
    assert [(s.status, s.value) for s in seen] == [
        (LabelStatus.ABSENT, None),
        (LabelStatus.ADDING, RED),
        (LabelStatus.SET, RED),
        (LabelStatus.REMOVING, RED),
        (LabelStatus.FOREIGN, STRANGER),
    ]


def test_after_a_patch_that_failed_the_label_s_value_is_no_fact() -> None:
    core = core_with()
    core.held_back = {"label-patch", "label-read"}
    core.prepare(ONE)
    core.away = True
    core.release("label-patch")
    assert label_report(core.state.domains) == LabelReport(LabelStatus.UNSURE, None, AWAY)
    assert not of_domain(core).labelled
    assert of_domain(core).missing.endswith(f"has not been read yet: {AWAY}")


def test_a_label_that_was_not_read_yet() -> None:
    after = core_with(ONE).restarted("label-read")
    assert label_report(after.state.domains) == LabelReport(LabelStatus.UNREAD, None, "")
    assert of_domain(after).status is DomainStatus.NOT_READY


# --- the host ---------------------------------------------------------------------------------------------------


def test_imex_is_said_as_the_host_has_it() -> None:
    assert imex_report(DomainCore().state.domains) == ImexReport(True, True, IMEX.clique_id, "", "", "")
    absent = DomainCore()
    absent.imex = ImexFacts(
        "/proc/devices has no nvidia-caps-imex-channels, so this node has no IMEX channels"
    )
    assert imex_report(absent.restarted().state.domains) == ImexReport(
        True, False, "", absent.imex.absent, "", ""
    )
    alone = DomainCore()
    alone.imex = ImexFacts(channel_major=501)
    found = imex_report(alone.restarted().state.domains)
    assert (found.present, found.clique_id) == (True, "")
    assert found.reason == "the node is on no NVLink fabric: claims are prepared without channel device nodes"
    assert not imex_report(alone.restarted("imex").state.domains).known


def test_a_daemon_of_the_host_s_is_ready_by_the_host_s_own_word() -> None:
    core = DomainCore(channel(ONE), settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    core.imex = replace(
        IMEX, host_problem="the host's IMEX daemon is not ready: nvidia-imex-ctl says NOT_READY"
    )
    core.prepare(ONE)
    found = of_domain(core)
    assert (found.status, found.missing) == (DomainStatus.NOT_READY, core.imex.host_problem)
    assert (found.missing, found.readiness) == (of_claim(core, ONE).problem, None)
    core.imex = IMEX
    core.pass_time(DOMAIN_READ_S)
    assert of_domain(core).status is DomainStatus.READY
    assert of_domain(core.restarted()).status is DomainStatus.READY, "by the host alone"


def test_without_compute_domains_nothing_is_said() -> None:
    core = DomainCore()
    off = replace(core.state.domains, settings=None)
    assert domain_reports(off) == ()
