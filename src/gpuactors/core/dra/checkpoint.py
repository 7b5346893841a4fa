"""The content of the checkpoint: what a daemon must know of the one before it in the same boot.

    {"version": 1, "bootId": "…", "firstDrivers": {"0000:23:00.0": {"driver": "nvidia", "vfio": false}},
     "claims": {"<uid>": {…}}}

Values only; `acts/checkpoint.py` reads and writes the file. A claim's entry is kept here as it is on disk: `table.py`
knows its fields. Fields that this version does not know, a newer daemon's, are kept and written back, so that a
downgrade and the upgrade after it lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from gpuactors.core.dra.claim import ClaimUid, FirstDriver, Json
from gpuactors.core.model import PciAddress, is_pci_address

VERSION: Final = 1
"""Raised when an older daemon could not go on with the content, and not for a field more."""

_FIELDS: Final = ("version", "bootId", "firstDrivers", "claims")
_DRIVER_FIELDS: Final = ("driver", "vfio")

_NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})


class MalformedError(ValueError):
    """A content that no daemon has written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is on disk."""

    claims: Mapping[ClaimUid, Mapping[str, Json]] = field(default_factory=dict)
    """The entry of each claim, all its fields as on disk."""
    first_drivers: Mapping[PciAddress, FirstDriver] = field(default_factory=dict)
    unknown: Mapping[str, Json] = field(default_factory=dict)
    """Fields of the file that this version does not know."""
    unknown_of_drivers: Mapping[PciAddress, Mapping[str, Json]] = field(default_factory=dict)
    """The same of the entries of `first_drivers`."""


class Origin(StrEnum):
    """Where the restored content comes from."""

    FOUND = "found"
    """The file."""
    NONE = "none"
    """There was no file: nothing was ever written, or it was removed by hand."""
    OTHER_BOOT = "other-boot"
    """The file is of another boot. What its acts did ended with that boot, so it counts as empty."""
    CORRUPT = "corrupt"
    """The file made no sense and was set aside. What it held is to be found out from the kernel, kubelet and the CDI
    files; nothing may be undone on the strength of its absence."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint as a daemon finds it at its start."""

    checkpoint: Checkpoint
    origin: Origin
    sentence: str
    """For the log."""


def encoded(checkpoint: Checkpoint, boot_id: str) -> Mapping[str, Json]:
    """The content of the file."""
    return {
        **checkpoint.unknown,
        "version": VERSION,
        "bootId": boot_id,
        "firstDrivers": {
            address: {
                **checkpoint.unknown_of_drivers.get(address, _NOTHING),
                "driver": first.driver,
                "vfio": first.vfio,
            }
            for address, first in sorted(checkpoint.first_drivers.items())
        },
        "claims": {uid: checkpoint.claims[uid] for uid in sorted(checkpoint.claims)},
    }


def version_of(content: Json) -> int:
    """The version of a file's content. Raises `MalformedError` if it has none."""
    version = content.get("version") if isinstance(content, Mapping) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise MalformedError("it has no version")
    return version


def decoded(content: Json) -> tuple[str, Checkpoint]:
    """The boot id and the checkpoint of a content of our version. Raises `MalformedError`, with what is wrong."""
    if not isinstance(content, Mapping):
        raise MalformedError("it is no object")
    boot_id, claims, drivers = content.get("bootId"), content.get("claims"), content.get("firstDrivers")
    if not isinstance(boot_id, str) or not boot_id:
        raise MalformedError("it has no bootId")
    if not isinstance(claims, Mapping) or not isinstance(drivers, Mapping):
        raise MalformedError("claims and firstDrivers must be objects")
    entries: dict[ClaimUid, Mapping[str, Json]] = {}
    for uid, entry in claims.items():
        if not isinstance(entry, Mapping):
            raise MalformedError(f"the entry of claim {uid} is no object")
        entries[ClaimUid(uid)] = entry
    first_drivers: dict[PciAddress, FirstDriver] = {}
    unknown_of_drivers: dict[PciAddress, Mapping[str, Json]] = {}
    for address, entry in drivers.items():
        first, rest = _first_driver(address, entry)
        first_drivers[first.address] = first
        if rest:
            unknown_of_drivers[first.address] = rest
    unknown = {name: value for name, value in content.items() if name not in _FIELDS}
    return boot_id, Checkpoint(entries, first_drivers, unknown, unknown_of_drivers)


def _first_driver(address: str, entry: Json) -> tuple[FirstDriver, Mapping[str, Json]]:
    if not is_pci_address(address) or not isinstance(entry, Mapping):
        raise MalformedError(f"firstDrivers has {address!r}, which is no PCI address with an object")
    driver, vfio = entry.get("driver"), entry.get("vfio")
    if not (driver is None or isinstance(driver, str)) or not isinstance(vfio, bool):
        raise MalformedError(f"the first driver of {address} is not a name or null, with vfio true or false")
    rest = {name: value for name, value in entry.items() if name not in _DRIVER_FIELDS}
    return FirstDriver(PciAddress(address), driver, vfio=vfio), rest
