"""The opaque configuration of a claim: what is taken, whose counts, and what the user reads of a mistake."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuactors.core.claims.opaque_config import ConfigFault, covers
from gpuactors.core.gpus.config import chosen, decoded
from gpuactors.core.values.claim import AllocatedDevice, Claim, ClaimName, ClaimUid, Json, OpaqueConfig
from gpuactors.core.values.names import is_domain_id
from gpuactors.core.values.vfio import BackendPolicy, VfioConfig

IOMMUFD = VfioConfig(BackendPolicy.PREFER_IOMMUFD)


def parameters(**iommu: Json) -> Mapping[str, Json]:
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "VfioDeviceConfig",
        **({"iommu": iommu} if iommu else {}),
    }


def claim(*configs: OpaqueConfig, requests: tuple[str, ...] = ("main",)) -> Claim:
    name = ClaimName("ns", "gpus", ClaimUid("11111111-2222-3333-4444-555555555555"))
    results = tuple(AllocatedDevice(request, "node-1", f"gpu-{n}") for n, request in enumerate(requests))
    return Claim(name, None, 0, results, configs)


def of_class(*requests: str, **iommu: Json) -> OpaqueConfig:
    return OpaqueConfig(True, requests, parameters(**iommu))


def of_claim(*requests: str, **iommu: Json) -> OpaqueConfig:
    return OpaqueConfig(False, requests, parameters(**iommu))


def test_without_any_configuration_the_api_device_is_given_as_kubevirt_needs_it() -> None:
    assert chosen(claim()) == {"main": VfioConfig(BackendPolicy.LEGACY_ONLY, True)}
    assert decoded(parameters()) == VfioConfig(BackendPolicy.LEGACY_ONLY, enable_api_device=True)


def test_the_claims_configuration_wins_whatever_the_order_of_the_list() -> None:
    of_both = (
        of_claim(backendPolicy="PreferIommuFD"),
        of_class(backendPolicy="LegacyOnly", enableAPIDevice=False),
    )
    assert chosen(claim(*of_both)) == {"main": IOMMUFD}
    assert chosen(claim(*reversed(of_both))) == {"main": IOMMUFD}


def test_of_two_of_one_source_the_later_wins_whole() -> None:
    first = of_claim(backendPolicy="PreferIommuFD", enableAPIDevice=False)
    assert chosen(claim(first, of_claim(enableAPIDevice=True))) == {"main": VfioConfig()}


def test_a_configuration_of_the_parent_request_covers_its_subrequests() -> None:
    found = chosen(claim(of_claim("main", backendPolicy="PreferIommuFD"), requests=("main/a", "other")))
    assert found == {"main/a": IOMMUFD, "other": VfioConfig()}


@pytest.mark.parametrize(
    ("requests", "request_name", "expected"),
    [
        ((), "main", True),
        (("main",), "main", True),
        (("main",), "main/sub", True),
        (("main/sub",), "main/sub", True),
        (("main/sub",), "main", False),
        (("main/sub",), "main/other", False),
        (("mai",), "main", False),
    ],
)
def test_which_requests_are_covered(requests: tuple[str, ...], request_name: str, expected: bool) -> None:
    assert covers(requests, request_name) is expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({**parameters(), "iommus": {}}, "unknown field iommus; VfioDeviceConfig has the fields"),
        (parameters(enableApiDevice=True), "unknown field iommu.enableApiDevice; iommu has the fields"),
        (parameters(backendPolicy="Legacy"), "iommu.backendPolicy is 'Legacy'; LegacyOnly or"),
        (parameters(backendPolicy=1), "iommu.backendPolicy is a number"),
        (parameters(enableAPIDevice="true"), "iommu.enableAPIDevice is 'true'; true or false"),
        (parameters(enableAPIDevice=1), "iommu.enableAPIDevice is a number"),
        ({**parameters(), "iommu": ()}, "iommu is an array; an object is expected"),
        ({**parameters(), "kind": "GpuConfig"}, "kind 'GpuConfig' is not known to this driver"),
        ({**parameters(), "apiVersion": "resource.nvidia.com/v2"}, "apiVersion 'resource.nvidia.com/v2'"),
        ({}, "apiVersion absent, kind absent"),
        (None, "the parameters are absent; an object of kind VfioDeviceConfig is expected"),
        ("VfioDeviceConfig", "the parameters are a string"),
    ],
)
def test_a_mistake_is_named(given: Json, words: str) -> None:
    fault = decoded(given)
    assert isinstance(fault, ConfigFault)
    assert words in str(fault)


def test_a_null_is_an_absent_field() -> None:
    assert decoded({**parameters(), "iommu": None}) == VfioConfig()
    assert decoded(parameters(backendPolicy=None, enableAPIDevice=None)) == VfioConfig()


def test_what_a_newer_daemon_accepted_is_read_leniently_from_the_checkpoint() -> None:
    newer = {**parameters(backendPolicy="PreferIommuFD", dmabuf=True), "quota": 3}
    assert isinstance(decoded(newer), ConfigFault)
    assert decoded(newer, strict=False) == IOMMUFD


def test_a_mistake_in_a_configuration_that_no_request_of_ours_uses_is_said_too() -> None:
    fault = chosen(claim(of_class(), of_claim("elsewhere", policy="x")))
    assert isinstance(fault, ConfigFault)
    assert str(fault).startswith("configuration 2 (the claim's): unknown field iommu.policy")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("11111111-2222-3333-4444-55555555555a", True),
        ("11111111-2222-3333-4444-55555555555A", False),
        ("../11111111-2222-3333-4444-555555555", False),
        ("11111111-2222-3333-4444-55555555555a\n", False),
        ("", False),
    ],
)
def test_a_domain_id_is_a_uuid_and_so_one_part_of_a_path(text: str, expected: bool) -> None:
    assert is_domain_id(text) is expected
