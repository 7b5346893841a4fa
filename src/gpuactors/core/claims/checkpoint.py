"""The content of the checkpoint: what a daemon must know of the one before it in the same boot, and which model each
device of an earlier boot's claim was.

    {"version": 1, "bootId": "…", "firstDrivers": {"0000:23:00.0": {"driver": "nvidia", "vfio": false, "presence": 7}},
     "claims": {"<uid>": {…}}, "owed": [{…}], "earlierModels": {"<uid>": {"0000:23:00.0": "10de:2330"}},
     "takenOver": {"from": "sha256:…", "claims": {"<uid>": {…}}}}

Values only; `acts/checkpoint.py` reads and writes the file. A claim's entry is kept here as it is on disk:
`values/claim_states.py` knows its fields. Fields that this version does not know, a newer daemon's, are kept and
written back, so that a downgrade and the upgrade after it lose nothing. Claims that NVIDIA's driver has prepared are by
themselves: a daemon that knows nothing of them keeps them, and does not take them for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.state.claims import StoredEntry
from gpuactors.core.values.claim import ClaimedModels, ClaimUid, Json, OriginalDriver
from gpuactors.core.values.model import DeviceKey, PciAddress, is_pci_address

VERSION: Final = 1
"""Raised when an older daemon could not go on with the content, and not for a field more."""

_FIELDS: Final = ("version", "bootId", "firstDrivers", "claims", "owed", "takenOver", "earlierModels")
_DRIVER_FIELDS: Final = ("driver", "vfio", "presence", "ids")

_NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})


class MalformedError(ValueError):
    """A content that no daemon has written."""


class Checkpoint(Struct, frozen=True, gc=False):
    """The content on disk."""

    claims: Mapping[ClaimUid, Mapping[str, Json]] = field(default_factory=dict)
    """The entry of each claim, all its fields as on disk."""
    original_drivers: Mapping[PciAddress, OriginalDriver] = field(default_factory=dict)
    unknown: Mapping[str, Json] = field(default_factory=dict)
    """Fields of the file that this version does not know."""
    unknown_of_drivers: Mapping[PciAddress, Mapping[str, Json]] = field(default_factory=dict)
    """The same of the entries of `original_drivers`."""
    owed: tuple[Mapping[str, Json], ...] = ()
    """Each return that is owed, all its fields as on disk. A daemon of before the field has none."""
    taken_over: Mapping[ClaimUid, Mapping[str, Json]] = field(default_factory=dict)
    """The entry of each claim that NVIDIA's driver has prepared, as in `claims`."""
    taken_from: str = ""
    """The checksum of its checkpoint as it was when they were taken over: they are not again, unless it has changed.
    Empty: never."""
    earlier_models: ClaimedModels = field(default_factory=dict)
    """Of the claims of earlier boots that have neither been prepared nor unprepared since: see `ClaimedModels`."""


class Origin(StrEnum):
    """Where the restored content comes from."""

    FOUND = "found"
    """The file."""
    NONE = "none"
    """There was no file: nothing was ever written, or it was removed by hand."""
    OTHER_BOOT = "other-boot"
    """The file is of another boot. The effects of its acts ended with that boot, so it is treated as empty."""
    CORRUPT = "corrupt"
    """The file is corrupt and was set aside. The kernel, kubelet and the CDI files show what it held. An entry that is
    missing here is no reason to undo anything."""


class Theirs(Struct, frozen=True, gc=False):
    """The claims of NVIDIA's driver in this boot, by its checkpoint."""

    checksum: str
    """Of the file's bytes: `sha256:<64 hex digits>`."""
    claims: tuple[StoredEntry, ...]
    """Those that it has prepared."""


class Restored(Struct, frozen=True, gc=False):
    """The checkpoint as a daemon finds it at its start."""

    checkpoint: Checkpoint
    origin: Origin
    sentence: str
    """For the log."""
    theirs: Theirs | None = None
    """None: NVIDIA's driver has left no checkpoint."""


def encoded(checkpoint: Checkpoint, boot_id: str) -> Mapping[str, Json]:
    """The content of the file."""
    taken: Mapping[str, Json] = {
        "takenOver": {"from": checkpoint.taken_from, "claims": dict(sorted(checkpoint.taken_over.items()))}
    }
    return {
        **checkpoint.unknown,
        **(taken if checkpoint.taken_from else _NOTHING),
        "version": VERSION,
        "bootId": boot_id,
        "firstDrivers": {
            address: {
                **checkpoint.unknown_of_drivers.get(address, _NOTHING),
                "driver": first.driver,
                "vfio": first.vfio,
                **({"presence": first.presence} if first.presence else {}),
                **({"ids": first.ids} if first.ids else {}),
            }
            for address, first in sorted(checkpoint.original_drivers.items())
        },
        "claims": {uid: checkpoint.claims[uid] for uid in sorted(checkpoint.claims)},
        **({"owed": checkpoint.owed} if checkpoint.owed else {}),
        **({"earlierModels": _as_json(checkpoint.earlier_models)} if checkpoint.earlier_models else {}),
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
    taken_from, taken_over = _taken_over(content.get("takenOver"))
    original_drivers: dict[PciAddress, OriginalDriver] = {}
    unknown_of_drivers: dict[PciAddress, Mapping[str, Json]] = {}
    for address, entry in drivers.items():
        first, rest = _original_driver(address, entry)
        original_drivers[first.address] = first
        if rest:
            unknown_of_drivers[first.address] = rest
    owed = content.get("owed", ())
    if not isinstance(owed, tuple):
        raise MalformedError("owed must be a list")
    returns = tuple(entry for entry in owed if isinstance(entry, Mapping))
    if len(returns) < len(owed):
        raise MalformedError("owed has something that is no object")
    unknown = {name: value for name, value in content.items() if name not in _FIELDS}
    checkpoint = Checkpoint(
        _entries(claims), original_drivers, unknown, unknown_of_drivers, returns, taken_over, taken_from
    )
    return boot_id, replace(checkpoint, earlier_models=_models(content.get("earlierModels")))


def _as_json(models: ClaimedModels) -> Json:
    return {uid: {str(a): ids for a, ids in of_claim.items()} for uid, of_claim in models.items()}


def _models(content: Json) -> ClaimedModels:
    """An older daemon has written none; what is no model says nothing."""
    return {
        ClaimUid(uid): {DeviceKey(a): ids for a, ids in of_claim.items() if isinstance(ids, str)}
        for uid, of_claim in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(of_claim, Mapping)
    }


def _entries(claims: Mapping[str, Json]) -> Mapping[ClaimUid, Mapping[str, Json]]:
    entries: dict[ClaimUid, Mapping[str, Json]] = {}
    for uid, entry in claims.items():
        if not isinstance(entry, Mapping):
            raise MalformedError(f"the entry of claim {uid} is no object")
        entries[ClaimUid(uid)] = entry
    return entries


def _taken_over(content: Json) -> tuple[str, Mapping[ClaimUid, Mapping[str, Json]]]:
    if content is None:
        return "", {}
    taken_from = content.get("from") if isinstance(content, Mapping) else None
    claims = content.get("claims") if isinstance(content, Mapping) else None
    if not isinstance(taken_from, str) or not isinstance(claims, Mapping):
        raise MalformedError("takenOver has no claims, or not where they are from")
    return taken_from, _entries(claims)


def _original_driver(address: str, entry: Json) -> tuple[OriginalDriver, Mapping[str, Json]]:
    if not is_pci_address(address) or not isinstance(entry, Mapping):
        raise MalformedError(f"firstDrivers has {address!r}, which is no PCI address with an object")
    driver, vfio, presence = entry.get("driver"), entry.get("vfio"), entry.get("presence", 0)
    ids = entry.get("ids", "")
    if not (driver is None or isinstance(driver, str)) or not isinstance(vfio, bool):
        raise MalformedError(
            f"the original driver of {address} is not a name or null, with vfio true or false"
        )
    rest = {name: value for name, value in entry.items() if name not in _DRIVER_FIELDS}
    if not isinstance(presence, int) or isinstance(presence, bool) or presence < 0:
        raise MalformedError(f"the presence of {address} is no number")
    if not isinstance(ids, str):
        raise MalformedError(f"the model of {address} is no text")
    return OriginalDriver(PciAddress(address), driver, vfio, presence, ids=ids), rest
