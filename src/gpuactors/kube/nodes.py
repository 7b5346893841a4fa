"""Our Node object: its UID and labels, without spec and status. Implements `ports_kube.NodeApi`."""

from __future__ import annotations

from typing import final
from urllib.parse import quote

import msgspec

from gpuactors.core.quote import quoted_name
from gpuactors.kube import errors, objects
from gpuactors.kube.client import JSON_PATCH, METADATA_ONLY, ApiClient, Call
from gpuactors.ports_kube import NodeMetadata


@final
class KubeNode:
    """The Node object of one name."""

    def __init__(self, client: ApiClient, node: str) -> None:
        self._client = client
        self._node = node
        self._path = f"/api/v1/nodes/{quote(node, safe='')}"

    async def read(self) -> NodeMetadata:
        """As `NodeApi.read`."""
        return await self._ask(
            Call(f"read the node {quoted_name(self._node)}", "GET", self._path, accept=METADATA_ONLY)
        )

    async def set_label(self, label: str, *, expected: str | None, value: str | None) -> NodeMetadata:
        """As `NodeApi.set_label`. A JSON patch: the test and the change are one step of the server, and nothing else of
        the node is touched."""
        path = f"/metadata/labels/{label.replace('~', '~0').replace('/', '~1')}"
        patch: list[dict[str, str | None]] = [{"op": "test", "path": path, "value": expected}]
        if value is not None:
            patch.append({"op": "add", "path": path, "value": value})
        elif expected is not None:
            patch.append({"op": "remove", "path": path})
        what = f"set the label {label} of the node {quoted_name(self._node)}"
        body = msgspec.json.encode(patch)
        return await self._ask(
            Call(what, "PATCH", self._path, body=body, content_type=JSON_PATCH, accept=METADATA_ONLY)
        )

    async def _ask(self, call: Call) -> NodeMetadata:
        body = await self._client.ask(call)
        try:
            meta = msgspec.json.decode(body, type=objects.PartialObject).metadata
        except msgspec.MsgspecError as exc:
            raise errors.malformed(call.what, self._client.server, str(exc)) from exc
        return NodeMetadata(meta.uid, meta.resource_version, meta.labels)
