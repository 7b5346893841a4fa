"""Resource and variable names: NVIDIA's own where they are valid, valid always."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.values.model import ResourceName
from gpuactors.core.values.naming import (
    env_name,
    parse_own_name,
    profile_resource,
    resource_name,
    virtual_name,
)
from gpuactors.host.pci_ids import SHIPPED

# k8s.io/apimachinery util/validation: IsQualifiedName, IsDNS1123Subdomain.
KUBELET_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
KUBELET_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def is_valid(resource: str) -> bool:
    domain, slash, name = resource.partition("/")
    return bool(
        slash and KUBELET_DOMAIN.fullmatch(domain) and KUBELET_NAME.fullmatch(name) and len(name) <= 63
    )


def shipped_models() -> list[tuple[str, str, str]]:
    """(vendor, device, name) of every device line of the shipped file, read naively."""
    models: list[tuple[str, str, str]] = []
    vendor = ""
    for line in SHIPPED.read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]{4}  ", line):
            vendor = line[:4]
        elif line.startswith("C "):
            break
        elif re.match(r"\t[0-9a-f]{4}  ", line):
            models.append((vendor, line[1:5], line[7:]))
    return models


@pytest.mark.parametrize(
    ("vendor", "device", "model", "expected"),
    [
        ("10de", "2330", "GH100 [H100 SXM5 80GB]", "nvidia.com/GH100_H100_SXM5_80GB"),
        ("10de", "1eb8", "TU104GL [Tesla T4]", "nvidia.com/TU104GL_TESLA_T4"),
        ("10de", "1e30", "TU102GL [Quadro RTX 6000/8000]", "nvidia.com/TU102GL_QUADRO_RTX_6000_8000"),
        ("10de", "0dfc", "GF108GLM [NVS 5200M]", "nvidia.com/GF108GLM_NVS_5200M"),
        ("10de", "05be", "PCIe 2.0  switch \t for S4 / S870", "nvidia.com/PCIE_2_0_SWITCH_FOR_S4___S870"),
        ("10de", "abcd", None, "nvidia.com/abcd"),
        ("10de", "abcd", "", "nvidia.com/abcd"),
        ("1002", "74a1", "Aqua Vanjaram [Instinct MI300X]", "amd.com/AQUA_VANJARAM_INSTINCT_MI300X"),
        ("8086", "56c0", "ATS-M [Data Center GPU Flex 170]", "intel.com/ATSM_DATA_CENTER_GPU_FLEX_170"),
        ("1234", "11e8", None, "pci-1234/11e8"),
    ],
)
def test_names_of_nvidias_plugin(vendor: str, device: str, model: str | None, expected: str) -> None:
    assert resource_name(vendor, device, model) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "GA104 [RTX A4500 Embedded GPU ]",
            "GA104_RTX_A4500_EMBEDDED_GPU",
        ),  # NVIDIA's: a trailing underscore
        ("_._ /X", "X"),
        ("///", "2330"),
        ("日本", "2330"),
        ("A" * 62 + "/B", "A" * 62),  # 64 characters; the cut would leave an underscore at the end
        ("X" * 80, "X" * 63),
        ("straße", "STRAE"),  # Go maps character to character, so ß stays and is dropped
        ("a\vb", "AB"),  # the vertical tab is no white space to Go's \s
    ],
)
def test_an_invalid_name_is_repaired(model: str, expected: str) -> None:
    assert resource_name("10de", "2330", model) == f"nvidia.com/{expected}"


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("nvidia.com/AD102GL_L40S", "nvidia.com/AD102GL_L40S_VF"),
        ("pci-1234/56c0", "pci-1234/56c0_VF"),
        (f"intel.com/{'A' * 60}", f"intel.com/{'A' * 60}_VF"),
        (f"intel.com/{'A' * 63}", f"intel.com/{'A' * 60}_VF"),
        (f"intel.com/{'A' * 58}__{'B' * 3}", f"intel.com/{'A' * 58}_VF"),
    ],
)
def test_virtual_functions_have_the_name_of_the_physical_one_and_a_suffix(
    resource: str, expected: str
) -> None:
    assert virtual_name(ResourceName(resource)) == expected
    assert is_valid(expected)


def test_ids_of_one_name_are_one_resource() -> None:
    assert resource_name("10de", "24fa", "RTX A4500 [GPU ]") == resource_name(
        "10de", "24ff", "RTX A4500 [GPU]"
    )


def test_unreadable_ids_still_make_a_valid_name() -> None:
    assert is_valid(resource_name("", "", None))


@given(
    st.sampled_from(["10de", "1002", "8086", "1234", "ffff", "0000"]),
    st.from_regex(r"[0-9a-f]{4}", fullmatch=True),
    st.none() | st.text() | st.text(alphabet="aZ09 _./-[]()\t é", max_size=90),
)
def test_any_name_is_valid_for_kubelet(vendor: str, device: str, model: str | None) -> None:
    assert is_valid(resource_name(vendor, device, model))


def test_every_name_in_the_shipped_pci_ids_is_valid() -> None:
    models = shipped_models()
    assert len(models) > 15_000
    invalid = [model for model in models if not is_valid(resource_name(*model))]
    assert invalid == []


def test_models_share_a_resource_where_nvidias_plugin_gives_them_one_name() -> None:
    """The repairs merge nothing further, and part nothing."""

    def theirs(name: str) -> str:
        """The rule of NVIDIA's kubevirt-gpu-device-plugin (getDeviceName) for names in ASCII."""
        name = name.strip().upper().replace("/", "_").replace(".", "_")
        return re.sub(r"[^a-zA-Z0-9_.]+", "", re.sub(r"\s+", "_", name))

    models = [model for model in shipped_models() if model[0] == "10de"]
    assert all(name.isascii() for _, _, name in models)
    both = {(resource_name(*model), theirs(model[2])) for model in models}
    assert len(both) == len({ours for ours, _ in both}) == len({their for _, their in both}) < len(models)


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("nvidia.com/GH100_H100_SXM5_80GB", "PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB"),
        ("pci-1234/11e8", "PCI_RESOURCE_PCI-1234_11E8"),
        ("amd.com/a.b-c", "PCI_RESOURCE_AMD_COM_A_B-C"),
    ],
)
def test_variable_as_kubevirt_computes_it(resource: str, expected: str) -> None:
    assert env_name(resource) == expected


# --- an operator's own name ---------------------------------------------------------------------------------------


def test_an_own_name_is_read_as_it_is_written() -> None:
    assert parse_own_name("10de:2330=example.com/h100") == (("10de", "2330"), "example.com/h100")
    assert parse_own_name(" 0x10DE:0x2330 = nvidia.com/GH100_H100-1.x ") == (
        ("10de", "2330"),
        "nvidia.com/GH100_H100-1.x",
    )


@given(st.from_regex(r"[a-z.-]{1,12}/[A-Za-z0-9_.-]{1,70}", fullmatch=True))
def test_an_own_name_that_is_taken_is_valid_for_kubelet(resource: str) -> None:
    try:
        parse_own_name(f"10de:2330={resource}")
    except ValueError:
        assert not is_valid(resource)
    else:
        assert is_valid(resource)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "example.com/h100",
            "is not VENDOR:DEVICE=DOMAIN/NAME; write for example 10de:2330=example.com/h100",
        ),
        ("10de=example.com/h100", "is not VENDOR:DEVICE=DOMAIN/NAME"),
        ("10de:233=example.com/h100", "is not VENDOR:DEVICE=DOMAIN/NAME"),
        ("10de:2330=h100", "'h100' is no resource: write a DNS name, a slash"),
        ("10de:2330=Example.com/h100", "is no resource"),
        ("10de:2330=example.com/h100/x", "is no resource"),
        ("10de:2330=example.com/" + "x" * 64, "at most 63 letters"),
        ("10de:2330=" + "a." * 122 + "b/h100", "is no resource"),
        ("10de:2330=kubernetes.io/h100", "is one of Kubernetes' own names: take a domain of yours"),
        ("10de:2330=gpu.kubernetes.io/h100", "is one of Kubernetes' own names"),
        ("10de:2330=requests.example.com/h100", "is one of Kubernetes' own names"),
    ],
)
def test_what_kubelet_would_not_take_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_own_name(text)


# --- the profiles of vGPUs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("GRID T4-1Q", "GRID_T4-1Q"),
        ("NVIDIA A100-1-5CME\n", "NVIDIA_A100-1-5CME"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-3Q", "NVIDIA_RTX_Pro_6000_Blackwell_DC-3Q"),
        (" NVIDIA \t H200X-1-18C ", "NVIDIA_H200X-1-18C"),
        ("GRID v1.2 (beta)/x", "GRID_v1.2_betax"),
        ("_-.NVIDIA-.", "NVIDIA"),
        ("N" * 62 + "-1Q", "N" * 62),
        ("???", "unknown"),
    ],
)
def test_the_resource_of_a_profile_keeps_case_and_hyphens(profile: str, expected: str) -> None:
    assert profile_resource("10de", profile) == f"nvidia.com/{expected}"
    assert is_valid(profile_resource("10de", profile))


def test_the_domain_of_a_profile_is_that_of_its_vendor() -> None:
    assert profile_resource("8086", "i915-GVTg_V5_4") == "intel.com/i915-GVTg_V5_4"
    assert profile_resource("1d0f", "mtty-1") == "pci-1d0f/mtty-1"
