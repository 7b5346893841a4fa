"""A changed configuration file that is used without a restart: the lists follow, and nobody loses a device."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActFailed
from gpuactors.core.events.daemon import ConfigUnused, ConfigUsed
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreferenceRequest
from gpuactors.core.events.host import FunctionInspected, HostChanged, HostScanned
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.gpus.offer import why_blocked
from gpuactors.core.gpus.returns import RETURN_RETRY_S
from gpuactors.core.reports.snapshot import project
from gpuactors.core.step import CALL_SETTLE_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ActFault, ClaimsOf, DraHealth, Prepared
from gpuactors.core.values.effects import Effect, Granted, Refused
from gpuactors.core.values.model import (
    DeviceId,
    InspectedKey,
    PciAddress,
    PciFunction,
    ResourceName,
    Token,
    device_key,
)
from gpuactors.core.values.own_resources import parse_model_rule, parse_rule
from gpuactors.core.values.selector import Selector, parse_selector
from gpuactors.core.values.slices import BlockKind, BlockReason
from gpuactors.core.values.vgpu import VendorVgpu, parse_own_type
from tests.core.builders import H100, SETTINGS, A, B, C, Core, allocate_call, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.observe.recording import RecordedSteps, write
from tests.replay.replayed import replayed

BIG: Final = ResourceName("example.com/big")

KEYS: Final[dict[str, tuple[Selector, ...]]] = {
    "select": (parse_selector("address=0000:01:00.0"), *map(parse_rule, [f"{BIG}=address=0000:02:00.0"])),
    "resource": (*SETTINGS.selectors, parse_rule(f"{BIG}=address=0000:02:00.0")),
    "resource_name": (*SETTINGS.selectors, parse_model_rule(f"10de:2331={BIG}")),
}
"""Selectors by which B is of another resource, and A stays, by the setting that has changed."""


def two() -> Core:
    return Core(gpu(A), gpu(B, device="2331"))


def used(core: Core, *selectors: Selector, keys: tuple[str, ...] = ("select",)) -> None:
    """The file has these selectors now, and the scan that follows comes back with all that was there."""
    core.feed(ConfigUsed(keys, selectors, core.state.daemon.settings.vgpu_types))
    scanned(core, *core.state.host.functions.values())


def scanned(core: Core, *functions: PciFunction) -> None:
    """The scan by the new selectors comes back with these."""
    scan = project(core.state).inspections.scan
    assert scan is not None, "a scan by the new selectors is requested"
    core.feed(HostScanned(scan, functions))


# --- what follows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_a_free_device_has_its_new_name_at_once_and_the_old_resource_keeps_the_others(key: str) -> None:
    core = two()
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.feed(ConfigUsed((key,), KEYS[key], ()))
    assert (core.device_list(), core.device_list(BIG)) == ({A: "Healthy"}, {B: "Healthy"})
    (line,) = core.logged("config.used")
    assert line.fields == {"changed": key}


def test_the_reader_gets_the_selectors_with_a_scan_that_the_core_requests() -> None:
    core = two()
    before = project(core.state).inspections
    assert (before.scan, before.selectors) == (None, SETTINGS.selectors)
    core.feed(ConfigUsed(("select",), KEYS["select"], ()))
    wanted = project(core.state).inspections
    assert (wanted.scan is not None, wanted.selectors) == (True, KEYS["select"])


def test_a_scan_that_was_begun_before_is_followed_by_another_one() -> None:
    core = Core()
    first = project(core.state).inspections.scan
    core.feed(ConfigUsed(("select",), KEYS["select"], ()))
    assert project(core.state).inspections.scan == first
    assert first is not None
    core.feed(HostScanned(first, ()))
    second = project(core.state).inspections.scan
    assert second is not None
    core.feed(HostScanned(second, (gpu(A),)))
    assert core.device_list() == {A: "Healthy"}


def test_what_only_the_new_selectors_choose_comes_with_the_scan() -> None:
    core = two()
    other = replace(gpu(C), vendor="1002", class_code="120000", model="")
    core.feed(ConfigUsed(("select",), (*SETTINGS.selectors, parse_selector("vendor=1002")), ()))
    scanned(core, *core.state.host.functions.values(), other)
    assert core.device_list(ResourceName("amd.com/2330")) == {C: "Healthy"}


def test_a_gpu_that_was_inspected_as_excluded_has_no_name_and_is_in_no_list_before_the_scan() -> None:
    """As one that a claim keeps. It was nvidia.com/2331 until the scan, and kubelet had that resource from then on."""
    core = Core(gpu(A), gpu(B))
    core.feed(ConfigUsed(("select",), (*SETTINGS.selectors, parse_selector(f"!address={B}")), ()))
    scanned(core, gpu(A), replace(gpu(B), model=None))
    core.feed(ConfigUsed(("select",), SETTINGS.selectors, ()))
    assert [*core.state.published.device_lists] == [H100]
    assert core.device_list() == {A: "Healthy"}
    scanned(core, gpu(A), gpu(B))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_an_excluded_device_leaves_the_list_and_one_in_an_answer_only_later() -> None:
    core = two()
    core.feed(PreferenceAsked(Token(2), H100, (PreferenceRequest((DeviceId(A),), (), 1),)))
    excluded = [parse_selector(f"!address={address}") for address in (A, B)]
    used(core, *SETTINGS.selectors, *excluded)
    assert core.device_list().keys() == {A, B}, "kubelet panics if it loses a device that it picks"
    core.pass_time(CALL_SETTLE_S + 0.1)
    assert core.device_list() == {}


def test_all_devices_of_a_resource_under_another_name_leave_it_with_capacity_0_until_it_retires() -> None:
    core = two()
    used(core, *SETTINGS.selectors, parse_rule(f"{BIG}=vendor=10de"), keys=("resource",))
    assert (core.device_list(), core.device_list(BIG)) == ({}, {A: "Healthy", B: "Healthy"})
    core.pass_time(limits.RETIRE_EMPTY_AFTER_S + 1.0)
    assert [*core.state.published.plugins] == [BIG]


def test_no_device_left_is_said() -> None:
    core = two()
    used(core, parse_selector("vendor=1002"))
    assert len(core.logged("host.no_gpus")) == 1


def test_the_name_of_a_vgpu_type_follows() -> None:
    card = replace(gpu("04:00.0", 4, driver="nvidia"), has_virtual_functions=True)
    vgpu = replace(
        gpu("04:00.4", 5, driver="nvidia", has_node=True),
        physical=card.address,
        vfio_bound=True,
        vgpu=VendorVgpu(1147, (), driver_bind=1),
    )
    core = Core(card, vgpu)
    assert ResourceName("nvidia.com/NVIDIA_L40S-1Q") not in core.state.published.device_lists
    core.feed(ConfigUsed(("vgpu_type",), SETTINGS.selectors, (parse_own_type("1147=NVIDIA L40S-1Q"),)))
    assert core.device_list(ResourceName("nvidia.com/NVIDIA_L40S-1Q")) == {vgpu.address: "Healthy"}


# --- who has one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_a_device_that_a_pod_has_keeps_its_name_until_the_pod_ends(key: str) -> None:
    core = two()
    core.feed(KubeletAppeared("kubelet"))
    core.ledger[B] = "vm"
    core.pass_time(40)
    used(core, *KEYS[key], keys=(key,))
    assert B in core.device_list()
    assert all(B not in core.device_list(r) for r in core.state.published.device_lists if r != H100)
    del core.ledger[B]
    core.pass_time(60)
    assert (B in core.device_list(), core.device_list(BIG)) == (False, {B: "Healthy"})


def test_an_excluded_device_of_a_pod_is_read_on_and_is_gone_after_its_pod() -> None:
    core = two()
    core.feed(KubeletAppeared("kubelet"))
    core.ledger[A] = "vm"
    core.pass_time(40)
    used(core, *SETTINGS.selectors, parse_selector(f"!address={A}"))
    assert A in core.device_list()
    assert A in project(core.state).inspections.given
    del core.ledger[A]
    core.pass_time(60)
    assert core.device_list() == {B: "Healthy"}


NOT_A: Final = (*SETTINGS.selectors, parse_selector(f"!address={A}"))
ONE, TWO = name("one"), name("two")


class Choosing(ClaimCore):
    """A scan and an inspection have what the selectors choose, and what is given, as the reader of sysfs."""

    def scanned(self) -> list[Effect]:
        there = self.functions
        self.functions = {a: f for a, f in there.items() if self._is_read(a)}
        try:
            return super().scanned()
        finally:
            self.functions = there

    def _answer(self) -> Event | None:
        event = super()._answer()
        if isinstance(event, FunctionInspected) and not self._is_read(event.address):
            return replace(event, functions=())
        return event

    def _is_read(self, address: InspectedKey) -> bool:
        wanted = project(self.state).inspections
        excluded = {s.address for s in wanted.selectors if s.exclude}
        return address not in excluded or address in wanted.given


def claimed(driver: str = "vfio-pci") -> Choosing:
    """The claim `one` has A, which the file excludes then, and the claim `two` was given it as well."""
    core = Choosing(gpu(A, driver=driver), gpu(B, 2))
    core.created(allocated(ONE, A), allocated(TWO, A))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    core.feed(ConfigUsed(("select",), NOT_A, ()))
    core.scanned()
    return core


@pytest.mark.parametrize("driver", ["vfio-pci", "nvidia"])
def test_a_claim_keeps_its_device_and_gives_it_back(driver: str) -> None:
    core = claimed(driver)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared), "kubelet asks again after its restart"
    assert core.state.gpus.reserved.keys() == {device_key(A)}
    assert core.logged("claim.astray") == []
    core.unprepare(ONE)
    assert core.driver(A) == driver
    assert device_key(A) not in core.state.offered.devices
    core.feed(HostChanged(PciAddress(A), None, "change pci"))
    assert A not in core.state.host.functions, "it is read no more"


def test_a_device_that_its_claim_alone_keeps_is_offered_as_not_selected_and_judged() -> None:
    core = claimed()
    kept = core.state.offered.devices[device_key(A)]
    assert (kept.claimed, kept.blocked) == (True, BlockReason(BlockKind.UNHEALTHY, "NotSelected"))
    assert "no selector matches it (--select)" in why_blocked(core.state, device_key(A))
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY, DraHealth.HEALTHY]
    core.changed(replace(gpu(A), has_fatal_errors=True))
    assert [h.health for h in core.wanted.health] == [DraHealth.UNHEALTHY, DraHealth.HEALTHY]


def test_a_device_that_is_not_selected_and_is_plugged_in_again_is_its_claims() -> None:
    core = claimed()
    core.unplugged(A)
    assert len(core.logged("claim.astray")) == 1
    core.changed(gpu(A))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)


def test_another_claim_does_not_get_a_device_that_is_not_selected_any_more() -> None:
    core = claimed()
    assert "no selector matches it (--select)" in core.refusal(core.prepare(TWO))
    core.unprepare(ONE)
    core.feed(HostChanged(PciAddress(A), None, "change pci"))
    assert "or no selector matches it any more" in core.refusal(core.prepare(TWO))


def test_a_return_that_is_owed_is_made_although_the_device_is_not_selected_any_more() -> None:
    core = claimed("nvidia")
    core.held_back = {"device"}
    core.unprepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "nvidia is not loaded", ActFault.NO_DRIVER, driver_kind=ClaimsOf.GPUS))
    assert core.state.gpus.owed.keys() == {device_key(A)}
    core.feed(HostChanged(PciAddress(A), None, "change pci"))
    core.held_back = set()
    core.pass_time(RETURN_RETRY_S + 1)
    assert core.driver(A) == "nvidia"


@pytest.mark.parametrize("first", ["scan", "checkpoint"])
def test_a_daemon_that_starts_with_narrower_selectors_reads_the_device_of_a_claim(first: str) -> None:
    before = claimed()
    core = Choosing(settings=before.state.daemon.settings, disk=before.disk)
    core.functions, core.api = before.functions, before.api
    if first == "scan":
        core.held_back = {"load"}
        core.scanned()
        assert A not in core.state.host.functions
        core.held_back = set()
        core.feed_answers()
    else:
        core.feed_answers()
        core.scanned()
    assert A in core.state.host.functions
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.logged("claim.astray") == []


def test_a_call_that_waits_is_answered_by_what_is_there_when_it_ends() -> None:
    core = two()
    assert core.answers(allocate_call(B)) == [], "it waits for an inspection"
    core.feed(ConfigUsed(("resource",), KEYS["resource"], ()))
    (answer,) = core.answers(core.inspected(B, core.state.host.functions[B]))
    assert isinstance(answer, Refused)
    assert answer.causes == (Cause.NOT_SELECTED,)


def test_an_allocate_of_the_new_name_is_granted() -> None:
    core = two()
    core.feed(ConfigUsed(("resource",), KEYS["resource"], ()))
    core.feed(AllocateAsked(Token(3), BIG, ((DeviceId(B),),)))
    (answer,) = core.answers(core.inspected(B, core.state.host.functions[B]))
    assert isinstance(answer, Granted)


def _number(core: Core) -> int:
    scan = project(core.state).inspections.scan
    assert scan is not None
    return scan


# --- what is not used -------------------------------------------------------------------------------------

UNUSED: Final[dict[str, tuple[ConfigUnused, str, str]]] = {
    "it is wrong": (ConfigUnused("a is b"), "config.refused", "it is refused: a is b"),
    "it needs a restart": (
        ConfigUnused("", ("dra", "http_address")),
        "config.restart_needed",
        "dra, http_address changed, which needs a restart: nothing of the change is used",
    ),
}


@pytest.mark.parametrize("why", UNUSED)
def test_a_file_that_is_not_used_changes_nothing_and_is_said(why: str) -> None:
    event, line, said = UNUSED[why]
    core = two()
    before = core.state
    core.feed(event)
    assert (core.state.daemon.settings, core.state.published) == (before.daemon.settings, before.published)
    assert project(core.state).inspections == project(before).inspections
    assert (core.state.daemon.config_unused, len(core.logged(line))) == (said, 1)
    core.feed(ConfigUsed((), SETTINGS.selectors, ()))
    assert core.state.daemon.config_unused == ""


# --- a journal --------------------------------------------------------------------------------------------


class Recorded(RecordedSteps, Core):
    """`Core`, whose steps are kept."""


def recorded(*functions: PciFunction) -> Recorded:
    core = Recorded()
    core.feed(HostScanned(_number(core), functions))
    return core


def test_a_replay_has_each_change(tmp_path: Path) -> None:
    core = recorded(gpu(A), gpu(B, device="2331"))
    for key in KEYS:
        core.feed(ConfigUsed((key,), KEYS[key], ()), after_s=1.0)
        core.feed(HostScanned(_number(core), tuple(core.state.host.functions.values())))
    core.feed(ConfigUnused("", ("dra",)))
    write(tmp_path, *core.steps)
    shown = "\n".join(replayed(tmp_path))
    assert "the configuration file has changed, and is used: resource_name" in shown
    assert "the configuration file has changed, and needs a restart: dra" in shown
