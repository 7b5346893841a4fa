"""KubeVirt's reader of a claim's metadata files, by the rules of its own (1.9, pkg/dra/utils.go), and a container
runtime's part: which files the CDI ids of a claim mount into the container. Also its reader of a device plugin's
variables (pkg/virt-launcher/virtwrap/device/hostdevice: addresspool.go, gpu/hostdev.go).

Written from those rules and not from our writer, so that one mistake is not made twice.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BASE = "var/run/kubernetes.io/dra-device-attributes"
_KNOWN = "metadata.resource.k8s.io/v1alpha1"


class NotReadableError(Exception):
    """virt-launcher does not start the VM."""


@dataclass(frozen=True)
class HostDevice:
    """A `<hostdev>` of the domain."""

    kind: str
    address: str


class _Pool:
    """The addresses of the resources of one prefix. One that is taken is nobody's any more."""

    def __init__(self, prefix: str, variables: Mapping[str, str], resources: Iterable[str]) -> None:
        self._addresses: dict[str, list[str]] = {}
        for resource in resources:
            name = f"{prefix}_{resource.upper().replace('/', '_').replace('.', '_')}"
            if name in variables:
                value = variables[name].removesuffix(",")
                self._addresses[resource] = value.split(",") if value else []

    def pop(self, resource: str) -> str | None:
        """The next address; None if there is none, which is no error yet."""
        taken = next(iter(self._addresses.get(resource, ())), None)
        self._addresses = {r: [a for a in left if a != taken] for r, left in self._addresses.items()}
        return taken


def host_devices(variables: Mapping[str, str], gpus: Sequence[str]) -> list[HostDevice]:
    """The devices of a VM whose `gpus[]` have these resources, by the variables of its container. Raises
    `NotReadableError`."""
    kinds = {"pci": "PCI_RESOURCE", "mdev": "MDEV_PCI_RESOURCE"}
    pools = {kind: _Pool(prefix, variables, gpus) for kind, prefix in kinds.items()}
    found = [
        HostDevice(kind, address)
        for kind, pool in pools.items()
        for resource in gpus
        if (address := pool.pop(resource)) is not None
    ]
    if len(found) != len(gpus):
        raise NotReadableError(f"{len(gpus)} GPUs and {len(found)} devices")
    return found


def start_container(cdi_dir: Path, ids: Iterable[str], container: Path) -> tuple[str, ...]:
    """Mounts (copies) what the CDI ids say into an empty container, and returns its device nodes. Raises `KeyError` for
    an id that no file of the directory has, as a runtime does."""
    known: dict[str, Any] = {}
    for file in sorted(cdi_dir.iterdir()):
        if file.suffix in (".json", ".yaml"):
            content = json.loads(file.read_bytes())
            assert tuple(map(int, content["cdiVersion"].split("."))) >= (0, 5, 0)
            for device in content["devices"]:
                assert device["containerEdits"], "empty edits are invalid"
                known[f"{content['kind']}={device['name']}"] = device["containerEdits"]
    nodes: list[str] = []
    for cdi_id in ids:
        edits = known[cdi_id]
        nodes += [node["path"] for node in edits.get("deviceNodes", ())]
        for mount in edits.get("mounts", ()):
            target = container / mount["containerPath"].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(mount["hostPath"], target)
    return tuple(nodes)


def host_device(
    container: Path, *, vmi_claim: str, request: str, resource_claim_name: str | None = None
) -> HostDevice:
    """The device of one `gpus[]` entry of a VMI: {claimName: vmi_claim, requestName: request}.

    `resource_claim_name` is `spec.resourceClaims[].resourceClaimName`; without it the claim is made from a template.
    Raises `NotReadableError`.
    """
    kind, name = (
        ("resourceclaims", resource_claim_name)
        if resource_claim_name
        else ("resourceclaimtemplates", vmi_claim)
    )
    found = glob.glob(os.path.join(str(container), _BASE, kind, name, request, "*-metadata.json"))
    if len(found) != 1:
        raise NotReadableError(f"{len(found)} metadata files")
    devices = [
        device
        for entry in _metadata(Path(found[0]).read_text())["requests"]
        if entry["name"] == request
        for device in entry["devices"]
    ]
    if len(devices) != 1:
        raise NotReadableError(f"request {request} has {len(devices)} devices")
    attributes = devices[0].get("attributes", {})
    if uuid := attributes.get("mdevUUID", {}).get("string"):
        return HostDevice("mdev", uuid)
    if address := attributes.get("resource.kubernetes.io/pciBusID", {}).get("string"):
        return HostDevice("pci", address)
    raise NotReadableError("neither mdevUUID nor pciBusID")


def _metadata(stream: str) -> Any:
    decoder, rest = json.JSONDecoder(), stream.lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError as error:
            raise NotReadableError(str(error)) from error
        if not value.get("apiVersion"):
            raise NotReadableError("no apiVersion")
        if value["apiVersion"] == _KNOWN:
            return value
        rest = rest[end:].lstrip()
    raise NotReadableError("no known version")
