"""Plays a script against one API server and makes the answers comparable.

An observation has all of an answer except for what differs between any two runs. UIDs, versions and generated names
become names that say where the script saw them first, so equal observations have equal relations. Times become `time`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import h11
import trio

from gpuactors_simulation.kube.status import Object
from tests.node.originals.api_steps import Arrange, Ask, Overload, Raw, Step, Until, Watch, resolved, value_at
from tests.support.patience import patient

WITHIN_S: Final = 20.0
"""The deadline of each step, beside the time that a watch asks for."""

_POLL_S: Final = 0.1
_CHUNK_BYTES: Final = 65536
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_TIMES: Final = frozenset({"creationTimestamp", "timeAdded"})
"""Fields whose times are the server's."""
_SEEN_HEADERS: Final = ("allow", "retry-after", "warning", "www-authenticate")

Observation = Mapping[str, Any]
"""What is compared, as JSON."""


@dataclass(slots=True)
class Reply:
    """An answer as it came."""

    status: int
    """0: the server has closed the connection without an answer."""
    headers: Mapping[str, tuple[str, ...]]
    body: bytes = b""
    closed: bool = False
    """The server has closed the connection after it."""
    lines: list[Object] = field(default_factory=list)


class Server(Protocol):
    """An API server that a script is played against."""

    async def connect(self, ask: Ask | None = None) -> trio.abc.Stream:
        """A new connection, as the client of `ask` makes it; without one as an administrator does."""
        ...

    def headers(self, ask: Ask) -> list[tuple[str, str]]:
        """The headers that say who asks, and `Host`."""
        ...

    async def arrange(self, step: Arrange, player: Player) -> Object:
        """Does what somebody else does."""
        ...

    async def overload(self, step: Overload, player: Player) -> Reply:
        """Sends the request while the server has no capacity for its client."""
        ...


@final
class Player:
    """One run of a script."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._names = Names()
        self.answers: dict[str, Any] = {}
        self.observations: dict[str, Observation] = {}

    async def play(self, script: Sequence[Step]) -> None:
        """Plays the steps in order. Raises `TooSlowError` if a step takes too long."""
        for step in script:
            with trio.fail_after(patient(WITHIN_S + _lasts_s(step))):
                await self._play(step)

    async def ask(self, ask: Ask) -> Reply:
        """The answer to one request, on a connection of its own."""
        stream = await self._server.connect(ask)
        async with stream:
            exchange = _Exchange(stream)
            await exchange.send(self._sent(ask))
            reply = await exchange.head()
            async for data in exchange.data():
                reply.body += data
        return reply

    def decoded(self, reply: Reply) -> Any:
        """The body as JSON if it is JSON, else as text."""
        try:
            return json.loads(reply.body)
        except ValueError:
            return reply.body.decode()

    async def _play(self, step: Step) -> None:
        match step:
            case Arrange():
                self.answers[step.name] = await self._server.arrange(step, self)
                self._names.learn(step.name, self.answers[step.name])
                return
            case Until():
                await self._until(step)
                return
            case Ask():
                reply = await self.ask(step)
            case Overload():
                reply = await self._server.overload(step, self)
            case Raw():
                reply = await self._raw(step)
            case Watch():
                reply = await self._watch(step)
        self._note(step, reply)

    def _note(self, step: Step, reply: Reply) -> None:
        self.answers[step.name] = self.decoded(reply)
        found: dict[str, Any] = {"status": reply.status}
        found["content-type"] = ", ".join(reply.headers.get("content-type", ()))
        for name in _SEEN_HEADERS:
            if name in reply.headers:
                found[name] = [self._names.text(step.name, value) for value in sorted(reply.headers[name])]
        if isinstance(step, Watch) and reply.status == 200:
            events = [line for line in reply.lines if not is_periodic(line)]
            found["events"] = [*_without_repeats(self._names.plain(step.name, event) for event in events)]
            found["periodic bookmarks"] = len(events) != len(reply.lines)
        else:
            found["body"] = self._names.plain(step.name, self.answers[step.name])
        if isinstance(step, Raw):
            found["closed"] = reply.closed
        self.observations[step.name] = found

    def _sent(self, ask: Ask) -> bytes:
        content = _content(resolved(ask.body, self.answers))
        headers = [*self._server.headers(ask), ("Accept", ask.accept)]
        if content is not None:
            headers += [("Content-Type", ask.content_type), ("Content-Length", str(len(content)))]
        lines = [f"{ask.method} {resolved(ask.path, self.answers)} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers]
        return "\r\n".join([*lines, "", ""]).encode() + (content or b"")

    async def _until(self, step: Until) -> None:
        known = resolved(step.unlike, self.answers)
        while True:
            if value_at(self.decoded(await self.ask(step.ask)), step.path) != known:
                return
            await trio.sleep(_POLL_S)

    async def _raw(self, step: Raw) -> Reply:
        async with await self._server.connect() as stream:
            exchange = _Exchange(stream)
            await exchange.send(step.data)
            reply = await exchange.head()
            async for data in exchange.data():
                reply.body += data
            reply.closed = await exchange.is_closed()
        return reply

    async def _watch(self, step: Watch) -> Reply:
        ask = Ask(name=step.name, path=step.path, accept=step.accept)
        async with await self._server.connect(ask) as stream:
            exchange = _Exchange(stream)
            await exchange.send(self._sent(ask))
            reply = await exchange.head()
            if reply.status != 200:
                async for data in exchange.data():
                    reply.body += data
                return reply
            enough = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lines, exchange, reply, enough, step.after)
                await enough.wait()
                for inner in step.during:
                    await self._play(inner)
        return reply

    async def _lines(self, exchange: _Exchange, reply: Reply, enough: trio.Event, after: int) -> None:
        rest = b""
        if after == 0:
            enough.set()
        async for data in exchange.data():
            *lines, rest = (rest + data).split(b"\n")
            reply.lines += [json.loads(line) for line in lines]
            if len(reply.lines) >= after:
                enough.set()
        enough.set()


def _lasts_s(step: Step) -> float:
    found = re.search(r"timeoutSeconds=(\d+)", step.path) if isinstance(step, Watch) else None
    return float(found[1]) if found is not None else 0.0


def _content(body: Any) -> bytes | None:
    match body:
        case None | bytes():
            return body
        case _:
            return json.dumps(body).encode()


def is_periodic(event: Object) -> bool:
    """A bookmark that comes by the clock, and so before or after any other event."""
    return event["type"] == "BOOKMARK" and "annotations" not in event["object"]["metadata"]


def _without_repeats(events: Iterator[Any]) -> Iterator[Any]:
    """Others change a Node as well, in what is not compared: such an event looks like the one before."""
    last = None
    for event in events:
        if event != last or "Node" not in str(event):
            yield event
        last = event


@final
class _Exchange:
    """The client's side of one request and its answer."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, data: bytes) -> None:
        # What is sent need not be HTTP; h11 only needs to know that a request is under way.
        head = h11.Request(method="GET", target="/", headers=[("Host", "x")])
        self._http.send(head)
        self._http.send(h11.EndOfMessage())
        await self._stream.send_all(data)

    async def head(self) -> Reply:
        event = await self._event()
        if not isinstance(event, h11.Response):
            return Reply(0, {}, closed=True)
        headers: dict[str, tuple[str, ...]] = {}
        for name, value in event.headers:
            known = headers.get(name.decode(), ())
            headers[name.decode()] = (*known, value.decode())
        return Reply(event.status_code, headers)

    async def data(self) -> Any:
        while self._http.their_state is h11.SEND_BODY and isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    async def is_closed(self) -> bool:
        """The server has closed the connection, or said that it does."""
        return self._http.their_state in (h11.MUST_CLOSE, h11.CLOSED)

    async def _event(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(bytes(await self._stream.receive_some(_CHUNK_BYTES)))
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            return h11.ConnectionClosed()
        return event


@final
class Names:
    """Names for the values of one run."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._prefixes: set[str] = set()

    def learn(self, step: str, found: Any) -> None:
        """The values in this answer get their names."""
        self.plain(step, found)

    def plain(self, step: str, found: Any) -> Any:
        """The answer with names instead of values."""
        self._note(step, found)
        return self._plain(step, found, "", found)

    def text(self, step: str, found: str) -> str:
        """The text with names instead of values."""
        for prefix in self._prefixes:
            found = re.sub(re.escape(prefix) + r"[a-z0-9]{5}\b", f"{prefix}*****", found)
        found = _UID.sub(lambda match: self._known.get(match[0], match[0]), found)
        return re.sub(r"\((\d{2,})\)", lambda match: f"({self._known.get(match[1], 'a number')})", found)

    def _note(self, step: str, found: Any) -> None:
        match found:
            case dict():
                meta = found.get("metadata")
                if isinstance(meta, dict):
                    for key in _told_by(found):
                        if isinstance(value := meta.get(key), str):
                            self._learn(value, f"{key} of {step}")
                    if meta.get("generateName"):
                        self._prefixes.add(meta["generateName"])
                for _, inner in sorted(found.items()):
                    self._note(step, inner)
            case list():
                for inner in found:
                    self._note(step, inner)
            case _:
                pass

    def _learn(self, value: str, name: str) -> None:
        if value not in self._known:
            self._counts[name] += 1
            number = self._counts[name]
            self._known[value] = f"{name}, {number}" if number > 1 else name

    def _plain(self, step: str, found: Any, key: str, parent: Any) -> Any:
        match found:
            case dict() if _is_node(found):
                return self._plain_node(step, found)
            case dict():
                kept = {k: v for k, v in found.items() if k != "managedFields"}
                return {k: self._plain(step, v, k, kept) for k, v in kept.items()}
            case list():
                return [self._plain(step, inner, key, parent) for inner in found]
            case str() if key == "resourceVersion" and found.isdigit():
                # The version of a list or a bookmark is that of the whole server, which others change.
                return self._known.get(found, "a version") if "uid" in parent else "a version"
            case str() if key in _TIMES and _TIME.fullmatch(found):
                return "time"
            case str():
                return self.text(step, found)
            case _:
                return found

    def _plain_node(self, step: str, found: Object) -> Object:
        """Its identity and labels: the rest is of kubelet and of the node controller."""
        meta = found["metadata"]
        kept = {key: meta[key] for key in ("name", "uid", "labels") if key in meta}
        kept["resourceVersion"] = meta.get("resourceVersion", "").isdigit() and "a version"
        return {
            "apiVersion": found["apiVersion"],
            "kind": found["kind"],
            "metadata": self._plain(step, kept, "", {}),
        }


def _is_node(found: Object) -> bool:
    if found.get("kind") not in ("Node", "PartialObjectMetadata") or "metadata" not in found:
        return False
    return "kubernetes.io/hostname" in found["metadata"].get("labels", {})


def _told_by(found: Object) -> tuple[str, ...]:
    """The fields whose values say something. The version of a list or bookmark is that of the whole server, and others
    change a Node."""
    if "items" in found or "uid" not in found["metadata"]:
        return ()
    return ("uid",) if _is_node(found) else ("uid", "resourceVersion")
