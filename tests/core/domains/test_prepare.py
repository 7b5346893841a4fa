"""Prepare and unprepare of channels and daemons: what a claim needs, what its files say, and why it is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.domains import claiming, config
from gpuactors.core.domains.label import LABEL_LINGERS_S, LABEL_RETRY_S
from gpuactors.core.domains.reads import DOMAIN_READ_S, IMEX_RETRY_S
from gpuactors.core.events import Event
from gpuactors.core.events.domains import DomainsTouched, LabelPatched
from gpuactors.core.events.kubelet import LedgerUnreadable
from gpuactors.core.values.claim import AllocatedDevice, Claim, ClaimUid, Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import (
    LABEL,
    Clique,
    ComputeDomain,
    DeviceKind,
    DomainConfig,
    DomainMode,
    ImexFacts,
)
from tests.core.claims.calls_core import AWAY
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


def core_with_daemon(*claims: Claim) -> DomainCore:
    """The daemon of RED runs, and is Ready as soon as the label is there."""
    return with_daemon(channel(ONE), channel(TWO), *claims)


def test_a_channel_is_prepared_when_label_daemon_and_readiness_are_there_and_each_that_lacks_is_named() -> (
    None
):
    core = DomainCore(channel(ONE), daemon(DAEMON))
    core.held_back = {"label-patch"}
    token = core.prepare(ONE)
    assert f"{LABEL} of the node {NODE} is not there yet" in core.problem(ONE)
    core.release("label-patch")
    assert core.label == RED
    assert "no prepared claim on this node" in core.problem(ONE)
    daemons = core.prepare(DAEMON)
    assert isinstance(core.answer(daemons), Prepared), "the daemon's prepare runs while the channel's waits"
    assert f"the ComputeDomain default/red does not say yet that the node {NODE} is Ready" in core.problem(
        ONE
    )
    assert core.answer(token) is None
    core.ready()
    core.pass_time(DOMAIN_READ_S)
    answer = core.answer(token)
    assert isinstance(answer, Prepared)
    assert [d.device for d in answer.devices] == ["channel-0"]


class AwayCore(DomainCore):
    """No read of kubelet's ledger succeeds, as where PodResources hangs."""

    def ledger_event(self, read: int) -> Event:
        return LedgerUnreadable(read, "kubelet is away", None)


def test_a_claim_is_prepared_where_kubelet_cannot_list_its_pods() -> None:
    core = AwayCore()
    core.created(channel(ONE), daemon(DAEMON))
    core.ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)


def test_the_clique_says_as_well_that_the_node_is_ready() -> None:
    core = core_with_daemon()
    core.domains[RED] = replace(core.domains[RED], ready_nodes=frozenset())
    core.cliques[RED] = Clique(frozenset({NODE}))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)


def test_readiness_of_another_node_is_none_of_this_one() -> None:
    core = core_with_daemon()
    core.ready("node-2")
    token = core.prepare(ONE)
    core.pass_time(10.0)
    assert core.answer(token) is None


def test_what_was_ready_before_the_label_was_there_is_read_again() -> None:
    core = core_with_daemon()
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    core.ready("node-2")
    core.release("label-patch")
    assert "does not say yet" in core.problem(ONE)


def test_what_was_ready_while_the_patch_was_under_way_is_read_again() -> None:
    """It was read after the patch was wanted, and perhaps before it was made."""
    core = core_with_daemon()
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    core.feed(DomainsTouched())
    core.ready("node-2")
    core.release("label-patch")
    assert core.label == RED
    assert "does not say yet" in core.problem(ONE)


def test_what_was_ready_before_the_label_was_there_is_read_again_also_where_the_patch_s_answer_is_lost() -> (
    None
):
    core = core_with_daemon()
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    patch = core.wanted.label_patch
    assert patch is not None
    core.set_label(RED)
    core.ready("node-2")
    core.feed(LabelPatched(patch.number, AWAY))
    core.pass_time(LABEL_RETRY_S)
    assert "does not say yet" in core.problem(ONE)


@pytest.mark.parametrize("lacks", ["label", "daemon", "readiness"])
def test_after_35_s_the_error_says_what_is_missing_and_the_log_says_it_in_the_same_words(lacks: str) -> None:
    core = core_with_daemon()
    if lacks == "label":
        core.held_back = {"label-patch"}
    elif lacks == "daemon":
        core.unprepare(DAEMON)
    else:
        core.ready("node-2")
    token = core.prepare(ONE)
    core.pass_time(limits.CLAIM_ANSWER_S - 0.1)
    assert core.answer(token) is None
    why = core.problem(ONE)
    core.pass_time(0.2)
    assert why in core.refusal(token)
    assert why in [line.fields.get("reason") for line in core.logged("claim.waiting")]
    assert {"label": LABEL, "daemon": "daemon of", "readiness": "Ready"}[lacks] in why


# --- the files ------------------------------------------------------------------------------------------------


def test_a_channel_s_files_have_its_node_by_the_driver_s_major_number() -> None:
    core = core_with_daemon()
    core.prepare(ONE)
    (edits,) = core.files[ONE.uid]
    assert edits.edits == {
        "env": (f"COMPUTE_DOMAIN_UUID={RED}",),
        "deviceNodes": (
            {
                "path": "/dev/nvidia-caps-imex-channels/channel0",
                "type": "c",
                "major": 501,
                "minor": 0,
                "fileMode": 0o666,
                "permissions": "rw",
            },
        ),
    }


def test_a_daemon_s_files_have_the_domain_its_directory_and_the_capability() -> None:
    core = core_with_daemon()
    (edits,) = core.files[DAEMON.uid]
    assert edits.edits == {
        "env": (
            "CLIQUE_ID=cluster.1",
            f"COMPUTE_DOMAIN_UUID={RED}",
            "COMPUTE_DOMAIN_NAME=red",
            "COMPUTE_DOMAIN_NAMESPACE=default",
        ),
        "mounts": (
            {
                "hostPath": f"/plugins/domains/{RED}",
                "containerPath": "/imexd",
                "options": ("rw", "nosuid", "nodev", "bind"),
            },
        ),
        "deviceNodes": (
            {
                "path": "/dev/nvidia-caps/nvidia-cap7",
                "type": "c",
                "major": 238,
                "minor": 7,
                "fileMode": 0o666,
                "permissions": "rw",
            },
        ),
    }
    assert core.directories == {f"/plugins/domains/{RED}"}
    core.unprepare(DAEMON)
    assert (core.files, core.directories) == ({}, set())


def test_on_a_node_without_fabric_a_channel_is_prepared_without_nodes_and_that_is_said_once() -> None:
    core = DomainCore()
    core.imex = ImexFacts(channel_major=501)
    core = core.restarted()
    core.created(daemon(DAEMON), channel(ONE))
    core.ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.files[ONE.uid][0].edits == {"env": (f"COMPUTE_DOMAIN_UUID={RED}",)}
    said = [line for line in core.logged("imex.read") if "no NVLink fabric" in str(line.fields)]
    assert len(said) == 1


def test_the_clique_is_read_anew_at_each_prepare() -> None:
    core = core_with_daemon()
    core.imex = replace(core.imex, clique_id="cluster.2", channel_major=502)
    core.prepare(ONE)
    assert core.own(ONE).imex == core.imex
    nodes = core.files[ONE.uid][0].edits
    assert "502" in str(nodes)


def test_mode_all_gives_every_channel_of_the_node_and_stands_in_the_way_of_each() -> None:
    settings = replace(DOMAIN_SETTINGS, channels=3)
    core = DomainCore(
        daemon(DAEMON),
        channel(ONE, allocationMode="All"),
        channel(TWO, device="channel-2"),
        channel(name("three")),
        settings=settings,
    )
    core.ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert [d.id for d in core.own(ONE).devices if d.kind is DeviceKind.CHANNEL] == [0, 1, 2]
    core.prepare(TWO)
    assert core.problem(TWO) == "channel-2: it belongs to the claim default/one"


def test_a_repeated_prepare_gets_the_same_answer_after_a_look() -> None:
    core = core_with_daemon()
    first = core.answer(core.prepare(ONE))
    assert core.answer(core.prepare(ONE)) == first
    core.held_back = {"files"}
    again = core.prepare(ONE)
    assert core.answer(again) is None
    core.release("files")
    assert core.answer(again) == first


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "domain",
    [
        "../../etc",
        "",
        "11111111-1111-1111-1111-11111111111G",
        RED + "/..",
        RED.upper().replace("1", "A"),
        f"{RED}\n",
    ],
)
@pytest.mark.parametrize("kind", ["channel", "daemon"])
def test_a_domain_id_that_is_no_uuid_is_refused_and_leaves_nothing_anywhere(domain: str, kind: str) -> None:
    core = DomainCore()
    claim = ONE if kind == "channel" else DAEMON
    core.created(channel(ONE, domain) if kind == "channel" else daemon(DAEMON, domain))
    core.held_back = {"domain"}
    token = core.prepare(claim)
    assert "domainID" in core.refusal(token), "without a look at the API server"
    assert (core.files, core.directories, core.label, core.disk) == ({}, set(), None, None)
    assert core.entry(claim) is None
    assert not core.wanted.domains, "nothing is asked of the API server with it"


INVALID: list[tuple[Claim, str]] = [
    (channel(ONE, colour="red"), "unknown field colour"),
    (channel(ONE, allocationMode="Some"), "allocationMode is 'Some'"),
    (replace(channel(ONE), configs=()), "has no ComputeDomainChannelConfig for its request channel"),
    (replace(channel(ONE), configs=daemon(DAEMON).configs), "needs a ComputeDomainChannelConfig"),
    (channel(ONE, device="channel-1"), "channel-1 is not offered here: the node has 1"),
    (channel(ONE, device="gpu-0000-23-00-0"), "is no device of this driver"),
    (replace(channel(ONE), results=None), "not allocated"),
    (channel(name("one", "elsewhere")), "in another namespace than the claim"),
    (replace(daemon(DAEMON), name=name("daemon")), f"in the namespace {NAMESPACE} only"),
    (channel(ONE, "33333333-3333-3333-3333-333333333333"), "there is no ComputeDomain with the UID 33333333"),
]


@pytest.mark.parametrize(("claim", "why"), INVALID)
def test_what_can_never_be_prepared_is_refused_at_once_and_leaves_nothing(claim: Claim, why: str) -> None:
    core = DomainCore(claim)
    token = core.prepare(claim.name)
    assert why in core.refusal(token)
    assert (core.files, core.directories, core.label, core.entry(claim.name)) == ({}, set(), None, None)


def test_admin_access_is_refused() -> None:
    core = DomainCore()
    results = (AllocatedDevice("channel", NODE, "channel-0", admin_access=True),)
    core.created(replace(channel(ONE), results=results))
    assert "admin access" in core.refusal(core.prepare(ONE))


def test_the_domain_is_looked_up_before_any_directory_is_made() -> None:
    core = DomainCore(daemon(DAEMON))
    core.held_back = {"domain"}
    token = core.prepare(DAEMON)
    assert (core.claim_state(DAEMON), core.directories) == (ClaimState.WAITING, set())
    del core.domains[RED]
    core.release("domain")
    assert "there is no ComputeDomain" in core.refusal(token)
    assert core.directories == set()


def test_a_domain_that_goes_while_its_channel_waits_is_named() -> None:
    core = DomainCore(channel(ONE))
    token = core.prepare(ONE)
    del core.domains[RED]
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "there is no ComputeDomain" in core.refusal(token)


def test_a_node_without_imex_says_so_once_offers_nothing_and_refuses() -> None:
    core = DomainCore()
    core.imex = ImexFacts("the host's driver has no IMEX: /proc/devices lists no nvidia-caps-imex-channels")
    core = core.restarted()
    core.created(channel(ONE), channel(TWO))
    offer = core.wanted.claims.offer
    assert offer is not None
    assert offer.devices == ()
    assert core.imex.absent in core.refusal(core.prepare(ONE))
    assert core.imex.absent in core.refusal(core.prepare(TWO))
    assert len(core.logged("imex.read")) == 1
    assert core.label is None


def test_imex_that_comes_later_is_offered() -> None:
    core = DomainCore()
    present = core.imex
    core.imex = ImexFacts("no driver")
    core = core.restarted()
    assert offered(core) == []
    core.imex = present
    core.pass_time(IMEX_RETRY_S)
    assert offered(core) == ["channel-0", "daemon-0"]
    asked = core.state.domains.last
    core.pass_time(3600)
    assert core.state.domains.last == asked, "a node that has it is not asked again"


def offered(core: DomainCore) -> list[str]:
    offer = core.wanted.claims.offer
    assert offer is not None
    assert [h.device for h in core.wanted.claims.health] == [device.name for device in offer.devices]
    return [device.name for device in offer.devices]


def test_what_is_offered_is_derived_again_only_when_it_or_a_claim_of_it_changes() -> None:
    core = core_with_daemon()
    token = core.prepare(ONE)
    assert isinstance(core.answer(token), Prepared)
    before = core.wanted.claims
    core.labelled(RED)
    core.pass_time(3600)
    assert core.wanted.claims.offer is before.offer
    assert core.wanted.claims.health is before.health
    core.unprepare(ONE)
    assert core.wanted.claims.offer is not before.offer


def test_the_configuration_of_a_claim_is_decoded_when_the_claim_is_read_and_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_with_daemon()
    decodings: list[Claim] = []

    def chosen(claim: Claim) -> DomainConfig | ConfigFault:
        decodings.append(claim)
        return config.chosen(claim)

    monkeypatch.setattr(claiming, "chosen", chosen)
    token = core.prepare(ONE)
    assert isinstance(core.answer(token), Prepared)
    assert len(decodings) == 2, "it is checked, and then it is kept"
    core.labelled(None)
    core.pass_time(3600)
    core.unprepare(ONE)
    assert len(decodings) == 2


def test_a_node_with_imex_offers_its_channels_and_one_daemon() -> None:
    core = DomainCore(settings=replace(DOMAIN_SETTINGS, channels=2))
    offer = core.wanted.claims.offer
    assert offer is not None
    assert (offer.driver, offer.node) == ("compute-domain.nvidia.com", NODE)
    shown = [(d.name, d.attributes["type"].value, d.attributes["id"].value) for d in offer.devices]
    assert shown == [("channel-0", "channel", 0), ("channel-1", "channel", 1), ("daemon-0", "daemon", 0)]


# --- exclusion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held_back",
    [{"checkpoint"}, {"label-patch"}, {"files"}, set()],
    ids=["reserved", "binding", "writing", "prepared"],
)
def test_a_channel_belongs_to_one_claim_whatever_that_is_doing(held_back: set[str]) -> None:
    core = core_with_daemon()
    core.held_back = held_back
    core.prepare(ONE)
    token = core.prepare(TWO)
    assert "it belongs to the claim default/one" in core.problem(TWO)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "channel-0: it belongs to the claim default/one" in core.refusal(token)


def test_a_node_takes_part_in_one_domain_at_a_time() -> None:
    core = DomainCore(
        channel(ONE),
        channel(TWO, BLUE, "channel-1"),
        daemon(DAEMON),
        settings=replace(DOMAIN_SETTINGS, channels=2),
    )
    core.ready()
    core.prepare(DAEMON)
    core.prepare(ONE)
    token = core.prepare(TWO)
    assert "takes part in another ComputeDomain, default/red with" in core.problem(TWO)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "the claim default/one" in core.refusal(token)
    assert core.history == [None, RED]


def test_two_channels_of_one_domain_share_the_label_and_the_last_one_takes_it_away() -> None:
    core = DomainCore(
        channel(ONE),
        channel(TWO, device="channel-1"),
        daemon(DAEMON),
        settings=replace(DOMAIN_SETTINGS, channels=2),
    )
    core.ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert isinstance(core.answer(core.prepare(TWO)), Prepared)
    core.unprepare(ONE)
    assert core.label == RED
    core.unprepare(TWO)
    core.lingered()
    assert core.history == [None, RED, None]


# --- host-managed -----------------------------------------------------------------------------------------------


def test_host_managed_needs_no_label_and_no_daemon_but_the_host_s_word() -> None:
    core = DomainCore(settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    core.imex = replace(core.imex, host_problem="nvidia-imex-ctl -q says INITIALIZING, and not READY")
    core.created(channel(ONE), daemon(DAEMON))
    token = core.prepare(ONE)
    assert core.problem(ONE) == core.imex.host_problem
    assert "daemon-0 is not offered here (--compute-domains host-managed)" in core.refusal(
        core.prepare(DAEMON)
    )
    core.imex = replace(core.imex, host_problem="")
    core.pass_time(DOMAIN_READ_S)
    assert isinstance(core.answer(token), Prepared)
    assert core.history == [None]
    offer = core.wanted.claims.offer
    assert offer is not None
    assert [(d.name, d.claimed) for d in offer.devices] == [("channel-0", True)]
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)


# --- the API server is away -------------------------------------------------------------------------------------


def test_while_the_api_server_is_away_a_prepare_says_so_and_an_unprepare_succeeds() -> None:
    core = core_with_daemon()
    core.prepare(ONE)
    core.away = True
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.label == RED
    token = core.prepare(TWO)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert AWAY in core.refusal(token)
    core.away = False
    core.pass_time(LABEL_LINGERS_S)
    assert core.label is None, "the label goes when the API server is back"


def test_a_prepare_outlasts_a_short_absence_of_the_api_server() -> None:
    core = core_with_daemon()
    core.held_back = {"domain", "label-patch"}
    token = core.prepare(ONE)
    core.away = True
    core.release("domain", "label-patch")
    core.pass_time(8.0)
    assert AWAY in core.problem(ONE)
    core.away = False
    core.pass_time(5.0)
    assert isinstance(core.answer(token), Prepared)


def test_a_replaced_claim_is_refused() -> None:
    core = core_with_daemon(channel(replace(ONE, uid=ClaimUid("uid-other"))))
    assert "no claim" in core.refusal(core.prepare(ONE))


def test_the_namespace_of_a_domain_is_in_the_daemon_s_files_and_not_the_claim_s() -> None:
    core = DomainCore()
    core.domains[RED] = ComputeDomain(RED, "red", "jobs")
    core.prepare(daemon(DAEMON))
    assert "COMPUTE_DOMAIN_NAMESPACE=jobs" in str(core.files[DAEMON.uid][0].edits)


def test_a_domain_without_a_claim_is_forgotten() -> None:
    """Jobs come and go, each with a domain of its own."""
    core = DomainCore(daemon(DAEMON), channel(name("one")))
    core.ready()
    core.prepare(DAEMON)
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert RED in core.state.domains.views
    core.unprepare(name("one"))
    core.unprepare(DAEMON)
    core.pass_time(CLAIM_TOMBSTONE_S + LABEL_LINGERS_S)
    assert core.state.domains.views == {}
