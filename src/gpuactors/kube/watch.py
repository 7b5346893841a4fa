"""A watch of some objects of one kind, renewed as long as the server can go on from where it ended.

Theory of operation. The server says with each event, and with a bookmark each minute, from which version on to watch
next. A watch ends after about WATCH_S, which is no event, and is renewed from there. If the server does not have that
version any more, it answers 200 and an ERROR event with code 410: all is to be learnt anew. So it is after a watch that
ended without a word: its version may be from before a restore of etcd, and of a version that is still to come the
server says nothing at all. Must not know what the objects are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, final

import msgspec
import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.jitter import about
from gpuactors.kube import errors, objects
from gpuactors.kube.client import JSON, ApiClient, Call
from gpuactors.ports.kube import ApiRefused

WATCH_S: Final = 3600.0
"""How long the server is asked to keep a watch, give or take API_HOUR_JITTER; then it is renewed from its last version:
one request an hour. The server's own choice would be 30 to 60 minutes (kube-apiserver --min-request-timeout)."""

WATCH_LATE_S: Final = 30.0
"""How long after WATCH_S gpuactors ends the watch itself."""

WATCH_SILENT_S: Final = 300.0
"""The silence after which a watch is ended and all is listed anew, in seconds: the server sends a bookmark every
minute, also when nothing has happened."""

WATCH_AGAIN_S: Final = (2.0, 2.0, 5.0, 30.0)
"""The waits before a watch is renewed, in seconds, by the number of watches in a row that ended before WATCH_SHORT_S,
give or take WATCH_AGAIN_JITTER; the last one repeats. The first is also the wait of every renewal: a proxy that ends
each watch at once must not be asked without pause. A change meanwhile is seen that much later."""

WATCH_AGAIN_JITTER: Final = 0.75
"""The share of such a wait that is random: a server that stops ends all its watches at one moment, and all nodes ask
the next one for theirs. Of 5,000 nodes 1,700 a second do so."""

WATCH_SHORT_S: Final = 10.0
"""The time that a watch lasts at least if it was not cut short, in seconds."""

_GONE: Final = 410


class Change(Struct, frozen=True):
    """One event of a watch; no bookmark and no error."""

    type: str
    """The type, `ADDED`, `MODIFIED`, `DELETED`, or one of a newer server."""
    object: msgspec.Raw


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


@dataclass(slots=True)
class _Place:
    """The version from which a watch begins, and its history."""

    version: str
    has_answered: bool = False
    """True if the last watch had an event."""
    short: int = 0
    """The number of watches in a row that were cut short."""


@final
class Watch:
    """The watch of the objects at one path."""

    def __init__(
        self, client: ApiClient, what: str, path: str, *, selector: str = "", accept: str = JSON
    ) -> None:
        """`what` is for sentences (`watch the ResourceSlices …`); `selector` selects by fields."""
        self._client = client
        self.what = what
        self._path = path
        self._selector = selector
        self._accept = accept

    async def changes(self, version: str = "") -> AsyncGenerator[Change]:
        """Yield each change after `version`; from nothing ("") first each present object, as `ADDED`.

        Ends when all is to be learnt anew, and not at once then: a server that answers each watch with 410 must not be
        asked without pause. Raises `ApiError`.
        """
        place = _Place(version)
        try:
            while True:
                async with aclosing(self._once(place)) as changes:
                    async for change in changes:
                        yield change
                if not place.has_answered:
                    break
                await trio.sleep(_again_s(place.short))
        except ApiRefused as exc:
            if exc.code != _GONE:
                raise
        await trio.sleep(_again_s(1))

    async def _once(self, place: _Place) -> AsyncGenerator[Change]:
        """Watch once from `place`, and advance it. Raises `ApiRefused` with code 410 if that is too old."""
        place.has_answered = False
        began = trio.current_time()
        asked_s = round(about(WATCH_S, limits.API_HOUR_JITTER))
        async with self._client.lines(self._call(place.version, asked_s), WATCH_SILENT_S) as lines:
            async for line in lines:
                place.has_answered = True
                change = self._change(line, place)
                if change is not None:
                    yield change
                if trio.current_time() > began + asked_s + WATCH_LATE_S:
                    break
        lasted_s = trio.current_time() - began
        place.short = place.short + 1 if lasted_s < WATCH_SHORT_S else 0

    def _call(self, version: str, asked_s: int) -> Call:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(asked_s),
        }
        if version:
            query["resourceVersion"] = version
        if self._selector:
            query["fieldSelector"] = self._selector
        return Call(self.what, "GET", self._path, query, accept=self._accept)

    def _change(self, line: bytes, place: _Place) -> Change | None:
        event = errors.answered(self.what, self._client.server, line, _WatchEvent)
        if event.type == "ERROR":
            raise errors.refused(self.what, self._client.server, errors.refusal(500, bytes(event.object)))
        subject = errors.answered(self.what, self._client.server, event.object, objects.PartialObject)
        place.version = subject.metadata.resource_version
        return None if event.type == "BOOKMARK" else Change(event.type, event.object)


def _again_s(short: int) -> float:
    """Return the wait before the next watch, after so many in a row that were cut short."""
    waits = WATCH_AGAIN_S
    return about(waits[min(short, len(waits) - 1)], WATCH_AGAIN_JITTER)
