"""The API server's treatment of a ResourceSlice, ResourceClaim or Event before it stores it: defaults,
dropped fields, rules (kubernetes pkg/apis/resource/validation and pkg/registry/resource/resourceslice/strategy.go, as
recorded; of events of core/v1 legacyValidateEvent in pkg/apis/core/validation/events.go, as read)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpuactors_simulation.kube import status
from gpuactors_simulation.kube.status import CLIQUES, DOMAINS, EVENTS, SLICES, Cause, Kind, Object

_DEVICES_MAX: Final = 128
_ADVANCED_MAX: Final = 64
"""Where any device has a taint or consumes counters."""
_COUNTER_SETS_MAX: Final = 8
_CONSUMPTIONS_MAX: Final = 2
_TAINTS_MAX: Final = 16
_ATTRIBUTES_MAX: Final = 32
_STRING_MAX_BYTES: Final = 64
_LABEL_MAX: Final = 63
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_KEY_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
"""Of a qualified name, what follows the slash."""
_SEMVER: Final = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_VALUES: Final = {"int": "IntValue", "bool": "BoolValue", "string": "StringValue", "version": "VersionValue"}
"""By the field of an attribute, its name in Go."""
_EMPTY: Final = '""'
_EFFECTS: Final = ("NoExecute", "NoSchedule", "None")


def pruned(sent: Object) -> Object:
    """Return the object without fields that are empty."""
    sent.get("metadata", {}).pop("managedFields", None)
    for field in ("devices", "sharedCounters"):
        if sent.get("spec", {}).get(field) == []:
            del sent["spec"][field]
    return sent


def defaulted(kind: Kind, sent: Object) -> Object:
    """Return the object with the defaults of its kind. `defaulted_claim` has those of ResourceClaims."""
    if kind is DOMAINS:
        spec = sent.get("spec", {})
        spec.setdefault("numNodes", 0)
        spec.get("channel", {}).setdefault("allocationMode", "Single")
        for node in sent.get("status", {}).get("nodes") or ():
            node.setdefault("status", "NotReady")
    elif kind is CLIQUES:
        for daemon in sent.get("daemons") or ():
            daemon.setdefault("status", "NotReady")
    elif kind is EVENTS:
        for key, value in (("eventTime", None), ("reportingComponent", ""), ("reportingInstance", "")):
            sent.setdefault(key, value)
    return sent


def defaulted_claim(sent: Object) -> Object:
    """Return a new claim with the defaults of its requests and an empty status."""
    for request in sent.get("spec", {}).get("devices", {}).get("requests", ()):
        for exact in [request["exactly"]] if "exactly" in request else request.get("firstAvailable", ()):
            exact.setdefault("allocationMode", "ExactCount")
            if exact["allocationMode"] == "ExactCount":
                exact.setdefault("count", 1)
    sent["status"] = {}
    return sent


def without_taints(new: Object, old: Object | None) -> None:
    """The gate DRADeviceTaints is off: taints are dropped, unless the stored slice has any."""
    if old is not None and _tainted(old):
        return
    for device in _devices(new):
        device.pop("taints", None)


def without_counters(new: Object, old: Object | None) -> None:
    """The gate DRAPartitionableDevices is off: counters are dropped, unless the stored slice has any."""
    if old is not None and (_counter_sets(old) or _consuming(old)):
        return
    new.get("spec", {}).pop("sharedCounters", None)
    for device in _devices(new):
        device.pop("consumesCounters", None)


def with_times(new: Object, now: str) -> None:
    """A taint without `timeAdded` gets one, whatever the stored slice has."""
    for device in _devices(new):
        for taint in device.get("taints", ()):
            taint.setdefault("timeAdded", now)


def check_slice(new: Object, old: Object | None) -> None:
    """Raise `Failure` 422 with all that is wrong."""
    causes = [*_immutable(new, old), *_both(new), *_devices_wrong(new), *_counter_sets_wrong(new)]
    if causes:
        raise status.invalid(SLICES, new["metadata"]["name"], causes)


def check_event(new: Object) -> None:
    """Raise `Failure` 422 if the event is in another namespace than what it is about; of a thing without a namespace
    it is in `default`. Events with a time of their own (`eventTime`) have other rules, and nobody here makes one."""
    about = new.get("involvedObject", {}).get("namespace", "")
    if new["metadata"].get("namespace") != (about or "default"):
        cause = f'Invalid value: "{about}": does not match event.namespace'
        wrong = Cause("involvedObject.namespace", "FieldValueInvalid", cause)
        raise status.invalid(EVENTS, new["metadata"]["name"], [wrong])


def check_labels(kind: Kind, new: Object) -> None:
    """Raise `Failure` 422 if a label has a value that is none."""
    causes = [
        Cause(
            "metadata.labels", "FieldValueInvalid", f'Invalid value: "{value}": {_label_value_wrong(value)}'
        )
        for value in (new["metadata"].get("labels") or {}).values()
        if _label_value_wrong(value)
    ]
    if causes:
        raise status.invalid(kind, new["metadata"]["name"], causes)


def _label_value_wrong(value: str) -> str:
    if len(value) > _LABEL_MAX:
        return f"must be no more than {_LABEL_MAX} bytes"
    if _LABEL_VALUE.fullmatch(value):
        return ""
    return (
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start "
        "and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for "
        f"validation is '{_LABEL_VALUE.pattern}')"
    )


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


def _both(new: Object) -> Iterator[Cause]:
    if _counter_sets(new) and _devices(new):
        message = 'Invalid value: "": only one of `sharedCounters` or `devices` is allowed'
        yield Cause("spec", "FieldValueInvalid", message)


def _counter_sets_wrong(new: Object) -> Iterator[Cause]:
    counter_sets = _counter_sets(new)
    yield from _counters_wrong(counter_sets, "name", "spec.sharedCounters", _COUNTER_SETS_MAX)


def _counters_wrong(sets: Sequence[Object], key: str, path: str, sets_max: int) -> Iterator[Cause]:
    """Counter sets, or what a device consumes of them, each with the field `key` as its name."""
    if len(sets) > sets_max:
        message = f"Too many: {len(sets)}: must have at most {sets_max} items"
        yield Cause(path, "FieldValueTooMany", message)
        return
    names: list[str] = [counter_set.get(key, "") for counter_set in sets]
    for index, counter_set in enumerate(sets):
        if not names[index]:
            yield Cause(f"{path}[{index}].{key}", "FieldValueRequired", "Required value")
        elif (wrong := _device_name_wrong(names[index])) is not None:
            message = f'Invalid value: "{names[index]}": {wrong}'
            yield Cause(f"{path}[{index}].{key}", "FieldValueInvalid", message)
        if not counter_set.get("counters"):
            yield Cause(f"{path}[{index}].counters", "FieldValueRequired", "Required value")
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Cause(f"{path}[{index}]", "FieldValueDuplicate", f'Duplicate value: "{name}"')


def _devices_wrong(new: Object) -> Iterator[Cause]:
    devices = _devices(new)
    devices_max = _ADVANCED_MAX if _tainted(new) or _consuming(new) else _DEVICES_MAX
    if len(devices) > devices_max:
        message = f"Too many: {len(devices)}: must have at most {devices_max} items"
        yield Cause("spec.devices", "FieldValueTooMany", message)
        return
    names: set[str] = set()
    for index, device in enumerate(devices):
        path, name = f"spec.devices[{index}]", device.get("name", "")
        if name in names:
            yield Cause(path, "FieldValueDuplicate", f'Duplicate value: "{name}"')
        names.add(name)
        yield from _device_wrong(device, path)


def _device_wrong(device: Object, path: str) -> Iterator[Cause]:
    name, attributes = device.get("name", ""), device.get("attributes", {})
    if (wrong := _device_name_wrong(name)) is not None:
        yield Cause(f"{path}.name", "FieldValueInvalid", f'Invalid value: "{name}": {wrong}')
    if (number := len(attributes) + len(device.get("capacity", {}))) > _ATTRIBUTES_MAX:
        message = f"Invalid value: {number}: the total number of attributes and capacities must not exceed 32"
        yield Cause(path, "FieldValueInvalid", message)
    for key, value in attributes.items():
        yield from _attribute_wrong(value, f"{path}.attributes[{key}]")
    yield from _taints_wrong(device.get("taints", ()), f"{path}.taints")
    consumed = device.get("consumesCounters", ())
    yield from _counters_wrong(consumed, "counterSet", f"{path}.consumesCounters", _CONSUMPTIONS_MAX)


def _taints_wrong(taints: Sequence[Object], path: str) -> Iterator[Cause]:
    if len(taints) > _TAINTS_MAX:
        message = f"Too many: {len(taints)}: must have at most {_TAINTS_MAX} items"
        yield Cause(path, "FieldValueTooMany", message)
        return
    for index, taint in enumerate(taints):
        if not _KEY_NAME.fullmatch(taint.get("key", "").rpartition("/")[2]):
            wrong = (
                "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
                "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
                f"'{_KEY_NAME.pattern}')"
            )
            message = f'Invalid value: "{taint.get("key", "")}": {wrong}'
            yield Cause(f"{path}[{index}].key", "FieldValueInvalid", message)
        if taint.get("effect") not in _EFFECTS:
            known = ", ".join(f'"{effect}"' for effect in _EFFECTS)
            message = f'Unsupported value: "{taint.get("effect", "")}": supported values: {known}'
            yield Cause(f"{path}[{index}].effect", "FieldValueNotSupported", message)


def _device_name_wrong(name: str) -> str | None:
    if len(name) > _LABEL_MAX:
        return f"must be no more than {_LABEL_MAX} characters"
    if _LABEL.fullmatch(name):
        return None
    return (
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
        "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
        f"'{_LABEL.pattern}')"
    )


def _attribute_wrong(value: Object, path: str) -> Iterator[Cause]:
    fields = [key for key in _VALUES if value.get(key) is not None]
    if len(fields) != 1:
        as_go = json.dumps({name: value.get(key) for key, name in _VALUES.items()}, separators=(",", ":"))
        message = f"Invalid value: {as_go if fields else _EMPTY}: exactly one value must be specified"
        yield Cause(path, "FieldValueInvalid", message)
        return
    if "version" in fields and not _SEMVER.fullmatch(value["version"]):
        wrong = "must be a string compatible with semver.org spec 2.0.0"
        yield Cause(f"{path}.version", "FieldValueInvalid", f'Invalid value: "{value["version"]}": {wrong}')
    for key in ("string", "version"):
        if len((value.get(key) or "").encode()) > _STRING_MAX_BYTES:
            message = f"Too long: may not be more than {_STRING_MAX_BYTES} bytes"
            yield Cause(f"{path}.{key}", "FieldValueTooLong", message)


def _devices(stored_slice: Object) -> list[Object]:
    devices: list[Object] = stored_slice.get("spec", {}).get("devices") or []
    return devices


def _tainted(stored_slice: Object) -> bool:
    return any(device.get("taints") for device in _devices(stored_slice))


def _consuming(stored_slice: Object) -> bool:
    return any(device.get("consumesCounters") for device in _devices(stored_slice))


def _counter_sets(stored_slice: Object) -> list[Object]:
    counter_sets: list[Object] = stored_slice.get("spec", {}).get("sharedCounters") or []
    return counter_sets
