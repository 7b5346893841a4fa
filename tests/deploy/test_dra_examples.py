"""The examples of claims: they fit each other, what we publish, and what we and KubeVirt take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest
import yaml

from gpuactors.config import Config
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.gpus.config import decoded
from gpuactors.core.values.naming import DOMAINS
from gpuactors.core.values.slices import STANDARD, Offer, ServerKeepsTaints
from tests.deploy.manifests import DEPLOY, Manifest
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


def selectors() -> Iterator[str]:
    for device_class in objects("DeviceClass").values():
        yield from expressions(device_class["spec"])
    for devices in claim_specs().values():
        for one in asked(devices):
            yield from expressions(one)


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


def published() -> dict[str, Any]:
    """The attributes of a device as they are in its slice, by their full names."""
    (shown,) = wanted_pool(
        Offer(DRIVER, "node-1", (offered_gpu(numa_node=0),)), ServerKeepsTaints.YES
    ).devices
    return {
        name if "/" in name else f"{DRIVER}/{name}": attribute.value
        for name, attribute in shown.attributes.items()
    }


def test_what_is_selected_by_is_published() -> None:
    attributes, found = published(), [*selectors()]
    assert len(found) >= 5
    for expression in found:
        compared = re.findall(r'device\.attributes\["([^"]+)"\]\.(\w+) == "([^"]*)"', expression)
        assert compared
        for domain, name, value in compared:
            assert isinstance(attributes[f"{domain}/{name}"], str)
            if name == "type":
                assert attributes[f"{domain}/{name}"] == value
            else:
                assert (name, bool(re.fullmatch("0x[0-9a-f]{4}", value))) == ("deviceID", True)
        assert re.sub(r'device\.attributes\["[^"]+"\]\.\w+ == "[^"]*"', "X", expression) in {
            "X",
            f'device.driver == "{DRIVER}" && X',
        }
    for devices in claim_specs().values():
        for constraint in devices.get("constraints", ()):
            assert constraint["matchAttribute"].startswith(STANDARD)
            assert constraint["matchAttribute"] in attributes


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
        for gpu in spec["domain"]["devices"]["gpus"]:
            assert gpu.keys() == {"name", "claimName", "requestName"}
            requests = {r["name"]: r for r in claim_specs()[templates[gpu["claimName"]]]["requests"]}
            # KubeVirt finds no alternative of a prioritized list (main/sub), and refuses two devices of one request.
            assert requests[gpu["requestName"]]["exactly"].get("count", 1) == 1
            used.append((gpu["claimName"], gpu["requestName"]))
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
