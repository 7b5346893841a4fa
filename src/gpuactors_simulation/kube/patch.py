"""JSON patch (RFC 6902: test, add, replace, remove) and merge patch (RFC 7386), as the API server applies them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from gpuactors_simulation.kube import status
from gpuactors_simulation.kube.status import Object


def json_patch(target: Object, operations: Any) -> Object:
    """The patched object. Raises `Failure` 422 if it cannot be applied, or a test fails. A test for null of what is
    absent holds, and `replace` adds what is absent."""
    patched = deepcopy(target)
    if not isinstance(operations, list):
        json_type = "object" if isinstance(operations, dict) else "value"
        raise status.bad_request(
            f"error decoding patch: json: cannot unmarshal {json_type} into Go value of type []handlers.jsonPatchOp"
        )
    for operation in operations:
        path = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent: Any = patched
        for part in path[:-1]:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if not isinstance(parent, dict):
            raise status.patch_failed()
        _apply(operation, parent, path[-1])
    return patched


def _apply(operation: Object, parent: Object, key: str) -> None:
    match operation["op"]:
        case "test" if parent.get(key) == operation.get("value"):
            return
        case "add" | "replace":
            parent[key] = operation["value"]
        case "remove" if key in parent:
            del parent[key]
        case _:
            raise status.patch_failed()


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the patched object."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    patched = deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            patched.pop(key, None)
        else:
            patched[key] = merge_patch(patched.get(key), value)
    return patched
