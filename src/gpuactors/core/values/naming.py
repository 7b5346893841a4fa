"""The names of a GPU: its resource for kubelet, and its variable for a virtual machine's launcher.

The names are those of NVIDIA's kubevirt-gpu-device-plugin (pkg/device_plugin/device_plugin.go, getDeviceName), so that
existing virtual machines find their GPUs; where one of its names would be refused by kubelet it is repaired. Or the
operator names a model's resource. Must not read anything: the model's name in pci.ids comes in as a fact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from gpuactors.core.values.model import ResourceName
from gpuactors.core.values.names import is_subdomain

RESOURCE_NAME_MAX_CHARS: Final = 63
"""The maximum length of the part after the slash: a Kubernetes label value."""

DOMAINS: Final[Mapping[str, str]] = {"10de": "nvidia.com", "1002": "amd.com", "8086": "intel.com"}
"""The domain of the resource by PCI vendor; any other vendor's is `pci-<vendor>`."""

ENV_PREFIX: Final = "PCI_RESOURCE_"
"""KubeVirt's prefix for the addresses of PCI devices of one resource (pkg/virt-launcher, hostdevice/pci)."""

MEDIATED_ENV_PREFIX: Final = "MDEV_PCI_RESOURCE_"
"""KubeVirt's prefix for the UUIDs of mediated devices of one resource. A resource has one of the two variables: with
both KubeVirt counts its devices twice."""

_VIRTUAL: Final = "_VF"
"""The suffix of the resource of virtual functions: AMD's in pci.ids have it, Intel's and NVIDIA's have the name of the
physical function."""

_ID = re.compile(r"[0-9a-f]{4}")
_QUALIFIED = rf"(?=.{{1,{RESOURCE_NAME_MAX_CHARS}}}$)[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
_KUBERNETES: Final = "kubernetes.io"
_QUOTA: Final = "requests."
"""The prefix of a resource in a ResourceQuota."""

# Go's \s, which is ASCII and leaves out the vertical tab.
_SPACES = re.compile(r"[\t\n\f\r ]+")
_DROPPED = re.compile(r"[^A-Z0-9_]+")
_NOT_IN_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_NOT_AT_END: Final = "_.-"
"""Kubelet wants a letter or digit at both ends (`_product`)."""
_LABEL_CHARS: Final = 50
"""The length of a driver's name in a domain, whose labels have 63 characters at most."""


@lru_cache(maxsize=4096)
def resource_name(vendor: str, device: str, model: str | None) -> ResourceName:
    """Return the extended resource that a GPU belongs to: `nvidia.com/GH100_H100_SXM5_80GB`.

    `vendor` and `device` are four hex digits as sysfs spells them, `model` is the device's name in pci.ids, if it has
    one. Always a name that kubelet accepts. Ids whose names come out the same are **one** resource on purpose: pci.ids
    gives many ids of one product the same name, and NVIDIA's plugin offers them under it.
    """
    return ResourceName(f"{_domain(vendor)}/{_product(model or '') or _hex_digits(device)}")


def virtual_name(resource: ResourceName) -> ResourceName:
    """Return the resource of virtual functions whose physical function is of this resource:
    `nvidia.com/AD102GL_L40S_VF`."""
    domain, _, name = resource.partition("/")
    kept = name[: RESOURCE_NAME_MAX_CHARS - len(_VIRTUAL)].rstrip("_")
    return ResourceName(f"{domain}/{kept}{_VIRTUAL}")


def profile_resource(vendor: str, profile: str) -> ResourceName:
    """Return the extended resource of the vGPUs of one profile: `nvidia.com/NVIDIA_L40S-1Q`.

    The name is that of NVIDIA's kubevirt-gpu-device-plugin (pkg/device_plugin/device_plugin.go) and of KubeVirt
    (mediated_device.go): white space becomes `_`, and case, `-` and `.` are kept. Always a name that kubelet accepts.
    """
    return ResourceName(f"{_domain(vendor)}/{_profile(profile)}")


def mediated_resource(type_id: str, profile: str) -> ResourceName:
    """Return the resource of mediated devices whose parent is no PCI function, so that it has no vendor:
    `mdev-mtty/Dual_port_serial`. The domain is that of the driver in the type's id, `<driver>-<type>`."""
    driver = re.sub(r"[^a-z0-9]+", "-", type_id.partition("-")[0].lower())[:_LABEL_CHARS].strip("-")
    return ResourceName(f"mdev-{driver or 'unknown'}/{_profile(profile)}")


def parse_own_name(text: str) -> tuple[tuple[str, str], ResourceName]:
    """Read `VENDOR:DEVICE=DOMAIN/NAME`, an operator's own resource of one model: the PCI ids, and the resource.

    The ids are four hex digits each; `0x` and upper case are accepted. The resource is one that kubelet accepts of a
    plugin (pkg/apis/core/v1/helper, IsExtendedResourceName): no name of Kubernetes' own. Raises ValueError with a
    sentence that says what is wrong and how to write it.
    """
    ids, equals, resource = (part.strip() for part in text.partition("="))
    vendor, _, device = ids.lower().partition(":")
    vendor, device = vendor.removeprefix("0x"), device.removeprefix("0x")
    if not equals or not (_ID.fullmatch(vendor) and _ID.fullmatch(device)):
        raise ValueError(
            f"{text!r} is not VENDOR:DEVICE=DOMAIN/NAME; write for example 10de:2330=example.com/h100"
        )
    return (vendor, device), parse_resource(resource)


def parse_resource(text: str) -> ResourceName:
    """Read `DOMAIN/NAME`, a resource that kubelet accepts of a plugin. Raises ValueError as `parse_own_name`."""
    resource = text.strip()
    domain, slash, name = resource.partition("/")
    if not slash or not is_subdomain(_QUOTA + domain) or not re.fullmatch(_QUALIFIED, name):
        raise ValueError(
            f"{resource!r} is no resource: write a DNS name, a slash, and at most {RESOURCE_NAME_MAX_CHARS} "
            "letters, digits, -, _ and ., with a letter or digit at both ends, for example example.com/h100"
        )
    if domain.endswith(_KUBERNETES) or resource.startswith(_QUOTA):
        raise ValueError(f"{resource!r} is one of Kubernetes' own names: take a domain of yours")
    return ResourceName(resource)


def env_name(resource: str, prefix: str = ENV_PREFIX) -> str:
    """Return the variable for the PCI addresses: `PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB`. With
    MEDIATED_ENV_PREFIX that for the UUIDs of mediated devices.

    KubeVirt computes it from the resource name of the virtual machine's specification, so the rule is exactly its own
    (pkg/util, ResourceNameToEnvVar): upper case, `/` and `.` become `_`, and `-` stays.
    """
    return prefix + resource.upper().replace("/", "_").replace(".", "_")


def _domain(vendor: str) -> str:
    return DOMAINS.get(vendor.lower()) or f"pci-{_hex_digits(vendor)}"


def _profile(profile: str) -> str:
    name = _NOT_IN_NAME.sub("", _SPACES.sub("_", profile.strip())).lstrip(_NOT_AT_END)
    return name[:RESOURCE_NAME_MAX_CHARS].rstrip(_NOT_AT_END) or "unknown"


def _product(model: str) -> str:
    """Return the name of a model as NVIDIA's plugin makes it, then repaired; empty if nothing of it is left."""
    name = "".join(map(_upper, model.strip())).replace("/", "_").replace(".", "_")
    name = _DROPPED.sub("", _SPACES.sub("_", name))
    # Kubelet wants a letter or digit at both ends (k8s.io/apimachinery util/validation, IsQualifiedName); of
    # "GK110BGL [Tesla K40s] *" an underscore would be left at the end. Cut first: the cut may leave one as well.
    return name.lstrip("_")[:RESOURCE_NAME_MAX_CHARS].rstrip("_")


def _upper(character: str) -> str:
    # Go's ToUpper maps character to character; Python's makes "SS" of "ß", which would then survive.
    upper = character.upper()
    return upper if len(upper) == 1 else character


def _hex_digits(text: str) -> str:
    # Also for an id that could not be read the result is a valid name, so that the core does not fail.
    digits = re.sub(r"[^0-9a-f]", "", text.lower())
    return digits[:4] or "unknown"
