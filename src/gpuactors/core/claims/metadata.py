"""The metadata files of a claim (KEP-5304), from which KubeVirt learns the PCI address of each device.

One file per request. It is a stream of JSON objects of the same fields, the newest version first; a reader takes the
first version that it knows (KubeVirt 1.9: v1alpha1, pkg/dra/utils.go). Values only; `acts/files.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from gpuactors.core.values.claim import AllocatedDevice, AttributeValue, Claim, Json
from gpuactors.core.values.names import is_label, is_subdomain
from gpuactors.core.values.slices import NUMA_NODE, PCIE_ROOT

VERSIONS: Final = ("metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1")
"""The versions of Kubernetes 1.37 and 1.36; the fields are the same."""

_DIRECTORY: Final = "/var/run/kubernetes.io/dra-device-attributes"
"""The directory of the files in the container."""

_LATER: Final = frozenset({NUMA_NODE, PCIE_ROOT})
"""The attributes that earlier versions did not write."""


class MetadataFile(Struct, frozen=True, gc=False):
    """The metadata file of one request."""

    request: str
    """The request's base name: the file is mounted in a directory of this name."""
    container_path: str
    documents: tuple[Json, ...]

    @property
    def earlier(self) -> tuple[Json, ...]:
        """The documents as an earlier version wrote them: right as well, as no reader depends on what they lack."""
        return tuple(map(_earlier, self.documents))


def _earlier(value: Json) -> Json:
    match value:
        case Mapping():
            return {name: _earlier(part) for name, part in value.items() if name not in _LATER}
        case tuple():
            return tuple(map(_earlier, value))
        case _:
            return value


def metadata_files(
    driver: str, claim: Claim, attributes: Mapping[str, Mapping[str, AttributeValue]]
) -> tuple[MetadataFile, ...]:
    """Return the metadata files of an allocated claim, in the order of its requests. `attributes` are those of each
    device by its name in the slice; each device of the claim has some.

    Raises `ValueError` if a name from outside is no part of a path: the driver's, the claim's or a request's.
    """
    requests: dict[str, list[AllocatedDevice]] = {}
    for result in claim.results or ():
        requests.setdefault(result.base_request, []).append(result)
    return tuple(
        MetadataFile(
            request,
            container_path(driver, claim, request),
            tuple(_document(version, driver, claim, results, attributes) for version in VERSIONS),
        )
        for request, results in requests.items()
    )


def container_path(driver: str, claim: Claim, request: str) -> str:
    """Return the path of the file of a request (base name) in the container. It has the claim's own name, or the pod's
    name for a claim that was made from a template: the pod does not know the claim's own name then."""
    if claim.pod_claim_name is None:
        kind, name, valid = "resourceclaims", claim.name.name, is_subdomain(claim.name.name)
    else:
        kind, name, valid = "resourceclaimtemplates", claim.pod_claim_name, is_label(claim.pod_claim_name)
    if not (valid and is_label(request) and is_subdomain(driver)):
        raise ValueError(
            f"no path can be made of the claim's name {name!r}, its request {request!r} and the driver's name "
            f"{driver!r}: each must be a DNS name"
        )
    return f"{_DIRECTORY}/{kind}/{name}/{request}/{driver}-metadata.json"


def _document(
    version: str,
    driver: str,
    claim: Claim,
    results: Sequence[AllocatedDevice],
    attributes: Mapping[str, Mapping[str, AttributeValue]],
) -> Json:
    named: dict[str, list[Json]] = {}
    for result in results:
        named.setdefault(result.request, []).append(
            {
                "driver": driver,
                "pool": result.pool,
                "name": result.device,
                "attributes": {
                    name: _value(value) for name, value in sorted(attributes[result.device].items())
                },
            }
        )
    document: dict[str, Json] = {
        "kind": "DeviceMetadata",
        "apiVersion": version,
        "metadata": {
            "name": claim.name.name,
            "namespace": claim.name.namespace,
            "uid": claim.name.uid,
            "generation": claim.generation,
        },
    }
    if claim.pod_claim_name is not None:
        document["podClaimName"] = claim.pod_claim_name
    document["requests"] = tuple(
        {"name": request, "devices": tuple(devices)} for request, devices in named.items()
    )
    return document


def _value(value: AttributeValue) -> Json:
    match value:
        case bool():  # before int, which it is as well
            return {"bool": value}
        case int():
            return {"int": value}
        case str():
            return {"string": value}
