"""The surroundings of the fake kubelet's DRA manager, out of a fake API server and the CDI files of a node.

Must not know kubelet: a claim is read as kubelet reads it, slices are deleted as it does, and CDI ids are resolved as a
container runtime does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import CLAIMS
from gpuactors_simulation.kubelet.dra.values import (
    KUBELET_1_37,
    ApiAwayError,
    ClaimObject,
    Release,
    Surroundings,
)

CdiFiles = Callable[[], Iterable[bytes]]
"""The contents of the files in the CDI directory, now."""


def surroundings_of(
    api: FakeApiServer, cdi_files: CdiFiles | None = None, release: Release = KUBELET_1_37
) -> Surroundings:
    """Kubelet on the node of this API server's cluster. Without `cdi_files` every CDI id is found, without a node."""

    def claim(namespace: str, name: str) -> ClaimObject | None:
        if api.away:
            raise ApiAwayError
        stored = api.store.find(CLAIMS, namespace, name)
        return None if stored is None else _claim(stored)

    def wipe(driver: str | None) -> None:
        if api.away:
            raise ApiAwayError
        api.delete_slices(driver)

    if cdi_files is None:
        return Surroundings(claim, wipe, release=release)
    return Surroundings(claim, wipe, nodes_of(cdi_files), release)


def _claim(stored: Mapping[str, Any]) -> ClaimObject:
    metadata = stored["metadata"]
    allocation = stored.get("status", {}).get("allocation") or {}
    results = allocation.get("devices", {}).get("results", ())
    drivers = dict.fromkeys(result["driver"] for result in results)
    return ClaimObject(metadata["namespace"], metadata["name"], metadata["uid"], tuple(drivers))


def nodes_of(cdi_files: CdiFiles) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return the device nodes of the host that a container with these CDI ids gets, each once.

    A file that is no CDI file is skipped, as the runtime skips it (container-device-interface, `pkg/cdi/cache.go`,
    `refresh`). Raises `LookupError` for an id that no file has, as the runtime fails the container then.
    """

    def nodes(cdi_ids: Sequence[str]) -> Sequence[str]:
        edits: dict[str, list[Any]] = {}
        for content in cdi_files():
            edits.update(_edits_by_id(content))
        for cdi_id in cdi_ids:
            if cdi_id not in edits:
                raise LookupError(cdi_id)
        return tuple(
            dict.fromkeys(
                node.get("hostPath") or node["path"]
                for cdi_id in cdi_ids
                for edit in edits[cdi_id]
                for node in edit.get("deviceNodes", ())
            )
        )

    return nodes


def _edits_by_id(content: bytes) -> dict[str, list[Any]]:
    """Return the edits of each device of a CDI file, by its id; empty if this is no CDI file."""
    edits: dict[str, list[Any]] = {}
    try:
        file = json.loads(content)
        for device in file.get("devices", ()):
            container_edits = [file.get("containerEdits"), device.get("containerEdits")]
            edits[f"{file['kind']}={device['name']}"] = [edit for edit in container_edits if edit]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return edits
