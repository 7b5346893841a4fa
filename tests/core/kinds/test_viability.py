"""The kernel's rule for an IOMMU group: what of it is the GPU's, and what keeps it from virtual machines."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors.core.kinds.table import slice_name
from gpuactors.core.kinds.viability import is_companion, with_companions
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import DraHealth, Prepared, Target
from gpuactors.core.values.model import Health, PciFunction, device_key, pci_address
from gpuactors.core.values.slices import BlockKind, BlockReason
from tests.core.builders import Core, audio, disk, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, core_with, name

GPU, AUDIO, USB, OTHER = map(pci_address, ("0000:01:00.0", "0000:01:00.1", "0000:01:00.2", "0000:02:00.0"))
GROUP: Final = 7
ON_HOST: Final = gpu(GPU, GROUP, driver="nvidia")
ON_VFIO: Final = gpu(GPU, GROUP)
SOUND: Final = audio(AUDIO, GROUP, driver="snd_hda_intel")


def function(ids: str, class_code: str, driver: str | None, address: str = OTHER) -> PciFunction:
    """A function in the GPU's group."""
    vendor, device = ids.split(":")
    other = gpu(address, GROUP, driver=driver)
    return replace(other, vendor=vendor, device=device, class_code=class_code, model=None)


OF_THE_HOST: Final = {
    "the root disk": function("15b7:5030", "010802", "nvme"),
    "a network card": function("8086:15f3", "020000", "igc"),
    "the network card of a converged card": function("15b3:101d", "020000", "mlx5_core"),
    "a USB controller": function("1022:149c", "0c0330", "xhci_hcd"),
    "a SATA controller": function("1022:7901", "010601", "ahci"),
    "a management controller's graphics": function("1a03:2000", "030000", "ast"),
    "a processor's graphics": function("8086:4680", "030000", "i915", "0000:00:02.0"),
    "a security processor": function("1022:15df", "108000", "ccp"),
    "another GPU": gpu(OTHER, GROUP, driver="nvidia"),
    "another card's audio": audio("0000:02:00.1", GROUP, driver="snd_hda_intel"),
    "a bridge whose driver does DMA": function("8086:1234", "060400", "shpchp", "0000:00:01.0"),
    "a host bridge with a driver": function("1022:1463", "060000", "k10temp", "0000:00:18.3"),
    "a security processor in the slot of a processor's graphics": function("1022:15df", "108000", "ccp", USB),
    "the host's USB controller in that slot": function("1022:15e0", "0c0330", "xhci_hcd", USB),
    "a function of the slot that cannot be read": replace(SOUND, vendor="", device=""),
    "a virtual function of another card": function("8086:154c", "020000", "iavf", "0000:01:10.0"),
    "a virtual function in its slot": replace(
        function("10de:2330", "030200", "nvidia", USB), physical=pci_address("0000:01:00.3")
    ),
    "a virtual function in its slot, without its link": replace(
        function("10de:2330", "030200", "nvidia", USB), unlinked=True
    ),
    "a function of its slot that has virtual functions": replace(
        function("10de:2330", "030200", "nvidia", USB), has_virtual_functions=True
    ),
}
"""Functions of the host in a GPU's group, which a claim must leave alone."""

HARMLESS: Final = {
    "a disk without a driver": disk(OTHER, GROUP, driver=None),
    "a disk that the operator has bound to vfio": disk(OTHER, GROUP, driver="vfio-pci"),
    "a disk on a stub": disk(OTHER, GROUP, driver="pci-stub"),
    "a root port": function("8086:1901", "060400", "pcieport", "0000:00:01.0"),
    "a bridge without a driver": function("8086:1901", "060400", None, "0000:00:01.0"),
    "another GPU on vfio": gpu(OTHER, GROUP),
    "a function of another vendor in the slot, without a driver": function("1022:15df", "108000", None, USB),
    "a virtual function in its slot, without a driver": replace(
        function("10de:2330", "030200", None, USB), physical=pci_address("0000:01:00.3")
    ),
}


def claimed(*functions: PciFunction) -> tuple[ClaimCore, object]:
    core = ClaimCore(*functions)
    return core, core.answer(core.prepare(allocated(name("one"), GPU)))


def blocked(core: ClaimCore) -> BlockReason | None:
    assert core.state.offered.offer is not None
    return next(d.blocked for d in core.state.offered.offer.devices if d.name == slice_name(device_key(GPU)))


@pytest.mark.parametrize("gpu_function", [ON_HOST, ON_VFIO], ids=["on nvidia", "on vfio"])
@pytest.mark.parametrize("kind", OF_THE_HOST)
def test_a_claim_leaves_the_hosts_functions_alone_and_names_the_one_in_its_way(
    kind: str, gpu_function: PciFunction
) -> None:
    other = OF_THE_HOST[kind]
    core = ClaimCore(gpu_function, other)
    assert blocked(core) == BlockReason(BlockKind.UNHEALTHY, "GroupNotViable")
    assert {h.health for h in core.wanted.health if h.device == "gpu-0000-01-00-0"} == {DraHealth.UNHEALTHY}
    reason = core.refusal(core.prepare(allocated(name("one"), GPU)))
    assert f"{other.address} is bound to {other.driver}" in reason
    assert "leaves it to the host" in reason
    assert (core.acts, core.driver(other.address)) == ([], other.driver)


@pytest.mark.parametrize("kind", OF_THE_HOST)
def test_the_device_plugin_says_the_same(kind: str) -> None:
    other = OF_THE_HOST[kind]
    assessment = Core(ON_VFIO, other).state.assessments[device_key(ON_VFIO.address)]
    assert (assessment.status.health, assessment.status.cause) == (Health.UNHEALTHY, Cause.GROUP_NOT_VIABLE)
    core = ClaimCore(ON_HOST, other)
    assert core.refusal(core.prepare(allocated(name("one"), GPU))) == f"{GPU}: {assessment.status.message}"
    assert "bind it" not in assessment.status.message, "nobody is told to take what is the host's"


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_leaves_a_group_viable_is_neither_in_the_way_nor_written_to(kind: str) -> None:
    other = HARMLESS[kind]
    assert Core(ON_VFIO, other).state.assessments[device_key(ON_VFIO.address)].status.health is Health.HEALTHY
    core, answer = claimed(ON_HOST, SOUND, other)
    assert isinstance(answer, Prepared)
    assert core.acts == [(Target.VFIO, GPU)]
    assert (core.driver(GPU), core.driver(AUDIO)) == ("vfio-pci", "vfio-pci")
    assert core.driver(other.address) == other.driver
    core.unprepare(name("one"))
    assert (core.driver(GPU), core.driver(AUDIO)) == ("nvidia", "snd_hda_intel")
    assert core.driver(other.address) == other.driver


def test_two_gpus_of_one_group_are_given_to_one_claim_and_to_no_other() -> None:
    core = core_with(ON_HOST, gpu(OTHER, GROUP, driver="nvidia"), both=(GPU, OTHER))
    assert "0000:02:00.0 is bound to nvidia" in core.refusal(core.prepare(allocated(name("one"), GPU)))
    assert isinstance(core.answer(core.prepare(name("both"))), Prepared)
    assert (core.driver(GPU), core.driver(OTHER)) == ("vfio-pci", "vfio-pci")
    core.unprepare(name("both"))
    assert (core.driver(GPU), core.driver(OTHER)) == ("nvidia", "nvidia")


def test_a_member_that_is_no_pci_function_is_in_the_way_as_long_as_the_host_uses_it() -> None:
    def with_member(driver: str, of: PciFunction = ON_HOST) -> PciFunction:
        return replace(of, other_members=(("AMDI0040:00", driver),))

    core = ClaimCore(with_member("sdhci-acpi"))
    assert blocked(core) == BlockReason(BlockKind.UNHEALTHY, "GroupNotViable")
    core.created(allocated(name("one"), GPU))
    assert "AMDI0040:00, which is no PCI function, is bound to sdhci-acpi" in core.refusal(
        core.prepare(name("one"))
    )
    on_vfio = with_member("sdhci-acpi", ON_VFIO)
    assert Core(on_vfio).state.assessments[device_key(GPU)].status.cause is Cause.GROUP_NOT_VIABLE
    assert isinstance(claimed(with_member("vfio-platform"))[1], Prepared)


def test_a_region_of_firmware_keeps_the_group_from_both_apis_with_one_cause() -> None:
    region = "0xbdf6f000 to 0xbdf7efff"
    core = ClaimCore(replace(ON_HOST, direct_region=region))
    assert blocked(core) == BlockReason(BlockKind.UNHEALTHY, "ReservedRegion")
    reason = core.refusal(core.prepare(allocated(name("one"), GPU)))
    assert core.acts == []
    status = Core(replace(ON_VFIO, direct_region=region)).state.assessments[device_key(GPU)].status
    assert (status.health, status.cause) == (Health.UNHEALTHY, Cause.RESERVED_REGION)
    assert reason == f"{GPU}: {status.message}"
    assert region in reason


def test_a_claim_is_refused_when_the_host_takes_a_function_of_the_group_after_it_was_offered() -> None:
    core = ClaimCore(ON_HOST, disk(OTHER, GROUP, driver=None))
    assert blocked(core) is None
    core.created(allocated(name("one"), GPU))
    core.functions[OTHER] = disk(OTHER, GROUP)  # no uevent has told of it
    assert "0000:02:00.0 is bound to nvme" in core.refusal(core.prepare(name("one")))
    assert core.acts == []


def test_the_companions_are_the_functions_of_the_slot_and_of_the_vendor() -> None:
    usb = function("10de:1ad6", "0c0330", "xhci_hcd", USB)
    of_group = (ON_HOST, SOUND, usb, *OF_THE_HOST.values(), *HARMLESS.values())
    assert [f.address for f in with_companions(ON_HOST, of_group)] == [GPU, AUDIO, USB]


def test_no_companion_is_a_bridge_of_the_slot_nor_what_is_on_a_stub() -> None:
    bridge = function("10de:22a3", "060400", None, USB)
    stub = replace(SOUND, driver="pci-stub")
    assert [f.address for f in with_companions(ON_HOST, (ON_HOST, stub, bridge))] == [GPU]


def test_of_a_gpu_whose_vendor_cannot_be_read_nothing_is_a_companion() -> None:
    """Two that cannot be read are not of one vendor for that."""
    unread, other = replace(ON_HOST, vendor=""), replace(SOUND, vendor="")
    assert not is_companion(unread, other)
    assert not is_companion(unread, SOUND)
