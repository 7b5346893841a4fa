"""The checkpoint that NVIDIA's DRA driver leaves, byte for byte as its kubelet plugins write it: `checkpoint.go`,
`checkpointv.go` and `prepared.go` in `cmd/*-kubelet-plugin/` of kubernetes-sigs/dra-driver-nvidia-gpu.

The original's own files are compared with what is written here: where its programs are there by
`tests/node/test_nvidias_checkpoint.py`, everywhere else by `tests/acts/test_nvidias_checkpoint.py`, with those that it
had written. What older releases write is by their sources alone.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

Object = dict[str, Any]

GPUS: Final = "gpu.nvidia.com"
DOMAINS: Final = "compute-domain.nvidia.com"

STARTED: Final = "PrepareStarted"
COMPLETED: Final = "PrepareCompleted"
ABORTED: Final = "PrepareAborted"
"""Of a compute domain: unprepared before its prepare had ended. It is kept for 90 s."""

_KINDS: Final = {GPUS: ("gpu", "mig", "vfio"), DOMAINS: ("channel", "daemon")}
"""The fields of a device, of which one is not null. `vfio` is left out where it is null."""


class Release(IntEnum):
    """Those of NVIDIA's driver that wrote something else than the one before."""

    R25_3 = 0
    """`v1` alone: only claims whose prepare had ended. Of a part of a GPU its own UUID alone."""
    R25_12 = 1
    """`v2` as well (from 25.8 on), and GPUs on vfio, without their addresses."""
    R0_4 = 2
    """The boot, the addresses, and the names of all claims of domains (these from 0.4.1 on)."""
    R0_5 = 3
    """No empty `mpsControlDaemonID`."""


@dataclass(frozen=True, slots=True)
class Device:
    """A prepared device of a claim."""

    driver: str
    kind: str
    name: str
    info: Mapping[str, Any]
    pool: str
    request: str
    cdi_ids: tuple[str, ...]
    metadata: Mapping[str, Any] | None = None
    """The attributes that it has in its slice, of a GPU on vfio with the gate DeviceMetadata."""


@dataclass(frozen=True, slots=True)
class TheirClaim:
    """A claim in the file."""

    state: str
    status: Object
    devices: tuple[Device, ...] = ()
    domain: str = ""
    namespace: str = ""
    name: str = ""
    aborted_at: str = ""


# --- devices ----------------------------------------------------------------------------------------------------------


def vfio(
    uid: str, pool: str, number: int, address: str, request: str = "gpu",
    attributes: Mapping[str, Any] | None = None,
) -> Device:  # fmt: skip
    """A GPU on vfio. It has a UUID of its own, made of its address. `attributes`: as the slice has them, with the gate
    DeviceMetadata."""
    info = {"uuid": str(uuid.uuid5(uuid.NAMESPACE_DNS, address)), "pciBusID": address}
    return _device(GPUS, "vfio", uid, pool, f"gpu-vfio-{number}", info, request, attributes)


def gpu(uid: str, pool: str, minor: int, uuid: str, request: str = "gpu") -> Device:
    """A GPU on NVIDIA's driver."""
    return _device(GPUS, "gpu", uid, pool, f"gpu-{minor}", {"uuid": uuid}, request)


def mig(
    uid: str, pool: str, parent_uuid: str, request: str = "gpu", parent_address: str = "0000:23:00.0"
) -> Device:
    """A part of a GPU. By the sources alone: the mock of NVML has none."""
    concrete = {"parentMinor": 0, "giId": 1, "ciId": 0, "migUUID": "MIG-1", "parentUUID": parent_uuid,
                "parentPCIBusID": parent_address}  # fmt: skip
    return _device(GPUS, "mig", uid, pool, "gpu-0-mig-1g24gb-19-0", concrete, request)


def channel(uid: str, pool: str, number: int = 0, request: str = "channel") -> Device:
    """A channel of a compute domain, on a node with a fabric."""
    return _device(DOMAINS, "channel", uid, pool, f"channel-{number}", {"id": number}, request)


def daemon(uid: str, pool: str, request: str = "daemon") -> Device:
    """The daemon of a compute domain."""
    return _device(DOMAINS, "daemon", uid, pool, "daemon-0", {"id": 0}, request)


def _device(
    driver: str, kind: str, uid: str, pool: str, name: str, info: Mapping[str, Any], request: str,
    metadata: Mapping[str, Any] | None = None,
) -> Device:  # fmt: skip
    common = (f"k8s.{driver}/device=all",) if kind == "daemon" else ()
    ids = (*common, f"k8s.{driver}/claim={uid}-{name}")
    return Device(driver, kind, name, info, pool, request, ids, metadata)


# --- claims -----------------------------------------------------------------------------------------------------------


def prepared(
    *devices: Device, domain: str = "", admin: bool = False, status: Object | None = None, namespace: str = "",
    name: str = "",
) -> TheirClaim:  # fmt: skip
    """A claim whose prepare has ended. `status`: the claim's own; else one that fits these devices."""
    return TheirClaim(COMPLETED, status or _status(devices, admin=admin), devices, domain, namespace, name)


def started(namespace: str, name: str, status: Object | None = None) -> TheirClaim:
    """A claim whose prepare has begun, and has not ended: nothing of its devices is written down."""
    return TheirClaim(STARTED, status or _status((), admin=False), namespace=namespace, name=name)


def aborted(namespace: str, name: str, at: str, status: Object | None = None) -> TheirClaim:
    """A claim of a domain that was unprepared before its prepare had ended. `at`: as `2026-11-29T18:00:00Z`."""
    return TheirClaim(
        ABORTED, status or _status((), admin=False), namespace=namespace, name=name, aborted_at=at
    )


def _status(devices: Iterable[Device], *, admin: bool) -> Object:
    """That of an allocated claim of a pod."""
    results = [
        {"request": device.request, "driver": device.driver, "pool": device.pool, "device": device.name}
        | ({"adminAccess": True} if admin else {})
        for device in devices
    ]
    node = {"key": "metadata.name", "operator": "In", "values": ["node-1"]}
    return {
        "allocation": {
            "devices": {"results": results},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [node]}]},
            "allocationTimestamp": "2026-11-29T18:00:00Z",
        },
        "reservedFor": [{"resource": "pods", "name": "job-0", "uid": "8a1b"}],
    }


def written(driver: str, boot: str, claims: Iterable[Object], attributes: Mapping[str, Any]) -> bytes:
    """What the driver has written of claims of the API server. Each has its object as `claim`, the `state` of its
    prepare, and `abortedAt` where that is aborted. `attributes`: of each device, as its slice has them."""
    return their_checkpoint(
        boot, {one["claim"]["metadata"]["uid"]: _as_allocated(driver, one, attributes) for one in claims}
    )


def _as_allocated(driver: str, one: Object, attributes: Mapping[str, Any]) -> TheirClaim:
    meta, status = one["claim"]["metadata"], one["claim"]["status"]
    if one["state"] == STARTED:
        return started(meta["namespace"], meta["name"], status)
    if one["state"] == ABORTED:
        return aborted(meta["namespace"], meta["name"], one["abortedAt"], status)
    devices = [
        _device_of(meta["uid"], result, attributes.get(result["device"], {}))
        for result in status["allocation"]["devices"]["results"]
        if result["driver"] == driver
    ]
    return prepared(
        *devices, domain=_domain_of(status), status=status, namespace=meta["namespace"], name=meta["name"]
    )


def _device_of(uid: str, result: Object, attributes: Mapping[str, Any]) -> Device:
    pool, name, request = result["pool"], result["device"], result["request"]
    number = int(re.findall(r"\d+", name)[0])
    if name.startswith("gpu-vfio-"):
        address = attributes["resource.kubernetes.io/pciBusID"]["string"]
        return vfio(uid, pool, number, address, request, attributes)
    if name.startswith("gpu-"):
        return gpu(uid, pool, number, attributes["uuid"]["string"], request)
    if name.startswith("channel-"):
        return channel(uid, pool, number, request)
    return daemon(uid, pool, request)


def _domain_of(status: Object) -> str:
    parameters = [
        config["opaque"]["parameters"] for config in status["allocation"]["devices"].get("config", ())
    ]
    return next((str(p["domainID"]) for p in parameters if "domainID" in p), "")


# --- the file ---------------------------------------------------------------------------------------------------------


def their_checkpoint(
    boot_id: str, claims: Mapping[str, TheirClaim], *, release: Release = Release.R0_5
) -> bytes:
    """The file of a release, with these claims by UID, as Go writes it: keys of maps in their order, those of structs
    in the order of their fields."""
    every = {uid: _entry(claims[uid], release) for uid in sorted(claims)}
    old = {
        uid: {key: entry[key] for key in ("status", "preparedDevices")}
        for uid, entry in every.items()
        if entry["checkpointState"] == COMPLETED
    }
    v1: Object = {"preparedClaims": old} if old else {}
    v2: Object = {"preparedClaims": every} if every else {}
    if release >= Release.R0_4:
        v2["nodeBootID"] = boot_id
    content: Object = {"checksum": _checksum({"checksum": 0, "v1": v1}), "v1": v1}
    if release > Release.R25_3:
        content["v2"] = {"checksum": _checksum({"checksum": 0, **v2}), **v2}
    return _json(content)


def _entry(claim: TheirClaim, release: Release) -> Object:
    entry: Object = {"checkpointState": claim.state, "status": claim.status}
    if claim.devices:
        devices = [_written(device, release) for device in claim.devices]
        state = _config_state(claim, release)
        entry["preparedDevices"] = [{"devices": devices, "configState": state}]
    # Of claims of GPUs whose prepare has ended no release writes the name.
    is_named = claim.state != COMPLETED or (claim.domain and release >= Release.R0_4)
    if is_named:
        entry |= {"name": claim.name, "namespace": claim.namespace}
    return entry | ({"abortedAt": claim.aborted_at} if claim.aborted_at else {})


def _config_state(claim: TheirClaim, release: Release) -> Object:
    if claim.domain:
        return {"Type": claim.devices[0].kind, "ComputeDomain": claim.domain}
    return {} if release >= Release.R0_5 else {"mpsControlDaemonID": ""}


def _written(device: Device, release: Release) -> Object:
    details: Object = {
        "Requests": [device.request], "PoolName": device.pool, "DeviceName": device.name,
        "CDIDeviceIDs": list(device.cdi_ids),
    }  # fmt: skip
    if device.metadata is not None and release >= Release.R0_4:
        attributes = {name: device.metadata[name] for name in sorted(device.metadata)}
        details["Metadata"] = {"Attributes": attributes, "NetworkData": None}
    name, info = _info(device, release)
    details = {name: info, "device": details}
    kinds = [kind for kind in _KINDS[device.driver] if kind in (device.kind, *_KINDS[device.driver][:2])]
    return {kind: details if kind == device.kind else None for kind in kinds}


def _info(device: Device, release: Release) -> tuple[str, Object]:
    if device.kind == "mig" and release == Release.R25_3:
        return "info", {"uuid": device.info["migUUID"]}
    later = () if release >= Release.R0_4 else ("pciBusID", "parentPCIBusID")
    info = {key: value for key, value in device.info.items() if key not in later}
    return "concrete" if device.kind == "mig" else "info", info


def _json(value: Object) -> bytes:
    """As Go's `json.Marshal`, which escapes what HTML would take for its own."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def _checksum(content: Object) -> int:
    """As Kubernetes' `checksum.New` of the JSON: FNV-1a, 32 bits, of the bytes as numbers in words."""
    words = f"([]uint8)[{' '.join(map(str, _json(content)))}]"
    value = 0x811C9DC5
    for byte in words.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
