"""KubeVirt's parser reads our metadata files, out of a container that was started with our CDI ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuactors.acts.disk import RealDisk
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.claims import cdi
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.claims.metadata import metadata_files
from gpuactors.core.kinds.pci_function import PCI_BUS_ID, PCI_FUNCTION
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, Claim, ClaimName, ClaimUid
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.vfio import VfioConfig
from tests.support.kubevirt import HostDevice, NotReadableError, host_device, start_container

DRIVER = "gpu.nvidia.com"


def prepared(
    tmp_path: Path, *requests: str, pod_claim_name: str | None = None
) -> tuple[Path, tuple[str, ...]]:
    """A container that was started with all CDI ids of a claim that has one GPU for each of `requests`."""
    results = tuple(AllocatedDevice(r, "node-1", f"gpu-0000-2{n}-00-0") for n, r in enumerate(requests))
    uid = ClaimUid("0f1e2d3c-0000-4000-8000-000000000001")
    claim = Claim(ClaimName("ns", "gpus", uid), pod_claim_name, 0, results)
    devices = [
        PCI_FUNCTION.edits(
            r,
            None,
            (BoundFunction(PciAddress(f"0000:2{n}:00.0"), "vfio-pci", 50 + n, f"vfio{n}", vfio=True),),
            VfioConfig(),
        )
        for n, r in enumerate(results)
    ]
    attributes = {r.device: {PCI_BUS_ID: f"0000:2{n}:00.0", "type": "vfio"} for n, r in enumerate(results)}
    writer = ClaimFiles(
        RealDisk(),
        driver=DRIVER,
        cdi_dir=str(tmp_path / "cdi"),
        plugin_dir=str(tmp_path / "plugins" / DRIVER),
    )
    writer.write(
        ClaimContents(
            claim.name,
            cdi.device_file(DRIVER, claim.name, devices),
            metadata_files(DRIVER, claim, attributes),
        )
    )
    ids = [i for of_device in cdi.cdi_ids(DRIVER, uid, results) for i in of_device]
    return tmp_path / "container", start_container(tmp_path / "cdi", ids, tmp_path / "container")


def test_a_claim_by_its_own_name(tmp_path: Path) -> None:
    container, nodes = prepared(tmp_path, "gpu")
    found = host_device(container, vmi_claim="pod-claim", request="gpu", resource_claim_name="gpus")
    assert found == HostDevice("pci", "0000:20:00.0")
    assert nodes == ("/dev/vfio/50", "/dev/vfio/vfio")


def test_a_claim_of_a_template_by_the_name_that_the_vm_has_for_it(tmp_path: Path) -> None:
    container, _ = prepared(tmp_path, "gpu", pod_claim_name="pod-claim")
    assert host_device(container, vmi_claim="pod-claim", request="gpu") == HostDevice("pci", "0000:20:00.0")


def test_two_requests_of_one_claim_are_two_devices_of_the_vm(tmp_path: Path) -> None:
    container, nodes = prepared(tmp_path, "a", "b")
    addresses = [
        host_device(container, vmi_claim="x", request=r, resource_claim_name="gpus").address
        for r in ("a", "b")
    ]
    assert addresses == ["0000:20:00.0", "0000:21:00.0"]
    assert nodes == ("/dev/vfio/50", "/dev/vfio/vfio", "/dev/vfio/51", "/dev/vfio/vfio")


def test_two_devices_of_one_request_are_more_than_kubevirt_takes(tmp_path: Path) -> None:
    container, _ = prepared(tmp_path, "gpu", "gpu")
    with pytest.raises(NotReadableError, match="has 2 devices"):
        host_device(container, vmi_claim="x", request="gpu", resource_claim_name="gpus")


def test_a_subrequest_is_in_the_directory_of_its_base_name_and_kubevirt_does_not_find_it_there(
    tmp_path: Path,
) -> None:
    # Known of KubeVirt 1.9: it compares the full name with the one in the VMI.
    container, _ = prepared(tmp_path, "gpu/any")
    with pytest.raises(NotReadableError, match="has 0 devices"):
        host_device(container, vmi_claim="x", request="gpu", resource_claim_name="gpus")


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ('{"apiVersion":"metadata.resource.k8s.io/v9"}\n', "no known version"),
        ('{"kind":"DeviceMetadata"}', "no apiVersion"),
        ('{"apiVersion":"metadata.resource.k8s.io/v9"} [', "Expecting"),
    ],
)
def test_the_parser_refuses_what_kubevirt_refuses(tmp_path: Path, stream: str, words: str) -> None:
    container, _ = prepared(tmp_path, "gpu")
    (file,) = container.rglob("*-metadata.json")
    file.write_text(stream)
    with pytest.raises(NotReadableError, match=words):
        host_device(container, vmi_claim="x", request="gpu", resource_claim_name="gpus")


def test_the_files_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    container, _ = prepared(tmp_path, "gpu")
    (file,) = container.rglob("*-metadata.json")
    versions = [json.loads(line)["apiVersion"] for line in file.read_text().splitlines()]
    assert versions == ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"]
