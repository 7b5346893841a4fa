"""The ResourceSlices of one driver on one node: list, watch and write. Implements `ports.kube.SliceApi`.

Theory of operation of `follow`. All are listed; then a watch begins at the list's version. When that cannot go on
(`watch.py`), all are listed anew.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Final, final
from urllib.parse import quote

import msgspec

from gpuactors.core.claims.slice_writes import name_prefix
from gpuactors.core.values.quote import quoted_name
from gpuactors.core.values.slices import SliceSpec, StoredSlice
from gpuactors.kube import errors, objects
from gpuactors.kube.client import ApiClient, Call
from gpuactors.kube.watch import Change, Watch
from gpuactors.ports.kube import ApiRefused, SliceDeleted, SliceEvent, SlicesListed, SliceStored

_PATH: Final = f"/apis/{objects.API}/resourceslices"


@final
class KubeSlices:
    """The slices of one driver on one node."""

    def __init__(self, client: ApiClient, driver: str, node: str) -> None:
        self._client = client
        self._driver = driver
        self._node = node
        self._selector = f"spec.driver={driver},spec.nodeName={node}"
        self._of = f"of {quoted_name(driver)} on {quoted_name(node)}"
        what = f"watch the ResourceSlices {self._of}"
        self._watch = Watch(client, what, _PATH, selector=self._selector)

    # --- reading ------------------------------------------------------------------------------------------

    def follow(self) -> AbstractAsyncContextManager[AsyncIterator[SliceEvent]]:
        return aclosing(self._events())

    async def _events(self) -> AsyncGenerator[SliceEvent]:
        while True:
            listed, version = await self._list()
            yield listed
            async with aclosing(self._watch.changes(version)) as changes:
                async for change in changes:
                    event = self._event(change)
                    if event is not None:
                        yield event

    async def _list(self) -> tuple[SlicesListed, str]:
        what = f"list the ResourceSlices {self._of}"
        call = Call(what, "GET", _PATH, {"fieldSelector": self._selector})
        listed = await self._client.decoded(call, objects.ListOf[objects.SliceObject])
        slices = tuple(self._converted(what, item) for item in listed.items or ())
        return SlicesListed(slices), listed.metadata.resource_version

    def _event(self, change: Change) -> SliceEvent | None:
        what = self._watch.what
        decoded = errors.answered(what, self._client.server, change.object, objects.SliceObject)
        stored = self._converted(what, decoded)
        match change.type:
            case "ADDED" | "MODIFIED":
                return SliceStored(stored)
            case "DELETED":
                return SliceDeleted(stored.name)
            case _:  # of a newer server
                return None

    # --- writing ------------------------------------------------------------------------------------------

    async def create(self, spec: SliceSpec, index: int, owner: str, *, dry_run: bool = False) -> StoredSlice:
        prefix = name_prefix(index, self._driver, self._node)
        body = objects.written_slice(
            spec, objects.Meta(generate_name=prefix, owner_references=[self._owner(owner)])
        )
        query = {"dryRun": "All"} if dry_run else {}
        what = f"{'try to ' if dry_run else ''}create a ResourceSlice {self._of}"
        return await self._stored(Call(what, "POST", _PATH, query, body))

    async def update(self, stored: StoredSlice, spec: SliceSpec, owner: str) -> StoredSlice:
        metadata = objects.Meta(
            name=stored.name,
            uid=stored.uid,
            resource_version=stored.version,
            owner_references=[self._owner(owner)],
        )
        body = objects.written_slice(spec, metadata)
        what = f"update the ResourceSlice {quoted_name(stored.name)}"
        return await self._stored(Call(what, "PUT", self._path_of(stored), body=body))

    async def delete(self, stored: StoredSlice) -> None:
        unchanged = {"uid": stored.uid, "resourceVersion": stored.version}
        options = {"preconditions": unchanged, "apiVersion": "v1", "kind": "DeleteOptions"}
        what = f"delete the ResourceSlice {quoted_name(stored.name)}"
        call = Call(what, "DELETE", self._path_of(stored), body=msgspec.json.encode(options))
        try:
            await self._client.ask(call)
        except ApiRefused as exc:
            if (exc.code, exc.refusal.name) != (404, stored.name):
                raise

    async def _stored(self, call: Call) -> StoredSlice:
        return self._converted(call.what, await self._client.decoded(call, objects.SliceObject))

    def _converted(self, what: str, stored: objects.SliceObject) -> StoredSlice:
        try:
            return objects.stored_slice(stored)
        except msgspec.ValidationError as exc:
            raise errors.malformed(what, self._client.server, str(exc)) from exc

    def _owner(self, uid: str) -> objects.OwnerReference:
        return objects.OwnerReference("v1", "Node", self._node, uid, controller=True)

    def _path_of(self, stored: StoredSlice) -> str:
        return f"{_PATH}/{quote(stored.name, safe='')}"
