"""The CDI files of a claim: nodes of one backend, the environment, the ids and their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpuactors.core.claims import cdi
from gpuactors.core.kinds import container
from gpuactors.core.kinds.pci_function import PCI_FUNCTION
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, ClaimName, ClaimUid, DeviceEdits, Json
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.names import uid_in_cdi_id
from gpuactors.core.values.vfio import BackendPolicy, VfioConfig
from gpuactors.host import root
from tests.support.edits import nodes_of

DRIVER = "gpu.nvidia.com"
UID = ClaimUid("0f1e2d3c-0000-4000-8000-000000000001")
CLAIM = ClaimName("ns", "gpus", UID)

LEGACY = VfioConfig()
IOMMUFD = VfioConfig(BackendPolicy.PREFER_IOMMUFD)


def function(number: int = 0, *, group: int | None = 51, cdev: str | None = None) -> BoundFunction:
    return BoundFunction(PciAddress(f"0000:23:00.{number}"), "vfio-pci", group, cdev, vfio=True)


def device(
    *functions: BoundFunction, config: VfioConfig = LEGACY, name: str = "gpu-0000-23-00-0"
) -> DeviceEdits:
    return PCI_FUNCTION.edits(AllocatedDevice("main", "node-1", name), None, functions, config)


def edits(content: Json) -> Mapping[str, Any]:
    assert isinstance(content, Mapping)
    devices = content["devices"]
    assert isinstance(devices, tuple)
    (only,) = devices
    assert isinstance(only, Mapping)
    found = only["containerEdits"]
    assert isinstance(found, Mapping)
    return found


@pytest.mark.parametrize(
    ("config", "cdev", "expected"),
    [
        (LEGACY, None, ("/dev/vfio/51", "/dev/vfio/vfio")),
        (LEGACY, "vfio3", ("/dev/vfio/51", "/dev/vfio/vfio")),
        (IOMMUFD, "vfio3", ("/dev/vfio/devices/vfio3", "/dev/iommu")),
        (IOMMUFD, None, ("/dev/vfio/51", "/dev/vfio/vfio")),
        (VfioConfig(enable_api_device=False), "vfio3", ("/dev/vfio/51",)),
        (VfioConfig(BackendPolicy.PREFER_IOMMUFD, False), "vfio3", ("/dev/vfio/devices/vfio3",)),
    ],
)
def test_a_device_has_the_nodes_of_one_backend(
    config: VfioConfig, cdev: str | None, expected: tuple[str, ...]
) -> None:
    assert nodes_of(device(function(cdev=cdev), config=config)) == expected


def test_with_iommufd_each_function_of_the_group_has_its_node_and_the_groups_node_is_not_given() -> None:
    both = device(function(cdev="vfio3"), function(1, cdev="vfio4"), config=IOMMUFD)
    assert nodes_of(both) == ("/dev/vfio/devices/vfio3", "/dev/vfio/devices/vfio4", "/dev/iommu")


def test_the_groups_node_serves_its_companions_and_is_there_once() -> None:
    assert nodes_of(device(function(), function(1))) == ("/dev/vfio/51", "/dev/vfio/vfio")


def test_the_nodes_of_the_container_are_those_of_the_host() -> None:
    assert (container.CONTAINER_NODE, container.IOMMUFD_NODE) == (
        root.CONTAINER_NODE,
        root.IOMMUFD_NODE,
    )
    assert nodes_of(device(function()))[0] == root.group_node(51)
    assert nodes_of(device(function(cdev="vfio3"), config=IOMMUFD))[0] == root.cdev_node("vfio3")


def test_the_file_of_a_claims_devices() -> None:
    assert cdi.device_file(DRIVER, CLAIM, [device(function())]) == {
        "cdiVersion": "0.5.0",
        "kind": "k8s.gpu.nvidia.com/claim",
        "devices": (
            {
                "name": f"{UID}-gpu-0000-23-00-0",
                "containerEdits": {
                    "env": ("NVIDIA_VISIBLE_DEVICES=void",),
                    "deviceNodes": (
                        {"path": "/dev/vfio/51", "permissions": "mrw"},
                        {"path": "/dev/vfio/vfio", "permissions": "mrw"},
                    ),
                },
            },
        ),
    }


def test_the_host_drivers_gpus_are_kept_out_of_the_container() -> None:
    assert edits(cdi.device_file(DRIVER, CLAIM, [device(function())]))["env"] == (
        "NVIDIA_VISIBLE_DEVICES=void",
    )


def test_admin_access_to_a_gpu_that_another_claim_holds_gets_no_node_and_no_empty_edits() -> None:
    assert edits(cdi.device_file(DRIVER, CLAIM, [device()])) == {"env": ("NVIDIA_VISIBLE_DEVICES=void",)}


def test_a_device_that_two_requests_have_is_described_once() -> None:
    content = cdi.device_file(DRIVER, CLAIM, [device(function()), device(function())])
    assert isinstance(content, Mapping)
    assert len(content["devices"]) == 1


def results(*requests: str) -> tuple[AllocatedDevice, ...]:
    return tuple(AllocatedDevice(request, "node-1", f"gpu-{n}") for n, request in enumerate(requests))


def test_the_metadata_is_mounted_once_a_request_behind_its_first_device() -> None:
    assert cdi.cdi_ids(DRIVER, UID, results("main", "main", "other")) == (
        (f"k8s.gpu.nvidia.com/claim={UID}-gpu-0", f"gpu.nvidia.com/metadata={UID}_main"),
        (f"k8s.gpu.nvidia.com/claim={UID}-gpu-1",),
        (f"k8s.gpu.nvidia.com/claim={UID}-gpu-2", f"gpu.nvidia.com/metadata={UID}_other"),
    )


def test_the_id_of_a_device_has_its_claims_uid() -> None:
    ((own, mount),) = cdi.cdi_ids(DRIVER, UID, results("main"))
    assert uid_in_cdi_id(own, DRIVER, "gpu-0") == UID
    for other in ((mount, DRIVER, "gpu-0"), (own, "gpu.example.com", "gpu-0"), (own, DRIVER, "gpu-1")):
        assert uid_in_cdi_id(*other) == ""
    assert uid_in_cdi_id(f"k8s.{DRIVER}/claim=../x-gpu-0", DRIVER, "gpu-0") == "", "a path is made of it"


def test_a_subrequests_metadata_is_by_its_base_name() -> None:
    assert cdi.cdi_ids(DRIVER, UID, results("main/any")) == (
        (f"k8s.gpu.nvidia.com/claim={UID}-gpu-0", f"gpu.nvidia.com/metadata={UID}_main"),
    )


def test_the_ids_keep_the_order_of_the_results_and_the_file_has_one_of_its_own() -> None:
    order = (AllocatedDevice("b", "node-1", "gpu-9"), AllocatedDevice("a", "node-1", "gpu-1"))
    assert [ids[0].rpartition("=")[2] for ids in cdi.cdi_ids(DRIVER, UID, order)] == [
        f"{UID}-gpu-9",
        f"{UID}-gpu-1",
    ]
    devices = [PCI_FUNCTION.edits(result, None, (function(),), LEGACY) for result in order]
    assert cdi.device_file(DRIVER, CLAIM, devices) == cdi.device_file(DRIVER, CLAIM, devices[::-1])


def test_a_metadata_mount_is_a_bind_that_cannot_be_written() -> None:
    content = cdi.metadata_file(DRIVER, CLAIM, [("main", "/p/main.json", "/c/main.json")])
    assert isinstance(content, Mapping)
    assert content["kind"] == "gpu.nvidia.com/metadata"
    assert edits(content) == {
        "mounts": ({"hostPath": "/p/main.json", "containerPath": "/c/main.json", "options": ("ro", "bind")},)
    }
