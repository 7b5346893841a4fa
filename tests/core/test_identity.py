"""Which device kubelet means by an ID. What stands in kubelet's ledger, or in a call, is input: any string."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.devices import holdings
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.deviceplugin import (
    AllocateAsked,
    PreferenceAsked,
    PreferenceRequest,
    PreStartAsked,
)
from gpuactors.core.events.host import HostChanged, HostScanned, InspectionFailed
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.ledger.identity import not_listed
from gpuactors.core.reports.snapshot import project, report
from gpuactors.core.step import CALL_SETTLE_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Granted, Ready, Refusal, Refused
from gpuactors.core.values.model import (
    DeviceId,
    LedgerEntry,
    PciAddress,
    PciFunction,
    Pod,
    ResourceName,
    Settings,
    Token,
    device_key,
)
from gpuactors.core.values.owner import Allocation
from gpuactors.core.values.selector import parse_selector
from tests.core.builders import (
    H100,
    MODEL,
    SETTINGS,
    A,
    B,
    C,
    Core,
    allocate_call,
    gpu,
    ledger_read,
    node,
    only,
    pre_start_call,
    read_of_young,
)

OTHERS = ResourceName("devices.kubevirt.io/other")
ODD_IDS = ("", "²", "1" * 4301, "٥١", "-1", "+1", " 1", "1\n", "0x1", "a/../b", "\x00", "💡", "0000:01:00.0 ")


def entry(resource: str, device: str, pod: str) -> LedgerEntry:
    return LedgerEntry(ResourceName(resource), DeviceId(device), Pod("default", pod, ""))


def read(core: Core, *entries: LedgerEntry) -> None:
    """Kubelet's ledger is read, and has these entries in this order."""
    core.silent = True
    core.feed(KubeletAppeared(f"socket at {core.at}"), after_s=1.0)
    core.feed(ledger_read(core.read, entries))


# --- odd IDs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ODD_IDS, ids=lambda i: ascii(i[:12]))
def test_an_odd_id_in_a_call_is_refused_and_nothing_else_happens(odd: str) -> None:
    core = Core(gpu(A), gpu(B))
    device = DeviceId(odd)
    answers = core.answers(
        AllocateAsked(Token(1), H100, ((device,),)), PreStartAsked(Token(2), H100, (device,))
    )
    assert [type(answer) for answer in answers] == [Refused, Refused]
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


@pytest.mark.parametrize("resource", [OTHERS, H100])
@pytest.mark.parametrize("odd", ODD_IDS, ids=lambda i: ascii(i[:12]))
def test_an_odd_id_in_kubelets_ledger_is_read(odd: str, resource: ResourceName) -> None:
    core = node(ledger={A: "vm-1"}, others={(resource, odd): "vm-2"})
    ours = {A: "Healthy", B: "Healthy"}
    assert core.device_list() == (ours if resource == OTHERS else ours | {odd: "Unhealthy"})


# --- one GPU, several entries -----------------------------------------------------------------------------


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_gpu_under_two_resources_is_counted_where_it_is_listed_whatever_the_order_of_the_list(
    ours_first: bool,
) -> None:
    """On a node with a sandbox plugin; List names pods in random order."""
    entries = [entry(H100, A, "vm-1"), entry(OTHERS, A, "vm-2")]
    core = node()
    read(core, *(entries if ours_first else reversed(entries)))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == f"allocated to pod default/vm-1; also allocated to pod default/vm-2 as {OTHERS}"


def test_a_gpu_that_a_pod_and_a_claim_have_is_counted_where_it_is_listed() -> None:
    core = node(ledger={A: "vm-1"})
    core.claims = {"gpu-0000-01-00-0": "claim-1"}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == (
        "allocated to pod default/vm-1; also in use by the claim default/claim-1 of pod default/claim-1"
    )


def test_a_gpu_of_two_others_is_unhealthy_and_names_both() -> None:
    core = node(others={("b.io/x", A): "vm-2", ("a.io/x", A): "vm-1"})
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert (
        core.reason(A)
        == "allocated to pod default/vm-1 as a.io/x; also allocated to pod default/vm-2 as b.io/x"
    )


# --- an older ID goes on meaning what it was given for ----------------------------------------------------


def test_an_older_id_means_its_gpu_when_that_comes_back_in_another_group() -> None:
    core = node(ledger={"1": "vm-1"})
    assert core.device_list() == {"1": "Healthy", B: "Healthy"}
    core.inspect(A)
    assert core.device_list() == {"1": "Unhealthy", B: "Healthy"}
    core.inspect(A, gpu(A, 60))
    assert core.device_list() == {"1": "Healthy", B: "Healthy"}
    assert core.reason("1") == "allocated to pod default/vm-1"
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_an_older_id_does_not_mean_a_gpu_that_comes_into_its_group_later() -> None:
    core = node(ledger={"1": "vm-1"})
    core.inspect(A, gpu(A, 60))
    core.inspect(C, gpu(C, 1))
    assert core.device_list() == {"1": "Healthy", B: "Healthy", C: "Healthy"}
    assert (core.reason("1"), core.reason(C)) == ("allocated to pod default/vm-1", "free")


@pytest.mark.parametrize("older_first", [True, False])
def test_an_older_id_and_the_address_both_in_the_ledger(older_first: bool) -> None:
    entries = [entry(H100, "1", "vm-1"), entry(H100, A, "vm-2")]
    core = node()
    read(core, *(entries if older_first else reversed(entries)))
    assert core.device_list() == {"1": "Healthy", A: "Healthy", B: "Healthy"}
    both = "allocated to pod default/vm-2 as 0000:01:00.0; also allocated to pod default/vm-1 as 1"
    assert core.reason(A) == both
    assert core.reason("1") == f"allocated to pod default/vm-1; it is listed as {A} too"
    read(core, entries[1])
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_only_the_number_as_the_kernel_writes_it_is_an_older_id() -> None:
    core = node(ledger={"1": "vm-1", "01": "vm-2"})
    assert core.device_list() == {"1": "Healthy", "01": "Unhealthy", B: "Healthy"}
    assert core.reason("01") == (
        f"allocated to pod default/vm-2, but no device of {H100} on this node is known by this ID"
    )


def test_a_ledger_that_is_unreadable_at_first_and_names_older_ids_while_a_call_settles() -> None:
    core = Core()
    core.ledger_problem = "connection refused"
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.feed(PreferenceAsked(Token(1), H100, (PreferenceRequest((DeviceId(A),), (), 1),)))
    core.ledger_problem, core.ledger = None, {"1": "vm-1"}
    core.feed(KubeletAppeared("1"))
    assert core.device_list() == {"1": "Healthy", A: "Unhealthy", B: "Healthy"}, (
        "no ID leaves the list under a call"
    )
    assert core.reason(A) == "it is listed as 1 now"
    core.pass_time(CALL_SETTLE_S)
    assert core.device_list() == {"1": "Healthy", B: "Healthy"}


def test_a_gpu_that_a_pod_has_by_its_older_id_is_not_handed_out_by_its_address() -> None:
    core = node(ledger={"1": "vm-1"})
    answer = only(Refused, core.called(allocate_call(A), gpu(A)))
    assert (answer.status, answer.reason, answer.causes) == (
        Refusal.FAILED_PRECONDITION,
        f"{A}: allocated to pod default/vm-1",
        (Cause.ALLOCATED,),
    )
    assert [(given.device, str(given.to)) for given in answer.owners] == [("1", "default/vm-1")]


def test_a_number_means_the_gpu_of_a_shared_group_that_no_other_id_means() -> None:
    core = node(gpu(A, 7), gpu(B, 7), ledger={A: "vm-1", "7": "vm-2"})
    assert core.device_list() == {A: "Healthy", "7": "Healthy"}
    assert {a.id: a.key for a in core.state.published.device_lists[H100]} == {
        A: device_key(A),
        "7": device_key(B),
    }


@pytest.mark.parametrize(("first", "second"), [(A, B), (B, A)])
def test_a_number_means_the_first_gpu_of_a_shared_group_whichever_came_first(
    first: PciAddress, second: PciAddress
) -> None:
    """NVIDIA's plugin lists the group once, by its first function."""
    core = node(gpu(first, 7))
    core.inspect(second, gpu(A, 7), gpu(B, 7))
    core.ledger = {"7": "vm-1"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert {a.id: a.key for a in core.state.published.device_lists[H100]} == {
        "7": device_key(A),
        B: device_key(B),
    }


def test_a_number_of_another_plugin_is_no_group_of_ours() -> None:
    core = node(others={(OTHERS, "1"): "vm-1"})
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


# --- what resolving costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [8, 64])
def test_a_thousand_numbers_of_other_plugins_are_resolved_without_an_inspection_of_every_device(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = tuple(gpu(f"{n:02x}:00.0") for n in range(gpus))
    touched = 0

    def counted(*args: Any) -> Allocation:
        nonlocal touched
        touched += 1
        return Allocation(*args)

    monkeypatch.setattr(holdings, "Allocation", counted)

    def cost(others: dict[tuple[str, str], str]) -> int:
        """Entries of devices made in half a minute of a node at rest, and by one Allocate."""
        nonlocal touched
        core = node(*functions, ledger={functions[0].address: "vm-1"}, others=others)
        core.state = replace(
            core.state, daemon=replace(core.state.daemon, settings=replace(SETTINGS, strict=False))
        )  # which derives all anew
        touched = 0
        core.pass_time(30.0)
        address = functions[1].address
        core.feed(allocate_call(address))
        (answer,) = core.answers(core.inspected(address, functions[1]))
        assert isinstance(answer, Granted)
        return touched

    few: dict[tuple[str, str], str] = {(OTHERS, "1000"): "pod"}
    many: dict[tuple[str, str], str] = {(OTHERS, str(n)): f"pod-{n}" for n in range(1000)}
    assert cost(many) == cost(few) > 0, "when it is given away"


# --- whatever is selected or named now --------------------------------------------------------------------

WAS_SERVED = {H100: frozenset({MODEL})}
ONLY_B = replace(SETTINGS, selectors=(parse_selector(f"address={B}"),))
NEW = ResourceName("nvidia.com/GH100_H100_SXM5_80GB_HBM3")
ELSE = ResourceName("nvidia.com/GA100_A100_SXM4_40GB")


def renewed(address: str) -> PciFunction:
    """The same GPU, by another name in a newer pci.ids."""
    return gpu(address, model="GH100 [H100 SXM5 80GB HBM3]")


def swapped(address: str) -> PciFunction:
    return gpu(address, device="20b0", model="GA100 [A100 SXM4 40GB]")


def restarted(
    *functions: PciFunction,
    served: ResourceName | None = H100,
    models: Collection[str] = (MODEL,),
    settings: Settings = SETTINGS,
    **pods: str,
) -> Core:
    """A daemon that starts while pods have GPUs by the old name, as `vm=A`; of that name these models were served."""
    core = Core(settings=settings, served={} if served is None else {served: frozenset(models)})
    core.ledger = {device: pod for pod, device in pods.items()}
    core.unselected = {A: gpu(A)}
    core.feed(HostScanned(1, functions))
    return core


def test_a_selection_that_was_narrowed_leaves_a_pod_its_gpu_until_it_ends() -> None:
    core = restarted(gpu(B), settings=ONLY_B, served=None, vm=A)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm"
    assert project(core.state).inspections.given == {A}
    assert [(d.key, d.resource, d.owner) for d in report(core.state)] == [
        (device_key(A), H100, "default/vm"),
        (device_key(B), H100, None),
    ]
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {B: "Healthy"}
    assert project(core.state).inspections.given == set()
    (answer,) = core.answers(allocate_call(A))
    assert isinstance(answer, Refused), "it is not offered again"


def test_an_inspection_that_fails_has_not_found_that_nothing_is_there() -> None:
    core = Core(settings=ONLY_B, served=WAS_SERVED)
    core.ledger, core.silent = {A: "vm"}, True
    core.feed(HostScanned(1, (gpu(B),)))
    core.feed(core.ledger_event(core.state.kubelet.ledger.refresh.outstanding or 0))
    core.feed(InspectionFailed(core.state.host.inspections.functions[A], A, "it hangs"))
    core.silent = False
    core.feed(core.poll_event(core.state.host.polls.refresh.outstanding or 0))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}, "one failed inspection holds up no list"
    core.unselected = {A: gpu(A, driver=None, has_node=True)}
    core.enabled = {A: 1}
    core.pass_time(UNSETTLED_INSPECTIONS_S[0] + POLL_S)
    assert "its unbind or unplug waits" in core.reason(A), (
        "it is the pod's device, and was found at the second inspection"
    )


def test_what_a_pod_has_and_no_selector_matches_is_not_gone_before_it_was_inspected() -> None:
    """The ledger was not readable when the first list was sent; kubelet counts the GPU as allocated."""
    core = Core(settings=ONLY_B, served=WAS_SERVED)
    core.ledger_problem = "kubelet does not answer"
    core.feed(HostScanned(1, (gpu(B),)))
    core.pass_time(limits.LEDGER_RETRY_S - 1)
    assert core.device_list() == {B: "Healthy"}
    core.ledger_problem, core.ledger, core.silent = None, {A: "vm"}, True
    core.feed(Ticked(), after_s=limits.LEDGER_RETRY_S)
    core.feed(core.ledger_event(core.state.kubelet.ledger.refresh.outstanding or 0))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.feed(core.inspected(A))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_what_no_selector_chooses_is_waited_for_from_the_ledger_on_that_names_it() -> None:
    """It is known before that read, as it shares a group: it was on no driver when this daemon first saw it."""
    core = Core(settings=ONLY_B, served=WAS_SERVED)
    core.ledger, core.enabled, core.silent = {A: "vm"}, {A: 1}, True
    core.feed(HostScanned(1, (gpu(A, 7, driver=None, has_node=True), gpu(B, 7))))
    assert not core.state.host.polls.leaving, "nobody is known to have been offered it"
    core.silent = False
    core.feed(core.ledger_event(core.state.kubelet.ledger.refresh.outstanding or 0))
    assert core.state.host.polls.leaving == {A}
    assert core.device_list()[A] == "Unhealthy"
    assert "its unbind or unplug waits" in core.reason(A)


def test_what_is_waited_for_is_so_still_when_its_ids_can_be_read() -> None:
    """They could not when the daemon started, in the middle of the unbind."""
    core = Core(served=WAS_SERVED)
    core.ledger, core.enabled = {A: "vm"}, {A: 1}
    leaving = gpu(A, 7, driver=None, has_node=True)
    core.feed(HostScanned(1, (replace(leaving, vendor="", fault="vendor cannot be read"), gpu(B, 8))))
    assert core.state.host.polls.leaving == {A}
    core.inspect(A, leaving)
    core.pass_time(limits.LEDGER_S)
    assert core.state.host.polls.leaving == {A}
    assert "its unbind or unplug waits" in core.reason(A)


def test_a_selection_that_leaves_nothing_of_a_resource_leaves_it_registered_until_its_last_pod_ends() -> None:
    core = restarted(settings=ONLY_B, vm=A)
    assert core.device_list() == {A: "Healthy"}
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert core.device_list() == {}
    core.pass_time(limits.RETIRE_EMPTY_AFTER_S)
    assert not core.state.published.plugins
    assert not core.state.published.served


def test_the_first_list_waits_for_the_inspection_of_what_a_pod_has() -> None:
    core = Core(settings=ONLY_B)
    core.ledger, core.silent = {A: "vm"}, True
    core.feed(HostScanned(1, (gpu(B),)))
    core.feed(core.ledger_event(core.read))
    while (poll := core.state.host.polls.refresh.outstanding) is not None:
        core.feed(core.poll_event(poll))
    assert core.state.published.device_lists == {}
    core.feed(core.inspected(A, gpu(A)))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_pod_starts_its_container_again_with_a_gpu_that_is_not_selected_any_more() -> None:
    core = restarted(gpu(B), settings=ONLY_B, vm=A)
    answers = core.called(pre_start_call(A), gpu(A))
    assert answers == [Ready()]


def test_a_pci_ids_that_was_renewed_leaves_a_pod_its_gpu_by_the_old_name_until_it_ends() -> None:
    core = restarted(renewed(A), renewed(B), vm=A)
    assert core.device_list() == {A: "Healthy"}
    assert core.device_list(NEW) == {B: "Healthy"}, "not free by the new name"
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert (core.device_list(), core.device_list(NEW)) == ({}, {A: "Healthy", B: "Healthy"})
    core.pass_time(limits.RETIRE_EMPTY_AFTER_S)
    assert core.state.published.plugins.keys() == core.state.published.served.keys() == {NEW}


def test_a_name_that_changes_under_a_running_daemon_leaves_a_pod_its_gpu_by_the_old_one() -> None:
    core = node(ledger={A: "vm-1"})
    core.inspect(A, renewed(A))
    core.inspect(B, renewed(B))
    assert (core.device_list(), core.device_list(NEW)) == ({A: "Healthy"}, {B: "Healthy"})


def test_without_a_name_from_the_daemon_before_the_old_name_is_another_plugins() -> None:
    core = restarted(renewed(A), renewed(B), served=None, vm=A)
    assert core.device_list(NEW) == {A: "Unhealthy", B: "Healthy"}
    assert core.state.published.plugins.keys() == {NEW}


def test_a_gpu_that_is_called_otherwise_now_is_not_said_to_be_another_one() -> None:
    core = restarted(renewed(A), swapped(B), vm=A)
    assert [not_listed(core.state, H100, device_key(a)).message for a in (A, B)] == [
        "no selector matches it under this name any more (--select, pci.ids)",
        "another device is there now (10de:20b0)",
    ]


def test_a_swapped_card_is_another_device() -> None:
    core = node(ledger={A: "vm-1"})
    core.inspect(A)
    core.inspect(A, swapped(A))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm-1, but another device is there now (10de:20b0)"
    assert core.device_list(ELSE) == {A: "Unhealthy"}


def test_a_card_that_was_swapped_while_no_daemon_ran_is_another_device() -> None:
    core = restarted(swapped(A), gpu(B), vm=A)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "allocated to pod default/vm, but another device is there now (10de:20b0)"
    assert core.device_list(ELSE) == {A: "Unhealthy"}
    core.inspect(A, gpu(A))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}, "it is put back"
    core.inspect(A, swapped(A))
    core.ledger = {}
    core.pass_time(limits.LEDGER_S)
    assert (core.device_list(), core.device_list(ELSE)) == ({B: "Healthy"}, {A: "Healthy"})


def test_a_card_that_was_swapped_while_no_daemon_ran_is_another_device_though_no_selector_chooses_it() -> (
    None
):
    core = Core(settings=ONLY_B, served=WAS_SERVED)
    core.ledger, core.unselected = {A: "vm"}, {A: swapped(A)}
    core.feed(HostScanned(1, (gpu(B),)))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_what_was_swapped_where_the_last_card_of_its_name_was_is_another_device() -> None:
    core = restarted(swapped(A), vm=A)
    assert (core.device_list(), core.device_list(ELSE)) == ({A: "Unhealthy"}, {A: "Unhealthy"})
    assert core.state.published.served == {H100: {MODEL}, ELSE: {"10de:20b0"}}, (
        "what is there now adds nothing to it"
    )


def test_a_name_kept_without_models_is_believed_of_any_card() -> None:
    core = restarted(swapped(A), models=(), vm=A)
    assert core.device_list() == {A: "Healthy"}


def test_a_name_kept_without_the_model_that_it_is_now_is_believed_of_that() -> None:
    """The daemon before was killed between its first list of that model and the write."""
    core = restarted(gpu(A, device="2331"), gpu(B), vm=A)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.state.published.served == {H100: {MODEL, "10de:2331"}}
    core.inspect(A, replace(renewed(A), device="2331"))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}, "it is remembered as what it is"


def test_a_card_whose_ids_cannot_be_read_at_the_start_is_judged_when_they_can_be() -> None:
    core = Core(settings=ONLY_B, served=WAS_SERVED)
    unread = replace(swapped(A), device="", fault=f"{A}: …/device cannot be read (Input/output error)")
    core.ledger, core.unselected = {A: "vm"}, {A: unread}
    core.feed(HostScanned(1, (gpu(B),)))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.unselected = {A: swapped(A)}
    core.feed(HostChanged(A, None, "change pci"))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}


def test_another_model_under_a_served_name_is_served_as_well_until_the_name_retires() -> None:
    core = node(gpu(A))
    assert core.state.published.served == {H100: {MODEL}}
    core.inspect(B, gpu(B, device="2331"))
    both = core.state.published.served
    assert both == {H100: {MODEL, "10de:2331"}}
    core.inspect(A)
    assert core.state.published.served == both, "a pod may have been given it"
    core.inspect(B)
    core.pass_time(limits.RETIRE_EMPTY_AFTER_S + 1)
    assert core.state.published.served == {}


def test_a_card_of_another_model_where_there_was_none_at_the_start_is_another_device() -> None:
    core = Core(served=WAS_SERVED)
    core.ledger = {A: "vm"}
    core.feed(HostScanned(1, (gpu(B),)))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.inspect(A, swapped(A))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.inspect(A, gpu(A))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_name_that_was_served_and_that_no_pod_has_anything_of_is_forgotten() -> None:
    core = restarted(renewed(A), served=ResourceName("nvidia.com/OLD"))
    assert core.state.published.served == {NEW: {MODEL}}


def test_a_kubelet_that_may_not_know_its_pods_yet_takes_no_name_away() -> None:
    """What its file does not name either may be listed as soon as the API server is back."""
    old = ResourceName("nvidia.com/OLD")
    core = Core(served={old: frozenset({MODEL})})
    core.silent = True
    core.feed(HostScanned(1, (gpu(B),)))
    for answer, served in ((read_of_young, {old: {MODEL}}), (ledger_read, {})):
        core.feed(answer(core.read))
        assert core.state.published.served == served
        core.feed(Ticked(), after_s=limits.LEDGER_QUIET_S)
