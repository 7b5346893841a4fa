"""The scenario of compute domains: what it shows, and that its expectations find a daemon that is wrong."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

import pytest

from gpuactors.core.domains import exclusion, label
from gpuactors_simulation import run
from gpuactors_simulation.expectations_domains import ImexOffered, LabelWas, Lacks, Says
from gpuactors_simulation.kubelet.device_manager import DeviceManager
from gpuactors_simulation.scenarios.compute_domain import COMPUTE_DOMAIN
from gpuactors_simulation.situation import ClaimSeen, ClaimsSeen, DomainsSeen, Expectation, Situation
from tests.support.scenarios import fails_at, steps_of


def test_the_label_the_daemon_and_its_readiness_at_each_step() -> None:
    steps = steps_of("compute-domain")
    assert [(step["domain"]["label"], step["domain"]["says"], daemons(step)) for step in steps] == [
        (None, None, {}),
        ("training", None, {}),
        *[("training", "Ready", {"training-daemon-1": True})] * 3,
        (None, None, {}),
    ]
    assert steps[-1]["domain"]["labels"] == [None, "training", None], "never absent in between"
    assert all(step["domain"]["offered"] == ["channel-0", "daemon-0"] for step in steps)


def daemons(step: Mapping[str, Any]) -> dict[str, bool]:
    return {c["name"]: c["prepared"] for c in step["claims"] if c["devices"] == ["daemon-0"]}


def test_the_new_claim_is_prepared_when_the_old_one_is_unprepared() -> None:
    _, _, _, replaced, handed_on, ended = steps_of("compute-domain")
    (waiting,) = (c for c in replaced["claims"] if c["name"] == "job-2-channel")
    assert (waiting["state"], waiting["prepared"]) == ("Waiting", False)
    assert waiting["problem"] == "channel-0: it belongs to the claim default/job-1-channel"
    first, daemon, new, old = handed_on["domain"]["calls"]
    assert (new["call"], new["claim"]) == ("prepare", "job-2-channel")
    assert (old["call"], old["claim"]) == ("unprepare", "job-1-channel")
    assert new["at_s"] < old["at_s"] < new["at_s"] + new["took_s"], "it waits in its call"
    assert first["at_s"] < daemon["at_s"] < first["at_s"] + first["took_s"], "and so did the first one"
    assert [call["error"] for call in ended["domain"]["calls"]] == [None] * 6
    (prepared,) = (c for c in handed_on["claims"] if c["name"] == "job-2-channel")
    assert prepared["prepared"]


def test_the_label_the_devices_and_the_calls_are_tables() -> None:
    out = io.StringIO()
    assert (
        run.simulate(scenario="compute-domain", seed=0, speed=1.0, json_lines=False, out=out) == run.EXIT_OK
    )
    *_, goes_on, _, handed_on, _ = (
        [" ".join(line.split()) for line in step.splitlines()] for step in out.getvalue().split("\nStep ")
    )

    def calls(lines: list[str]) -> list[list[str]]:
        return [line.split()[2:4] for line in lines if line.endswith("s done")]

    assert "default/training training Ready" in goes_on
    assert "daemon-0 offered training-daemon-1 (Prepared)" in goes_on
    assert calls(goes_on) == [["prepare", "job-1-channel"], ["prepare", "training-daemon-1"]]
    assert {"1 domain as before", "1 IMEX device as before"} <= {*handed_on}
    assert "channel-0 offered job-2-channel (Prepared)" in handed_on
    assert calls(handed_on) == [["prepare", "job-2-channel"], ["unprepare", "job-1-channel"]]


def test_a_claim_that_waits_says_what_it_lacks() -> None:
    _, waits, *_ = steps_of("compute-domain")
    (claim,) = waits["claims"]
    assert claim["problem"] == (
        "the daemon of the ComputeDomain default/training has no prepared claim on this node yet"
    )


# --- a daemon that is wrong is found -----------------------------------------------------------------------------


def test_a_label_that_goes_with_the_old_claim_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA issue 641: the claim that waits does not hold it."""
    monkeypatch.setattr(label, "_KEEPS", label._NEEDS)
    monkeypatch.setattr(label, "_lingering", lambda domains, _of, patch, _at: (domains, patch))
    unmet = fails_at(monkeypatch, COMPUTE_DOMAIN, 5)
    assert "it was: absent, then training, then absent" in unmet


def test_a_channel_that_two_claims_get_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "_by_another_claim", lambda *_: None)
    unmet = fails_at(monkeypatch, COMPUTE_DOMAIN, 4)
    assert "the prepare of job-2-channel waits for job-1-channel" in unmet


# --- the expectations --------------------------------------------------------------------------------------------

EMPTY = DeviceManager(random.Random(0)).view(0.0)
SEEN = DomainsSeen("default/training", (None, "training"), "Ready", ("channel-0", "daemon-0"))
WAITS = ClaimSeen(
    "one", frozenset({"channel-0"}), is_known=True, is_prepared=False, state="", problem="no label"
)


@pytest.mark.parametrize(
    ("expectation", "seen", "problem"),
    [
        (ImexOffered(("channel-0", "daemon-0")), ClaimsSeen(domains=SEEN), None),
        (ImexOffered(("channel-0",)), ClaimsSeen(domains=SEEN), "it has channel-0, daemon-0"),
        (ImexOffered(("channel-0",)), ClaimsSeen(), "it has nothing"),
        (LabelWas((None, "training")), ClaimsSeen(domains=SEEN), None),
        (LabelWas((None,)), ClaimsSeen(domains=SEEN), "it was: absent, then training"),
        (Says("Ready"), ClaimsSeen(domains=SEEN), None),
        (Says(""), ClaimsSeen(domains=SEEN), "it says Ready"),
        (Lacks("one", ("label",)), ClaimsSeen(claims=(WAITS,)), None),
        (Lacks("one", ("daemon",)), ClaimsSeen(claims=(WAITS,)), "not known to the daemon: no label"),
        (Lacks("two", ("label",)), ClaimsSeen(claims=(WAITS,)), "it is not there"),
    ],
)
def test_an_unmet_expectation_says_what_is_there_instead(
    expectation: Expectation, seen: ClaimsSeen, problem: str | None
) -> None:
    found = expectation.unmet(Situation(EMPTY, frozenset(), EMPTY, {}, (), claims=seen))
    assert (found is None) if problem is None else (found is not None and problem in found)
