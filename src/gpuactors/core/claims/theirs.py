"""The checkpoint of NVIDIA's DRA driver, which has our driver's name, directory and file name: the owner of a file, and
the claims that it has prepared.

    {"checksum": 123, "v1": {"preparedClaims": {…}}, "v2": {"checksum": 456, "nodeBootID": "…", "preparedClaims":
     {"<uid>": {"checkpointState": "PrepareCompleted", "status": {"allocation": {…}}, "preparedDevices":
      [{"devices": [{"vfio": {"info": {"uuid": …, "pciBusID": …}, "device": {"Requests": [], "PoolName": …, …}}}],
        "configState": {…}}]}}}}

`v1` has the prepared claims of `v2` again, for a downgrade; releases before 25.8 wrote `v1` alone. A claim that is
prepared has no namespace and name (NVIDIA issue 1278), except claims of compute domains from 0.4.1 on. The checksums
are not checked: a field that is missing says more.

Values only. The file is never written: it belongs to NVIDIA's driver, which uses it again when it comes back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from gpuactors.core.claims.checkpoint import MalformedError
from gpuactors.core.values.claim import AllocatedDevice, ClaimName, ClaimUid, Json, PreparedDevice
from gpuactors.core.values.domain import DomainUid
from gpuactors.core.values.model import DeviceKey, is_pci_address
from gpuactors.core.values.names import is_domain_id, is_uid

_OURS: Final = re.compile(rb'\s*\{"checksum":"sha256:')
_THEIRS: Final = re.compile(rb'\s*\{\s*"checksum"\s*:\s*\d+\s*[,}]')

_PREPARED: Final = "PrepareCompleted"


class Whose(StrEnum):
    """The author of a file by the name `checkpoint.json`."""

    OURS = "ours"
    """gpuactors, before its file had a name of its own."""
    THEIRS = "theirs"
    NOBODYS = "nobody's"
    """Unknown: the file has neither form."""


def whose(content: bytes) -> Whose:
    """Return the author of a file by its beginning: a file that is damaged behind it has an author as well."""
    if _OURS.match(content):
        return Whose.OURS
    return Whose.THEIRS if _THEIRS.match(content) else Whose.NOBODYS


class TheirDevice(Struct, frozen=True, gc=False):
    """One device of a claim."""

    prepared: PreparedDevice
    admin_access: bool = False
    key: DeviceKey | None = None
    """The address of a GPU; None if the file does not have it: releases up to 25.12 write none, and no release writes
    that of a GPU on its host's driver."""
    uuid: str = ""
    """The UUID `GPU-…` of the GPU, or of a MIG device's GPU; empty if the file does not have it."""


class TheirClaim(Struct, frozen=True, gc=False):
    """One prepared claim."""

    name: ClaimName
    """The claim's name; often only the UID is known."""
    devices: tuple[TheirDevice, ...]
    domain: DomainUid | None = None
    """The compute domain that it is for; None for a claim of GPUs."""

    @property
    def results(self) -> tuple[AllocatedDevice, ...]:
        """Its devices as the scheduler has allocated them."""
        return tuple(
            AllocatedDevice(request, d.prepared.pool, d.prepared.device, d.prepared.share_id, d.admin_access)
            for d in self.devices
            for request in d.prepared.requests[:1]
        )


class TheirCheckpoint(Struct, frozen=True, gc=False):
    """The content of the file."""

    boot_id: str
    """The boot's ID; empty if the file does not have it: releases before 25.12."""
    claims: tuple[TheirClaim, ...]


def decoded(content: Json, driver: str) -> TheirCheckpoint:
    """Decode the claims of a driver in the file. Raises `MalformedError`."""
    newest = _object(content, "the file")
    newest = _object(newest.get("v2") or newest.get("v1") or {}, "v2")
    claims = _object(newest.get("preparedClaims") or {}, "preparedClaims")
    boot_id = newest.get("nodeBootID")
    prepared = (_claim(uid, _object(claim, f"the claim {uid}"), driver) for uid, claim in claims.items())
    return TheirCheckpoint(
        boot_id if isinstance(boot_id, str) else "", tuple(claim for claim in prepared if claim is not None)
    )


def _claim(uid: str, content: Mapping[str, Json], driver: str) -> TheirClaim | None:
    """Decode one claim; None if its prepare has not ended: no pod has it, and kubelet asks for it again."""
    if not is_uid(uid):
        raise MalformedError(f"{uid!r} is no UID of a claim")
    if content.get("checkpointState", _PREPARED) != _PREPARED:
        return None
    groups = [_object(g, f"a group of devices of the claim {uid}") for g in _list(content, "preparedDevices")]
    admin = _with_admin_access(content, driver)
    devices = tuple(
        _device(uid, _object(device, f"a device of the claim {uid}"), admin)
        for group in groups
        for device in _list(group, "devices")
    )
    name, namespace = content.get("name"), content.get("namespace")
    is_named = isinstance(name, str) and isinstance(namespace, str) and bool(name and namespace)
    return TheirClaim(
        ClaimName(str(namespace), str(name), ClaimUid(uid)) if is_named else ClaimName("", "", ClaimUid(uid)),
        devices,
        _domain(groups),
    )


def _device(uid: str, content: Mapping[str, Json], admin: frozenset[str]) -> TheirDevice:
    """Decode one device. Exactly one of the kinds that it may be (`gpu`, `mig`, `vfio`, `channel`, `daemon`) is not
    null."""
    kinds = [kind for kind in content.values() if isinstance(kind, Mapping)]
    if len(kinds) != 1:
        raise MalformedError(f"a device of the claim {uid} is of no kind, or of several")
    details = kinds[0].get("info") or kinds[0].get("concrete")
    info: Mapping[str, Json] = details if isinstance(details, Mapping) else {}
    device = _object(kinds[0].get("device"), f"a device of the claim {uid}")
    name = _text(device, "DeviceName")
    address = next((a for key in ("pciBusID", "parentPCIBusID") if (a := info.get(key))), None)
    uuid = next((u for key in ("parentUUID", "uuid") if (u := info.get(key))), None)
    prepared = PreparedDevice(
        _texts(device, "Requests"),
        _text(device, "PoolName"),
        name,
        _texts(device, "CDIDeviceIDs"),
        share if isinstance(share := device.get("ShareID"), str) else None,
    )
    return TheirDevice(prepared, name in admin, _address(address), uuid if isinstance(uuid, str) else "")


def _with_admin_access(content: Mapping[str, Json], driver: str) -> frozenset[str]:
    """Return the names of the devices that the claim has admin access to, by its stored status."""
    match content:
        case {"status": {"allocation": {"devices": {"results": tuple(results)}}}}:
            return frozenset(
                str(r.get("device"))
                for r in results
                if isinstance(r, Mapping) and r.get("adminAccess") is True and r.get("driver") == driver
            )
        case _:
            return frozenset()


def _domain(groups: Iterable[Mapping[str, Json]]) -> DomainUid | None:
    for group in groups:
        state = group.get("configState")
        domain = state.get("ComputeDomain") if isinstance(state, Mapping) else None
        if isinstance(domain, str) and is_domain_id(domain):
            return DomainUid(domain)
    return None


def _address(text: Json) -> DeviceKey | None:
    lower = text.lower() if isinstance(text, str) else ""
    return DeviceKey(lower) if is_pci_address(lower) else None


def _object(content: Json, what: str) -> Mapping[str, Json]:
    if not isinstance(content, Mapping):
        raise MalformedError(f"{what} is no object")
    return content


def _list(content: Mapping[str, Json], name: str) -> tuple[Json, ...]:
    value = content.get(name)
    if value is not None and not isinstance(value, tuple):
        raise MalformedError(f"{name} is no list")
    return value or ()


def _text(content: Mapping[str, Json], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise MalformedError(f"{name} is no text")
    return value


def _texts(content: Mapping[str, Json], name: str) -> tuple[str, ...]:
    return tuple(str(text) for text in _list(content, name) if isinstance(text, str))
