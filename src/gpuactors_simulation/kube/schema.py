"""The fields that objects have, as far as the API server looks for those that it does not know.

From k8s.io/api/resource/v1 of 1.35. A level that is not here may have any field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuactors_simulation.kube.status import SLICES, Kind, Object

Schema = Mapping[str, Any]
"""By field: a schema, a list with the schema of its items, or None for anything. `*` is each key of a map."""

_TOP: Final[Schema] = {"apiVersion": None, "kind": None, "metadata": None}
_DEVICE: Final[Schema] = {
    "name": None,
    "attributes": {"*": {"int": None, "bool": None, "string": None, "version": None}},
    "capacity": {"*": {"value": None, "requestPolicy": None}},
    "consumesCounters": [{"counterSet": None, "counters": {"*": {"value": None}}}],
    "nodeName": None,
    "nodeSelector": None,
    "allNodes": None,
    "taints": [{"key": None, "value": None, "effect": None, "timeAdded": None}],
    "bindsToNode": None,
    "bindingConditions": None,
    "bindingFailureConditions": None,
    "allowMultipleAllocations": None,
}
_SLICE: Final[Schema] = {
    "driver": None,
    "pool": {"name": None, "generation": None, "resourceSliceCount": None},
    "nodeName": None,
    "nodeSelector": None,
    "allNodes": None,
    "devices": [_DEVICE],
    "perDeviceNodeSelection": None,
    "sharedCounters": [{"name": None, "counters": {"*": {"value": None}}}],
}


def without_unknown(kind: Kind, sent: Object) -> tuple[Object, tuple[str, ...]]:
    """Return a copy without unknown fields, and the paths of those."""
    schema: Schema = {**_TOP, **dict.fromkeys(kind.fields)}
    if kind is SLICES:
        schema = {**schema, "spec": _SLICE}
    return _known(sent, schema), tuple(_unknown(sent, schema, ""))


def _unknown(sent: Any, schema: Any, path: str) -> Iterator[str]:
    match sent, schema:
        case dict(), dict():
            for key, value in sent.items():
                below = f"{path}.{key}" if path else key
                if key in schema or "*" in schema:
                    yield from _unknown(value, schema.get(key, schema.get("*")), below)
                else:
                    yield below
        case list(), [items]:
            for index, value in enumerate(sent):
                yield from _unknown(value, items, f"{path}[{index}]")
        case _:
            return


def _known(sent: Any, schema: Any) -> Any:
    match sent, schema:
        case dict(), dict():
            return {
                key: _known(value, schema.get(key, schema.get("*")))
                for key, value in sent.items()
                if key in schema or "*" in schema
            }
        case list(), [items]:
            return [_known(value, items) for value in sent]
        case dict(), _:
            return {key: _known(value, None) for key, value in sent.items()}
        case list(), _:
            return [_known(value, None) for value in sent]
        case _:
            return sent
