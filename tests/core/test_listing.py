"""Kubelet's own list against ours: an open stream does not say that kubelet has our list."""

from __future__ import annotations

import pytest
from msgspec import structs

from gpuactors import limits
from gpuactors.core.deviceplugin.listing import KUBELET_LIST_ID_MAX_CHARS, comparable, healthy
from gpuactors.core.deviceplugin.registration import (
    DESERTED_MAX_S,
    KUBELET_LIST_TAKEN_S,
    is_registered,
    order,
)
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.deviceplugin import (
    StreamEnded,
    StreamOpened,
)
from gpuactors.core.events.host import HostScanned
from gpuactors.core.events.kubelet import ForeignSocketsSeen, KubeletAppeared, LedgerUnreadable
from gpuactors.core.reports.readiness import unmet_prerequisites
from gpuactors.core.reports.snapshot import project
from gpuactors.core.step import next_deadline
from gpuactors.core.values.effects import Effect, Log
from gpuactors.core.values.model import DeviceId
from tests.core.builders import H100, Core, allocate_call, gpu, ledger_read

ONE, TWO = "0000:01:00.0", "0000:02:00.0"
OURS = [ONE, TWO]
THEIRS = ["51", "52", "53"]


@pytest.fixture
def core() -> Core:
    """Two GPUs, registered, and kubelet has been seen to have our list."""
    core = registered()
    core.pass_time(KUBELET_LIST_TAKEN_S)
    assert core.plugin.listing.compared_at == core.at
    return core


def registered() -> Core:
    core = Core(gpu("01:00.0"), gpu("02:00.0"))
    core.kubelets = OURS
    core.feed(KubeletAppeared("kubelet-1"))
    core.register()
    assert is_registered(core.plugin)
    return core


def said(effects: list[Effect], name: str) -> list[str]:
    return [str(e.fields.get("reason", "")) for e in effects if isinstance(e, Log) and e.name == name]


def lose_and_register(core: Core, stream: int) -> None:
    """Kubelet has noticed that we ended the old stream; we register, and it opens another."""
    core.feed(*(StreamEnded(H100, old) for old in sorted(core.plugin.streams)))
    core.register(stream)


# --- after a registration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kubelets", [OURS, None], ids=["told", "not told"])
def test_kubelets_list_is_read_once_soon_after_a_registration(kubelets: list[str] | None) -> None:
    """The pod is ready when that read is back; one more read, whether kubelet has such a list or not."""
    core = registered()
    core.kubelets = kubelets
    (lack,) = unmet_prerequisites(core.state)
    assert lack.endswith("kubelet's own list has not been compared with ours yet")
    core.pass_time(KUBELET_LIST_TAKEN_S)
    assert unmet_prerequisites(core.state) == ()
    read_at = core.state.kubelet.ledger.read_at
    core.pass_time(limits.LEDGER_QUIET_S - 1)
    assert core.state.kubelet.ledger.read_at == read_at


# --- another plugin takes the resource --------------------------------------------------------------------------


def test_another_list_in_two_reads_is_said_and_leads_to_registering_again(core: Core) -> None:
    core.pass_time(60)
    core.kubelets = THEIRS
    bind = core.plugin.bind
    out = core.pass_time(limits.LEDGER_QUIET_S + limits.KUBELET_LIST_AGAIN_S)
    assert not is_registered(core.plugin)
    (reason,) = said(out, "plugin.contested")
    assert reason == core.plugin.problem
    assert "kubelet has 3 healthy devices that are not ours ('51', '52', …): another plugin serves" in reason
    assert "switch it off" in reason
    assert core.plugin.bind == bind
    core.pass_time(limits.CONTEND_BACKOFF_S[0])
    assert core.plugin.bind == bind + 1
    assert order(core.plugin).renew, "the old stream is ended before we register: nothing else heals"


def test_one_read_with_another_list_is_none(core: Core) -> None:
    core.kubelets = THEIRS
    core.pass_time(limits.LEDGER_QUIET_S + 1)
    assert core.plugin.listing.against == 1
    core.kubelets = OURS
    out = core.pass_time(600)
    assert is_registered(core.plugin)
    assert core.plugin.bind == 2, "nothing was made anew since kubelet appeared"
    assert said(out, "plugin.contested") == []


@pytest.mark.parametrize("answer", ["not told", "unreadable"])
def test_kubelet_that_does_not_say_is_no_reason_for_anything(core: Core, answer: str) -> None:
    core.kubelets = None
    if answer == "unreadable":
        core.ledger_problem = "not today"
    out = core.pass_time(3600)
    assert is_registered(core.plugin)
    assert said(out, "plugin.contested") == []
    reads = [e for e in out if isinstance(e, Log) and e.name.startswith("ledger.")]
    assert len(reads) <= 3600 / limits.LEDGER_RETRY_S + 1


def test_an_empty_list_says_that_nobody_has_it(core: Core) -> None:
    """The other plugin has left: all Unhealthy for ever, with our stream open."""
    core.kubelets = []
    core.pass_time(limits.LEDGER_QUIET_S + limits.KUBELET_LIST_AGAIN_S)
    problem = core.plugin.problem
    assert problem is not None
    assert problem.startswith("kubelet has no healthy device of this resource, and 2 are listed as healthy")
    core.pass_time(limits.CONTEND_BACKOFF_S[0])
    lose_and_register(core, 2)
    core.kubelets = OURS
    core.pass_time(60)
    assert is_registered(core.plugin)
    assert core.plugin.problem is None


def test_a_read_asked_for_before_kubelet_could_take_our_list_says_nothing(core: Core) -> None:
    """A list that changes while the read is out, or just before it was asked for."""
    core.pass_time(60)
    core.silent = True
    core.pass_time(limits.LEDGER_QUIET_S)
    read = core.read
    assert project(core.state).ledger.resources == (H100,)
    core.feed(
        HostScanned(
            core.state.host.inspections.whole.outstanding or core.state.host.inspections.last,
            (gpu("01:00.0"), gpu("02:00.0")),
        )
    )
    core.feed(structs.replace(scan(core), functions=(gpu("01:00.0"),)))
    assert [a.id for a in core.state.published.device_lists[H100]] == [ONE]
    assert project(core.state).ledger.resources == ()
    core.feed(ledger_read(read, healthy={H100: comparable(OURS)}))
    assert core.plugin.listing.against == 0


def scan(core: Core) -> HostScanned:
    """A full scan is asked for, and comes back."""
    core.at += 300
    core.feed(Ticked())
    return HostScanned(core.scan, ())


def test_a_list_of_ours_that_has_replaced_theirs_does_not_bring_the_endpoint_back(core: Core) -> None:
    """Kubelet's list is ours since our list changed, and Allocate goes to the other plugin, or to none."""
    core.pass_time(60)
    core.kubelets = THEIRS
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.plugin.listing.against == 1
    core.kubelets = [ONE, TWO, "0000:03:00.0"]
    core.feed(Ticked(), after_s=0)
    core.at = max(core.at, core.state.host.inspections.whole.due_at)
    core.feed(Ticked())
    three = tuple(gpu(a) for a in ("01:00.0", "02:00.0", "03:00.0"))
    core.feed(HostScanned(core.scan, three))
    core.pass_time(limits.KUBELET_LIST_AGAIN_S + KUBELET_LIST_TAKEN_S)
    assert not is_registered(core.plugin)
    assert (core.plugin.problem or "").startswith("kubelet had another list of healthy devices until ours")


def third_gpu_found(core: Core) -> HostScanned:
    """What the due scan finds; kubelet takes the list with it at once."""
    core.at = core.state.host.inspections.whole.due_at
    core.feed(Ticked(), after_s=0)
    core.kubelets = [*OURS, "0000:03:00.0"]
    return HostScanned(core.scan, tuple(gpu(a) for a in ("01:00.0", "02:00.0", "03:00.0")))


def test_a_list_that_changed_before_an_odd_sight_was_checked_is_no_sign_of_peace(core: Core) -> None:
    """The other came and went within the second: our new list is kubelet's, and Allocate goes to nobody."""
    core.pass_time(60)
    bind = core.plugin.bind
    found = third_gpu_found(core)
    core.feed(ForeignSocketsSeen(("kubevirt-gpu.sock",)), after_s=0.1)
    core.feed(found, after_s=0.1)
    core.feed(ForeignSocketsSeen(()), after_s=0.1)
    core.pass_time(limits.ODD_SIGHT_S + limits.KUBELET_LIST_AGAIN_S + KUBELET_LIST_TAKEN_S)
    core.pass_time(limits.CONTEND_BACKOFF_S[0])
    assert core.plugin.bind == bind + 1, "it registers again, once"


def test_a_list_that_changed_just_before_a_neighbour_was_seen_to_go_is_no_sign_of_peace(core: Core) -> None:
    """Kubelet noticed the other's end, then took our list, and Allocate goes to nobody."""
    core.feed(ForeignSocketsSeen(("kubevirt-gpu.sock",)))
    core.pass_time(60)
    bind = core.plugin.bind
    core.feed(third_gpu_found(core), after_s=0)
    core.feed(ForeignSocketsSeen(()), after_s=0)
    core.pass_time(limits.ODD_SIGHT_S + limits.KUBELET_LIST_AGAIN_S + KUBELET_LIST_TAKEN_S)
    core.pass_time(limits.CONTEND_BACKOFF_S[0])
    assert core.plugin.bind == bind + 1, "it registers again, once"


def test_other_plugins_that_appear_as_we_register_are_no_reason_to_register_again(core: Core) -> None:
    """After kubelet's restart all plugins of a node make their sockets anew at once."""
    core.feed(ForeignSocketsSeen(("kubevirt-kvm.sock",)), after_s=0.1)
    bind = core.plugin.bind
    core.pass_time(600)
    assert is_registered(core.plugin)
    assert core.plugin.bind == bind


@pytest.mark.parametrize("stays_s", [0.3, 4.0])
def test_a_neighbour_that_goes_while_nothing_is_healthy_leads_to_registering_again(
    core: Core, stays_s: float
) -> None:
    """Kubelet's list is empty with us or without us; the next GPU that turns healthy must not meet nobody."""
    core.enabled, core.kubelets = {ONE: 1, TWO: 1}, None
    core.pass_time(60)
    core.kubelets = []
    assert healthy(core.state.published.device_lists[H100]) == ()
    bind = core.plugin.bind
    core.pass_time(600)
    assert core.plugin.bind == bind, "nobody was seen"
    core.feed(ForeignSocketsSeen(("kubevirt-gpu.sock",)))
    core.kubelets = THEIRS
    core.pass_time(stays_s)
    core.feed(ForeignSocketsSeen(()))
    core.kubelets = []
    core.pass_time(DESERTED_MAX_S + limits.LEDGER_S)
    assert core.plugin.bind > bind
    bind = core.plugin.bind
    lose_and_register(core, 2)
    core.pass_time(600)
    assert core.plugin.bind == bind, "once is enough"
    assert is_registered(core.plugin)


def test_against_a_plugin_that_registers_again_the_waits_grow_and_stay_grown(core: Core) -> None:
    core.kubelets = THEIRS
    waits = []
    for stream in range(2, 14):
        bind, began = core.plugin.bind, core.at
        while core.plugin.bind == bind:
            core.pass_time(1)
        waits.append(core.at - began)
        core.kubelets = OURS
        lose_and_register(core, stream)
        core.pass_time(60)
        assert is_registered(core.plugin), "for a minute it is ours"
        core.kubelets = THEIRS
    expected = [*limits.CONTEND_BACKOFF_S, *limits.CONTEND_BACKOFF_S[-1:] * 4]
    slack = limits.LEDGER_QUIET_S + limits.KUBELET_LIST_AGAIN_S + 2
    for wait, least in zip(waits, expected, strict=True):
        assert least <= wait <= least + slack


def test_after_a_long_peace_the_first_wait_counts_again(core: Core) -> None:
    for stream in (2, 3, 4):
        core.kubelets = THEIRS
        core.pass_time(limits.CONTEND_BACKOFF_S[3] + limits.LEDGER_QUIET_S)
        core.kubelets = OURS
        lose_and_register(core, stream)
    assert core.plugin.listing.reclaims == 3
    core.pass_time(limits.CONTENTION_OVER_S + limits.LEDGER_QUIET_S)
    assert core.plugin.listing.reclaims == 0


def test_a_stream_that_ends_in_a_fight_is_not_answered_at_once(core: Core) -> None:
    """A plugin that ends its old stream before it registers again makes kubelet hang up on us."""
    core.pass_time(60)
    core.kubelets = THEIRS
    core.pass_time(limits.LEDGER_QUIET_S + limits.KUBELET_LIST_AGAIN_S + limits.CONTEND_BACKOFF_S[0])
    lose_and_register(core, 2)
    core.kubelets = OURS
    core.pass_time(60)
    bind = core.plugin.bind
    core.kubelets = THEIRS
    core.feed(StreamEnded(H100, 2))
    core.pass_time(limits.CONTEND_BACKOFF_S[1] - 1)
    assert core.plugin.bind == bind
    core.pass_time(limits.CONTEND_BACKOFF_S[1])
    assert core.plugin.bind == bind + 1


def test_where_the_other_has_left_a_grown_wait_is_cut_short(core: Core) -> None:
    core.kubelets = THEIRS
    for stream in range(2, 10):
        bind = core.plugin.bind
        while core.plugin.bind == bind:
            core.pass_time(1)
        lose_and_register(core, stream)
    bind = core.plugin.bind
    core.pass_time(60)
    assert not is_registered(core.plugin)
    core.kubelets = []
    core.pass_time(limits.LEDGER_QUIET_S + DESERTED_MAX_S)
    assert core.plugin.bind == bind + 1


# --- odd sights -------------------------------------------------------------------------------------------------


def test_a_socket_of_somebody_else_leads_to_a_read_soon_and_is_named(core: Core) -> None:
    core.pass_time(60)
    core.kubelets = THEIRS
    core.feed(ForeignSocketsSeen(("kubevirt-gpu.sock",)))
    core.pass_time(limits.ODD_SIGHT_S + limits.KUBELET_LIST_AGAIN_S)
    assert "other sockets in kubelet's directory: 'kubevirt-gpu.sock'" in (core.plugin.problem or "")


def test_a_socket_that_appears_as_soon_as_we_are_registered_leads_to_a_read_that_can_tell(core: Core) -> None:
    """The first read that it leads to is asked for before kubelet has had our list for long enough."""
    core.pass_time(60)
    core.feed(StreamEnded(H100, 1))
    core.feed(Ticked())
    core.feed(ForeignSocketsSeen(("kubevirt-gpu.sock",)))
    core.pass_time(limits.ODD_SIGHT_S / 2)
    core.register(2)
    core.kubelets = THEIRS
    core.pass_time(limits.ODD_SIGHT_S + KUBELET_LIST_TAKEN_S + limits.KUBELET_LIST_AGAIN_S)
    assert not is_registered(core.plugin)


def test_a_storm_of_sockets_costs_one_read_a_second(core: Core) -> None:
    core.pass_time(60)
    out: list[Effect] = []
    for n in range(1000):
        out += core.feed(ForeignSocketsSeen((f"{n}.sock",)))
        out += core.pass_time(0.01)
    reads = [e for e in out if isinstance(e, Log) and e.name == "ledger.read"]
    assert 5 <= len(reads) <= 11


def test_the_end_of_an_unknown_stream_changes_nothing_while_kubelet_has_our_list(core: Core) -> None:
    core.feed(StreamOpened(H100, 2))
    core.pass_time(60)
    before = core.plugin
    core.feed(StreamEnded(H100, 2))
    core.pass_time(600)
    assert is_registered(core.plugin)
    assert (core.plugin.bind, core.plugin.register) == (before.bind, before.register)


def test_whoever_opens_our_stream_and_leaves_it_does_not_make_us_register_again(core: Core) -> None:
    """However often, and however often our list changes meanwhile: kubelet has each of our lists."""
    core.pass_time(60)
    before = core.plugin
    out: list[Effect] = []
    for n in range(100):
        core.feed(StreamOpened(H100, 2 + n), StreamEnded(H100, 2 + n))
        core.ledger = {f"odd-{n}": "pod"}
        out += core.feed(allocate_call(ONE, token=n)) + core.pass_time(0.5)
    out += core.pass_time(60)
    assert said(out, "plugin.contested") == []
    assert (core.plugin.bind, core.plugin.register) == (before.bind, before.register)


def test_kubelets_stream_that_was_taken_for_a_bystanders_is_missed_within_seconds(core: Core) -> None:
    """Stream 1 dialled first and is not kubelet's; 2 is."""
    core.feed(StreamOpened(H100, 2))
    core.pass_time(60)
    bind = core.plugin.bind
    core.kubelets = []
    core.feed(StreamEnded(H100, 2))
    core.pass_time(limits.ODD_SIGHT_S + limits.KUBELET_LIST_AGAIN_S)
    assert not is_registered(core.plugin)
    core.pass_time(limits.CONTEND_BACKOFF_S[0])
    assert core.plugin.bind == bind + 1
    assert order(core.plugin).renew, "the bystander's stream is ended as well"


# --- what is compared -------------------------------------------------------------------------------------------


def test_a_huge_list_of_anybodys_is_cut_on_both_sides_alike() -> None:
    many = [f"{n:06d}" for n in range(100_000)]
    assert comparable(reversed(many)) == comparable(many)
    assert len(comparable(many)) == limits.CALL_DEVICES_MAX
    assert comparable(["x" * 5000]) == (DeviceId("x" * KUBELET_LIST_ID_MAX_CHARS),)


def test_control_characters_of_a_neighbour_are_escaped(core: Core) -> None:
    core.kubelets = ["\x1b[31m" + "x" * 1000]
    core.feed(ForeignSocketsSeen(("a\nb.sock",)))
    core.pass_time(limits.LEDGER_QUIET_S)
    problem = core.plugin.problem or ""
    assert problem.isprintable()
    assert len(problem) < 1000


def test_a_read_that_fails_does_not_hurry_the_next(core: Core) -> None:
    core.pass_time(60)
    core.kubelets = THEIRS
    core.feed(ForeignSocketsSeen(("x",)))
    core.pass_time(limits.ODD_SIGHT_S)
    assert core.plugin.listing.against == 1
    core.silent = True
    core.pass_time(limits.KUBELET_LIST_AGAIN_S)
    core.feed(LedgerUnreadable(core.read, "no"))
    assert core.plugin.listing.against == 1
    assert next_deadline(core.state) > core.at
    assert core.state.kubelet.ledger.refresh.due_at >= core.at + limits.KUBELET_LIST_AGAIN_S
