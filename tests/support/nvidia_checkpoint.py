"""The checkpoint that NVIDIA's DRA drivers leave, of the shape that their sources give it (`cmd/*-kubelet-plugin/` of
kubernetes-sigs/dra-driver-nvidia-gpu: `checkpoint.go`, `checkpointv.go`, `prepared.go`).

A claim that is prepared has no namespace and name there. The checksums are any numbers: they are of Go's values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GPUS = "gpu.nvidia.com"
DOMAINS = "compute-domain.nvidia.com"


def their_checkpoint(
    boot_id: str, claims: Mapping[str, Mapping[str, Any]], *, versions: str = "v1 v2"
) -> bytes:
    """The file, with these claims by UID. `versions`: releases before 25.8 wrote `v1` alone."""
    prepared = {uid: c for uid, c in claims.items() if c["checkpointState"] == "PrepareCompleted"}
    old = {uid: {key: c[key] for key in ("status", "preparedDevices")} for uid, c in prepared.items()}
    content: dict[str, Any] = {"checksum": 2710841317, "v1": {"preparedClaims": old}}
    if "v2" in versions:
        content["v2"] = {"checksum": 1049272338, "preparedClaims": dict(claims)}
        content["v2"] |= {"nodeBootID": boot_id} if boot_id else {}
    return json.dumps(content, separators=(",", ":")).encode()


def prepared(
    driver: str, pool: str, *devices: Mapping[str, Any], domain: str = "", admin: bool = False
) -> dict[str, Any]:
    """A claim whose prepare has ended."""
    results = [
        {"request": "r", "driver": driver, "pool": pool, "device": _device(device)["DeviceName"]}
        | ({"adminAccess": True} if admin else {})
        for device in devices
    ]
    return {
        "checkpointState": "PrepareCompleted",
        "status": {
            "allocation": {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": []}},
            "reservedFor": [{"resource": "pods", "name": "job-0", "uid": "8a1b"}],
        },
        "preparedDevices": [
            {
                "devices": list(devices),
                "configState": {"Type": "channel", "ComputeDomain": domain}
                if domain
                else {"mpsControlDaemonID": ""},
            }
        ],
    }


def started(namespace: str, name: str) -> dict[str, Any]:
    """A claim whose prepare has begun, and has not ended."""
    return {
        "checkpointState": "PrepareStarted",
        "status": {"allocation": {"devices": {"results": []}}},
        "name": name,
        "namespace": namespace,
    }


def vfio(uid: str, pool: str, number: int, address: str = "", request: str = "gpu") -> dict[str, Any]:
    """A GPU on vfio. Releases up to 25.12 do not write its address."""
    info = {"uuid": f"VFIO-{number}"} | ({"pciBusID": address} if address else {})
    return {
        "gpu": None,
        "mig": None,
        "vfio": {"info": info, "device": _prepared(GPUS, uid, pool, f"gpu-vfio-{number}", request)},
    }


def gpu(uid: str, pool: str, minor: int, uuid: str, request: str = "gpu") -> dict[str, Any]:
    """A GPU on NVIDIA's driver."""
    device = _prepared(GPUS, uid, pool, f"gpu-{minor}", request)
    return {"gpu": {"info": {"uuid": uuid}, "device": device}, "mig": None}


def mig(uid: str, pool: str, parent_uuid: str, request: str = "gpu") -> dict[str, Any]:
    """A part of a GPU."""
    concrete = {"parentMinor": 0, "giId": 1, "ciId": 0, "migUUID": "MIG-1", "parentUUID": parent_uuid}
    device = _prepared(GPUS, uid, pool, "gpu-0-mig-1g24gb-19-0", request)
    return {"gpu": None, "mig": {"concrete": concrete, "device": device}}


def channel(uid: str, pool: str, number: int = 0) -> dict[str, Any]:
    """A channel of a compute domain."""
    device = _prepared(DOMAINS, uid, pool, f"channel-{number}", "channel")
    return {"channel": {"info": {"id": number}, "device": device}, "daemon": None}


def daemon(uid: str, pool: str) -> dict[str, Any]:
    """The daemon of a compute domain."""
    device = _prepared(DOMAINS, uid, pool, "daemon-0", "daemon")
    device["CDIDeviceIDs"] = [f"k8s.{DOMAINS}/device=all", *device["CDIDeviceIDs"]]
    return {"channel": None, "daemon": {"info": {"id": 0}, "device": device}}


def _prepared(driver: str, uid: str, pool: str, name: str, request: str) -> dict[str, Any]:
    return {
        "Requests": [request],
        "PoolName": pool,
        "DeviceName": name,
        "CDIDeviceIDs": [f"k8s.{driver}/claim={uid}-{name}"],
    }


def _device(device: Mapping[str, Any]) -> Mapping[str, Any]:
    (kind,) = (value for value in device.values() if value is not None)
    found: Mapping[str, Any] = kind["device"]
    return found
