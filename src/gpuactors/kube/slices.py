"""The ResourceSlices of one driver on one node: list, watch and write. Implements `ports_kube.SliceApi`.

Theory of operation of `follow`. All are listed; then a watch begins at the list's version. The server says with each
event, and with a bookmark each minute, from which version on to watch next. A watch ends after WATCH_S, which is no
event, and is renewed from there. If the server does not have that version any more, it answers 200 and an ERROR event
with code 410: all are listed anew. So they are after a watch that ended without a word: its version may be from before
a restore of etcd, and of a version that is still to come the server says nothing at all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final, final
from urllib.parse import quote

import msgspec
import trio

from gpuactors import limits
from gpuactors.core.dra.slice_writes import name_prefix
from gpuactors.core.dra.slices import SliceSpec, StoredSlice
from gpuactors.core.quote import quoted_name
from gpuactors.kube import errors, objects
from gpuactors.kube.client import ApiClient, Call
from gpuactors.ports_kube import ApiRefused, SliceDeleted, SliceEvent, SlicesListed, SliceStored

_PATH: Final = f"/apis/{objects.API}/resourceslices"
_GONE: Final = 410


class _List(msgspec.Struct):
    metadata: objects.Meta
    items: list[objects.SliceObject]


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Preconditions(msgspec.Struct, rename="camel"):
    uid: str
    resource_version: str


class _DeleteOptions(msgspec.Struct, rename="camel"):
    preconditions: _Preconditions
    api_version: str = "v1"
    kind: str = "DeleteOptions"


@dataclass(slots=True)
class _Place:
    """Where a watch begins, and what became of it."""

    version: str
    said: bool = False
    """The last watch said anything."""
    short: int = 0
    """How many watches in a row were cut short."""


@final
class KubeSlices:
    """The slices of one driver on one node."""

    def __init__(self, client: ApiClient, driver: str, node: str) -> None:
        self._client = client
        self._driver = driver
        self._node = node
        self._selector = f"spec.driver={driver},spec.nodeName={node}"
        self._of = f"of {quoted_name(driver)} on {quoted_name(node)}"

    # --- reading ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[AsyncIterator[SliceEvent]]:
        """As `SliceApi.follow`."""
        async with aclosing(self._events()) as events:
            yield events

    async def _events(self) -> AsyncGenerator[SliceEvent]:
        while True:
            listed, version = await self._list()
            yield listed
            place = _Place(version)
            try:
                while True:
                    async with aclosing(self._watch(place)) as events:
                        async for event in events:
                            yield event
                    if not place.said:
                        break
                    await trio.sleep(limits.WATCH_AGAIN_S[min(place.short, len(limits.WATCH_AGAIN_S) - 1)])
            except ApiRefused as exc:
                if exc.code != _GONE:
                    raise
            # Not at once: a server that answers each watch with 410 must not be asked without pause.
            await trio.sleep(limits.WATCH_AGAIN_S[1])

    async def _list(self) -> tuple[SlicesListed, str]:
        what = f"list the ResourceSlices {self._of}"
        body = await self._client.ask(Call(what, "GET", _PATH, {"fieldSelector": self._selector}))
        try:
            found = msgspec.json.decode(body, type=_List)
            slices = tuple(map(objects.stored_slice, found.items))
        except msgspec.MsgspecError as exc:
            raise errors.malformed(what, self._client.server, str(exc)) from exc
        return SlicesListed(slices), found.metadata.resource_version

    async def _watch(self, place: _Place) -> AsyncGenerator[SliceEvent]:
        """One watch from `place`, which it moves on. Raises `ApiRefused` with code 410 if that is too old."""
        call = self._watch_call(place.version)
        place.said = False
        began = trio.current_time()
        async with self._client.lines(call, limits.WATCH_SILENT_S) as lines:
            async for line in lines:
                place.said = True
                event = self._event(line, place, call.what)
                if event is not None:
                    yield event
                if trio.current_time() > began + limits.WATCH_S + limits.WATCH_LATE_S:
                    break
        lasted_s = trio.current_time() - began
        place.short = place.short + 1 if lasted_s < limits.WATCH_SHORT_S else 0

    def _watch_call(self, version: str) -> Call:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": f"{limits.WATCH_S:.0f}",
            "fieldSelector": self._selector,
        }
        return Call(f"watch the ResourceSlices {self._of}", "GET", _PATH, query)

    def _event(self, line: bytes, place: _Place, what: str) -> SliceEvent | None:
        try:
            event = msgspec.json.decode(line, type=_WatchEvent)
            if event.type == "ERROR":
                raise errors.refused(what, self._client.server, errors.refusal(500, bytes(event.object)))
            if event.type == "BOOKMARK":
                found = msgspec.json.decode(event.object, type=objects.PartialObject)
                place.version = found.metadata.resource_version
                return None
            stored = objects.stored_slice(msgspec.json.decode(event.object, type=objects.SliceObject))
        except msgspec.MsgspecError as exc:
            raise errors.malformed(what, self._client.server, str(exc)) from exc
        place.version = stored.version
        match event.type:
            case "ADDED" | "MODIFIED":
                return SliceStored(stored)
            case "DELETED":
                return SliceDeleted(stored.name)
            case _:  # of a newer server
                return None

    # --- writing ------------------------------------------------------------------------------------------

    async def create(self, spec: SliceSpec, index: int, owner: str, *, dry_run: bool = False) -> StoredSlice:
        """As `SliceApi.create`."""
        prefix = name_prefix(index, self._driver, self._node)
        body = objects.written_slice(
            spec, objects.Meta(generate_name=prefix, owner_references=[self._owner(owner)])
        )
        query = {"dryRun": "All"} if dry_run else {}
        what = f"{'try to ' if dry_run else ''}create a ResourceSlice {self._of}"
        return await self._stored(Call(what, "POST", _PATH, query, body))

    async def update(self, stored: StoredSlice, spec: SliceSpec, owner: str) -> StoredSlice:
        """As `SliceApi.update`."""
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
        """As `SliceApi.delete`."""
        options = _DeleteOptions(_Preconditions(stored.uid, stored.version))
        what = f"delete the ResourceSlice {quoted_name(stored.name)}"
        call = Call(what, "DELETE", self._path_of(stored), body=msgspec.json.encode(options))
        try:
            await self._client.ask(call)
        except ApiRefused as exc:
            if (exc.code, exc.refusal.name) != (404, stored.name):
                raise

    async def _stored(self, call: Call) -> StoredSlice:
        body = await self._client.ask(call)
        try:
            return objects.stored_slice(msgspec.json.decode(body, type=objects.SliceObject))
        except msgspec.MsgspecError as exc:
            raise errors.malformed(call.what, self._client.server, str(exc)) from exc

    def _owner(self, uid: str) -> objects.OwnerReference:
        return objects.OwnerReference("v1", "Node", self._node, uid, controller=True)

    def _path_of(self, stored: StoredSlice) -> str:
        return f"{_PATH}/{quote(stored.name, safe='')}"
