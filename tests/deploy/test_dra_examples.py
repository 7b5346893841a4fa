"""The examples of claims: they fit each other, what we publish, and what we and KubeVirt take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import replace

from gpuactors.config import Config
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.gpus.config import decoded
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.values.model import device_key
from gpuactors.core.values.naming import DOMAINS
from gpuactors.core.values.slices import STANDARD, Offer, OfferedDevice, ServerKeeps
from gpuactors.core.values.vgpu import VendorVgpu
from tests.core.builders import Core, gpu
from tests.deploy.cel import CelError, evaluated
from tests.deploy.manifests import DEPLOY, Manifest
from tests.node.pages import selecting_expressions
from tests.support.offered import offered_gpu

EXAMPLES: Final = {path.name: path for path in sorted((DEPLOY / "examples" / "dra").glob("*.yaml"))}
DRIVER: Final = Config().driver_name


def objects(kind: str) -> dict[str, Manifest]:
    """All objects of a kind by name; each name is there once."""
    found: dict[str, Manifest] = {}
    for path in EXAMPLES.values():
        for manifest in yaml.safe_load_all(path.read_text()):
            if manifest["kind"] == kind:
                assert manifest["metadata"]["name"] not in found
                found[manifest["metadata"]["name"]] = manifest
    return found


def claim_specs() -> dict[str, Manifest]:
    """The `devices` of each claim and template."""
    found = {name: claim["spec"]["devices"] for name, claim in objects("ResourceClaim").items()}
    return found | {n: t["spec"]["spec"]["devices"] for n, t in objects("ResourceClaimTemplate").items()}


def asked(devices: Manifest) -> Iterator[Manifest]:
    """What the requests of a claim ask for, alternatives included."""
    for request in devices["requests"]:
        yield from request.get("firstAvailable") or [request["exactly"]]


def expressions(selecting: Manifest) -> Iterable[str]:
    return [selector["cel"]["expression"] for selector in selecting.get("selectors", ())]


def test_each_is_of_the_api_that_is_served_from_1_34_on() -> None:
    versions = {
        manifest["apiVersion"]
        for path in EXAMPLES.values()
        for manifest in yaml.safe_load_all(path.read_text())
    }
    assert versions == {"resource.k8s.io/v1", "v1", "kubevirt.io/v1"}


def test_each_claim_names_a_class_that_is_there() -> None:
    classes = objects("DeviceClass")
    assert "vfio.gpu.nvidia.com" in classes
    for devices in claim_specs().values():
        assert {one["deviceClassName"] for one in asked(devices)} <= classes.keys()


TYPES: Final = ((558, "NVIDIA A40-12Q"),)


def published() -> Mapping[str, Manifest]:
    """A device of each kind, as CEL sees it: driver, and attributes by domain."""
    # A mediated device as its kind offers it.
    vgpu = {"type": "vgpu", "profile": "NVIDIA A40-12Q", "parent": "0000:3b:00.0", "vendorID": "0x10de"}
    kinds = {
        "whole": _attributes(offered_gpu(numa_node=0)),
        "switch": _attributes(offered_gpu(class_code="068000")),
        "vf": _attributes(_offered_part(driver="vfio-pci")),
        "vgpu, vendor VFIO": _attributes(
            _offered_part(driver="nvidia", vgpu=VendorVgpu(558, TYPES, driver_bind=1))
        ),
        "vgpu, mdev": {DRIVER: vgpu | {"vgpuFramework": "mdev"}},
    }
    return {name: {"driver": DRIVER, "attributes": attributes} for name, attributes in kinds.items()}


def _attributes(device: OfferedDevice) -> dict[str, dict[str, object]]:
    (shown,) = wanted_pool(Offer(DRIVER, "node-1", (device,)), ServerKeeps.YES).devices
    found: dict[str, dict[str, object]] = {}
    for name, attribute in shown.attributes.items():
        domain, _, own = name.rpartition("/")
        found.setdefault(domain or DRIVER, {})[own] = attribute.value
    return found


def _offered_part(**facts: Any) -> OfferedDevice:
    """A virtual function with these facts."""
    pf = replace(gpu("0000:3b:00.0", 1, driver="nvidia"), has_virtual_functions=True)
    vf = replace(gpu("0000:3b:00.4", 2), physical=pf.address, **facts)
    device = Core(pf, vf).state.index.devices[device_key(vf.address)]
    return kind_of(device).offer(device, claimed=False)


def selected(selecting: Manifest) -> set[str]:
    """The kinds whose devices all expressions of a class or of a request select."""
    return {
        name
        for name, device in published().items()
        if all(_is_true(expression, device) for expression in expressions(selecting))
    }


def _is_true(expression: str, device: Manifest) -> bool:
    """An expression without a value, as of a device that lacks an attribute, selects nothing."""
    try:
        return evaluated(expression, {"device": device}) is True
    except CelError:
        return False


VGPUS: Final = {"vgpu, vendor VFIO", "vgpu, mdev"}


def test_each_class_selects_the_devices_of_its_kind_and_no_other() -> None:
    classes = {name: selected(one["spec"]) for name, one in objects("DeviceClass").items()}
    assert classes == {
        "vfio.gpu.nvidia.com": {"whole"},
        "counted.vfio.gpu.nvidia.com": {"whole"},
        "vf.gpu.nvidia.com": {"vf"},
        "vgpu.gpu.nvidia.com": VGPUS,
    }


def test_each_claim_of_a_kind_finds_one() -> None:
    templates = claim_specs()
    classes = {name: one["spec"] for name, one in objects("DeviceClass").items()}
    kinds = {
        "one-virtual-function": {"vf"},
        "one-virtual-function-of-a-card": {"vf"},
        "one-vgpu": VGPUS,
        "one-mediated-device": {"vgpu, mdev"},
    }
    for name, expected in kinds.items():
        ((one,),) = ([*asked(templates[name])],)
        assert selected(classes[one["deviceClassName"]]) & selected(one) == expected, name


def test_each_expression_of_the_page_finds_a_device() -> None:
    """`tests/node/test_pages.py` has a real API server compile them."""
    page = (DEPLOY.parent / "docs" / "dra.md").read_text(encoding="utf-8")
    for expression in (found := selecting_expressions(page)):
        assert selected({"selectors": [{"cel": {"expression": expression}}]}), expression
    assert len(found) >= 6


def test_another_driver_has_no_device_of_a_class() -> None:
    other = published()["whole"] | {"driver": "gpus.example"}
    for device_class in objects("DeviceClass").values():
        assert not all(_is_true(one, other) for one in expressions(device_class["spec"]))


def test_what_a_claim_selects_by_is_published() -> None:
    attributes = {name for device in published().values() for name in device["attributes"][DRIVER]}
    found = [e for devices in claim_specs().values() for one in asked(devices) for e in expressions(one)]
    assert len(found) >= 5
    for expression in found:
        compared = re.findall(r'device\.attributes\["([^"]+)"\]\.(\w+) == "([^"]*)"', expression)
        assert compared
        for domain, name, value in compared:
            assert domain == DRIVER
            assert name in attributes
            assert name != "deviceID" or re.fullmatch("0x[0-9a-f]{4}", value)
    for devices in claim_specs().values():
        for constraint in devices.get("constraints", ()):
            assert constraint["matchAttribute"].startswith(STANDARD)
            domain, _, name = constraint["matchAttribute"].rpartition("/")
            assert name in published()["whole"]["attributes"][domain]


def test_each_configuration_is_taken_by_a_prepare() -> None:
    configs = [config for devices in claim_specs().values() for config in devices.get("config", ())]
    assert configs
    for config in configs:
        assert config["opaque"]["driver"] == DRIVER
        found = decoded(config["opaque"]["parameters"])
        assert not isinstance(found, ConfigFault), found
        assert found.enable_api_device


@pytest.mark.parametrize("kind", ["Pod", "VirtualMachine"])
def test_a_claim_that_is_named_is_there(kind: str) -> None:
    found = 0
    for consumer in objects(kind).values():
        spec = consumer["spec"] if kind == "Pod" else consumer["spec"]["template"]["spec"]
        for claim in spec.get("resourceClaims", ()):
            found += 1
            assert claim["resourceClaimTemplateName"] in objects("ResourceClaimTemplate")
    assert found


def test_each_gpu_of_a_virtual_machine_is_a_request_of_one_device() -> None:
    for machine in objects("VirtualMachine").values():
        spec = machine["spec"]["template"]["spec"]
        templates = {claim["name"]: claim["resourceClaimTemplateName"] for claim in spec["resourceClaims"]}
        used = []
        for wanted in spec["domain"]["devices"]["gpus"]:
            assert wanted.keys() == {"name", "claimName", "requestName"}
            requests = {r["name"]: r for r in claim_specs()[templates[wanted["claimName"]]]["requests"]}
            # KubeVirt finds no alternative of a prioritized list (main/sub), and refuses two devices of one request.
            assert requests[wanted["requestName"]]["exactly"].get("count", 1) == 1
            used.append((wanted["claimName"], wanted["requestName"]))
        assert len(set(used)) == len(used)


def test_an_extended_resource_is_none_that_the_device_plugin_can_advertise() -> None:
    names = [c["spec"].get("extendedResourceName") for c in objects("DeviceClass").values()]
    (name,) = filter(None, names)
    assert name.partition("/")[0] not in DOMAINS.values()
    assert any(
        name in container["resources"].get("limits", {})
        for consumer in objects("Pod").values()
        for container in consumer["spec"]["containers"]
    )


def test_images_are_nobodys() -> None:
    for path in EXAMPLES.values():
        for image in re.findall(r"image: (\S+)", path.read_text()):
            assert image.startswith("registry.example/")
