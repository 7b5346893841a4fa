"""Which functions are devices, and what of their files forbids them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.assessment.assess import assess
from gpuactors.core.values.group import GroupInputs
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Health, PciFunction, Settings, pci_address
from gpuactors.core.values.selector import parse_selector
from tests.core.builders import SETTINGS, audio, devices_of, gpu


def devices(*functions: PciFunction, settings: Settings = SETTINGS) -> tuple[Device, ...]:
    return devices_of(*functions, settings=settings)


def decided(device: Device) -> tuple[Health, str]:
    status = assess(GroupInputs(1, (device,)))[device.key].status
    return status.health, status.message


def test_a_bound_gpu_with_its_node_is_healthy() -> None:
    (device,) = devices(gpu("01:00.0"))
    assert decided(device) == (Health.HEALTHY, "free")


@pytest.mark.parametrize("driver", ["vfio-pci", None, "pci-stub", "pcieport"])
def test_a_group_is_viable_beside_these_drivers(driver: str | None) -> None:
    (device,) = devices(gpu("01:00.0", 7), audio("01:00.1", 7, driver=driver))
    assert decided(device)[0] is Health.HEALTHY


def test_a_function_on_a_host_driver_makes_the_group_not_viable_and_is_named() -> None:
    (device,) = devices(gpu("01:00.0", 7), audio("01:00.1", 7, driver="snd_hda_intel"))
    word, reason = decided(device)
    assert word is Health.UNHEALTHY
    assert reason == (
        "IOMMU group 7 is not viable: 0000:01:00.1 is bound to snd_hda_intel; bind it to vfio-pci or to no driver"
    )


def test_a_host_driver_in_another_group_does_not_matter() -> None:
    (device,) = devices(gpu("01:00.0", 7), audio("01:00.1", 8, driver="snd_hda_intel"))
    assert decided(device)[0] is Health.HEALTHY


def test_no_iommu_group_names_the_kernel_command_line() -> None:
    function = gpu("01:00.0")
    (device,) = devices(
        PciFunction(**{f: getattr(function, f) for f in function.__struct_fields__} | {"iommu_group": None})
    )
    word, reason = decided(device)
    assert word is Health.UNHEALTHY
    assert "intel_iommu=on" in reason


def test_no_iommu_mode_is_said_and_never_offered() -> None:
    """Issue 10, 15: it was told as "does not exist"."""
    (device,) = devices(replace(gpu("01:00.0", has_node=False), without_iommu=True))
    word, reason = decided(device)
    assert word is Health.UNHEALTHY
    assert "/dev/vfio/noiommu-1" in reason
    assert "intel_iommu=on" in reason
    assert "enable_unsafe_noiommu_mode" in reason
    assert "does not exist" not in reason


def test_behind_vmd_the_firmware_is_named_and_not_the_command_line() -> None:
    """Issue 10, 15."""
    (device,) = devices(replace(gpu("01:00.0"), address=pci_address("10000:01:00.0"), iommu_group=None))
    word, reason = decided(device)
    assert word is Health.UNHEALTHY
    assert "behind an Intel VMD controller (its PCI domain is 10000)" in reason
    assert "intel_iommu" not in reason


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((), "neither /dev/vfio/1 nor /dev/vfio/vfio exists; is /dev of the host visible"),
        (("/dev/vfio/vfio",), "/dev/vfio/1 does not exist"),
    ],
)
def test_which_nodes_are_missing(nodes: tuple[str, ...], said: str) -> None:
    (device,) = devices(replace(gpu("01:00.0"), nodes=nodes))
    assert decided(device)[1].startswith(said)


def test_a_cdev_without_a_group_node_will_do() -> None:
    (device,) = devices(gpu("01:00.0", has_node=False, cdev=3))
    assert decided(device)[0] is Health.HEALTHY


@pytest.mark.parametrize(
    ("driver", "said"), [(None, "bound to no driver"), ("nvidia", "bound to nvidia, which is no vfio driver")]
)
def test_a_gpu_on_another_driver_is_not_offered(driver: str | None, said: str) -> None:
    (device,) = devices(gpu("01:00.0", driver=driver))
    word, reason = decided(device)
    assert word is Health.UNHEALTHY
    assert reason.startswith(said)


def test_companions_are_never_a_gpu_unless_they_are_asked_for() -> None:
    functions = (gpu("01:00.0", 7), audio("01:00.1", 7))

    def chosen(*selectors: str) -> set[str]:
        settings = Settings(tuple(map(parse_selector, selectors)), 300.0, True)
        return {d.key[-1] for d in devices(*functions, settings=settings)}

    assert chosen("vendor=10de") == {"0"}
    assert chosen("vendor=10de,class=0403") == {"1"}
    assert chosen("vendor=10de,device=1aef") == {"1"}
    assert chosen("address=01:00.1") == {"1"}
    assert chosen("vendor=1002") == set()
