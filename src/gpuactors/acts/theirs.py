"""The claims that NVIDIA's DRA driver has prepared, by its files: its checkpoint, and the CDI file of each claim, which
says where a GPU is if the checkpoint does not; and the files of a claim's metadata (its gate DeviceMetadata).

    <plugin-dir>/checkpoint.json
    <cdi-dir>/k8s.gpu.nvidia.com-claim_<uid>.yaml
    <cdi-dir>/gpu.nvidia.com_metadata_<uid>_<request>.json
    <plugin-dir>/dra-device-metadata/<namespace>_<claim>/<request>/metadata.json

Its checkpoint is never written, moved or removed: it goes on with it when it comes back. The files of a claim that ends
here are removed.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.disk import Disk, unlink_if_there
from gpuactors.core.claims import theirs
from gpuactors.core.claims.checkpoint import Theirs
from gpuactors.core.claims.theirs import TheirCheckpoint, TheirClaim, TheirDevice
from gpuactors.core.state.claims import (
    ClaimedGpu,
    DomainReservation,
    GpuReservation,
    Reservation,
    StoredEntry,
)
from gpuactors.core.values.claim import Claim, ClaimUid, Json, OriginalDriver, PreparedDevice
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import ClaimedDomain, device_of
from gpuactors.core.values.model import DeviceKey, device_key, function_address
from gpuactors.core.values.names import is_label
from gpuactors.decoding import decode_json, without_deep
from gpuactors.host.places import Places
from gpuactors.ports.errors import StateFileError
from gpuactors.process.plain_files import NotPlainError

FILE_NAME: Final = "checkpoint.json"

STAYS: Final = "NVIDIA's DRA driver has prepared it: its driver stays as it is"
"""The reason why a taken-over GPU keeps its driver when its claim ends."""

_DEPTH_MAX: Final = 64
"""Limit on the nesting that is decoded; their checkpoint has 13 levels, without what a user writes."""

_NODE: Final = re.compile(rb"/dev/vfio/(?:[0-9]+|devices/vfio[0-9]+)\b")


class _Allocated(msgspec.Struct, omit_defaults=True):
    results: object = None


class _Allocation(msgspec.Struct, omit_defaults=True):
    devices: _Allocated | None = None


class _Status(msgspec.Struct, omit_defaults=True):
    allocation: _Allocation | None = None


class _Claim(msgspec.Struct, rename="camel", omit_defaults=True):
    checkpoint_state: object = msgspec.UNSET
    namespace: object = None
    name: object = None
    status: _Status | None = None
    prepared_devices: object = None


class _Version(msgspec.Struct, rename="camel", omit_defaults=True):
    prepared_claims: dict[str, _Claim] | None = None
    node_boot_id: object = msgspec.field(name="nodeBootID", default=None)


class _Checkpoint(msgspec.Struct, omit_defaults=True):
    """The decoded part of their checkpoint. It has the parameters of each claim as its user wrote them: nobody here
    needs them, and whatever they are costs the other claims nothing."""

    v1: _Version | None = None
    v2: _Version | None = None


def cdi_path(cdi_dir: str, driver: str, uid: ClaimUid) -> str:
    """Return the CDI file of a claim that NVIDIA's driver has prepared: certainly that claim's, as its UID is in the
    name."""
    return os.path.join(cdi_dir, f"k8s.{driver}-claim_{uid}.yaml")


def _metadata_path(cdi_dir: str, driver: str, uid: ClaimUid, request: str) -> str:
    """Return the CDI file of the metadata of one request."""
    return os.path.join(cdi_dir, f"{driver}_metadata_{uid}_{request}.json")


def prepared_by(disk: Disk, plugin_dir: str, driver: str, boot_id: str) -> tuple[str, tuple[ClaimUid, ...]]:
    """Return the path of NVIDIA's checkpoint, and the claims that its driver would take for prepared: none where there
    is no such file, or it is of another boot. Raises `StateFileError` if that is not known."""
    path = os.path.join(plugin_dir, FILE_NAME)
    try:
        content = disk.read(path, limits.CLAIMS_FILE_MAX_BYTES)
        if theirs.whose(content) is not theirs.Whose.THEIRS:
            raise ValueError("it has another form")
        checkpoint = _decoded(content, driver)
    except (FileNotFoundError, NotADirectoryError):
        return path, ()
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StateFileError(f"{path} is no checkpoint of NVIDIA's driver: {error}") from None
    is_of_this_boot = checkpoint.boot_id in ("", boot_id)
    return path, tuple(claim.name.uid for claim in checkpoint.claims) if is_of_this_boot else ()


def _decoded(content: bytes, driver: str) -> TheirCheckpoint:
    """Decode their checkpoint. Raises `ValueError`."""
    fields = msgspec.to_builtins(decode_json(without_deep(content, _DEPTH_MAX), _Checkpoint))
    return theirs.decoded(frozen_json(fields), driver)


_METADATA_DIR: Final = "dra-device-metadata"
_METADATA: Final = re.compile(
    rb"/dra-device-metadata/([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)/metadata\.json"
)


def remove_files(disk: Disk, cdi_dir: str, driver: str, plugin_dir: str, uid: ClaimUid) -> None:
    """Remove NVIDIA's files of the claim. Raises `OSError`. The directories are the caller's to sync.

    A metadata file is in a directory by the claim's name, which another claim may have by now: the CDI file, by the
    UID, says which one it mounts, and goes last.
    """
    unlink_if_there(disk, cdi_path(cdi_dir, driver, uid))
    start = os.path.basename(_metadata_path(cdi_dir, driver, uid, ""))[: -len(".json")]
    try:
        names = disk.names(cdi_dir)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if not name.startswith(start):
            continue
        path = os.path.join(cdi_dir, name)
        for claim, request in {*_METADATA.findall(disk.read(path, limits.CDI_SPEC_MAX_BYTES))}:
            of_claim = os.path.join(plugin_dir, _METADATA_DIR, claim.decode())
            of_request = os.path.join(of_claim, request.decode())
            _remove_metadata(disk, os.path.join(of_request, "metadata.json"), uid, (of_request, of_claim))
        unlink_if_there(disk, path)


def _remove_metadata(disk: Disk, path: str, uid: ClaimUid, directories: tuple[str, ...]) -> None:
    """Remove it if it is this claim's still, and the directories that are empty then."""
    try:
        if uid.encode() not in disk.read(path, limits.CLAIMS_FILE_MAX_BYTES):
            return
    except (FileNotFoundError, NotADirectoryError, NotPlainError):
        pass
    else:
        unlink_if_there(disk, path)
    for directory in directories:
        try:
            disk.remove_directory(directory)
        except FileNotFoundError:
            continue
        except OSError:
            return  # another request's is in it, or another claim's


@final
class TheirClaims:
    """The claims of one driver."""

    def __init__(self, disk: Disk, *, driver: str, cdi_dir: str, places: Places | None) -> None:
        """`places`: None where no claim has a GPU."""
        self._disk = disk
        self._driver = driver
        self._cdi_dir = cdi_dir
        self._places = places

    def read(self, content: bytes, boot_id: str) -> Theirs:
        """Decode their checkpoint for this boot. Raises `ValueError`; `OSError` or `HostShortError` where what is
        needed beside it cannot be read now."""
        checksum = f"sha256:{sha256(content).hexdigest()}"
        checkpoint = _decoded(content, self._driver)
        if checkpoint.boot_id not in ("", boot_id):
            return Theirs(checksum, ())
        has_boot = checkpoint.boot_id != ""
        claims = (c for c in checkpoint.claims if has_boot or self._cdi_file(c.name.uid) is not None)
        return Theirs(checksum, tuple(map(self._entry, claims)))

    def _entry(self, claim: TheirClaim) -> StoredEntry:
        gpus: dict[DeviceKey, None] = {}
        unplaced: list[str] = []
        devices = tuple(d for name in claim.devices if (d := device_of(name.prepared.device)) is not None)
        for device in claim.devices if not devices else ():
            if device.admin_access:
                continue
            placed = self._places_of(claim, device)
            gpus |= dict.fromkeys(placed)
            if not placed:
                unplaced.append(device.prepared.device)
        reservation: Reservation = GpuReservation(
            tuple(
                ClaimedGpu(key, (OriginalDriver(function_address(key), None, vfio=True),), STAYS)
                for key in sorted(gpus)
            )
        )
        if claim.domain and devices:
            reservation = DomainReservation(domain=ClaimedDomain(claim.domain, "", "", devices, None))
        return StoredEntry(
            claim.name,
            ClaimState.TAKEN_OVER,
            Claim(claim.name, None, 0, claim.results),
            reservation,
            given=tuple(self._with_metadata(claim.name.uid, device.prepared) for device in claim.devices),
            unplaced=tuple(unplaced),
        )

    def _with_metadata(self, uid: ClaimUid, prepared: PreparedDevice) -> PreparedDevice:
        """Return the device as kubelet was answered: Kubernetes' helper put the CDI id of the metadata behind that of
        the driver, whose checkpoint lacks it."""
        requests = [r.partition("/")[0] for r in prepared.requests]
        ids = [
            f"{self._driver}/metadata={uid}_{request}"
            for request in dict.fromkeys(requests)
            if is_label(request) and self._is_there(_metadata_path(self._cdi_dir, self._driver, uid, request))
        ]
        return replace(prepared, cdi_ids=tuple(dict.fromkeys((*prepared.cdi_ids, *ids)))) if ids else prepared

    def _is_there(self, path: str) -> bool:
        try:
            self._disk.read(path, limits.CDI_SPEC_MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError, NotPlainError):
            return False
        return True

    def _places_of(self, claim: TheirClaim, device: TheirDevice) -> tuple[DeviceKey, ...]:
        """Return the GPUs of a device. The CDI file of a claim with several devices does not say which node is whose:
        each has all of them."""
        if device.key is not None:
            return (device.key,)
        if self._places is None:
            return ()
        if device.uuid and (address := self._places.of_uuid(device.uuid)) is not None:
            return (device_key(address),)
        nodes = _NODE.findall(self._cdi_file(claim.name.uid) or b"")
        return tuple(
            device_key(a) for node in dict.fromkeys(nodes) for a in self._places.of_node(node.decode())
        )

    def _cdi_file(self, uid: ClaimUid) -> bytes | None:
        """Read the claim's CDI file; None if it is not there. Raises `OSError`: an unreadable file does not mean that
        the claim has ended."""
        try:
            path = cdi_path(self._cdi_dir, self._driver, uid)
            return self._disk.read(path, limits.CLAIMS_FILE_MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except NotPlainError:
            return b""


def frozen_json(value: Any) -> Json:
    """Convert a decoded value: tuples for arrays, as in the core."""
    if isinstance(value, list):
        return tuple(frozen_json(item) for item in value)
    if isinstance(value, dict):
        return {name: frozen_json(item) for name, item in value.items()}
    assert value is None or isinstance(value, bool | int | float | str)
    return value
