"""The files of a claim as values: the wanted ones, and those found on disk. `acts/files.py` writes and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gpuactors.core.claims.cdi import device_file, device_name
from gpuactors.core.claims.metadata import MetadataFile, metadata_files
from gpuactors.core.values.claim import Claim, ClaimName, ClaimUid, DeviceEdits, Json


class PlacedFile(Struct, frozen=True, gc=False):
    """A file in a directory that a container has mounted."""

    path: str
    text: str


class ClaimContents(Struct, frozen=True, gc=False):
    """The content of the files of a claim."""

    claim: ClaimName
    devices: Json
    """The content of `cdi.device_file`."""
    metadata: tuple[MetadataFile, ...]
    directories: tuple[str, ...] = ()
    """The host's directories that a container mounts: made before the files."""
    placed: tuple[PlacedFile, ...] = ()
    """The files in those directories, written before the container starts."""


def contents_of(
    driver: str,
    claim: Claim,
    devices: tuple[DeviceEdits, ...],
    directories: tuple[str, ...] = (),
    placed: tuple[PlacedFile, ...] = (),
) -> ClaimContents:
    """Return the content of a claim's files. `devices` has one for each of its results. Raises `ValueError` if a name
    from outside is no part of a path."""
    return ClaimContents(
        claim.name,
        device_file(driver, claim.name, devices),
        metadata_files(driver, claim, {device.result.device: device.attributes for device in devices}),
        directories,
        placed,
    )


class FoundFiles(Struct, frozen=True, gc=False):
    """The files of one claim as found at a start, the last resort where the checkpoint is lost. They are hints: they
    may be half of what was written."""

    claim: ClaimName | None
    """The claim's name by a metadata file; None if none of them can be read."""
    devices: tuple[str, ...] | None
    """The names of the devices (`gpu-0000-23-00-0`) in the CDI file; None without that file."""

    @classmethod
    def of(cls, uid: ClaimUid, cdi: Iterable[object] | None, documents: Iterable[object]) -> FoundFiles:
        """Read the content of the CDI file of the devices (None without that file) and of the metadata files, whatever
        is in them."""
        claim = next((name for d in documents if (name := _claim(uid, d)) is not None), None)
        return cls(claim, None if cdi is None else _devices(uid, cdi))


def _claim(uid: ClaimUid, document: object) -> ClaimName | None:
    match document:
        case {"metadata": {"namespace": str(namespace), "name": str(name), "uid": str(stored_uid)}} if (
            stored_uid == uid
        ):
            return ClaimName(namespace, name, uid)
        case _:
            return None


def _devices(uid: ClaimUid, documents: Iterable[object]) -> tuple[str, ...]:
    names: list[str] = []
    for document in documents:
        entries = document.get("devices") if isinstance(document, Mapping) else None
        for entry in entries if isinstance(entries, tuple | list) else ():
            name = entry.get("name") if isinstance(entry, Mapping) else None
            prefix = device_name(uid, "")
            if isinstance(name, str) and name.startswith(prefix):
                names.append(name.removeprefix(prefix))
    return tuple(names)
