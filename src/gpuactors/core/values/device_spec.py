"""The CDI files of the device plugin: one of each resource, by whose devices' names Allocate answers.

Kata joins the resource's name and the ID of each device that kubelet lists for a pod, `nvidia.com/GH100=0000:3b:00.0`,
and looks that up in the CDI directory when it makes the sandbox (kata-containers, pod-resources and
`device_cold_plug.go`); a container runtime gets the same name with Allocate's answer. Values only; `acts/spec_files.py`
writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

from msgspec import Struct

from gpuactors.core.values.cdi import device_nodes
from gpuactors.core.values.claim import Json
from gpuactors.core.values.model import DeviceId, ResourceName

SPEC_VERSION: Final = "0.6.0"
"""The CDI version of the files: a class may have a dot since 0.6.0, and a device's name begin with a digit since
0.5.0."""

_PREFIX: Final = "gpuactors-"
_ENDING: Final = ".json"

_KIND: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*(?<=[A-Za-z0-9])/[A-Za-z][A-Za-z0-9_.-]*(?<=[A-Za-z0-9])")
"""A CDI kind: vendor and class each begin with a letter, and end with a letter or digit (CDI, parser.go,
ValidateVendorName and ValidateClassName)."""

DeviceSpec: TypeAlias = Mapping[DeviceId, tuple[str, ...]]
"""The devices of one file: the device nodes of each, by its ID at kubelet."""

DeviceSpecs: TypeAlias = Mapping[ResourceName, DeviceSpec]
"""The files, by their resource, which is their CDI kind."""


class SpecsWanted(Struct, frozen=True, gc=False):
    """The files that are to be there."""

    specs: DeviceSpecs
    writes: bool
    """False: another daemon serves and writes its own. Only look which of these are there."""


def is_kind(resource: str) -> bool:
    """Return whether a resource's name is a CDI kind. Kubelet admits more names: `nvidia.com/2330`."""
    return _KIND.fullmatch(resource) is not None


def cdi_id(resource: ResourceName, device: DeviceId) -> str:
    """Return the CDI id of a device, by which Allocate answers: `nvidia.com/GH100=0000:3b:00.0`."""
    return f"{resource}={device}"


def file_name(resource: ResourceName) -> str:
    """Return the name of a resource's file. No two resources have one: a resource's domain has no `_`."""
    return f"{_PREFIX}{resource.replace('/', '_', 1)}{_ENDING}"


def resource_of(name: str) -> ResourceName | None:
    """Return the resource whose file has this name; None if it is no name of such a file."""
    resource = ResourceName(name.removeprefix(_PREFIX).removesuffix(_ENDING).replace("_", "/", 1))
    return resource if is_kind(resource) and file_name(resource) == name else None


def content(resource: ResourceName, spec: DeviceSpec) -> Json:
    """Return the content of a resource's file. It has device nodes and no variable: in a guest,
    `NVIDIA_VISIBLE_DEVICES=void` would hide the GPU."""
    return {
        "cdiVersion": SPEC_VERSION,
        "kind": resource,
        "devices": tuple(
            {"name": device, "containerEdits": {"deviceNodes": device_nodes(nodes)}}
            for device, nodes in sorted(spec.items())
        ),
    }
