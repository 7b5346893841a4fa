"""Compute domains in deploy/: the definitions fit what is read, and the examples fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
import yaml
from msgspec.structs import replace

from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.domains.config import decoded
from gpuactors.core.domains.offer import offered
from gpuactors.core.state.claims import NO_CLAIMS, ClaimSettings
from gpuactors.core.state.domains import Domains, ImexView
from gpuactors.core.values.domain import DRIVER, DomainMode, DomainSettings, ImexFacts
from gpuactors.core.values.slices import Attribute
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import CLIQUES, DOMAINS, Kind, Object
from tests.deploy.cel import evaluated
from tests.deploy.manifests import DEPLOY, Manifest

CRDS: Final = DEPLOY / "chart" / "gpuactors" / "definitions"
EXAMPLES: Final = DEPLOY / "examples" / "compute-domains"


class OfferedDevice(Protocol):
    """A device in a ResourceSlice."""

    @property
    def attributes(self) -> Mapping[str, Attribute]: ...


def manifests(directory: Path) -> Iterator[Manifest]:
    for path in sorted(directory.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def of_kind(kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests(EXAMPLES) if manifest["kind"] == kind]


# --- the definitions --------------------------------------------------------------------------------------


def definition(kind: Kind) -> Manifest:
    (found,) = (crd for crd in manifests(CRDS) if crd["spec"]["names"]["kind"] == kind.kind)
    return found


@pytest.mark.parametrize("kind", [DOMAINS, CLIQUES], ids=lambda kind: kind.plural)
def test_a_definition_is_of_the_kind_that_is_asked_for(kind: Kind) -> None:
    found = definition(kind)
    assert found["metadata"]["name"] == kind.qualified
    spec = found["spec"]
    assert (spec["group"], spec["names"]["plural"], spec["names"]["listKind"]) == (
        kind.group,
        kind.plural,
        f"{kind.kind}List",
    )
    assert (spec["scope"] == "Namespaced") == kind.namespaced
    (version,) = spec["versions"]
    assert (version["name"], version["served"], version["storage"]) == (kind.version, True, True)
    # A status that is a resource of its own is not counted as a change of the object.
    assert ("subresources" in version) == ("status" in kind.fields)
    assert version["schema"]["openAPIV3Schema"]["properties"].keys() == {*kind.fields}


def violations(value: Any, schema: Manifest, path: str) -> Iterator[str]:
    """Where the value is not what the schema says, or would be pruned."""
    types: dict[str, type[Any]] = {"object": dict, "array": list, "string": str}
    if not isinstance(value, types[schema["type"]]):
        yield f"{path} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is not one of {schema['enum']}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from violations(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            if name in known:
                yield from violations(inner, known[name], f"{path}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{path}.{name} is pruned"


def fields(kind: Kind, found: Object) -> Object:
    return {name: value for name, value in found.items() if name in kind.fields}


def written() -> Iterator[tuple[Kind, Object]]:
    """What NVIDIA's programs write, as the fake API server has it; and the example."""
    server = FakeApiServer()
    uid = server.add_domain("team-a", "training")["metadata"]["uid"]
    yield DOMAINS, server.set_domain_nodes("team-a", "training", {"node-1": "Ready", "node-2": "NotReady"})
    yield CLIQUES, server.set_clique("dra-driver-nvidia-gpu", uid, "c.1", {"node-1": "Ready"})
    (example,) = of_kind("ComputeDomain")
    yield DOMAINS, example


def test_what_is_written_fits_the_definitions_and_nothing_of_it_is_lost() -> None:
    found = [*written()]
    assert len(found) == 3
    for kind, one in found:
        schema = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert [*violations(fields(kind, one), schema, kind.kind)] == []
    (domain, clique, _) = (one for _, one in found)
    status = definition(DOMAINS)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    wrong = {"nodes": [{"status": "ready"}], "status": "NotReady"}
    assert [*violations(wrong, status, "status")] == [
        "status.nodes[0].name is missing",
        "status.nodes[0].status is not one of ['Ready', 'NotReady']",
    ]
    assert domain["status"]["nodes"]
    assert clique["daemons"]


# --- the examples -----------------------------------------------------------------------------------------


def classes() -> dict[str, str]:
    """The expression of each DeviceClass, in one line."""
    found = {}
    for one in of_kind("DeviceClass"):
        (selector,) = one["spec"]["selectors"]
        found[one["metadata"]["name"]] = selector["cel"]["expression"].strip()
    return found


def selects(expression: str, device: OfferedDevice) -> bool:
    """Whether the expression is true of one of our devices."""
    attributes = {name: attribute.value for name, attribute in device.attributes.items()}
    shown = {"driver": DRIVER, "attributes": {DRIVER: attributes}}
    return evaluated(expression, {"device": shown}) is True


def test_the_classes_are_nvidias_by_name_and_select_the_devices_that_they_mean() -> None:
    domains = Domains(
        DomainSettings(DomainMode.ON, "node-1", ("dra-driver-nvidia-gpu",), channels=2),
        replace(NO_CLAIMS, settings=ClaimSettings(DRIVER, "node-1"), loaded=True),
        imex=ImexView(1, ImexFacts(channel_major=236)),
    )
    offer = offered(domains).offered.offer
    assert offer is not None
    assert sorted(device.name for device in offer.devices) == ["channel-0", "channel-1", "daemon-0"]
    chosen = {
        name: [one.name for one in offer.devices if selects(expression, one)]
        for name, expression in classes().items()
    }
    assert chosen == {
        "compute-domain-default-channel.nvidia.com": ["channel-0"],
        "compute-domain-daemon.nvidia.com": ["daemon-0"],
    }


def test_a_claim_names_a_class_that_is_there_and_is_configured_for_the_driver() -> None:
    templates = {one["metadata"]["name"]: one for one in of_kind("ResourceClaimTemplate")}
    assert len(templates) == 2
    for template in templates.values():
        devices = template["spec"]["spec"]["devices"]
        (request,), (config,) = devices["requests"], devices["config"]
        assert request["exactly"]["deviceClassName"] in classes()
        assert config["requests"] == [request["name"]]
        assert config["opaque"]["driver"] == DRIVER
        found = decoded(config["opaque"]["parameters"])
        assert not isinstance(found, ConfigFault), found
        assert found.kind == request["name"]


def test_the_pods_use_the_template_that_their_domain_names() -> None:
    (domain,), (job,) = of_kind("ComputeDomain"), of_kind("Job")
    assert domain["apiVersion"] == DOMAINS.api_version
    made = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    assert made in {one["metadata"]["name"] for one in of_kind("ResourceClaimTemplate")}
    pod = job["spec"]["template"]["spec"]
    (claim,) = pod["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == made
    (container,) = pod["containers"]
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    assert container["image"].startswith("registry.example/")
