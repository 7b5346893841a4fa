"""Cards that are given away in parts, as the doctor judges them: which parts nobody offers, and why; and that no advice
takes a card from the driver that makes its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from gpuactors.cli.doctor.checks.gpus import check
from gpuactors.cli.doctor.checks.kubevirt import permitted
from gpuactors.cli.doctor.facts import Devices, Facts, PermittedDevice
from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.control.view import DeviceView
from gpuactors.core.values.cause import Cause
from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.host.vgpu import VgpuType
from tests.cli.doctor.rig import GPU, Patient, findings, open_patient

FIRST, SECOND = f"{GPU[:-1]}4", f"{GPU[:-1]}5"
UUID = "c5f9a3a0-0000-4000-8000-000000000001"


@pytest.fixture
def patient() -> Iterator[Patient]:
    with open_patient() as found:
        yield found


def card(patient: Patient, driver: str | None, parts: str | None, vendor: str = "8086") -> None:
    """A card on `driver` with two virtual functions on `parts`."""
    spec = PciSpec(GPU, vendor, "56c0", "038000", 35, driver=driver, total_vfs=2)
    patient.node.tree.plug(spec)
    patient.node.tree.virtualize(GPU, 2, parts)
    patient.flags["select"] = f"vendor={vendor}"


def of_gpus(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.check is Check.GPUS_USABLE]


def judged(patient: Patient) -> list[Finding]:
    return of_gpus(findings(patient.examined(pre=True)))


def test_parts_that_a_virtual_machine_can_have_are_a_pass_and_so_is_their_card(patient: Patient) -> None:
    card(patient, "xe", "vfio-pci")
    assert [(f.level, f.message) for f in judged(patient)] == [
        (Level.PASS, f"given away in parts, and so not whole: {GPU}"),
        (Level.PASS, "2 of 2 could be given to virtual machines"),
    ]


@pytest.mark.parametrize("driver", [None, "xe"])
def test_parts_on_no_vfio_driver_are_offered_to_claims_alone(patient: Patient, driver: str | None) -> None:
    card(patient, "xe", driver)
    (parts,) = [f for f in judged(patient) if f.cause is Cause.NOT_BOUND]
    assert parts.devices == (FIRST, SECOND)
    assert f"for a in {FIRST} {SECOND}; do driverctl set-override $a vfio-pci" in parts.remedy
    patient.flags["dra"] = "on"
    assert [f.level for f in judged(patient)] == [Level.PASS, Level.PASS]
    assert "2 of 2 could be given to virtual machines; a claim binds" in judged(patient)[1].message


@pytest.mark.parametrize(
    ("driver", "cause", "words"),
    [
        ("vfio-pci", Cause.PHYSICAL_FUNCTION_ON_VFIO, "a VM would need the token"),
        (None, Cause.PHYSICAL_FUNCTION_NOT_READY, "bound to no driver"),
    ],
)
def test_parts_that_their_card_keeps_from_everybody_are_named_with_the_reason(
    patient: Patient, driver: str | None, cause: Cause, words: str
) -> None:
    card(patient, driver, "vfio-pci")
    (parts,) = [f for f in judged(patient) if f.cause is cause]
    assert (parts.level, parts.devices) == (Level.WARN, (FIRST, SECOND))
    assert words in parts.message


@pytest.mark.parametrize("dra", ["off", "on"])
def test_no_advice_binds_a_card_that_has_parts(patient: Patient, dra: str) -> None:
    for driver in ("xe", None, "vfio-pci"):
        with open_patient() as other:
            card(other, driver, "vfio-pci")
            other.flags["dra"] = dra
            found = judged(other)
            assert found
            assert not [f for f in found if f"set-override {GPU} " in f.remedy or f" {GPU} " in f.remedy]


def test_virtual_functions_of_nvidia_without_a_type_are_a_warning_until_the_card_gives_some_away(
    patient: Patient,
) -> None:
    card(patient, "nvidia", "nvidia", vendor="10de")
    found = patient.examined(pre=True).facts
    (untyped,) = [f for f in of_gpus([*check(found)]) if FIRST in f.devices]
    assert (untyped.level, untyped.devices) == (Level.WARN, (FIRST, SECOND))
    typed = with_views(found, lambda v: vgpu(v) if v.address == FIRST else v)
    (untyped,) = [f for f in of_gpus([*check(typed)]) if SECOND in f.devices]
    assert (untyped.level, untyped.devices) == (Level.PASS, (SECOND,))
    assert "NVIDIA's driver" in untyped.message


def test_a_vgpu_whose_type_has_no_name_is_named_with_the_setting_and_permitted_to_nobody(
    patient: Patient,
) -> None:
    """The card is full, so that its lists name no type any more."""
    types = (VgpuType(1147, "NVIDIA L40S-1Q", 1), VgpuType(1148, "NVIDIA L40S-48Q", 1))
    spec = PciSpec(GPU, "10de", "26b9", "030200", 35, driver="nvidia", total_vfs=1, vgpu_types=types)
    patient.node.tree.plug(spec)
    patient.node.tree.virtualize(GPU, 1, "nvidia")
    patient.node.tree.set_vgpu_type(FIRST, 1147)
    found = patient.examined(pre=True)
    (unnamed,) = [f for f in findings(found) if f.cause is Cause.VGPU_UNNAMED]
    assert (unnamed.level, unnamed.devices) == (Level.WARN, (FIRST,))
    assert f"--vgpu-type='{GPU}/1147=NAME'" in unnamed.message
    assert permitted(found.facts).all == ()
    patient.flags["vgpu_type"] = "1147=NVIDIA L40S-1Q"
    found = patient.examined(pre=True)
    assert [f for f in findings(found) if f.cause is Cause.VGPU_UNNAMED] == []
    assert permitted(found.facts).pci == (
        PermittedDevice("nvidia.com/NVIDIA_L40S-1Q", "10DE:26B9", is_external=True),
    )


def test_a_mediated_device_is_judged_by_its_cause_and_its_card_is_let_alone(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    found = patient.examined(pre=True).facts
    assert isinstance(found.devices, Devices)
    (parent,) = found.devices.view.devices
    mdev = replace(vgpu(parent), address=UUID, kind="mediated-device", parent=GPU)
    both = replace(found.devices.view, devices=(parent, mdev))
    facts = replace(found, devices=replace(found.devices, view=both))
    assert [(f.level, f.devices) for f in of_gpus([*check(facts)])] == [(Level.PASS, ()), (Level.PASS, ())]
    lost = {"cause": str(Cause.NODE_MISSING), "reason": "/dev/vfio/7 does not exist"}
    facts = with_views(facts, lambda v: replace(v, **lost) if v.address == UUID else v)
    (bad,) = [f for f in of_gpus([*check(facts)]) if UUID in f.devices]
    assert (bad.level, bad.cause) == (Level.FAIL, Cause.NODE_MISSING)


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci"])
def test_a_dead_gpu_is_a_failure_whatever_driver_it_is_on_and_whoever_has_it(
    patient: Patient, driver: str
) -> None:
    patient.gpu(driver=driver)
    patient.node.tree.fail_fatally(GPU)
    (bad,) = of_gpus([*check(patient.examined(pre=True).facts)])
    assert (bad.level, bad.cause, bad.devices) == (Level.FAIL, Cause.DEAD, (GPU,))
    assert "has had a fatal PCIe error" in bad.message
    assert "/sys/bus/pci/rescan" in bad.remedy


def test_a_part_without_its_driver_is_never_to_be_bound_to_vfio(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    found = patient.examined(pre=True).facts
    lost = {"kind": "mediated-device", "address": UUID, "reason": "a mediated device on no driver"}
    facts = with_views(found, lambda v: replace(v, **lost))
    (bad,) = of_gpus([*check(facts)])
    assert (bad.level, bad.cause) == (Level.WARN, Cause.NOT_BOUND)
    assert "vfio-pci" not in bad.remedy


def vgpu(view: DeviceView) -> DeviceView:
    known = {"kind": "vgpu", "profile": "NVIDIA A40-12Q", "listed": True, "health": "Healthy"}
    return replace(view, **known, cause=str(Cause.FREE), reason="free")


def with_views(facts: Facts, change: Callable[[DeviceView], DeviceView]) -> Facts:
    assert isinstance(facts.devices, Devices)
    views = tuple(map(change, facts.devices.view.devices))
    return replace(facts, devices=replace(facts.devices, view=replace(facts.devices.view, devices=views)))
