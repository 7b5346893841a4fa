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
from itertools import starmap
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, field, to_builtins
from msgspec.structs import fields

from gpuactors.core.state.claims import StoredEntry
from gpuactors.core.values.claim import ClaimedModels, ClaimUid, Json, OriginalDriver, OriginalDrivers
from gpuactors.core.values.model import DeviceKey, pci_address

VERSION: Final = 1
"""The version of the content. A new field does not raise it; a content that an older daemon could not go on with
does."""

T = TypeVar("T")

_NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})


class MalformedError(ValueError):
    """A content that no daemon has written."""


class Checkpoint(Struct, frozen=True, gc=False):
    """The content on disk."""

    claims: Mapping[ClaimUid, Mapping[str, Json]] = field(default_factory=dict)
    """The entry of each claim, all its fields as on disk."""
    original_drivers: OriginalDrivers = field(default_factory=dict)
    unknown: Mapping[str, Json] = field(default_factory=dict)
    """The fields of the file that this version does not know."""
    unknown_of_drivers: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """The fields of the entries of `original_drivers` that this version does not know."""
    owed: tuple[Mapping[str, Json], ...] = ()
    """The owed returns, each with all its fields as on disk. A daemon from before the field has none."""
    taken_over: Mapping[ClaimUid, Mapping[str, Json]] = field(default_factory=dict)
    """The entry of each claim that NVIDIA's driver has prepared, as in `claims`."""
    taken_from: str = ""
    """The checksum of the checkpoint of NVIDIA's driver at the takeover: its claims are taken over again only if it
    changes. Empty if none was taken over."""
    earlier_models: ClaimedModels = field(default_factory=dict)
    """The models of the devices of earlier boots' claims that have been neither prepared nor unprepared since
    (`ClaimedModels`)."""


class _FirstDriver(Struct, frozen=True, gc=False, omit_defaults=True):
    """An entry of `firstDrivers`."""

    driver: str | None
    vfio: bool
    presence: Annotated[int, Meta(ge=0)] = 0
    ids: str = ""


class _TakenOver(Struct, frozen=True, gc=False):
    claims: Mapping[ClaimUid, Mapping[str, Any]]
    taken_from: str = field(name="from")


class _File(Struct, frozen=True, gc=False, rename="camel"):
    """The content on disk, with its entries as they are there. A field with a default is missing in an older daemon's
    file."""

    version: int
    boot_id: Annotated[str, Meta(min_length=1)]
    first_drivers: Mapping[str, Mapping[str, Any]]
    claims: Mapping[ClaimUid, Mapping[str, Any]]
    owed: tuple[Mapping[str, Any], ...] = ()
    taken_over: _TakenOver | None = None
    earlier_models: Any = None


class Origin(StrEnum):
    """The origin of the restored content."""

    FOUND = "found"
    """The content is from the file."""
    NONE = "none"
    """There was no file: nothing was ever written, or it was removed by hand."""
    OTHER_BOOT = "other-boot"
    """The file is of another boot. The effects of its acts ended with that boot, so it is treated as empty."""
    CORRUPT = "corrupt"
    """The file is corrupt and was quarantined. The kernel, kubelet and the CDI files show what it held. An entry that
    is missing here is no reason to undo anything."""


class Theirs(Struct, frozen=True, gc=False):
    """The claims of NVIDIA's driver in this boot, by its checkpoint."""

    checksum: str
    """The checksum of the file's bytes: `sha256:<64 hex digits>`."""
    claims: tuple[StoredEntry, ...]
    """The claims that it has prepared."""


class Restored(Struct, frozen=True, gc=False):
    """The checkpoint as a daemon finds it at its start."""

    checkpoint: Checkpoint
    origin: Origin
    sentence: str
    """The sentence for the log."""
    theirs: Theirs | None = None
    """The claims of NVIDIA's driver; None if it has left no checkpoint."""


def encoded(checkpoint: Checkpoint, boot_id: str) -> Mapping[str, Json]:
    """Return the content of the file."""
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
                **to_builtins(_FirstDriver(first.driver, first.vfio, first.presence, first.ids)),
            }
            for address, first in sorted(checkpoint.original_drivers.items())
        },
        "claims": {uid: checkpoint.claims[uid] for uid in sorted(checkpoint.claims)},
        **({"owed": checkpoint.owed} if checkpoint.owed else {}),
        **({"earlierModels": _as_json(checkpoint.earlier_models)} if checkpoint.earlier_models else {}),
    }


def version_of(content: Json) -> int:
    """Return the version of a file's content. Raises `MalformedError` if it has none."""
    version = content.get("version") if isinstance(content, Mapping) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise MalformedError("it has no version")
    return version


def decoded(content: Json) -> tuple[str, Checkpoint]:
    """Decode the boot ID and the checkpoint of a content of this version. Raises `MalformedError`, with what is
    wrong."""
    if not isinstance(content, Mapping):
        raise MalformedError("it is no object")
    stored = converted(content, _File, "its content")
    drivers = {f.address: f for f in starmap(_original_driver, stored.first_drivers.items())}
    unknown_of_drivers = {a: _unknown(stored.first_drivers[a], _FirstDriver) for a in drivers}
    taken = stored.taken_over
    checkpoint = Checkpoint(
        stored.claims,
        drivers,
        _unknown(content, _File),
        {a: unknown for a, unknown in unknown_of_drivers.items() if unknown},
        stored.owed,
        taken.claims if taken is not None else {},
        taken.taken_from if taken is not None else "",
        _models(stored.earlier_models),
    )
    return stored.boot_id, checkpoint


def _as_json(models: ClaimedModels) -> Json:
    return {uid: {str(a): ids for a, ids in of_claim.items()} for uid, of_claim in models.items()}


def _models(content: Json) -> ClaimedModels:
    """Decode the models. An older daemon has written none; a value that is no model is left out."""
    return {
        ClaimUid(uid): {DeviceKey(a): ids for a, ids in of_claim.items() if isinstance(ids, str)}
        for uid, of_claim in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(of_claim, Mapping)
    }


def _original_driver(address: str, entry: Json) -> OriginalDriver:
    try:
        at = pci_address(address)
    except ValueError:
        raise MalformedError(f"firstDrivers has {address!r}, which is no PCI address") from None
    first = converted(entry, _FirstDriver, f"the original driver of {address}")
    return OriginalDriver(at, first.driver, first.vfio, first.presence, ids=first.ids)


def _unknown(content: Mapping[str, Json], kind: type[Struct]) -> Mapping[str, Json]:
    """Return the fields of a part of the file that this version does not know."""
    field_names = {field.encode_name for field in fields(kind)}
    return {name: value for name, value in content.items() if name not in field_names}


def converted(content: Json, kind: type[T], what: str) -> T:
    """Convert a part of the file. Raises `MalformedError`, which names the field."""
    try:
        return convert(content, kind)
    except ValidationError as error:
        raise MalformedError(f"{what}: {error}") from None
