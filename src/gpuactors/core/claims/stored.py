"""A claim's entry as JSON, in the checkpoint, and back.

    "<uid>": {"namespace": "default", "name": "one", "state": "Prepared", "gpus": […], "bound": […], …}

The structs here are the content of the file: msgspec writes their fields in this order and by these names, and checks
them when it reads. A field with a default is one that an older daemon has not written. A field that is not known, a
newer daemon's, is ignored here; `acts/checkpoint.py` keeps those of the file. Every content of a file is decoded to a
value that this daemon can use, or raises `MalformedError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from msgspec import UNSET, Struct, UnsetType, convert, field, to_builtins
from msgspec.structs import asdict, replace

from gpuactors.core.claims.checkpoint import Checkpoint, MalformedError, converted
from gpuactors.core.kinds.table import is_key
from gpuactors.core.state.claims import (
    ClaimedGpu,
    DomainReservation,
    GpuReservation,
    OwedReturn,
    Reservation,
    StoredEntry,
    domain_of,
    gpus_of,
)
from gpuactors.core.values.claim import (
    BoundFunction,
    Claim,
    ClaimedModels,
    ClaimName,
    ClaimUid,
    Json,
    OriginalDriver,
    OriginalDrivers,
    PreparedDevice,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import CHANNELS_MAX, ClaimedDomain, device_of
from gpuactors.core.values.model import DeviceKey, function_address, is_pci_address
from gpuactors.core.values.names import is_domain_id

EARLIER_CLAIMS_MAX: Final = 1024
"""The maximum number of earlier boots' claims for which the model of each device is remembered: four for each GPU of a
node with 256."""

T = TypeVar("T")

_STATES: Final = (
    ClaimState.RESERVED,
    ClaimState.PREPARED,
    ClaimState.TAKEN_OVER,
    ClaimState.RELEASING,
)


# --- the content of the file --------------------------------------------------------------------------------


class _OnDisk(Struct, frozen=True, gc=False, rename="camel"):
    """A part of the file. Its attributes have the names of the value that it is read into."""


class _AtAddress(_OnDisk, frozen=True):
    address: str

    def __post_init__(self) -> None:
        """Check the address. Raises `ValueError`, to which msgspec adds the place in the file."""
        if not is_pci_address(self.address):
            raise ValueError(f"{self.address!r} is no PCI address")


class _Function(_AtAddress, frozen=True):
    """An `OriginalDriver`."""

    driver: str | None
    vfio: bool
    presence: int = 0
    was_bound: bool = False
    ids: str = ""
    persistence: bool = False


class _Gpu(_OnDisk, frozen=True, omit_defaults=True):
    """A `ClaimedGpu`."""

    key: str = field(name="address")
    keep_on_vfio: str = field(name="stays")
    functions: tuple[_Function, ...]
    model: str = ""
    group: int | None = None

    def __post_init__(self) -> None:
        """Check the key. Raises `ValueError`, to which msgspec adds the place in the file."""
        if not is_key(self.key):
            raise ValueError(f"{self.key!r} is no key of a device")


class _Bound(_AtAddress, frozen=True):
    """A `BoundFunction`."""

    driver: str | None
    iommu_group: int | None
    cdev: str | None
    vfio: bool
    presence: int = 0
    persistence: bool = False


class _Imex(_OnDisk, frozen=True):
    """The part of `ImexFacts` that the files of a claim are made of."""

    channel_major: int | None
    caps_major: int | None
    mgmt_minor: int | None
    clique_id: str
    channels: int = CHANNELS_MAX
    management: str = ""


class _Domain(_OnDisk, frozen=True):
    """A `ClaimedDomain`."""

    uid: str
    name: str
    namespace: str
    devices: tuple[str, ...]
    imex: _Imex | None = None
    every: bool = False

    def __post_init__(self) -> None:
        """Check the domain's UID and devices. Raises `ValueError`."""
        if not is_domain_id(self.uid):
            raise ValueError(f"the domain's UID is {self.uid!r}, which is no UUID")
        if not self.devices or None in map(device_of, self.devices):
            raise ValueError("the devices of a domain are no names of devices")


class _Given(_OnDisk, frozen=True):
    """A `PreparedDevice`."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None


class _Result(_OnDisk, frozen=True):
    """An `AllocatedDevice`."""

    request: str
    pool: str
    device: str
    share_id: str | None
    admin_access: bool


class _Config(_OnDisk, frozen=True):
    """An `OpaqueConfig`."""

    from_class: bool
    requests: tuple[str, ...]
    parameters: Any


class _Claim(_OnDisk, frozen=True):
    """A `Claim` without its name. In the file its fields are beside those of its entry."""

    pod_claim_name: str | None
    generation: int
    results: tuple[_Result, ...]
    configs: tuple[_Config, ...]


class _Entry(_OnDisk, frozen=True):
    """A `StoredEntry` without its claim."""

    namespace: str
    name: str
    state: ClaimState
    gpus: tuple[_Gpu, ...]
    bound: tuple[_Bound, ...]
    domain: _Domain | UnsetType | None = UNSET
    given: tuple[_Given, ...] | UnsetType = UNSET
    """The same as `StoredEntry.given`; written, like `unplaced`, only for a claim that was taken over."""
    unplaced: tuple[str, ...] | UnsetType = UNSET


# --- to JSON and back ---------------------------------------------------------------------------------------


def encoded_entry(entry: StoredEntry) -> Mapping[str, Json]:
    """Encode an entry for the disk."""
    content: dict[str, object] = {
        "namespace": entry.name.namespace,
        "name": entry.name.name,
        "state": entry.state,
        "gpus": gpus_of(entry).gpus,
        "bound": tuple(gpus_of(entry).bound.values()),
    }
    if (own := domain_of(entry).domain) is not None:
        content["domain"] = {**asdict(own), "devices": tuple(map(str, own.devices))}
    if entry.state is ClaimState.TAKEN_OVER:
        content |= {"given": entry.given, "unplaced": entry.unplaced}
    encoded = _encoded(content, _Entry)
    if entry.claim is None:
        return encoded
    return {**encoded, **_encoded(replace(entry.claim, results=entry.claim.results or ()), _Claim)}


def decoded_entry(uid: ClaimUid, content: Mapping[str, Json]) -> StoredEntry:
    """Decode the entry of a claim. Raises `MalformedError`."""
    stored = converted(content, _Entry, f"the claim {uid}")
    name = ClaimName(stored.namespace, stored.name, uid)
    if stored.state not in _STATES:
        raise MalformedError(f"the claim {name} has the state {str(stored.state)!r}")
    claim = None
    if "results" in content:
        claim = _value({"name": name, **asdict(converted(content, _Claim, f"the claim {name}"))}, Claim)
    return StoredEntry(
        name,
        stored.state,
        claim,
        _reservation(stored),
        given=_value(stored.given or (), tuple[PreparedDevice, ...]),
        unplaced=stored.unplaced or (),
    )


def _reservation(stored: _Entry) -> Reservation | None:
    if own := stored.domain:
        named = {**asdict(own), "devices": tuple(map(device_of, own.devices))}
        return DomainReservation(domain=_value(named, ClaimedDomain))
    if not (stored.gpus or stored.bound):
        return None
    bound = {b.address: b for b in _value(stored.bound, tuple[BoundFunction, ...])}
    return GpuReservation(_value(stored.gpus, tuple[ClaimedGpu, ...]), bound)


def models_of(checkpoint: Checkpoint) -> ClaimedModels:
    """Return the model of each device of the claims that a checkpoint of an earlier boot has: kubelet prepares such a
    claim again, and another device may be in the slot by then. The newest, if there are more than EARLIER_CLAIMS_MAX.
    An entry that cannot be decoded has none."""
    models_by_claim = dict(checkpoint.earlier_models)
    for uid, content in checkpoint.claims.items():
        models = _models_of(uid, content, checkpoint.original_drivers)
        models_by_claim.pop(uid, None)
        if models:
            models_by_claim[uid] = models
    return dict([*models_by_claim.items()][-EARLIER_CLAIMS_MAX:])


def _models_of(
    uid: ClaimUid, content: Mapping[str, Json], drivers: OriginalDrivers
) -> Mapping[DeviceKey, str]:
    try:
        gpus = gpus_of(decoded_entry(uid, content)).gpus
    except MalformedError:
        return {}
    firsts = {**drivers} | {f.address: f for gpu in gpus for f in gpu.functions if f.ids}
    models = {gpu.key: gpu.model or _ids(firsts.get(function_address(gpu.key))) for gpu in gpus}
    return {key: model for key, model in models.items() if model}


def _ids(function: OriginalDriver | None) -> str:
    return function.ids if function is not None else ""


def encoded_return(owed: OwedReturn) -> Mapping[str, Json]:
    """Encode an owed return for the disk: the claim's name, and the device."""
    return {**to_builtins(owed.claim), **_encoded(owed.gpu, _Gpu)}


def decoded_return(content: Mapping[str, Json]) -> OwedReturn:
    """Decode an owed return. Raises `MalformedError`."""
    name = converted(content, ClaimName, "a return that is owed")
    return OwedReturn(_value(converted(content, _Gpu, f"the return that {name} owes"), ClaimedGpu), name)


def _encoded(value: object, kind: type[_OnDisk]) -> dict[str, Json]:
    content: dict[str, Json] = to_builtins(convert(value, kind, from_attributes=True))
    return content


def _value(stored: object, kind: type[T]) -> T:
    return convert(stored, kind, from_attributes=True)
