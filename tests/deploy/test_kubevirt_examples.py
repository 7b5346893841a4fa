"""The examples for KubeVirt by the device plugin: the names are those that the daemon advertises for these IDs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest
import yaml

from gpuactors.core.values.naming import resource_name
from gpuactors.host.pci_ids import PciIds
from tests.deploy.manifests import DEPLOY, Manifest

EXAMPLES: Final = DEPLOY / "examples" / "kubevirt"

SELECTORS: Final = {"kubevirt.yaml": "pciVendorSelector", "hyperconverged.yaml": "pciDeviceSelector"}
"""KubeVirt's own key, and that of the operator which writes KubeVirt's object on OpenShift."""


def example(name: str) -> Manifest:
    found = yaml.safe_load((EXAMPLES / name).read_text())
    assert isinstance(found, dict)
    return found


def permitted(name: str) -> list[Manifest]:
    spec = example(name)["spec"]
    spec = spec.get("configuration", spec)
    (devices,) = spec["permittedHostDevices"].values()
    assert isinstance(devices, list)
    return devices


@pytest.mark.parametrize("name", SELECTORS)
def test_each_resource_is_what_the_daemon_makes_of_its_id(name: str) -> None:
    names = PciIds.open(None)
    for device in permitted(name):
        assert device.keys() == {SELECTORS[name], "resourceName", "externalResourceProvider"}
        vendor, _, model = device[SELECTORS[name]].lower().partition(":")
        assert device["resourceName"] == resource_name(vendor, model, names.lookup(vendor, model))
        # Else KubeVirt's own device plugin registers the name, too.
        assert device["externalResourceProvider"] is True


def test_both_permit_the_same() -> None:
    ours, theirs = (
        {(one[key], one["resourceName"]) for one in permitted(name)} for name, key in SELECTORS.items()
    )
    assert ours == theirs


def asked() -> Iterator[str]:
    for gpu in example("virtual-machine.yaml")["spec"]["template"]["spec"]["domain"]["devices"]["gpus"]:
        assert gpu.keys() == {"name", "deviceName"}
        yield gpu["deviceName"]


def test_the_virtual_machine_asks_for_what_is_permitted() -> None:
    found = [*asked()]
    assert len(found) == 2
    assert set(found) <= {one["resourceName"] for one in permitted("kubevirt.yaml")}


def test_every_file_is_looked_at_and_images_are_nobodys() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {*SELECTORS, "virtual-machine.yaml"}
    for path in EXAMPLES.iterdir():
        for image in re.findall(r"image: (\S+)", path.read_text()):
            assert image.startswith("registry.example/")
