"""The objects of the API as far as we use them, and their translation from and to the core's values.

Unknown fields are ignored, with one exception: of a slice's spec they are named (`SliceSpec.foreign`), as an edit that
adds one is to be undone. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from gpuactors.core.values.claim import (
    PARAMETER_FIELDS,
    AllocatedDevice,
    Claim,
    ClaimName,
    ClaimUid,
    Json,
    OpaqueConfig,
)
from gpuactors.core.values.slices import Attribute, CounterSet, SliceDevice, SliceSpec, StoredSlice, Taint
from gpuactors.core.values.text import encodable
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.ports.kube import ObjectRef

T = TypeVar("T")

API: Final = "resource.k8s.io/v1"

POD_CLAIM_NAME: Final = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim that was made from a template: its name in the pod (k8s.io/api/resource/v1,
PodResourceClaimAnnotation)."""

_FOREIGN_MAX: Final = 16
"""Limit on the unknown fields of a slice that are named."""


class OwnerReference(msgspec.Struct, rename="camel", omit_defaults=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(msgspec.Struct, rename="camel", omit_defaults=True):
    """`ObjectMeta`."""

    name: str = ""
    namespace: str = ""
    generate_name: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []


class ListOf(msgspec.Struct, Generic[T]):
    """A list of objects, as the server answers it."""

    items: list[T] | None
    """The objects; None stands for an empty list: where only the metadata is asked for, the server (1.35.3, 1.36.2)
    writes `null` for an empty list. An answer without the field is no list."""
    metadata: Meta = msgspec.field(default_factory=Meta)


class PartialObject(msgspec.Struct):
    """An object of which only the metadata was asked for, or is of interest."""

    metadata: Meta


# --- claims -----------------------------------------------------------------------------------------------


class _Result(msgspec.Struct, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = msgspec.field(name="shareID", default=None)
    admin_access: bool | None = None


class _Opaque(msgspec.Struct):
    driver: str
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    """The parameters, undecoded: gpuactors does not know those of other drivers."""


class _Config(msgspec.Struct):
    source: str = ""
    requests: list[str] | None = None
    opaque: _Opaque | None = None


class _Devices(msgspec.Struct):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(msgspec.Struct):
    devices: _Devices = msgspec.field(default_factory=_Devices)


class _Consumer(msgspec.Struct, rename="camel"):
    resource: str = ""
    name: str = ""
    uid: str = ""
    api_group: str = ""


class _ClaimStatus(msgspec.Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class ClaimObject(msgspec.Struct):
    """A ResourceClaim."""

    metadata: Meta
    status: _ClaimStatus = msgspec.field(default_factory=_ClaimStatus)


def claim(stored: ClaimObject, driver: str, pool: str) -> Claim:
    """Return the claim's part for one driver and pool."""
    meta, allocation = stored.metadata, stored.status.allocation
    return Claim(
        name=ClaimName(meta.namespace, meta.name, ClaimUid(meta.uid)),
        pod_claim_name=meta.annotations.get(POD_CLAIM_NAME),
        generation=meta.generation,
        results=None if allocation is None else tuple(_results(allocation.devices, driver, pool)),
        configs=() if allocation is None else tuple(_configs(allocation.devices, driver)),
    )


def pods_of(stored: ClaimObject) -> Iterator[ObjectRef]:
    """Yield the pods that the claim is reserved for. Other objects may be in the list (`apiGroup`, `resource`)."""
    for consumer in stored.status.reserved_for or ():
        if (consumer.api_group, consumer.resource) == ("", "pods"):
            yield ObjectRef("Pod", stored.metadata.namespace, consumer.name, consumer.uid)


def _results(devices: _Devices, driver: str, pool: str) -> Iterator[AllocatedDevice]:
    for result in devices.results or ():
        if (result.driver, result.pool) == (driver, pool):
            admin = bool(result.admin_access)
            yield AllocatedDevice(result.request, result.pool, result.device, result.share_id, admin)


def _configs(devices: _Devices, driver: str) -> Iterator[OpaqueConfig]:
    for config in devices.config or ():
        if config.opaque is not None and config.opaque.driver == driver:
            requests = tuple(config.requests or ())
            try:
                parameters = _frozen(decode_json(config.opaque.parameters, object, _PARAMETERS_DEPTH_MAX))
            except UndecodableError as error:
                yield OpaqueConfig(config.source == "FromClass", requests, None, str(error))
            else:
                yield OpaqueConfig(config.source == "FromClass", requests, parameters)


_PARAMETERS_DEPTH_MAX: Final = 32
"""Limit on the nesting of the parameters for this driver. Its kinds have two levels; a mistake of the user's is named
by its field."""


def _frozen(value: Any) -> Json:
    """Freeze the value. Of what no configuration of ours has only the name is kept: no field of ours is an array."""
    match value:
        case list():
            return tuple(None for _ in value)
        case dict():
            return {
                encodable(key): _frozen(inner) if key in PARAMETER_FIELDS else None
                for key, inner in value.items()
            }
        case str():
            return encodable(value)
        case None | bool() | int() | float():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} is no JSON")


# --- slices -----------------------------------------------------------------------------------------------


class _Pool(msgspec.Struct, rename="camel"):
    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class _Attribute(msgspec.Struct, omit_defaults=True):
    string: str | None = None
    integer: int | None = msgspec.field(name="int", default=None)
    boolean: bool | None = msgspec.field(name="bool", default=None)
    version: str | None = None


_FIELDS: Final = {"string": "string", "int": "integer", "bool": "boolean", "version": "version"}
"""The field of an attribute's value, by the attribute's type."""


class _Taint(msgspec.Struct, rename="camel", omit_defaults=True):
    key: str
    effect: str = ""
    value: str = ""
    time_added: str | None = None


class _Capacity(msgspec.Struct):
    value: str = ""


class _Consumption(msgspec.Struct, rename="camel"):
    counter_set: str = ""
    counters: dict[str, _Capacity] = {}


class _CounterSet(msgspec.Struct):
    name: str = ""
    counters: dict[str, _Capacity] = {}


class _Device(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    attributes: dict[str, _Attribute] = {}
    capacity: dict[str, _Capacity] = {}
    consumes_counters: list[_Consumption] = []
    taints: list[_Taint] = []


class _Spec(msgspec.Struct, rename="camel", omit_defaults=True):
    driver: str = ""
    node_name: str = ""
    pool: _Pool = msgspec.field(default_factory=_Pool)
    devices: list[_Device] = []
    shared_counters: list[_CounterSet] = []


class SliceObject(msgspec.Struct, rename="camel"):
    """A ResourceSlice; its spec as it came."""

    metadata: Meta
    spec: dict[str, Any]


class _WrittenSlice(msgspec.Struct, rename="camel"):
    metadata: Meta
    spec: _Spec
    api_version: str = API
    kind: str = "ResourceSlice"


def stored_slice(stored: SliceObject) -> StoredSlice:
    """Convert a slice of the server. Raises `msgspec.ValidationError`."""
    fields = {key: value for key, value in stored.spec.items() if value is not None}
    spec = msgspec.convert(fields, _Spec)
    owners = [o.uid for o in stored.metadata.owner_references if o.kind == "Node" and o.controller]
    foreign: list[str] = []
    for path in _unknown(fields, msgspec.to_builtins(spec), ""):
        foreign.append(path)
        if len(foreign) == _FOREIGN_MAX:
            break
    return StoredSlice(
        name=stored.metadata.name,
        uid=stored.metadata.uid,
        version=stored.metadata.resource_version,
        owner=owners[0] if owners else None,
        spec=SliceSpec(
            driver=spec.driver,
            node=spec.node_name,
            pool=spec.pool.name,
            generation=spec.pool.generation,
            slice_count=spec.pool.resource_slice_count,
            devices=tuple(map(_core_device, spec.devices)),
            foreign=tuple(foreign),
            counter_sets=tuple(CounterSet(s.name, _quantities(s.counters)) for s in spec.shared_counters),
        ),
    )


def written_slice(spec: SliceSpec, metadata: Meta) -> bytes:
    """Encode a slice for the server."""
    devices = [_api_device(device) for device in spec.devices]
    pool = _Pool(spec.pool, spec.generation, spec.slice_count)
    counters = [_CounterSet(s.name, _api_quantities(s.counters)) for s in spec.counter_sets]
    return msgspec.json.encode(
        _WrittenSlice(metadata, _Spec(spec.driver, spec.node, pool, devices, counters))
    )


def _core_device(device: _Device) -> SliceDevice:
    attributes = {name: _core_attribute(value) for name, value in device.attributes.items()}
    taints = tuple(Taint(t.key, t.value, t.effect, t.time_added) for t in device.taints)
    consumes = tuple(CounterSet(c.counter_set, _quantities(c.counters)) for c in device.consumes_counters)
    return SliceDevice(device.name, attributes, taints, _quantities(device.capacity), consumes)


def _quantities(quantities: Mapping[str, _Capacity]) -> dict[str, str]:
    return {name: quantity.value for name, quantity in quantities.items()}


def _api_quantities(quantities: Mapping[str, str]) -> dict[str, _Capacity]:
    return {name: _Capacity(value) for name, value in quantities.items()}


def _core_attribute(attribute: _Attribute) -> Attribute:
    for kind, name in _FIELDS.items():
        if (value := getattr(attribute, name)) is not None:
            return Attribute(kind, value)
    return Attribute("", "")  # a list, of a newer server; its field is foreign


def _api_device(device: SliceDevice) -> _Device:
    attributes = {name: _Attribute(**{_FIELDS[a.type]: a.value}) for name, a in device.attributes.items()}  # type: ignore[arg-type]
    taints = [_Taint(t.key, t.effect, t.value, t.time_added) for t in device.taints]
    consumes = [_Consumption(c.name, _api_quantities(c.counters)) for c in device.consumes]
    return _Device(device.name, attributes, _api_quantities(device.capacity), consumes, taints)


def _unknown(raw: object, decoded: object, path: str) -> Iterator[str]:
    """Yield the paths of `raw` that are not in `decoded`."""
    if raw == decoded:  # as nearly always: a slice is as gpuactors has written it
        return
    match raw, decoded:
        case dict(), Mapping():
            for key, value in raw.items():
                below = f"{path}.{key}" if path else str(key)
                if key in decoded:
                    yield from _unknown(value, decoded[key], below)
                elif value not in (None, [], {}, "", 0, False):
                    yield below
        case list(), list():
            for index, (value, understood) in enumerate(zip(raw, decoded, strict=True)):
                yield from _unknown(value, understood, f"{path}[{index}]")
        case _:
            return
