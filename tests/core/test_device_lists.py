"""Device lists and resources: what is sent to kubelet, and when a resource appears or retires."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin import device_lists, entries
from gpuactors.core.deviceplugin.device_lists import HISTORY_ENTRIES
from gpuactors.core.events.daemon import PredecessorGone, ShutdownRequested, Ticked
from gpuactors.core.events.host import HostScanned, UeventsLost
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.usage import CLOSING_S, POLL_S
from gpuactors.core.reports.snapshot import project, report
from gpuactors.core.state import NodeState
from gpuactors.core.step import CALL_SETTLE_S, next_deadline
from gpuactors.core.values import memo
from gpuactors.core.values.effects import Effect, Field, Level, Log
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    AdvertisedDevice,
    DeviceId,
    Holder,
    PciFunction,
    ResourceName,
    device_key,
    pci_address,
)
from gpuactors.core.values.status import DeviceStatus
from tests.core.builders import H100, SETTINGS, A, B, C, Core, allocate_call, gpu
from tests.support.planted_status import plant_allocated_is_unhealthy

A100 = ResourceName("nvidia.com/GA100_A100_SXM4_40GB")


def a100(address: str) -> PciFunction:
    return gpu(address, device="20b0", model="GA100 [A100 SXM4 40GB]")


def test_a_model_never_seen_before_becomes_a_resource_of_its_own() -> None:
    core = Core(gpu(A))
    core.inspect(B, a100(B))
    assert core.device_list() == {A: "Healthy"}
    assert core.device_list(A100) == {B: "Healthy"}
    assert set(project(core.state).plugins) == {H100, A100}


def test_an_unknown_id_gets_its_hex_digits() -> None:
    core = Core(gpu(A, device="29ff", model=""))
    assert core.device_list(ResourceName("nvidia.com/29ff")) == {A: "Healthy"}


def test_two_ids_with_one_name_are_one_resource() -> None:
    core = Core(gpu(A, device="2330"), gpu(B, device="2331"))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert list(core.state.published.plugins) == [H100]


def test_a_card_swapped_for_another_model_changes_resource() -> None:
    core = Core(gpu(A))
    core.inspect(A, a100(A))
    assert core.device_list() == {}
    assert core.device_list(A100) == {A: "Healthy"}


def test_a_card_swapped_under_a_call_is_kept_in_the_old_list_and_new_in_the_other() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate_call(B))
    core.inspect(A, a100(A))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.device_list(A100) == {A: "Healthy"}


def test_a_node_without_gpus_has_no_resource_until_one_comes() -> None:
    core = Core()
    core.feed(HostScanned(1, ()))
    assert core.state.published.plugins == {}
    core.inspect(A, gpu(A))
    assert core.device_list() == {A: "Healthy"}


def test_an_emptied_resource_shows_an_empty_list_then_retires() -> None:
    core = Core(gpu(A), a100(B))
    core.inspect(B)
    assert core.device_list(A100) == {}
    due = next_deadline(core.state)
    assert due <= core.at + limits.RETIRE_EMPTY_AFTER_S
    core.feed(Ticked(), after_s=limits.RETIRE_EMPTY_AFTER_S)
    assert set(core.state.published.plugins) == {H100}
    assert set(core.state.published.device_lists) == {H100}


def test_a_rebind_before_the_resource_retires_keeps_its_plugin() -> None:
    core = Core(gpu(A))
    before = core.state.published.plugins[H100].bind
    core.inspect(A, gpu(A, driver=None))
    core.feed(Ticked(), after_s=limits.RETIRE_EMPTY_AFTER_S - 1)
    core.inspect(A, gpu(A))
    core.feed(Ticked(), after_s=5)
    assert core.device_list() == {A: "Healthy"}
    assert core.state.published.plugins[H100].bind == before


def test_a_retired_resource_comes_back_with_a_fresh_plugin() -> None:
    core = Core(gpu(A))
    core.inspect(A)
    core.feed(Ticked(), after_s=limits.RETIRE_EMPTY_AFTER_S)
    assert core.state.published.plugins == {}
    core.inspect(A, gpu(A))
    assert core.device_list() == {A: "Healthy"}


def test_numa_nodes_are_in_the_list() -> None:
    core = Core(gpu(A, numa_node=0), gpu(B, numa_node=None))
    assert [(a.key, a.numa_node) for a in core.state.published.device_lists[H100]] == [
        (device_key(A), 0),
        (device_key(B), None),
    ]


def test_nothing_changes_the_list_object_when_nothing_changed() -> None:
    core = Core(gpu(A), gpu(B))
    before = core.state.published.device_lists[H100]
    core.inspect(A, gpu(A))
    core.feed(UeventsLost("overflow"))
    core.feed(HostScanned(core.scan, (gpu(A), gpu(B))))
    assert core.state.published.device_lists[H100] == before


def test_an_inspection_that_finds_what_is_known_and_a_call_that_begins_make_no_list_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many IDs of a list mean nothing: an Allocate costs two lists, one when it is answered, and one when
    kubelet has had time to use the answer."""
    core = Core(gpu(A), gpu(B))
    core.ledger = {f"odd {n}": "pod" for n in range(300)}
    core.pass_time(60)
    made: list[NodeState] = []

    view = device_lists._view

    def counted(state: NodeState) -> object:
        made.append(state)
        return view(state)

    monkeypatch.setattr(device_lists, "_view", counted)
    core.inspect(A, gpu(A))
    core.feed(allocate_call("odd 7"))
    assert made == [], "nothing was found that was not known, and nothing was given away"
    core.called(allocate_call(A, token=2), gpu(A))
    core.ledger[A] = "vm-1"
    core.feed(Ticked(), after_s=CALL_SETTLE_S)
    assert len(made) <= 3
    assert "allocated to pod default/vm-1" in core.reason(A)


def test_a_call_holds_no_id_that_means_no_device() -> None:
    """Kubelet cannot have chosen it, as it was never Healthy; calls that never end must not make the list grow."""
    core = Core(gpu(A), gpu(B))
    core.ledger = {"odd": "pod", "51": "pod"}
    core.pass_time(60)
    core.feed(allocate_call(A))
    assert core.state.calls.waiting
    core.ledger = {}
    core.feed(KubeletAppeared("socket"))
    assert core.state.calls.waiting
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_of_many_ids_that_mean_nothing_some_are_said_and_the_others_counted() -> None:
    core = Core(gpu(A), gpu(B))
    core.ledger = {f"odd {n:03}": "pod" for n in range(500)} | {B: "vm-1"}
    said = [e for e in core.feed(KubeletAppeared("socket 1")) if isinstance(e, Log)]
    lines = [e.fields for e in said if e.name == "device.changed"]
    assert [f["device"] for f in lines if f["health"] == "Healthy"] == [B]
    assert len(lines) == limits.QUOTED_ITEMS_MAX + 1
    (rest,) = [e.fields for e in said if e.name == "devices.unknown"]
    assert (rest["resource"], rest["count"]) == (H100, 500 - limits.QUOTED_ITEMS_MAX)
    assert len(core.device_list()) == 502, "each of them is listed"
    core.ledger = {}
    said = [e for e in core.feed(KubeletAppeared("socket 2")) if isinstance(e, Log)]
    gone = [e.fields["device"] for e in said if e.name == "device.gone"]
    assert len(gone) == limits.QUOTED_ITEMS_MAX
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_more_devices_of_one_status_than_a_line_names_have_one_line() -> None:
    many = [gpu(f"0000:{n:02x}:00.0") for n in range(1, limits.QUOTED_ITEMS_MAX + 3)]
    core = Core(*many, gpu("0000:f0:00.0", fault="broken"))
    (together,) = core.logged("devices.changed")
    assert together.level is Level.INFO
    first = tuple(f.address for f in many[: limits.QUOTED_ITEMS_MAX])
    status = {"health": "Healthy", "cause": "Free", "reason": "free"}
    assert together.fields == {"resource": H100, "devices": (*first, "and 2 more"), **status}
    (alone,) = core.logged("device.changed")
    assert (alone.level, alone.fields["device"]) == (Level.WARNING, "0000:f0:00.0")


class _CountedId(str):
    """An ID that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _CountedId.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_list_of_many_odd_ids_is_not_searched_for_each_of_them() -> None:
    core = Core(gpu(A), gpu(B))
    for turn in range(2):
        core.ledger = {_CountedId(f"odd {turn} {n}"): "pod" for n in range(1000)}
        _CountedId.compared = 0
        core.feed(KubeletAppeared(f"socket {turn}"))
        assert len(core.device_list()) == 1002
        assert _CountedId.compared < 50 * 1000


def test_a_device_that_goes_is_said_with_its_reason_in_the_log_and_in_its_history() -> None:
    core = Core(gpu(A), gpu(B))
    core.effects = []
    core.inspect(A)
    core.inspect(B, gpu(B, driver="nvidia"))
    why = {
        A: "the PCI function is gone from this node",
        B: "bound to nvidia, which is no vfio driver; bind it to vfio-pci to offer it",
    }
    gone = [e.fields for e in core.logged("device.gone")]
    causes = {A: "Gone", B: "NotBound"}
    assert gone == [
        {"resource": H100, "device": a, "cause": causes[a], "reason": reason} for a, reason in why.items()
    ]
    for address, reason in why.items():
        assert (
            core.state.published.history[device_key(pci_address(address))][-1].reason
            == f"no longer listed: {reason}"
        )


def test_the_history_of_a_device_has_its_last_changes_and_no_more_than_the_bound() -> None:
    core = Core(gpu(A))
    core.feed(KubeletAppeared("1"))
    for n in range(2 * HISTORY_ENTRIES):
        core.ledger = {A: f"vm-{n}"}
        core.pass_time(limits.LEDGER_QUIET_S)
    history = core.state.published.history[device_key(A)]
    assert len(history) == HISTORY_ENTRIES
    assert history[-1].reason == core.reason(A)
    assert f"vm-{2 * HISTORY_ENTRIES - 1}" in history[-1].reason


def test_stopping_ends_every_plugin() -> None:
    core = Core(gpu(A), a100(B))
    core.feed(ShutdownRequested())
    assert project(core.state).plugins == {}
    assert project(core.state).stopping


def test_the_report_names_every_selected_function_offered_or_not() -> None:
    core = Core(gpu(A), gpu(B, driver="nvidia"), gpu(C, driver=None))
    found = {d.key: (str(d.health), d.reason) for d in report(core.state)}
    assert found == {
        device_key(A): ("Healthy", "free"),
        device_key(B): (
            "Unhealthy",
            "bound to nvidia, which is no vfio driver; bind it to vfio-pci to offer it",
        ),
        device_key(C): ("Unhealthy", "bound to no driver; bind it to vfio-pci to offer it"),
    }


# --- a rule that does not hold ----------------------------------------------------------------------------


def _twice(device_id: DeviceId, device: Device, status: DeviceStatus) -> AdvertisedDevice:
    """Every device of a list is said to be the first one."""
    return AdvertisedDevice(
        device_id, device_key(A), status.health, device.numa_node, status.message, status.cause
    )


def test_a_rule_that_does_not_hold_ends_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_allocated_is_unhealthy(monkeypatch, "planted")
    core = Core()
    core.ledger = {A: "vm-1"}
    with pytest.raises(
        AssertionError, match=r"0000:01:00\.0: it is allocated to pod default/vm-1 but Unhealthy"
    ):
        core.feed(HostScanned(1, (gpu(A), gpu(B))))


def test_in_production_a_wrong_status_is_said_once_and_the_rest_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Core(settings=replace(SETTINGS, strict=False))
    core.ledger = {A: "vm-1"}
    with monkeypatch.context() as patch:
        plant_allocated_is_unhealthy(patch, "planted")
        said = broken_rules(core.feed(HostScanned(1, (gpu(A), gpu(B)))))
        reason = (
            "quarantined, the rest is served: it is allocated to pod default/vm-1 but Unhealthy (planted); "
            "this is a bug in gpuactors: report it with the journal"
        )
        assert said == [{"resource": H100, "device": A, "reason": reason}]
        assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
        assert [d.reason for d in report(core.state)] == [reason, "free"]
        core.inspect(B, gpu(B, numa_node=1))
        assert broken_rules(core.effects) == said, "said once, as long as it lasts"
    memo.forget()  # what is remembered is wrong still
    core.inspect(B, gpu(B))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_in_production_a_device_that_is_described_twice_is_offered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "_advertised", _twice)
    core = Core(gpu(A), gpu(B), gpu(C), settings=replace(SETTINGS, strict=False))
    assert core.device_list() == {A: "Healthy", B: "Unhealthy", C: "Unhealthy"}
    assert [fields["device"] for fields in broken_rules(core.effects)] == [B, C]


def test_in_production_what_a_pod_has_is_listed_even_if_that_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_lists, "_listed", lambda *_: {H100: {}})
    core = Core(settings=replace(SETTINGS, strict=False))
    core.ledger = {A: "vm-1"}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    assert core.device_list() == {A: "Unhealthy"}
    assert "allocated to pod default/vm-1 but not listed" in core.reason(A)


def test_an_odd_id_in_a_broken_rule_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lists, "_listed", lambda *_: {H100: {}})
    core = Core(settings=replace(SETTINGS, strict=False))
    core.ledger = {"\x1b[2J": "vm-1"}
    core.feed(HostScanned(1, (gpu(A),)))
    (said,) = broken_rules(core.effects)
    assert said["device"] == r"\x1b[2J"


def broken_rules(effects: list[Effect]) -> list[Mapping[str, Field]]:
    return [e.fields for e in effects if isinstance(e, Log) and e.name == "rule.broken"]


def test_a_gpu_that_is_held_at_the_start_is_one_warning() -> None:
    """There were three after each restart: that it is in use, by which process, and by which other one."""
    core = Core()
    core.enabled = {"0000:01:00.0": 1}
    core.feed(HostScanned(core.scan, (gpu("01:00.0"),)))
    core.pass_time(10)
    for pids in ((4711,), (4711, 4712)):
        core.holders = {1: tuple(Holder(pid, "qemu", None) for pid in pids)}
        core.pass_time(10)
    lines = core.logged("device.changed")
    assert [line.level for line in lines] == [Level.WARNING, Level.INFO, Level.INFO]
    assert {line.fields["cause"] for line in lines} == {"HeldByOther"}
    assert "process 4712" in str(lines[-1].fields["reason"])


def test_a_held_gpu_is_no_second_warning_after_a_moment_in_which_nobody_knows_whose_it_is() -> None:
    """A daemon that begins to serve reads kubelet's ledger anew, for its predecessor's grants."""
    core = Core(settings=replace(SETTINGS, hand_over=True))
    core.enabled = {"0000:01:00.0": 1}
    core.feed(KubeletAppeared("1"), HostScanned(core.scan, (gpu("01:00.0"),)))
    core.feed(PredecessorGone("none was there", {}), after_s=0.01)
    core.pass_time(10)

    def said() -> list[tuple[Level, str]]:
        lines = core.logged("device.changed")
        return [(line.level, str(line.fields["cause"])) for line in lines]

    held, unknown = "HeldByOther", "HolderUnknown"
    at_start = [(Level.WARNING, held), (Level.INFO, unknown), (Level.INFO, held)]
    assert said() == at_start
    core.enabled = {}
    core.pass_time(POLL_S + CLOSING_S)
    assert core.device_list() == {"0000:01:00.0": "Healthy"}
    core.enabled = {"0000:01:00.0": 1}
    core.pass_time(10)
    assert said()[len(at_start) :][-1] == (Level.WARNING, held), "another use is said"
