"""JSON patch (RFC 6902: test, add, replace, remove) and merge patch (RFC 7386), as the API server applies them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from gpuactors_simulation.kube import status
from gpuactors_simulation.kube.status import Object


def json_patch(of: Object, operations: Any) -> Object:
    """The patched object. Raises `Failure` 422 if it cannot be applied, or a test fails. A test for null of what is
    absent holds, and `replace` adds what is absent."""
    new = deepcopy(of)
    if not isinstance(operations, list):
        what = "object" if isinstance(operations, dict) else "value"
        raise status.bad_request(
            f"error decoding patch: json: cannot unmarshal {what} into Go value of type []handlers.jsonPatchOp"
        )
    for operation in operations:
        path = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent: Any = new
        for part in path[:-1]:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if not isinstance(parent, dict):
            raise status.patch_failed()
        _apply(operation, parent, path[-1])
    return new


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


def merge_patch(of: Any, patch: Any) -> Any:
    """The patched object."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    new = deepcopy(of) if isinstance(of, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merge_patch(new.get(key), value)
    return new
