"""What the API server makes of a ResourceSlice, ResourceClaim or Event before it stores it: defaults, dropped fields,
rules (kubernetes pkg/apis/resource/validation and pkg/registry/resource/resourceslice/strategy.go, as recorded; of
events of core/v1 legacyValidateEvent in pkg/apis/core/validation/events.go, as read)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Final

from gpuactors.simulation.kube import status
from gpuactors.simulation.kube.status import EVENTS, SLICES, Cause, Kind, Object

_DEVICES_MAX: Final = 128
_TAINTED_MAX: Final = 64
_ATTRIBUTES_MAX: Final = 32
_STRING_MAX_BYTES: Final = 64
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VALUES: Final = ("string", "int", "bool", "version")
_EFFECTS: Final = ("NoExecute", "NoSchedule", "None")
_TOP: Final = frozenset({"apiVersion", "kind", "metadata"})


def unknown_field(kind: Kind, given: Object) -> str | None:
    """A field of the object that its kind does not have."""
    return min(given.keys() - _TOP.union(kind.fields), default=None)


def pruned(kind: Kind, given: Object) -> Object:
    """The object without fields that its kind does not have, and without those that are empty."""
    known = {key: deepcopy(value) for key, value in given.items() if key in _TOP.union(kind.fields)}
    known.get("metadata", {}).pop("managedFields", None)
    if kind is SLICES and known.get("spec", {}).get("devices") == []:
        del known["spec"]["devices"]
    return known


def defaulted_claim(given: Object) -> Object:
    """A new claim with the defaults of its requests and an empty status."""
    for request in given.get("spec", {}).get("devices", {}).get("requests", ()):
        for exact in [request["exactly"]] if "exactly" in request else request.get("firstAvailable", ()):
            exact.setdefault("allocationMode", "ExactCount")
            if exact["allocationMode"] == "ExactCount":
                exact.setdefault("count", 1)
    given["status"] = {}
    return given


def without_taints(new: Object, old: Object | None) -> None:
    """The gate DRADeviceTaints is off: taints are dropped, unless the stored slice has any."""
    if old is not None and _tainted(old):
        return
    for device in _devices(new):
        device.pop("taints", None)


def with_times(new: Object, now: str) -> None:
    """A taint without `timeAdded` gets one, whatever the stored slice has."""
    for device in _devices(new):
        for taint in device.get("taints", ()):
            taint.setdefault("timeAdded", now)


def check_slice(new: Object, old: Object | None) -> None:
    """Raises `Failure` 422 with all that is wrong."""
    causes = [*_immutable(new, old), *_devices_wrong(new)]
    if causes:
        raise status.invalid(SLICES, new["metadata"]["name"], causes)


def check_event(new: Object) -> None:
    """Raises `Failure` 422 if the event is in another namespace than what it is about; of a thing without a namespace
    it is in `default`. Events with a time of their own (`eventTime`) have other rules, and nobody here makes one."""
    about = new.get("involvedObject", {}).get("namespace", "")
    if new["metadata"].get("namespace") != (about or "default"):
        cause = f'Invalid value: "{about}": does not match event.namespace'
        wrong = Cause("involvedObject.namespace", "FieldValueInvalid", cause)
        raise status.invalid(EVENTS, new["metadata"]["name"], [wrong])


def _immutable(new: Object, old: Object | None) -> Iterator[Cause]:
    if old is None:
        return
    for path in ("driver", "nodeName", "pool.name"):
        before, after = _at(old["spec"], path), _at(new["spec"], path)
        if before != after:
            yield Cause(f"spec.{path}", "FieldValueInvalid", f'Invalid value: "{after}": field is immutable')


def _at(spec: Any, path: str) -> Any:
    for part in path.split("."):
        spec = spec.get(part, {})
    return spec


def _devices_wrong(new: Object) -> Iterator[Cause]:
    devices = _devices(new)
    most = _TAINTED_MAX if _tainted(new) else _DEVICES_MAX
    if len(devices) > most:
        message = f"Too many: {len(devices)}: must have at most {most} items"
        yield Cause("spec.devices", "FieldValueTooMany", message)
        return
    seen: set[str] = set()
    for index, device in enumerate(devices):
        path, name = f"spec.devices[{index}]", device.get("name", "")
        if name in seen:
            yield Cause(path, "FieldValueDuplicate", f'Duplicate value: "{name}"')
        seen.add(name)
        yield from _device_wrong(device, path)


def _device_wrong(device: Object, path: str) -> Iterator[Cause]:
    name, attributes = device.get("name", ""), device.get("attributes", {})
    if not _LABEL.fullmatch(name) or len(name) > 63:
        message = f"Invalid value: \"{name}\": a lowercase RFC 1123 label must consist of lower case characters or '-'"
        yield Cause(f"{path}.name", "FieldValueInvalid", message)
    if (number := len(attributes) + len(device.get("capacity", {}))) > _ATTRIBUTES_MAX:
        message = f"Invalid value: {number}: the total number of attributes and capacities must not exceed 32"
        yield Cause(path, "FieldValueInvalid", message)
    for key, value in attributes.items():
        at = f"{path}.attributes[{key}]"
        if len([v for v in _VALUES if value.get(v) is not None]) != 1:
            yield Cause(at, "FieldValueInvalid", 'Invalid value: "": exactly one value must be specified')
        elif len(value.get("string", "").encode()) > _STRING_MAX_BYTES:
            message = f"Too long: may not be more than {_STRING_MAX_BYTES} bytes"
            yield Cause(f"{at}.string", "FieldValueTooLong", message)
    for index, taint in enumerate(device.get("taints", ())):
        if taint.get("effect") not in _EFFECTS:
            known = ", ".join(f'"{effect}"' for effect in _EFFECTS)
            message = f'Unsupported value: "{taint.get("effect", "")}": supported values: {known}'
            yield Cause(f"{path}.taints[{index}].effect", "FieldValueNotSupported", message)


def _devices(of: Object) -> list[Object]:
    found: list[Object] = of.get("spec", {}).get("devices") or []
    return found


def _tainted(of: Object) -> bool:
    return any(device.get("taints") for device in _devices(of))
