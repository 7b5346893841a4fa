"""What an API server was asked: by verb and resource, by second, in bytes. It counts at the server's side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, final
from urllib.parse import urlsplit

import trio
from msgspec.structs import replace

from gpuactors_simulation.kube.server import ApiAnswer, ApiRequest
from gpuactors_simulation.kube.status import Object
from tests.memory.kube import MemoryApiServer

_VERBS: Final = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@final
class Tally:
    """The requests of all nodes together, over any number of servers that share one virtual time."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        """By `verb resource`."""
        self.seconds: Counter[int] = Counter()
        """By the second in which they came."""
        self.connections = 0
        """Those that were tried, also in vain."""
        self.events: Counter[str] = Counter()
        """Events of watches by `TYPE resource`, bookmarks among them."""
        self.event_bytes: Counter[str] = Counter()
        self.answer_bytes: Counter[str] = Counter()
        """By `verb resource`; without those of watches."""

    def clear(self) -> None:
        """Forgets all."""
        for counter in self._counters():
            counter.clear()
        self.connections = 0

    def _counters(self) -> tuple[Counter[Any], ...]:
        return self.asked, self.seconds, self.events, self.event_bytes, self.answer_bytes

    @property
    def total(self) -> int:
        """All requests."""
        return self.asked.total()

    @property
    def peak(self) -> int:
        """The most requests within one second."""
        return max(self.seconds.values(), default=0)

    def add(self, other: Tally) -> None:
        """What others have asked at the same virtual times."""
        for mine, theirs in zip(self._counters(), other._counters(), strict=True):
            mine.update(theirs)
        self.connections += other.connections

    def count(self, api: MemoryApiServer) -> None:
        """Counts what this server is asked from now on."""
        answer, connect = api.server.answer, api.connect

        async def answered(request: ApiRequest) -> ApiAnswer:
            self.seconds[int(trio.current_time())] += 1
            what = named(request.method, request.target)
            self.asked[what] += 1
            found = await answer(request)
            if found.lines is None:
                self.answer_bytes[what] += len(found.body)
                return found
            return replace(found, lines=self._counted(what.split()[1], found.lines))

        async def connected(owner: str) -> trio.abc.Stream:
            self.connections += 1
            return await connect(owner)

        api.server.answer = answered  # type: ignore[method-assign]
        api.connect = connected  # type: ignore[method-assign]

    async def _counted(self, resource: str, lines: AsyncIterator[Object]) -> AsyncIterator[Object]:
        async with aclosing(lines) as events:  # type: ignore[type-var]  # the server's are generators
            async for event in events:
                key = f"{event['type']} {resource}"
                self.events[key] += 1
                # As the real server writes it, without blanks.
                self.event_bytes[key] += len(json.dumps(event, separators=(",", ":"))) + 1
                yield event


def named(method: str, target: str) -> str:
    """A request as the API server's own metrics name it: `list resourceslices`, `create resourceslices (dry run)`."""
    url = urlsplit(target)
    parts = [part for part in url.path.split("/") if part][2 if url.path.startswith("/api/") else 3 :]
    if parts[:1] == ["namespaces"]:
        parts = parts[2:]
    verb = _VERBS[method]
    if verb == "get" and len(parts) == 1:
        verb = "watch" if "watch=true" in url.query else "list"
    return f"{verb} {parts[0]}" + (" (dry run)" if "dryRun" in url.query else "")
