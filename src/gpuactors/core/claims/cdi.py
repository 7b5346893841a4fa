"""The content of the CDI files of a claim, and the ids by which kubelet names their devices to the container runtime.

Two files per claim, as a CDI file has one kind: the devices (`k8s.<driver>/claim`) and the mounts of the metadata files
(`<driver>/metadata`). Values only; `acts/files.py` writes them. Empty container edits are invalid in CDI, so a part
without any is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gpuactors.core.values.claim import AllocatedDevice, ClaimName, ClaimUid, DeviceEdits, Json

CDI_VERSION: Final = "0.5.0"
"""The lowest version that readers of metadata mounts accept (KEP-5304)."""


def device_kind(driver: str) -> str:
    """Return the CDI kind of claims' devices: `k8s.gpu.nvidia.com/claim`."""
    return f"k8s.{driver}/claim"


def metadata_kind(driver: str) -> str:
    """Return the CDI kind of metadata mounts: `gpu.nvidia.com/metadata`."""
    return f"{driver}/metadata"


def device_name(uid: ClaimUid, device: str) -> str:
    """Return the name of a claim's device within its kind."""
    return f"{uid}-{device}"


def metadata_name(uid: ClaimUid, request: str) -> str:
    """Return the name of the metadata mount of a request (its base name) within its kind."""
    return f"{uid}_{request}"


def cdi_ids(
    driver: str, uid: ClaimUid, results: Sequence[AllocatedDevice], *, metadata: bool = True
) -> tuple[tuple[str, ...], ...]:
    """Return the CDI ids of each result, in the order of the results: the same for each answer, as old kubelets append
    those of a repeated one (kubernetes 140471). The first device of each request has the metadata mount's id behind its
    own."""
    mounted: set[str] = set()
    ids_of_results = []
    for result in results:
        ids = [f"{device_kind(driver)}={device_name(uid, result.device)}"]
        if metadata and result.base_request not in mounted:
            mounted.add(result.base_request)
            ids.append(f"{metadata_kind(driver)}={metadata_name(uid, result.base_request)}")
        ids_of_results.append(tuple(ids))
    return tuple(ids_of_results)


def device_file(driver: str, claim: ClaimName, devices: Iterable[DeviceEdits]) -> Json:
    """Return the CDI file of a claim's devices."""
    # A device is allocated once to a claim, but by several requests if it is with admin access.
    named = {device_name(claim.uid, device.result.device): device for device in devices}
    return {
        "cdiVersion": CDI_VERSION,
        "kind": device_kind(driver),
        "devices": tuple(
            {"name": name, "containerEdits": device.edits} for name, device in sorted(named.items())
        ),
    }


def metadata_file(driver: str, claim: ClaimName, mounts: Iterable[tuple[str, str, str]]) -> Json:
    """Return the CDI file of a claim's metadata mounts: of each request (base name) the path on the host and the one in
    the container."""
    return {
        "cdiVersion": CDI_VERSION,
        "kind": metadata_kind(driver),
        "devices": tuple(
            {
                "name": metadata_name(claim.uid, request),
                "containerEdits": {
                    "mounts": (
                        {
                            "hostPath": host_path,
                            "containerPath": container_path,
                            "options": ("ro", "bind"),
                        },
                    )
                },
            }
            for request, host_path, container_path in sorted(mounts)
        ),
    }
