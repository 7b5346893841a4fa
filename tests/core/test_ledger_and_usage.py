"""Kubelet's ledger × who uses the group in the kernel × sysfs: one status and one reason per device.

One test per row of the table "Which devices are Healthy" (architecture), then what happens between the rows.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin.calls import PRE_START_WAIT_S
from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone, SuccessorLost, Ticked
from gpuactors.core.events.deviceplugin import (
    PreferenceAsked,
    PreferenceRequest,
)
from gpuactors.core.events.host import (
    GroupsObserved,
    HostChanged,
    HostScanned,
    SomeGroupsObserved,
)
from gpuactors.core.events.kubelet import KubeletAppeared, LedgerRead, LedgerUnreadable
from gpuactors.core.host.schedule import POLL_FAST_FOR_S, POLL_FAST_S
from gpuactors.core.host.usage import CLOSING_S, POLL_S
from gpuactors.core.ledger.ledger import LEDGER_SETTLING_S
from gpuactors.core.reports.snapshot import project, report
from gpuactors.core.step import CALL_SETTLE_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Granted, Preferred, Ready, Refusal, Refused, Reply
from gpuactors.core.values.model import (
    DeviceId,
    GroupUse,
    Holder,
    LedgerEntry,
    LedgerFile,
    PciAddress,
    PciFunction,
    Pod,
    ResourceName,
    Role,
    Token,
    device_key,
    pci_address,
)
from gpuactors.core.values.selector import Selector
from tests.core.builders import (
    H100,
    MODEL,
    SETTINGS,
    A,
    B,
    C,
    Core,
    allocate_call,
    audio,
    gpu,
    ledger_read,
    node,
    only,
    pre_start_call,
    read_of_young,
)

QEMU = Holder(4711, "qemu-system-x86", None)
T = Token(1)


# --- the rows ---------------------------------------------------------------------------------------------


def test_free() -> None:
    core = node()
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == "free"


@pytest.mark.parametrize("held", [True, False])
def test_allocated_is_healthy_held_or_not(held: bool) -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,) if held else ())
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_held_by_an_external_process_is_unhealthy_and_names_it_and_is_healthy_again_when_it_is_closed() -> (
    None
):
    core = node()
    core.holders = {1: (QEMU,)}
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert (
        core.reason(A)
        == "IOMMU group 1 is held by process 4711 (qemu-system-x86), and kubelet has given it to no pod"
    )
    core.holders = {}
    core.pass_time(POLL_FAST_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def _polls_in(core: Core, seconds: float) -> int:
    """How many polls come back in that time."""
    polled, end = 0, core.at + seconds
    while core.at < end:
        before = core.state.host.polls.done
        core.pass_time(POLL_FAST_S / 2)
        polled += core.state.host.polls.done != before
    return polled


def test_an_external_process_that_stays_for_hours_is_polled_for_no_more_often_than_a_free_group() -> None:
    """Issue 10, 23: four polls a second for ever, each of them recorded."""
    core = node()
    core.holders = {1: (QEMU,)}
    core.pass_time(POLL_S + POLL_FAST_FOR_S)
    assert _polls_in(core, 60.0) <= 60.0 / POLL_S
    core.holders = {}
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_pod_that_is_gone_and_never_lets_go_is_polled_for_slowly_after_a_while() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S + POLL_S + POLL_FAST_FOR_S)
    assert core.state.kubelet.orphans
    assert _polls_in(core, 60.0) <= 60.0 / POLL_S


@pytest.mark.parametrize("what", ["another external process", "another group", "a pod is gone"])
def test_a_release_is_seen_soon_again_after_any_change_beside_an_external_process_that_stays(
    what: str,
) -> None:
    core = node(ledger={B: "vm-1"})
    core.holders = {1: (QEMU,)}
    core.pass_time(POLL_S + POLL_FAST_FOR_S + 2 * limits.LEDGER_S)
    match what:
        case "another external process":
            core.holders = {1: (replace(QEMU, pid=4712),)}
        case "another group":
            core.holders = {1: (QEMU,), 2: (QEMU,)}
        case _:
            core.ledger = {}
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert _polls_in(core, 4.0) >= 4.0 / POLL_FAST_S - 2


@pytest.mark.parametrize("held", ["free", "in use", "held externally"])
def test_what_a_poll_finds_as_it_was_makes_no_list_anew(held: str) -> None:
    """Issue 10, 23: with a GPU in use every tick and poll made all lists anew, most of a quiet daemon's time."""
    core = node(ledger={A: "vm-1"} if held == "in use" else {}, enabled=() if held == "free" else (A,))
    core.pass_time(POLL_S + limits.LEDGER_S)
    device_lists = core.state.published.device_lists
    core.pass_time(60.0)
    assert core.state.published.device_lists is device_lists
    core.enabled = {B: 1}
    core.pass_time(POLL_S)
    assert core.device_list()[B] == "Unhealthy"


def test_a_read_that_comes_after_a_use_was_seen_decides_though_neither_differs_from_the_last() -> None:
    core = node()
    core.silent = True
    core.enabled = {A: 1}
    core.feed(Ticked(), after_s=POLL_S)
    core.feed(core.poll_event(core.poll))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}, "not decided: kubelet's ledger was read before"
    core.feed(core.ledger_event(core.read))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_a_container_that_waits_is_answered_soon_however_long_the_pod_before_has_held_on() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger = {A: "vm-2"}
    core.pass_time(2 * POLL_FAST_FOR_S)
    assert core.state.kubelet.orphans
    core.called(pre_start_call(A), gpu(A))
    core.pass_time(POLL_S)
    assert core.state.calls.waiting, "waiting"
    core.enabled = {}
    answers = [e.answer for e in core.pass_time(POLL_FAST_S) if isinstance(e, Reply)]
    assert answers == [Ready()]


def test_without_names_the_evidence_is_given() -> None:
    core = node(enabled=(A,))
    assert (
        core.reason(A)
        == "IOMMU group 1 is in use (enable of 0000:01:00.0 is 1), and kubelet has given it to no pod"
    )


def test_a_pod_that_is_gone_and_still_holds_is_unhealthy_until_it_lets_go() -> None:
    """Forced deletion: out of kubelet's ledger within 5 ms, the process lives on."""
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.holders = {1: (QEMU,)}
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == (
        "IOMMU group 1 is still held by process 4711 (qemu-system-x86): "
        "pod default/vm-1 is gone from kubelet's ledger, its process is not"
    )
    core.enabled, core.holders = {}, {}
    core.pass_time(POLL_FAST_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.state.kubelet.orphans == {}


def test_a_pod_that_ends_normally_never_shows_as_unhealthy() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger, core.enabled = {}, {}
    said = core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert not [s for s in said if "Unhealthy" in str(s)]


def test_a_device_of_a_claim_is_unhealthy_here() -> None:
    core = node()
    core.claims = {"gpu-0000-01-00-0": "claim-1"}
    core.feed(KubeletAppeared("k1"))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "in use by the claim default/claim-1 of pod default/claim-1"


def test_the_sibling_in_a_used_group_is_unhealthy() -> None:
    core = node(gpu(A, 7), gpu(B, 7), gpu(C, 8), ledger={A: "vm-1"})
    assert core.device_list() == {A: "Healthy", B: "Unhealthy", C: "Healthy"}
    assert core.reason(B) == "IOMMU group 7 is in use: 0000:01:00.0 is allocated to pod default/vm-1"


def test_gone_while_allocated_stays_listed_until_its_pod_is_gone() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.inspect(A)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm-1, but the PCI function is gone from this node"
    core.enabled = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {B: "Healthy"}


def test_unbound_while_allocated_stays_listed_and_says_so() -> None:
    core = node(ledger={A: "vm-1"})
    core.inspect(A, gpu(A, driver="nvidia"))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A).startswith("allocated to pod default/vm-1, but bound to nvidia")
    core.inspect(A, gpu(A))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_an_allocated_device_with_a_host_driver_beside_it_stays_healthy() -> None:
    core = node(gpu(A, 7), gpu(B, 8), ledger={A: "vm-1"})
    core.inspect(A, gpu(A, 7), replace(gpu("01:00.1", 7, driver="snd_hda_intel"), class_code="040300"))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_an_unreadable_ledger_keeps_what_was_known_and_guesses_nothing() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger_problem = "rejected by rate limit"
    core.enabled = {A: 1, B: 1}
    core.pass_time(60)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm-1"
    assert core.reason(B) == (
        "IOMMU group 2 is in use (enable of 0000:02:00.0 is 1); kubelet's ledger cannot be read: rejected by rate limit"
    )
    core.ledger_problem = None
    core.pass_time(limits.LEDGER_RETRY_S)
    assert core.device_list() == {A: "Healthy", B: "Unhealthy"}


# --- between the rows -------------------------------------------------------------------------------------


def test_no_holder_is_called_external_before_the_ledger_was_read_again() -> None:
    """Another daemon's Allocate may stand in kubelet's ledger since we read it last."""
    core = node()
    core.silent = True
    core.feed(Ticked(), after_s=POLL_S)
    core.enabled, core.ledger = {A: 1}, {A: "vm-1"}
    core.feed(core.poll_event(core.poll))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.feed(core.ledger_event(core.read))
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_the_first_list_waits_for_all_three_sides() -> None:

    core = Core()
    core.silent = True
    core.feed(HostScanned(1, (gpu(A),)))
    assert core.state.published.device_lists == {}
    core.feed(ledger_read(2))
    assert core.state.published.device_lists == {}
    core.feed(core.poll_event(core.poll))
    assert core.device_list() == {A: "Healthy"}


def test_the_first_list_does_not_offer_what_an_external_process_holds() -> None:
    """At start the ledger is read before the first poll: who uses a group is not decided until it is read again."""
    core = Core()
    core.silent = True
    core.enabled = {A: 1}
    core.feed(HostScanned(1, (gpu(A), gpu(B))), ledger_read(2))
    core.feed(core.poll_event(core.poll))
    assert core.state.published.device_lists == {}
    core.feed(core.ledger_event(core.read))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_a_ledger_that_cannot_be_read_at_all_does_not_delay_the_first_list() -> None:

    core = Core()
    core.ledger_problem = "no such directory"
    core.feed(HostScanned(1, (gpu(A),)))
    assert core.device_list() == {A: "Healthy"}


def test_the_baseline_of_the_enable_count_is_learned_while_the_function_is_suspended() -> None:
    core = node()
    core.silent = True

    def poll(count: int, *, active: bool) -> None:
        core.feed(Ticked(), after_s=POLL_S)
        event = core.poll_event(core.poll)
        assert isinstance(event, GroupsObserved)
        uses = tuple(
            replace(u, enabled={A: count}, active=frozenset({A}) if active else frozenset())
            if u.group == 1
            else u
            for u in event.uses
        )
        core.feed(replace(event, uses=uses))

    poll(1, active=False)
    assert not core.state.host.polls.groups[1].in_use, "somebody wrote 1 to enable; no descriptor is open"
    poll(1, active=True)
    assert not core.state.host.polls.groups[1].in_use
    poll(2, active=True)
    assert core.state.host.polls.groups[1].in_use


def written_to(core: Core, count: int) -> None:
    """An operator writes to A's `enable`; nobody has it open, so it is suspended."""
    _poll(core, {A: count}, active=False)


def _poll(core: Core, enabled: dict[PciAddress, int], *, active: bool) -> None:
    """A poll that sees these counts in group 1."""
    silent, core.silent = core.silent, True
    if core.state.host.polls.refresh.outstanding is None:
        core.feed(Ticked(), after_s=POLL_S)
    number = core.poll
    seen = frozenset(enabled) if active else frozenset()
    uses = (GroupUse(1, enabled, seen, None, None), GroupUse(2, {B: 0}, frozenset(), None, None))
    core.silent = silent
    core.feed(GroupsObserved(number, uses))


def test_the_baseline_goes_back_when_the_count_does() -> None:
    """Issue 10: a mutation that kept the highest baseline for ever was caught by no test."""
    core = node()
    core.silent = True
    written_to(core, 1)
    written_to(core, 0)
    _poll(core, {A: 1}, active=True)
    assert core.state.host.polls.groups[1].in_use
    assert core.state.host.polls.groups[1].open == {A}


REPLUGGED = (
    ("plugged out and in", ((),), (gpu(A),)),
    ("swapped for another model", (), (gpu(A, device="20b0", model="GA100"),)),
    ("unbound and bound again", ((gpu(A, driver=None),),), (gpu(A),)),
    ("on a host driver for a while", ((gpu(A, driver="nvidia"),),), (gpu(A),)),
    ("on another vfio driver", (), (replace(gpu(A, driver="nvgrace_gpu_vfio_pci", has_node=True), vfio_bound=True),)),
)  # fmt: skip


@pytest.mark.parametrize(("between", "after"), [r[1:] for r in REPLUGGED], ids=[r[0] for r in REPLUGGED])
def test_a_baseline_dies_with_the_function_or_its_binding(
    between: tuple[tuple[PciFunction, ...], ...], after: tuple[PciFunction, ...]
) -> None:
    """Issue 10, 14: after a replug a card that an external process held counted as free, and was granted."""
    core = node()
    written_to(core, 1)
    assert core.state.host.polls.baselines[A] == 1
    for found in (*between, after):
        core.inspect(A, *found)
    assert not core.state.host.polls.baselines
    core.enabled = {A: 1}
    core.pass_time(POLL_S)
    assert core.state.host.polls.groups[1].in_use
    if after == (gpu(A),):
        assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
        assert "kubelet has given it to no pod" in core.reason(A)


@pytest.mark.parametrize("cause", ["remove pci", "unbind pci"])
def test_a_baseline_dies_with_a_binding_that_no_inspection_saw_end(cause: str) -> None:
    """It was bound again before an inspection: only the uevent shows it."""
    core = node()
    written_to(core, 1)
    core.feed(HostChanged(A, None, cause))
    core.feed(core.inspected(A, gpu(A)))
    core.enabled = {A: 1}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Unhealthy"


def test_a_poll_from_before_a_replug_gives_the_new_function_no_baseline() -> None:
    core = node()
    core.silent = True
    core.feed(Ticked(), after_s=POLL_S)
    under_way = core.poll
    core.inspect(A)
    core.inspect(A, gpu(A))
    core.feed(GroupsObserved(under_way, (GroupUse(1, {A: 1}, frozenset(), None, None),)))
    assert not core.state.host.polls.baselines
    _poll(core, {A: 1}, active=True)
    assert core.state.host.polls.groups[1].in_use


def test_a_companion_that_was_never_on_vfio_makes_no_external_holder() -> None:
    """Issue 10, 14: a bridge's `enable` never falls (pci_enable_bridge), and its group was held for ever."""
    bridge = replace(gpu("01:01.0", 1, driver=None, has_node=True), class_code="060400")
    sound = audio("01:00.1", 1, driver=None)
    core = node(gpu(A), bridge, sound, gpu(B))
    core.enabled = {bridge.address: 1, sound.address: 1}
    core.pass_time(60)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    answers = core.called(allocate_call(A), gpu(A), bridge, sound)
    assert isinstance(answers[0], Granted)


def test_a_companion_is_waited_for_as_long_as_its_unbind_is() -> None:
    """It was on vfio: whoever has it open has the group."""
    sound = audio("01:00.1", 1)
    core = node(gpu(A), sound, gpu(B))
    core.enabled = {sound.address: 1}
    core.pass_time(POLL_S)
    waits = replace(sound, driver=None, vfio_bound=False)
    core.inspect(A, gpu(A), waits)
    core.pass_time(60)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.enabled = {}
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.enabled = {sound.address: 1}  # an operator writes to it: it is on no driver, and nobody waits
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_late_uevent_of_the_unbind_before_does_not_end_one_that_waits() -> None:
    """A claim bound it to vfio-pci, and that unbind's uevent came after an administrator's unbind had begun: the GPU
    left the list under its virtual machine (history of seed 22943386053)."""
    core = node(UNBINDING, gpu(B), enabled=(A,))
    core.feed(HostChanged(A, None, "unbind pci"))
    core.feed(core.inspected(A, UNBINDING))
    core.pass_time(POLL_S)
    assert WAITS in core.reason(A)
    core.enabled = {}
    core.pass_time(POLL_S)
    assert core.device_list() == {B: "Healthy"}


def test_a_daemon_that_starts_while_an_unbind_waits_blames_no_bridge() -> None:
    """What was on vfio is not known then; the group's node tells that something was, and a bridge never is."""
    bridge = replace(gpu("01:01.0", 1, driver=None, has_node=True), class_code="060400")
    core = node(UNBINDING, bridge, gpu(B), enabled=(A,))
    core.enabled[bridge.address] = 1
    assert WAITS in core.reason(A)
    core.enabled.pop(A)
    core.pass_time(POLL_S)
    assert core.device_list() == {B: "Healthy"}


def test_a_daemon_that_starts_among_bridges_that_are_selected_waits_for_none_of_them() -> None:
    """A selector may name a bridge's class; its `enable` never falls, so it would be leaving for ever."""
    bridge = replace(gpu("01:01.0", 1, driver=None, has_node=True), class_code="060400")
    core = Core(settings=replace(SETTINGS, selectors=(*SETTINGS.selectors, Selector(class_prefix="06"))))
    core.enabled = {bridge.address: 1}
    core.feed(HostScanned(1, (gpu(A), bridge, gpu(B))))
    core.pass_time(60)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert bridge.address not in core.state.host.polls.leaving


UNSEEN = "/sys/bus/pci/devices/0000:01:00.0/enable cannot be read (Input/output error)"


def blind(core: Core, enabled: dict[PciAddress, int] | None = None, unseen: str = UNSEEN) -> None:
    """The next poll cannot read A's `enable`."""
    core.silent = True
    if core.state.host.polls.refresh.outstanding is None:
        core.feed(Ticked(), after_s=POLL_S)
    use = GroupUse(1, enabled or {}, frozenset(), None, None, unseen)
    core.feed(GroupsObserved(core.poll, (use, GroupUse(2, {B: 0}, frozenset(), None, None))))
    core.silent = False


def test_a_device_whose_use_cannot_be_seen_is_unhealthy_at_once_and_comes_back() -> None:
    """Issue 10, 14: it was offered, and each Allocate of it refused after 12 s."""
    core = node()
    blind(core)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == f"whether IOMMU group 1 is in use cannot be determined: {UNSEEN}"
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_allocate_of_a_device_whose_use_cannot_be_seen_is_refused_at_once() -> None:
    core = node()
    core.silent = True
    core.called(allocate_call(A), gpu(A))
    core.feed(core.ledger_event(core.read))
    blind(core)
    (answer,) = [e.answer for e in core.effects if isinstance(e, Reply)]
    assert isinstance(answer, Refused)
    assert answer.status is Refusal.FAILED_PRECONDITION
    assert UNSEEN in answer.reason


def test_an_allocated_device_whose_use_cannot_be_seen_stays_healthy() -> None:
    core = node(ledger={A: "vm-1"})
    blind(core)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_what_cannot_be_seen_has_not_ended() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert "its process is not" in core.reason(A)
    blind(core)
    assert core.state.host.polls.groups[1].in_use
    assert core.state.kubelet.orphans
    assert core.device_list()[A] == "Unhealthy"


def test_a_poll_from_before_a_read_does_not_clear_who_has_just_left() -> None:
    """Issue 10: a mutation of this was caught by no test. The poll may have read before the pod opened the group."""
    core = node(ledger={A: "vm-1"})
    core.silent = True
    core.pass_time(POLL_S)
    old = core.poll
    core.pass_time(limits.LEDGER_S)
    read = core.read
    assert old < read
    core.feed(ledger_read(read))
    core.feed(core.poll_event(old))
    assert device_key(A) in core.state.kubelet.orphans
    core.silent, core.ledger, core.enabled = False, {}, {A: 1}
    core.feed(Ticked())
    assert "pod default/vm-1 is gone from kubelet's ledger, its process is not" in core.reason(A)
    core.enabled = {}
    core.pass_time(POLL_S)
    assert core.state.kubelet.orphans == {}


def test_a_use_is_over_when_what_was_suspended_before_is_suspended_again() -> None:
    core = node()
    core.enabled, core.awake = {A: 1}, {A}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Unhealthy"
    core.enabled = {}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Unhealthy", "its slot is being reset"
    assert core.reason(A).startswith(f"IOMMU group 1 is being closed ({A} is not suspended yet)")
    core.awake = set()
    core.pass_time(POLL_FAST_S)
    assert core.device_list()[A] == "Healthy"


def test_nothing_is_waited_for_longer_than_a_reset_takes() -> None:
    """Somebody wrote `on` to power/control meanwhile."""
    core = node()
    core.enabled, core.awake = {A: 1}, {A}
    core.pass_time(POLL_S)
    core.enabled = {}
    core.pass_time(CLOSING_S - POLL_FAST_S)
    assert core.device_list()[A] == "Unhealthy"
    core.pass_time(2 * POLL_FAST_S)
    assert core.device_list()[A] == "Healthy"


def test_a_gpu_that_its_audio_function_keeps_awake_is_not_waited_for() -> None:
    """Without vfio-pci the audio function is awake, and so is the GPU that it hangs on (drivers/pci/quirks.c,
    quirk_gpu_hda). Vfio resets no slot of which it has but a part."""
    audio = replace(
        gpu(A), address=pci_address("0000:01:00.1"), class_code="040300", driver=None, vfio_bound=False
    )
    core = node(gpu(A), audio, gpu(B))
    core.enabled, core.awake = {A: 1}, {A}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Unhealthy"
    core.enabled = {}
    core.pass_time(POLL_FAST_S)
    assert core.device_list()[A] == "Healthy"


def test_a_container_does_not_start_while_the_slot_of_its_device_is_being_reset() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.enabled, core.ledger = {}, {}
    core.pass_time(limits.LEDGER_S)
    core.enabled, core.awake = {A: 1}, {A}
    core.pass_time(POLL_S)
    core.enabled, core.ledger = {}, {A: "vm-2"}
    assert core.called(pre_start_call(A), gpu(A)) == []
    core.awake = set()
    core.feed(Ticked(), after_s=POLL_FAST_S)
    assert [e.answer for e in core.effects if isinstance(e, Reply)] == [Ready()]


def test_a_free_function_that_is_woken_for_a_moment_is_free() -> None:
    """Reading its configuration space resumes it."""
    core = node()
    core.awake = {A}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Healthy"


def test_a_function_that_is_never_suspended_is_free_when_it_is_disabled() -> None:
    core = Core()
    core.awake = {A}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.enabled = {A: 1}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Unhealthy"
    core.enabled = {}
    core.pass_time(POLL_FAST_S)
    assert core.device_list()[A] == "Healthy"


def test_a_function_that_was_unbound_under_its_holder_is_not_waited_for() -> None:
    """Without vfio-pci nothing suspends it."""
    core = node(gpu(A, 7), gpu(B, 7))
    core.enabled, core.awake = {B: 1}, {B}
    core.pass_time(POLL_S)
    assert core.device_list()[A] == "Unhealthy"
    core.enabled = {}
    core.inspect(B, gpu(A, 7), gpu(B, 7, driver=None))
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Healthy"}


# --- the gate ---------------------------------------------------------------------------------------------


def test_allocate_of_a_device_held_externally_is_refused_and_unhealthy_in_the_next_list() -> None:
    core = node()
    core.enabled = {A: 1}
    answer = only(Refused, core.called(allocate_call(A), gpu(A)))
    assert answer.status is Refusal.FAILED_PRECONDITION
    assert (
        answer.reason
        == f"{A}: IOMMU group 1 is in use (enable of {A} is 1), and kubelet has given it to no pod"
    )
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_allocate_of_a_sibling_in_a_used_group_is_refused() -> None:
    core = node(gpu(A, 7), gpu(B, 7), ledger={A: "vm-1"})
    core.feed(allocate_call(B))
    where = pci_address(B)
    answer = only(Refused, core.answers(core.inspected(where, gpu(A, 7), gpu(B, 7))))
    assert "IOMMU group 7 is in use: 0000:01:00.0 is allocated to pod default/vm-1" in answer.reason


def test_a_whole_group_is_handed_out_in_one_call() -> None:
    core = node(gpu(A, 7), gpu(B, 7))
    core.feed(allocate_call(A, B))
    both = (gpu(A, 7), gpu(B, 7))
    events = [core.inspected(a, *both) for a in (A, B)]
    assert isinstance(core.answers(*events)[0], Granted)


def test_an_external_process_that_follows_a_released_pod_is_no_pod_that_is_gone() -> None:
    """Between two polls the pod's process ended and somebody else opened the group: it is in use all the time."""
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.holders = {1: (replace(QEMU, pid=8, pod_uid="0b1c"),)}
    core.pass_time(POLL_S)
    core.ledger = {}
    core.holders = {1: (QEMU,)}
    core.pass_time(limits.LEDGER_S)
    assert core.reason(A) == (
        "IOMMU group 1 is held by process 4711 (qemu-system-x86), and kubelet has given it to no pod"
    )
    assert core.state.kubelet.orphans == {}


@pytest.mark.parametrize("pod_uid", [None, "0b1c"])
def test_a_process_that_held_it_for_the_pod_is_the_pods_whatever_its_cgroup(pod_uid: str | None) -> None:
    """Kata Containers may keep the virtual machine outside the pod's cgroup."""
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.holders = {1: (replace(QEMU, pod_uid=pod_uid),)}
    core.pass_time(POLL_S)
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert "pod default/vm-1 is gone from kubelet's ledger" in core.reason(A)


def test_allocate_waits_to_know_whose_process_holds_it() -> None:
    """The daemon has not noticed yet that a pod has ended, and an external process is on its GPU already."""
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.holders = {1: (replace(QEMU, pid=8, pod_uid="0b1c"),)}
    core.pass_time(POLL_S)
    core.ledger, core.holders = {}, {1: (QEMU,)}
    core.silent = True
    core.feed(allocate_call(A))
    look_back = core.inspected(A, gpu(A))
    poll = core.poll
    assert core.answers(look_back, core.poll_event(poll)) == [], "kubelet's ledger may name its pod"
    assert core.answers(core.ledger_event(core.read)) == [], "vm-1 has left: is it its process?"
    answer = only(Refused, core.answers(core.poll_event(core.poll)))
    assert answer.status is Refusal.FAILED_PRECONDITION
    assert (
        answer.reason
        == f"{A}: IOMMU group 1 is held by process 4711 (qemu-system-x86), and kubelet has given it to no pod"
    )


def test_what_was_handed_out_and_given_back_at_once_is_not_handed_out_again_from_under_an_external_process() -> (
    None
):
    """The pod ended before kubelet's ledger was read with it in."""
    core = node()
    assert isinstance(core.called(allocate_call(A), gpu(A))[0], Granted)
    core.holders = {1: (QEMU,)}
    answer = only(Refused, core.called(allocate_call(A, token=2), gpu(A)))
    assert (
        answer.reason
        == f"{A}: IOMMU group 1 is held by process 4711 (qemu-system-x86), and kubelet has given it to no other pod"
    )


def test_a_card_swapped_for_another_model_under_its_pod_is_lost() -> None:
    core = node(ledger={A: "vm-1"})
    core.inspect(A, gpu(A, device="20b0", model="GA100 [A100 PCIe 40GB]"))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == ("allocated to pod default/vm-1, but another device is there now (10de:20b0)")


@pytest.mark.parametrize(
    "found",
    [
        replace(gpu(A), class_code="", fault="cannot be read"),
        replace(gpu(A), vendor="", model=None, fault="cannot be read"),
        replace(gpu(A), device="", model=None, fault="cannot be read"),
    ],
)
def test_an_allocated_device_whose_identity_cannot_be_read_is_not_lost(found: PciFunction) -> None:
    """A daemon that starts just then does not know that it is one of its own; kubelet's ledger does."""
    core = node(gpu(B), found, ledger={A: "vm-1"})
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_what_was_just_handed_out_and_is_gone_stays_listed_though_the_ledger_cannot_be_read() -> None:
    core = node()
    assert isinstance(core.called(allocate_call(A), gpu(A))[0], Granted)
    core.ledger_problem = "kubelet does not answer"
    core.inspect(A)
    core.pass_time(limits.GRANT_GRACE_S - 1)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "just allocated, but the PCI function is gone from this node"


def test_a_call_is_not_answered_from_a_poll_that_had_to_leave_its_group_out() -> None:
    core = node()
    core.silent = True
    core.called(allocate_call(A), gpu(A))
    assert core.answers(GroupsObserved(core.poll, ())) == []
    core.silent = False
    core.enabled = {A: 1}
    (answer,) = [e.answer for e in core.pass_time(POLL_FAST_S) if isinstance(e, Reply)]
    assert isinstance(answer, Refused)
    assert "in use (enable of 0000:01:00.0 is 1)" in answer.reason


# --- unbound, or unplugged, while somebody has it open ------------------------------------------------------

WAITS = (
    "its unbind or unplug waits in the kernel until no process has it open: "
    "end the process that has /dev/vfio/1 open"
)
UNBINDING = gpu(A, driver=None, has_node=True)
"""The driver's link is gone, the group's node is not."""


def test_a_device_whose_unbind_waits_for_an_external_process_stays_listed_and_goes_when_it_is_closed() -> (
    None
):
    core = node(enabled=(A,))
    core.inspect(A, UNBINDING)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    held = "IOMMU group 1 is in use (enable of 0000:01:00.0 is 1), and kubelet has given it to no pod"
    assert core.reason(A) == f"{held}; {WAITS}; nothing can be bound to it before"
    core.pass_time(60)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.enabled = {}
    core.pass_time(POLL_S)
    assert core.device_list() == {B: "Healthy"}, "without another inspection, in case its uevent was lost"


def test_the_process_that_an_unbind_waits_for_is_named_and_so_is_its_release() -> None:
    core = node()
    core.holders, core.enabled = {1: (QEMU,)}, {A: 1}
    core.pass_time(POLL_S)
    core.inspect(A, UNBINDING)
    assert core.reason(A).startswith("IOMMU group 1 is held by process 4711 (qemu-system-x86), and kubelet")
    assert WAITS in core.reason(A)
    core.holders, core.enabled = {}, {}
    core.inspect(A, gpu(A, driver=None))
    assert core.device_list() == {B: "Healthy"}


def test_a_device_that_nobody_has_open_goes_at_once() -> None:
    core = node()
    core.inspect(A, gpu(A, driver=None))
    assert core.device_list() == {B: "Healthy"}


def test_what_has_lost_its_driver_stays_listed_until_a_poll_after_that_has_seen_whether_it_is_open() -> None:
    """An external process may have opened it since the last poll; and a poll that is on its way may have been there
    before."""
    core = node(gpu(A), gpu(B))
    core.silent = True
    core.pass_time(POLL_S)
    under_way, core.enabled = core.state.host.polls.refresh.outstanding or 0, {A: 1}
    core.feed(HostChanged(A, None, "remove vfio-dev"))
    core.feed(core.inspected(A, UNBINDING))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.feed(GroupsObserved(under_way, ()))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.feed(GroupsObserved(core.state.host.polls.refresh.outstanding or 0, ()))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}, "that poll could read nothing"
    core.silent = False
    core.pass_time(POLL_S)
    assert WAITS in core.reason(A)
    core.enabled = {}
    core.pass_time(POLL_S)
    assert core.device_list() == {B: "Healthy"}


def test_what_has_lost_its_driver_stays_listed_after_a_poll_of_its_group_alone_that_could_read_nothing() -> (
    None
):
    core = node(gpu(A), gpu(B))
    core.silent = True
    core.feed(HostChanged(A, None, "remove vfio-dev"))
    core.feed(core.inspected(A, UNBINDING))
    poll = core.state.host.polls
    assert poll.refresh.outstanding is not None
    assert poll.asked_groups is not None
    core.feed(SomeGroupsObserved(poll.refresh.outstanding, ()))
    core.pass_time(limits.GRANT_GRACE_S)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.feed(GroupsObserved(core.state.host.polls.refresh.outstanding or 0, ()))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_a_device_on_no_driver_beside_one_that_is_open_is_not_listed() -> None:
    """Its group's node is there for the other one."""
    core = node(gpu(A, 7), gpu(B, 7), enabled=(B,))
    core.inspect(A, gpu(A, 7, driver=None, has_node=True), gpu(B, 7))
    assert core.device_list() == {B: "Unhealthy"}


def test_a_function_whose_unbind_waits_for_its_holder_keeps_its_group_in_use() -> None:
    core = node(gpu(A, 7), gpu(B, 7), enabled=(A,))
    core.inspect(A, gpu(A, 7, driver=None, has_node=True), gpu(B, 7))
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Unhealthy", B: "Unhealthy"}
    core.enabled = {}
    core.pass_time(POLL_FAST_S)
    assert core.device_list() == {B: "Healthy"}


def test_a_daemon_that_starts_while_an_unbind_waits_lists_it_as_well() -> None:
    core = node(UNBINDING, gpu(B), enabled=(A,))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert WAITS in core.reason(A)


def test_an_enable_count_alone_lists_nothing() -> None:
    """Any process may write to it, also where there was never a driver."""
    core = node(gpu(A, driver=None), gpu(B), enabled=(A,))
    core.pass_time(POLL_S)
    assert core.device_list() == {B: "Healthy"}


def test_a_pods_device_that_is_being_unbound_says_what_it_waits_for() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.inspect(A, UNBINDING)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A).startswith(f"allocated to pod default/vm-1; {WAITS}")
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert "pod default/vm-1 is gone from kubelet's ledger, its process is not; " in core.reason(A)
    assert WAITS in core.reason(A)
    core.enabled = {}
    core.pass_time(POLL_FAST_S)
    assert core.device_list() == {B: "Healthy"}
    assert core.state.kubelet.orphans == {}


def test_calls_for_a_device_that_is_being_unbound_are_refused_with_that_reason() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    for call in (allocate_call(A), pre_start_call(A)):
        core.feed(call)
        answer = only(Refused, core.answers(core.inspected(A, UNBINDING)))
        assert answer.status is Refusal.FAILED_PRECONDITION
        assert WAITS in answer.reason
        assert "bind it to vfio-pci" not in answer.reason


def test_who_had_what_is_on_no_driver_any_more_is_not_waited_for() -> None:
    """Else the groups would be polled four times a second for ever."""
    core = node(ledger={A: "vm-1"})
    core.inspect(A, gpu(A, driver=None))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    core.pass_time(POLL_S)
    assert core.device_list() == {B: "Healthy"}
    assert core.state.kubelet.orphans == {}


def test_no_list_shrinks_before_the_ledger_was_read() -> None:
    """The daemon before this one may have handed out what is pulled now."""
    core = Core()
    core.ledger_problem = "kubelet does not answer"
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.inspect(A)
    core.pass_time(limits.LEDGER_RETRY_S - 1)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.ledger_problem = None
    core.pass_time(limits.LEDGER_RETRY_S)
    assert core.device_list() == {B: "Healthy"}


def test_no_group_is_opened_as_a_probe_before_the_ledger_was_read() -> None:
    core = Core()
    core.silent = True
    core.feed(HostScanned(1, (gpu(A),)))
    assert [t.may_open for t in project(core.state).inspections.poll.targets] == [False]
    core.feed(core.ledger_event(core.state.kubelet.ledger.refresh.outstanding or 0))
    assert [t.may_open for t in project(core.state).inspections.poll.targets] == [True]
    core.feed(HandOverRequested())
    assert [t.may_open for t in project(core.state).inspections.poll.targets] == [False], (
        "another daemon hands them out now"
    )


def test_no_group_is_opened_as_a_probe_while_neither_list_nor_file_can_name_every_pod() -> None:
    """The node was rebooted, and kubelet's file cannot be read: kubelet has given GPUs away that it does not list."""
    core = Core()
    core.silent = True
    core.feed(HostScanned(1, (gpu(A),)))
    theirs = LedgerEntry(ResourceName("example.org/nic"), DeviceId("x"), Pod("", "", "uid-1"))
    for file, may_open in ((None, False), (LedgerFile((theirs,)), True)):
        core.pass_time(limits.LEDGER_QUIET_S)
        read = core.state.kubelet.ledger.refresh.outstanding or 0
        core.feed(read_of_young(read, file))
        assert [t.may_open for t in project(core.state).inspections.poll.targets] == [may_open]


def test_no_group_is_opened_as_a_probe_while_a_pod_has_a_member_that_lost_its_driver() -> None:
    """An unbound function is not polled any more, and the group is the pod's still: a probe would meet its open."""
    second = gpu("0000:01:00.2", 1)
    core = node(gpu(A), second, ledger={A: "vm-1"})
    core.inspect(A, gpu(A, driver=None), second)
    core.silent = True
    core.pass_time(POLL_S)
    assert core.state.kubelet.ledger.refresh.outstanding is None, "while one is, no group is opened anyway"
    (target,) = project(core.state).inspections.poll.targets
    assert target.functions == (second.address,)
    assert not target.may_open


def test_a_successor_keeps_the_names_that_are_served_until_it_serves() -> None:
    """Nobody has anything of them when it starts; the daemon that serves may still give something away as that."""
    old = ResourceName("nvidia.com/2330")
    core = Core(settings=replace(SETTINGS, hand_over=True), served={old: frozenset({MODEL})})
    core.feed(Ticked())
    assert core.state.kubelet.ledger.read > 0
    core.others = {(old, A): "vm-1"}
    core.feed(HostScanned(1, (gpu(A), gpu(B))), PredecessorGone("handed over"))
    core.pass_time(limits.LEDGER_S)
    assert core.device_list(old) == {A: "Healthy"}


def test_a_lost_device_is_listed_though_its_resource_has_no_plugin_any_more() -> None:
    """The daemon was restarted after the only bound GPU of a model was pulled from under its pod; another one is there
    and not bound."""
    core = node(gpu(B, driver=None), ledger={A: "vm-1"})
    assert core.device_list() == {A: "Unhealthy"}
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {}


def test_allocate_does_not_wait_for_a_ledger_that_cannot_be_read() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger_problem = "kubelet does not answer"
    core.holders = {1: (QEMU,)}
    assert len(core.called(allocate_call(A), gpu(A))) == 1


def entries(pod: Pod) -> tuple[LedgerEntry, ...]:
    return (LedgerEntry(H100, DeviceId(A), pod),)


def test_a_pod_that_is_named_otherwise_by_the_other_source_is_not_gone() -> None:
    """PodResources has names, the checkpoint file has UIDs."""
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.silent = True
    core.pass_time(limits.LEDGER_S)
    core.feed(LedgerRead(core.read, None, (), (), file=LedgerFile(entries(Pod("", "", "0b1c")))))
    assert core.state.kubelet.orphans == {}
    assert core.device_list()[A] == "Healthy"


def test_a_pod_that_is_listed_again_is_not_gone() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert set(core.state.kubelet.orphans) == {device_key(A)}
    core.ledger = {A: "vm-1"}
    core.pass_time(limits.LEDGER_S)
    assert core.state.kubelet.orphans == {}
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_a_ledger_that_was_read_before_the_first_scan_is_read_again() -> None:
    """At the start its answer may come first: nothing of ours was known then, and it must not be the last read."""
    core = Core()
    core.ledger = {A: "vm-1"}
    core.feed(core.ledger_event(core.state.kubelet.ledger.refresh.outstanding or 0))
    core.ledger = {}
    core.feed(HostScanned(1, (gpu(A, 7), gpu(B, 7))))
    assert "allocated to pod default/vm-1" in core.reason(A)
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(B) == "free"


def test_a_kubelet_that_has_just_started_is_asked_more_often() -> None:
    core = node(ledger={A: "vm-1"})
    core.silent = True
    core.pass_time(limits.LEDGER_S)
    read = core.read
    pod = Pod("", "", "0b1c")
    core.feed(read_of_young(read, LedgerFile(entries(pod))))
    assert core.state.kubelet.ledger.refresh.due_at == core.at + LEDGER_SETTLING_S


def test_what_was_handed_out_counts_as_allocated_until_the_ledger_lists_it() -> None:
    core = node()
    core.called(allocate_call(A), gpu(A))
    assert core.reason(A) == "just allocated"
    core.enabled, core.ledger_problem = {A: 1}, "kubelet does not answer"
    core.pass_time(POLL_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.ledger, core.ledger_problem = {A: "vm-1"}, None
    core.pass_time(limits.LEDGER_RETRY_S)
    assert core.reason(A) == "allocated to pod default/vm-1"
    assert core.state.kubelet.pending_allocations == {}


def test_what_was_handed_out_in_vain_is_free_again_after_the_grace() -> None:
    """A kubelet that was restarted just then says no sooner that nobody has it."""
    core = node()
    core.called(allocate_call(A), gpu(A))
    core.silent = True

    def settling() -> LedgerRead:
        return read_of_young(core.state.kubelet.ledger.refresh.outstanding or 0)

    began_at = core.at
    while core.at < began_at + limits.GRANT_GRACE_S - 1:
        core.feed(Ticked(), settling(), after_s=LEDGER_SETTLING_S)
        assert core.reason(A) == "just allocated"
    core.feed(Ticked(), after_s=2)
    core.feed(settling())
    assert core.reason(A) == "free"


def test_what_was_handed_out_is_not_forgotten_before_the_ledger_was_read() -> None:
    """The machine slept: the grace and the read are due at once."""
    core = node()
    core.called(allocate_call(A), gpu(A))
    core.silent = True
    core.feed(Ticked(), after_s=600)
    assert core.reason(A) == "just allocated"
    read = core.read
    core.ledger = {A: "vm-1"}
    core.feed(core.ledger_event(read))
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_the_next_pod_gets_the_device_and_its_start_waits_for_the_old_process() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list()[A] == "Unhealthy"
    assert isinstance(core.called(allocate_call(A), gpu(A))[0], Granted)
    core.ledger = {A: "vm-2"}
    assert core.called(pre_start_call(A, token=2), gpu(A)) == []
    core.pass_time(5)
    assert set(core.state.calls.waiting) == {Token(2)}, "still waiting"
    core.enabled = {}
    answers = [e.answer for e in core.pass_time(POLL_FAST_S) if hasattr(e, "answer")]
    assert answers == [Ready()]


def test_a_start_that_waits_too_long_is_refused_with_the_holders_name() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.holders = {1: (QEMU,)}
    core.ledger = {A: "vm-2"}
    core.pass_time(limits.LEDGER_S)
    core.called(pre_start_call(A), gpu(A))
    (answer,) = [e.answer for e in core.pass_time(PRE_START_WAIT_S) if hasattr(e, "answer")]
    assert isinstance(answer, Refused)
    assert answer.status is Refusal.UNAVAILABLE
    assert answer.reason == (
        f"{A}: IOMMU group 1 is still held by process 4711 (qemu-system-x86): "
        "pod default/vm-1 is gone from kubelet's ledger, its process is not"
    )
    assert core.device_list()[A] == "Healthy", "it is allocated to vm-2: counted once"


def test_without_the_gate_a_device_that_is_still_held_is_refused_at_allocate() -> None:
    core = Core(settings=replace(SETTINGS, pre_start_gate=False))

    core.ledger, core.enabled = {A: "vm-1"}, {A: 1}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert isinstance(core.called(allocate_call(A), gpu(A))[0], Refused)


def test_preferred_allocation_puts_what_can_really_be_opened_first() -> None:
    core = node(gpu(A), gpu(B), gpu(C))
    core.silent = True
    core.enabled = {A: 1}
    core.feed(Ticked(), after_s=POLL_S)
    core.feed(core.poll_event(core.poll))
    request = PreferenceRequest(tuple(map(DeviceId, (A, B, C))), (), 2)
    assert core.answers(PreferenceAsked(T, H100, (request,))) == [Preferred(((DeviceId(B), DeviceId(C)),))]
    everything = PreferenceRequest(tuple(map(DeviceId, (A, B, C))), (), 3)
    answer = only(Preferred, core.answers(PreferenceAsked(T, H100, (everything,))))
    assert len(answer.containers[0]) == 3, "never an error, never fewer than asked for"


# --- IDs --------------------------------------------------------------------------------------------------


def test_a_device_known_by_its_group_number_keeps_that_id_until_its_pod_ends() -> None:
    core = node(gpu(A, 51), gpu(B, 52), ledger={"51": "vm-1"}, enabled=(A,))
    assert core.device_list() == {"51": "Healthy", B: "Healthy"}
    core.ledger, core.enabled = {}, {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_device_is_taken_under_either_id_and_the_variable_has_the_address() -> None:
    core = node(gpu(A, 51), gpu(B, 52), ledger={"51": "vm-1"})
    for number, name in enumerate(("51", A)):
        assert core.called(pre_start_call(name, token=number), gpu(A, 51)) == [Ready()]


def test_the_id_does_not_change_under_a_call() -> None:
    core = node(gpu(A, 51), gpu(B, 52), ledger={"51": "vm-1"})
    core.feed(allocate_call(B))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {"51": "Healthy", B: "Healthy"}
    core.feed(core.inspected(B, gpu(B, 52)))
    core.pass_time(CALL_SETTLE_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_an_allocated_id_that_is_on_this_node_no_more_stays_listed() -> None:
    core = node(ledger={"0000:99:00.0": "vm-1"})
    assert core.device_list() == {A: "Healthy", B: "Healthy", "0000:99:00.0": "Unhealthy"}


# --- hand-over --------------------------------------------------------------------------------------------


def test_a_successor_gets_ready_and_touches_nothing_until_the_old_daemon_is_gone() -> None:

    core = Core(settings=replace(SETTINGS, hand_over=True))
    core.ledger = {A: "vm-1"}
    assert not project(core.state).take_over
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    assert project(core.state).take_over
    assert project(core.state).plugins == {}
    core.feed(PredecessorGone("handed over"))
    assert core.state.daemon.role is Role.SERVING
    assert list(project(core.state).plugins) == [H100]
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.feed(HandOverRequested())
    assert project(core.state).plugins == {}
    assert not project(core.state).take_over
    core.feed(SuccessorLost())
    assert project(core.state).take_over
    core.feed(PredecessorGone("no daemon answered"))
    assert list(project(core.state).plugins) == [H100]


def test_who_serves_again_lists_what_its_successor_gave_away_by_another_name() -> None:
    core = node(gpu(A), gpu(B))
    core.feed(HandOverRequested())
    new = ResourceName("nvidia.com/NEW")
    core.others = {(new, A): "vm-1"}
    core.feed(SuccessorLost(), PredecessorGone("none", {new: frozenset({MODEL})}))
    core.pass_time(limits.LEDGER_S)
    assert core.device_list(new) == {A: "Healthy"}
    assert core.device_list() == {B: "Healthy"}


def test_a_container_start_that_waits_at_a_hand_over_is_refused_in_words() -> None:
    core = node(gpu(A), gpu(B))
    core.silent = True
    core.feed(pre_start_call(B, token=2))
    answers = core.answers(HandOverRequested())
    reason = "gpuactors is handing over to its successor: ask again"
    assert answers == [Refused(Refusal.UNAVAILABLE, reason, (Cause.NOT_SERVING,))]
    assert core.state.calls.waiting == {}


def test_the_report_names_owner_holder_and_history() -> None:
    core = node(ledger={A: "vm-1"}, enabled=(A,))
    core.holders = {1: (QEMU,)}
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    found = {d.id: d for d in report(core.state)}
    assert found[DeviceId(A)].holders == (QEMU,)
    first, *_, last = found[DeviceId(A)].history
    assert (first.health, first.reason) == ("Healthy", "allocated to pod default/vm-1")
    assert (last.health, last.reason) == ("Unhealthy", core.reason(A))


def test_an_unreadable_ledger_at_start_is_read_when_kubelet_appears() -> None:
    core = Core()
    core.ledger_problem = "kubelet is not there"

    core.enabled = {A: 1}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.ledger_problem, core.ledger = None, {A: "vm-1"}
    core.feed(KubeletAppeared("k1"))
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_late_answers_change_nothing() -> None:
    core = node()
    before = core.state
    core.feed(ledger_read(1), LedgerUnreadable(1, "x"), GroupsObserved(1, ()))
    assert core.state == before
