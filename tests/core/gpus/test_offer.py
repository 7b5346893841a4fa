"""What the node offers to claims, and what it says of a device's health."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.values.claim import DraHealth
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Level
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.slices import BlockKind, BlockReason, OfferedDevice
from tests.core.builders import SETTINGS, A, B, allocate_call, audio, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, core_with, name


def offered(core: ClaimCore, address: str) -> OfferedDevice:
    assert core.wanted.offer is core.state.offered.offer
    device = core.state.offered.devices[DeviceKey(address)]
    assert device is not None
    return device


def test_a_gpu_on_its_host_driver_is_offered_as_is_one_on_vfio() -> None:
    core = ClaimCore(gpu(A, group=1, driver="nvidia"), gpu(B, group=2))
    assert [offered(core, a).blocked for a in (A, B)] == [None, None]


def test_a_gpu_offers_iommufd_as_long_as_the_node_has_it_and_a_bind_changes_nothing_of_the_slice() -> None:
    """A GPU on its host's driver has no cdev. If the attribute followed the binding, no claim could ask for a GPU by
    it, and each prepare and each release would write the slice."""
    core = ClaimCore(replace(gpu(A, group=1, driver="nvidia"), iommufd=True))
    before = offered(core, A)
    assert before.attributes["iommuFDEnabled"].value is True
    core.prepare(allocated(name("one"), A))
    assert replace(offered(core, A), claimed=False) == before


def test_a_companion_on_the_host_does_not_block_it() -> None:
    core = ClaimCore(gpu(A, group=1), audio("0000:01:00.1", 1, driver="snd_hda_intel"))
    assert offered(core, A).blocked is None


def test_a_gpu_that_a_pod_has_by_the_device_plugin_is_held_and_healthy() -> None:
    core = ClaimCore(gpu(A, group=1), gpu(B, group=2))
    core.feed(allocate_call(A))
    core.ledger[A] = "vm-1"
    core.pass_time(6)
    assert offered(core, A).blocked == BlockReason(BlockKind.HELD, "Allocated")
    assert {h.health for h in core.wanted.health} == {DraHealth.HEALTHY}


def test_a_claimed_gpu_stays_without_a_taint_and_the_device_plugin_does_not_offer_it() -> None:
    core = ClaimCore(gpu(A, group=1), gpu(B, group=2))
    core.prepare(allocated(name("one"), A))
    assert (offered(core, A).claimed, offered(core, A).blocked) == (True, None)
    assert core.device_list()[A] == "Unhealthy"
    assert core.reason(A) == "in use by the claim default/one"
    core.unprepare(name("one"))
    assert core.device_list()[A] == "Healthy"


def test_a_gpu_in_no_group_is_blocked_and_unhealthy() -> None:
    core = ClaimCore(replace(gpu(A), iommu_group=None))
    assert offered(core, A).blocked == BlockReason(BlockKind.UNHEALTHY, "NoIommuGroup")
    assert [h.health for h in core.wanted.health] == [DraHealth.UNHEALTHY]


def nvswitch(driver: str | None) -> PciFunction:
    return replace(
        gpu("0000:05:00.0", 5, device="22a3", model="GH100 [H100 NVSwitch]", driver=driver),
        class_code="068000",
    )


def test_a_gpu_in_a_fabric_of_the_host_is_blocked_and_one_on_vfio_is_not() -> None:
    core = ClaimCore(gpu(A, group=1, driver="nvidia"), gpu(B, group=2), nvswitch("nvidia-nvswitch"))
    assert offered(core, A).blocked == BlockReason(BlockKind.UNHEALTHY, "FabricOfHost")
    assert offered(core, B).blocked is None
    assert next(h.message for h in core.wanted.health if h.device == "gpu-0000-01-00-0").startswith(
        "0000:01:00.0 is on its host's driver, in an NVLink fabric that the host runs (NVSwitch 0000:05:00.0 is on"
    )


def test_a_gpu_is_offered_when_the_nvswitches_are_off_the_hosts_driver() -> None:
    core = ClaimCore(gpu(A, group=1, driver="nvidia"), nvswitch("nvidia-nvswitch"))
    for driver in (None, "vfio-pci"):
        core.changed(nvswitch(driver))
        assert offered(core, A).blocked is None
        core.changed(nvswitch("nvidia-nvswitch"))
        assert offered(core, A).blocked is not None


def test_a_gpu_without_a_driver_and_another_vendors_device_are_in_no_fabric_of_the_host() -> None:
    every = replace(SETTINGS, selectors=(*SETTINGS.selectors, Selector(class_prefix="03")))
    other = replace(gpu(B, group=2, driver="amdgpu"), vendor="1002")
    core = ClaimCore(gpu(A, group=1, driver=None), other, nvswitch("nvidia-nvswitch"), settings=every)
    assert [offered(core, a).blocked for a in (A, B)] == [None, None]


def test_of_a_gpu_in_no_group_the_health_says_so_also_beside_nvswitches_of_the_host() -> None:
    core = ClaimCore(replace(gpu(A, driver="nvidia"), iommu_group=None), nvswitch("nvidia-nvswitch"))
    assert offered(core, A).blocked == BlockReason(BlockKind.UNHEALTHY, "NoIommuGroup")
    assert "IOMMU" in next(h.message for h in core.wanted.health if h.device == "gpu-0000-01-00-0")


def test_the_operator_may_allow_a_gpu_to_leave_the_fabric() -> None:
    allowed = GpuSettings(nvswitch_allowed=True)
    core = ClaimCore(gpu(A, group=1, driver="nvidia"), nvswitch("nvidia-nvswitch"), gpu_settings=allowed)
    assert offered(core, A).blocked is None


def test_an_nvswitch_is_offered_as_what_it_is() -> None:
    core = ClaimCore(gpu(A, group=1), nvswitch("vfio-pci"))
    assert [offered(core, a).attributes["type"].value == "nvswitch" for a in (A, "0000:05:00.0")] == [
        False,
        True,
    ]


def test_a_claimed_gpu_that_is_pulled_out_is_unhealthy_until_the_claim_ends() -> None:
    core = ClaimCore(gpu(A, group=1))
    core.prepare(allocated(name("one"), A))
    core.unplugged(A)
    gone = offered(core, A)
    assert (gone.claimed, gone.blocked) == (True, BlockReason(BlockKind.UNHEALTHY, "Gone"))
    assert [(h.health, h.message) for h in core.wanted.health] == [
        (DraHealth.UNHEALTHY, "the PCI function is gone from this node")
    ]
    core.unprepare(name("one"))
    assert core.wanted.health == ()
    assert core.wanted.offer is not None
    assert core.wanted.offer.devices == ()


@pytest.mark.parametrize("driver", [None, "nvidia"])
def test_a_claimed_gpu_that_loses_its_vfio_driver_under_its_holder_is_unhealthy(driver: str | None) -> None:
    """An unplug waits for the process that has the device open: the function is there for as long, without a driver."""
    core = ClaimCore(gpu(A, group=1, driver="nvidia"), gpu(B, group=2))
    core.prepare(allocated(name("one"), A))
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY, DraHealth.HEALTHY]
    core.changed(gpu(A, group=1, driver=driver))
    assert [h.health for h in core.wanted.health] == [DraHealth.UNHEALTHY, DraHealth.HEALTHY]
    assert core.wanted.health[0].message.startswith(f"bound to {driver or 'no driver'}")
    core.changed(gpu(A, group=1))
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY, DraHealth.HEALTHY]


def test_a_claimed_gpu_is_healthy_while_it_is_bound_and_until_that_was_inspected() -> None:
    core = core_with(gpu(A, group=1, driver="nvidia"), one=(A,))
    core.held_back = {"device"}
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.BINDING
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY]
    core.held_back = {"inspection"}
    core.feed_answers()
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY]
    core.functions[PciAddress(A)] = gpu(A, group=1, driver=None)
    core.release("inspection")
    assert [h.health for h in core.wanted.health] == [DraHealth.UNHEALTHY]


def test_that_a_claim_has_it_is_no_warning_of_the_device_plugin() -> None:
    core = core_with(gpu(A, group=1), one=(A,))
    core.effects.clear()
    core.prepare(name("one"))
    changed = core.logged("device.changed")
    assert [(e.level, e.fields["cause"]) for e in changed] == [(Level.INFO, "ClaimedElsewhere")]
