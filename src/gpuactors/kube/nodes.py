"""Our Node object: its UID and labels, without spec and status. Implements `ports.kube.NodeApi`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Final, final
from urllib.parse import quote

import msgspec

from gpuactors.core.values.quote import quoted_name
from gpuactors.kube import errors, objects
from gpuactors.kube.client import JSON_PATCH, METADATA_ONLY, ApiClient, Call
from gpuactors.kube.watch import Watch
from gpuactors.ports.kube import ApiRefused, LabelConflict, NodeMetadata

_PATH: Final = "/api/v1/nodes"


@final
class KubeNode:
    """The Node object of one name."""

    def __init__(self, client: ApiClient, node: str) -> None:
        self._client = client
        self._node = node
        self._path = f"{_PATH}/{quote(node, safe='')}"
        what = f"watch the node {quoted_name(node)}"
        self._watch = Watch(client, what, _PATH, selector=f"metadata.name={node}", accept=METADATA_ONLY)

    async def read(self) -> NodeMetadata:
        return await self._ask(
            Call(f"read the node {quoted_name(self._node)}", "GET", self._path, accept=METADATA_ONLY)
        )

    async def set_label(
        self, label: str, *, expected: str | None, value: str | None
    ) -> NodeMetadata | LabelConflict:
        """Implement `NodeApi.set_label`. A JSON patch: the test and the change are one step of the server, and nothing
        else of the node is touched. A test for null holds for a label that is absent."""
        path = f"/metadata/labels/{label.replace('~', '~0').replace('/', '~1')}"
        patch: list[dict[str, str | None]] = [{"op": "test", "path": path, "value": expected}]
        if value is not None:
            patch.append({"op": "add", "path": path, "value": value})
        elif expected is not None:
            patch.append({"op": "remove", "path": path})
        what = f"set the label {label} of the node {quoted_name(self._node)}"
        body = msgspec.json.encode(patch)
        call = Call(what, "PATCH", self._path, body=body, content_type=JSON_PATCH, accept=METADATA_ONLY)
        try:
            return await self._ask(call)
        except ApiRefused as exc:
            # Of a failed test the server says no more than 422. A policy that forbids the change names the node.
            if exc.code == 422 and not exc.refusal.name:
                return LabelConflict()
            raise

    def watch_node(self) -> AbstractAsyncContextManager[AsyncIterator[NodeMetadata]]:
        """Implement `NodeApi.watch_node`. From nothing each time: then no right to list nodes is needed."""
        return aclosing(self._states())

    async def _states(self) -> AsyncGenerator[NodeMetadata]:
        while True:
            async with aclosing(self._watch.changes()) as changes:
                async for change in changes:
                    if change.type != "DELETED":
                        yield self._metadata(change.object, self._watch.what)

    async def _ask(self, call: Call) -> NodeMetadata:
        return self._metadata(await self._client.ask(call), call.what)

    def _metadata(self, body: bytes | msgspec.Raw, what: str) -> NodeMetadata:
        meta = errors.answered(what, self._client.server, body, objects.PartialObject).metadata
        return NodeMetadata(meta.uid, meta.labels)
