"""What `inspect` and `explain` print of compute domains, read off states that the real core made."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.cli.inspect.report import (
    as_json,
    as_table,
    claim_explanation,
    claim_explanation_json,
    domain_explanation,
    domain_explanation_json,
    pod_explanation,
)
from gpuactors.cli.inspect.view import (
    ExplainedClaim,
    ExplainedDomain,
    ExplainedPod,
    UnknownAddressError,
    find_named,
)
from gpuactors.control.node_view import view_of
from gpuactors.core.domains.label import LABEL_RETRY_S
from gpuactors.core.events.claims import CheckpointRefused, SlicesPublished
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.domain import DomainMode, ImexFacts
from gpuactors.core.values.slices import Publication, ServerKeeps
from tests.cli.inspect.test_claims_report import by_daemon
from tests.control.test_view import received
from tests.core.builders import Core, gpu
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
    name,
    with_daemon,
)
from tests.core.gpus.claim_core import ClaimCore, allocated

ONE, TWO = name("one"), name("two")
STRANGER = "99999999-9999-9999-9999-999999999999"
NO_IMEX = ImexFacts("/proc/devices has no nvidia-caps-imex-channels, so this node has no IMEX channels")


def core_with(*, ready: bool = True) -> DomainCore:
    """The daemon of RED has its claim; there are claims of channels, of RED and of BLUE."""
    core = with_daemon(channel(ONE), channel(TWO, BLUE), ready=ready)
    core.pass_time(200)
    return core


def section(core: DomainCore) -> list[str]:
    """The part of the table that is about compute domains."""
    table = as_table(by_daemon(core), 100)
    assert all(len(line) <= 100 for line in table.splitlines())
    (found,) = (part for part in table.split("\n\n") if part.startswith("Compute domains"))
    return found.splitlines()


def explained(core: DomainCore, text: str) -> list[str]:
    named = find_named(by_daemon(core), text)
    if isinstance(named, ExplainedDomain):
        return domain_explanation(named, 100).splitlines()
    assert isinstance(named, ExplainedClaim)
    return claim_explanation(named, 100).splitlines()


def test_the_table_has_the_domains_with_their_claims() -> None:
    core = core_with()
    core.prepare(ONE)
    core.prepare(TWO)
    core.pass_time(3)
    assert section(core) == [
        "Compute domains of driver compute-domain.nvidia.com",
        "  IMEX: clique cluster.1",
        f"  Label: {RED}",
        f"  default/red, UID {RED}  Ready",
        "    dra-driver-nvidia-gpu/daemon  Prepared for 3 min  daemon-0",
        "    default/one  Prepared for 3 s  channel-0",
        f"  default/blue, UID {BLUE}  NotReady",
        "    channel-0: it belongs to the claim default/one",
        "    default/two  Waiting for 3 s  channel-0  (1 call of kubelet waits)",
    ]


def test_what_is_missing_is_said_once_and_in_the_words_of_the_refusal() -> None:
    core = core_with(ready=False)
    token = core.prepare(ONE)
    core.pass_time(3)
    reason = f"the ComputeDomain default/red does not say yet that the node {NODE} is Ready"
    assert section(core)[3:] == [
        f"  default/red, UID {RED}  NotReady",
        f"    {reason}",
        "    dra-driver-nvidia-gpu/daemon  Prepared for 3 min  daemon-0",
        "    default/one  Binding for 3 s  channel-0  (1 call of kubelet waits)",
    ]
    assert explained(core, "default/red")[1] == f"NotReady: {reason}"
    assert f"Problem        {reason}" in explained(core, "default/one")
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert reason in core.refusal(token)


def test_a_claim_that_has_ended_is_of_no_domain_any_more() -> None:
    core = core_with()
    core.prepare(ONE)
    core.unprepare(ONE)
    core.pass_time(5.0)
    assert section(core)[2:] == [
        f"  Label: {RED}",
        f"  default/red, UID {RED}  Unused",
        "    dra-driver-nvidia-gpu/daemon  Prepared for 3 min  daemon-0",
        "  claims without a domain: not read yet, or ended",
        "    default/one  Unprepared for 5 s",
    ]


def test_the_label_is_said_as_it_is_known() -> None:
    core = core_with()
    core.held_back = {"label-patch", "label-read"}
    core.prepare(ONE)
    assert section(core)[2] == f"  Label: {RED} is being added"
    core.away = True
    core.release("label-patch")
    assert section(core)[2:4] == [
        "  Label: unknown: a patch failed, or found another label",
        f"  Label: {AWAY}",
    ]
    core.away = False
    core.release("label-read")
    core.pass_time(LABEL_RETRY_S)
    assert section(core)[2] == f"  Label: {RED}"
    core.labelled(STRANGER)
    assert section(core)[2] == f"  Label: {STRANGER}, set by no claim here"
    assert f"Label      {STRANGER}, set by no claim here" in explained(core, "default/red")


def test_of_a_node_without_imex_the_reason_is_said() -> None:
    core = DomainCore()
    core.imex = NO_IMEX
    assert section(core.restarted()) == [
        "Compute domains of driver compute-domain.nvidia.com",
        f"  No IMEX: {NO_IMEX.absent}",
        "  Label: absent",
    ]
    assert section(core.restarted("imex"))[1] == "  IMEX: the host has not said yet what it has"
    core.imex = ImexFacts(channel_major=501)
    assert section(core.restarted())[1].startswith("  IMEX: the node is on no NVLink fabric")


def test_the_slices_are_those_of_the_driver_with_the_reason_of_a_taint() -> None:
    core = core_with()
    core.prepare(ONE)
    core.imex = NO_IMEX
    core.prepare(ONE)
    tainted = Publication(
        "compute-domain.nvidia.com", ServerKeeps.YES, True, 3, 1, ("channel-0",), (), {}, ""
    )
    core.feed(SlicesPublished(tainted, ClaimsOf.DOMAINS))
    assert as_table(by_daemon(core), 100).split("\n\n")[-1].splitlines() == [
        "ResourceSlices of driver compute-domain.nvidia.com: 1, generation 3, as offered",
        "  tainted: channel-0: /proc/devices has no nvidia-caps-imex-channels, so this node has no IMEX",
        "    channels",
    ]


def test_with_a_daemon_of_the_host_s_neither_label_nor_readiness_is_spoken_of() -> None:
    core = DomainCore(channel(ONE), settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    core.imex = replace(
        IMEX, host_problem="the host's IMEX daemon is not ready: nvidia-imex-ctl says NOT_READY"
    )
    core.prepare(ONE)
    assert section(core)[1:] == [
        "  IMEX: clique cluster.1",
        f"  IMEX: {core.imex.host_problem}",
        f"  default/red, UID {RED}  NotReady",
        f"    {core.imex.host_problem}",
        "    default/one  Binding for 0 s  channel-0  (1 call of kubelet waits)",
    ]
    assert explained(core, RED)[3:-2] == [
        f"UID        {RED}",
        "Since      2026-11-22T16:00:00Z, for 0 s",
        "Last read  0 s ago",
        "Claim      default/one, Binding for 0 s, channel-0",
        "IMEX       clique cluster.1",
        f"           {core.imex.host_problem}",
    ]


def test_a_domain_is_explained_by_its_name_or_uid() -> None:
    core = core_with()
    core.prepare(ONE)
    core.pass_time(3)
    assert explained(core, "default/red") == explained(core, RED)
    assert explained(core, RED) == [
        "ComputeDomain default/red",
        "Ready: its channels can be used here",
        "",
        f"UID        {RED}",
        "Since      2026-11-22T15:59:57Z, for 3 s",
        "Label      resource.nvidia.com/computeDomain names it",
        "Daemon     dra-driver-nvidia-gpu/daemon, Prepared for 3 min, daemon-0",
        "Readiness  the API server says Ready for this node, as last read",
        "Last read  3 s ago",
        "Claim      default/one, Prepared for 3 s, channel-0",
        "IMEX       clique cluster.1",
        "Node       gpu-17",
        "Seen by    the running daemon (process 7, version 1.2.3)",
    ]
    after = explained(core.restarted(), RED)
    assert (
        after[1]
        == "Unread: label and daemon are there; whether it is Ready is read when a claim waits for that"
    )
    assert "Readiness  not read since the label was added, or since the daemon started" in after


def test_a_claim_of_a_domain_is_explained() -> None:
    core = core_with(ready=False)
    core.prepare(ONE)
    core.pass_time(3)
    assert explained(core, "default/one") == [
        "Claim default/one",
        "Binding: its channel is its own; label, daemon and readiness are waited for",
        "",
        "UID            uid-one",
        "Since          2026-11-22T15:59:57Z, 3 s ago",
        f"Problem        the ComputeDomain default/red does not say yet that the node {NODE} is Ready",
        "Waiting calls  1",
        "Device         channel-0",
        f"ComputeDomain  default/red, UID {RED}: NotReady",
        "Node           gpu-17",
        "Seen by        the running daemon (process 7, version 1.2.3)",
    ]
    assert explained(core, DAEMON.uid)[-4:-2] == [
        f"ComputeDomain  default/red, UID {RED}: NotReady",
        f"                 the ComputeDomain default/red does not say yet that the node {NODE} is Ready",
    ]


def test_of_a_claim_of_every_channel_the_first_ones_are_named_and_the_others_counted() -> None:
    core = DomainCore(channel(ONE, allocationMode="All"), settings=replace(DOMAIN_SETTINGS, channels=2048))
    core.prepare(ONE)
    first = ", ".join(f"channel-{n}" for n in range(16))
    lines = " ".join(" ".join(section(core)).split())
    assert f"default/one Binding for 0 s {first}, and 2,032 more (1 call of kubelet waits)" in lines
    told = explained(core, "default/one")
    began = told.index("Device         channel-0")
    rest = [*(f"channel-{n}" for n in range(1, 16)), "and 2,032 more"]
    assert [line.strip() for line in told[began + 1 : began + 17]] == rest
    assert all(len(line) <= 100 for line in explained(core, "default/red"))
    (claim,) = json.loads(as_json(by_daemon(core)))["compute_domains"]["claims"]
    assert len(claim["devices"]) == 2048


def test_a_name_that_is_a_claim_s_and_a_domain_s_is_asked_for_by_uid() -> None:
    core = core_with()
    core.prepare(channel(name("red")))
    with pytest.raises(
        UnknownAddressError,
        match=f"a claim and a ComputeDomain: run gpuactors explain uid-red, or gpuactors explain {RED}",
    ):
        find_named(by_daemon(core), "default/red")
    assert explained(core, "uid-red")[0] == "Claim default/red"
    assert explained(core, RED)[0] == "ComputeDomain default/red"


def test_a_claim_with_devices_of_both_drivers_is_explained_for_each() -> None:
    core = core_with()
    core.prepare(ONE)
    gpus = ClaimCore(gpu("0000:01:00.0", group=1))
    gpus.prepare(allocated(ONE, "0000:01:00.0"))
    core.state = replace(gpus.state, domains=core.state.domains)
    parts = "\n".join(explained(core, "default/one")).split("\n\nClaim ")
    assert ["Device  0000:01:00.0" in part for part in parts] == [True, False]
    assert [f"Device         channel-0\nComputeDomain  default/red, UID {RED}" in part for part in parts] == [
        False,
        True,
    ]
    named = find_named(by_daemon(core), "default/one")
    assert isinstance(named, ExplainedClaim)
    told = json.loads(claim_explanation_json(named))
    assert (told["devices"], told["compute_domain_claim"]["devices"]) == (["0000:01:00.0"], ["channel-0"])


def test_the_pod_of_a_channel_is_explained() -> None:
    core = core_with()
    core.prepare(ONE)
    core.pass_time(60)
    named = find_named(by_daemon(core), "pod/default/pod")
    assert isinstance(named, ExplainedPod)
    text = pod_explanation(named).splitlines()
    assert text[1] == "has no GPU by kubelet's ledger, and 2 claims"
    assert text[3] == "Claim        default/one: Prepared for 1 min"


def test_a_name_that_is_not_known_and_what_is() -> None:
    core = core_with()
    core.prepare(ONE)
    with pytest.raises(
        UnknownAddressError,
        match="knows dra-driver-nvidia-gpu/daemon, default/one, the ComputeDomain default/red",
    ):
        find_named(by_daemon(core), "default/none")
    with pytest.raises(UnknownAddressError, match=f"knows no claim and no pod that is called {BLUE}"):
        find_named(by_daemon(core), BLUE)


def test_json_has_words_for_programs() -> None:
    core = core_with(ready=False)
    core.prepare(ONE)
    core.pass_time(3)
    reason = f"the ComputeDomain default/red does not say yet that the node {NODE} is Ready"
    known = json.loads(as_json(by_daemon(core)))["compute_domains"]
    assert (known["driver"], known["mode"], known["problem"]) == ("compute-domain.nvidia.com", "on", None)
    assert known["imex"] == {
        "present": True,
        "clique": "cluster.1",
        "reason": None,
        "host_problem": None,
        "problem": None,
    }
    assert known["label"] == {"status": "Set", "value": RED, "problem": None}
    (domain,) = known["domains"]
    assert domain == {
        "namespace": "default",
        "name": "red",
        "uid": RED,
        "status": "NotReady",
        "missing": reason,
        "labelled": True,
        "daemon": "uid-daemon",
        "readiness": "NotReady",
        "problem": None,
    }
    assert [(c["name"], c["state"], c["devices"], c["domain"]) for c in known["claims"]] == [
        ("daemon", "Prepared", ["daemon-0"], RED),
        ("one", "Binding", ["channel-0"], RED),
    ]
    of_domain = find_named(by_daemon(core), RED)
    assert isinstance(of_domain, ExplainedDomain)
    told = json.loads(domain_explanation_json(of_domain))
    times = {"since": "2026-11-22T15:59:57Z", "since_s": 3.0, "read_s": 1.0}
    assert told == domain | times | {"claims": known["claims"], "node": "gpu-17", "source": "daemon"}
    of_claim = find_named(by_daemon(core), ONE.uid)
    assert isinstance(of_claim, ExplainedClaim)
    told = json.loads(claim_explanation_json(of_claim))
    assert (told["problem"], told["domain"], told["time"]) == (reason, domain, "2026-11-22T15:59:57Z")


def test_why_no_claim_is_served_is_said() -> None:
    core = DomainCore()
    core.feed(
        CheckpointRefused(
            "a newer version has written the checkpoint: go back to it", driver_kind=ClaimsOf.DOMAINS
        )
    )
    assert section(core)[1] == "  a newer version has written the checkpoint: go back to it"


def test_without_compute_domains_nothing_is_said_of_them() -> None:
    found = by_daemon(Core())
    assert "ompute" not in as_table(found)
    assert json.loads(as_json(found))["compute_domains"] is None


def test_the_wire_changes_nothing_of_domains() -> None:
    core = core_with(ready=False)
    core.prepare(ONE)
    core.prepare(TWO)
    core.imex = replace(IMEX, host_problem="not asked for")
    for seen in (core, core.restarted("imex", "label-read"), core.restarted()):
        view = view_of(seen.state, seen.at)
        assert view.domains is not None
        assert received(view).view == view
