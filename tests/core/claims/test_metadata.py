"""The metadata files of a claim (KEP-5304): their places, their content, and names that are no path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpuactors.core.claims.metadata import metadata_files
from gpuactors.core.kinds.pci_function import PCI_BUS_ID
from gpuactors.core.values.claim import AllocatedDevice, AttributeValue, Claim, ClaimName, ClaimUid
from gpuactors.core.values.slices import STANDARD

DRIVER = "gpu.nvidia.com"
ATTRIBUTES: Mapping[str, Mapping[str, AttributeValue]] = {
    "gpu-0000-23-00-0": {PCI_BUS_ID: "0000:23:00.0", "iommuFDEnabled": True, "iommuGroup": 51},
    "gpu-0000-24-00-0": {PCI_BUS_ID: "0000:24:00.0"},
}


def claim(*results: tuple[str, str], pod_claim_name: str | None = None, name: str = "gpus") -> Claim:
    devices = tuple(AllocatedDevice(request, "node-1", device) for request, device in results)
    return Claim(ClaimName("ns", name, ClaimUid("uid-1")), pod_claim_name, 3, devices)


ONE = (("main", "gpu-0000-23-00-0"),)


def documents(*results: tuple[str, str], pod_claim_name: str | None = None) -> list[Any]:
    (file,) = metadata_files(DRIVER, claim(*results, pod_claim_name=pod_claim_name), ATTRIBUTES)
    return list(file.documents)


def test_the_newest_version_comes_first_and_both_have_the_same_fields() -> None:
    newest, older = documents(*ONE)
    assert newest["apiVersion"] == "metadata.resource.k8s.io/v1beta1"
    assert older["apiVersion"] == "metadata.resource.k8s.io/v1alpha1"
    assert {**newest, "apiVersion": ""} == {**older, "apiVersion": ""}


def test_a_document_has_the_claims_and_the_devices_names_and_typed_attributes() -> None:
    assert documents(*ONE)[1] == {
        "kind": "DeviceMetadata",
        "apiVersion": "metadata.resource.k8s.io/v1alpha1",
        "metadata": {"name": "gpus", "namespace": "ns", "uid": "uid-1", "generation": 3},
        "requests": (
            {
                "name": "main",
                "devices": (
                    {
                        "driver": "gpu.nvidia.com",
                        "pool": "node-1",
                        "name": "gpu-0000-23-00-0",
                        "attributes": {
                            "iommuFDEnabled": {"bool": True},
                            "iommuGroup": {"int": 51},
                            PCI_BUS_ID: {"string": "0000:23:00.0"},
                        },
                    },
                ),
            },
        ),
    }


def test_a_claim_of_its_own_name_and_one_of_a_template_have_their_directories() -> None:
    (own,) = metadata_files(DRIVER, claim(*ONE), ATTRIBUTES)
    (made,) = metadata_files(DRIVER, claim(*ONE, pod_claim_name="gpu"), ATTRIBUTES)
    directory = "/var/run/kubernetes.io/dra-device-attributes"
    assert own.container_path == f"{directory}/resourceclaims/gpus/main/gpu.nvidia.com-metadata.json"
    assert made.container_path == f"{directory}/resourceclaimtemplates/gpu/main/gpu.nvidia.com-metadata.json"
    assert "podClaimName" not in documents(*ONE)[0]
    assert documents(*ONE, pod_claim_name="gpu")[0]["podClaimName"] == "gpu"


def test_a_subrequest_has_its_base_name_in_the_path_and_its_full_name_inside() -> None:
    (file,) = metadata_files(DRIVER, claim(("main/any", "gpu-0000-23-00-0")), ATTRIBUTES)
    assert file.request == "main"
    assert "/main/gpu.nvidia.com-metadata.json" in file.container_path
    assert documents(("main/any", "gpu-0000-23-00-0"))[0]["requests"][0]["name"] == "main/any"


def test_each_request_has_a_file_with_all_its_devices_and_no_others() -> None:
    files = metadata_files(
        DRIVER,
        claim(("a", "gpu-0000-23-00-0"), ("a", "gpu-0000-24-00-0"), ("b", "gpu-0000-23-00-0")),
        ATTRIBUTES,
    )
    assert [file.request for file in files] == ["a", "b"]
    names = [
        [device["name"] for request in file.documents[0]["requests"] for device in request["devices"]]  # type: ignore
        for file in files
    ]
    assert names == [["gpu-0000-23-00-0", "gpu-0000-24-00-0"], ["gpu-0000-23-00-0"]]


@pytest.mark.parametrize(
    "bad",
    [
        claim(("..", "gpu-0000-23-00-0")),
        claim(("../x/y", "gpu-0000-23-00-0")),
        claim(*ONE, name="../../etc"),
        claim(*ONE, pod_claim_name="a/b"),
        claim(*ONE, pod_claim_name=""),
    ],
)
def test_a_name_that_is_no_part_of_a_path_is_refused(bad: Claim) -> None:
    with pytest.raises(ValueError, match="no path can be made"):
        metadata_files(DRIVER, bad, ATTRIBUTES)


def test_a_driver_whose_name_is_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="no path can be made"):
        metadata_files("../gpu", claim(*ONE), ATTRIBUTES)


def test_a_file_of_an_earlier_version_lacks_where_the_device_is() -> None:
    at: dict[str, AttributeValue] = {PCI_BUS_ID: "0000:23:00.0"}
    placed = {**at, f"{STANDARD}numaNode": 1, f"{STANDARD}pcieRoot": "pci0000:20"}
    (file,) = metadata_files(DRIVER, claim(*ONE), {"gpu-0000-23-00-0": placed})
    (older,) = metadata_files(DRIVER, claim(*ONE), {"gpu-0000-23-00-0": at})
    assert file.earlier == older.documents != file.documents
    assert older.earlier == older.documents
