"""The interfaces of the HTTP endpoints: the server, and what is counted. As `node.py`; apart from it, as a daemon
without endpoints needs none of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from msgspec import Struct

from gpuactors.core.values.effects import Answer
from gpuactors.ports.errors import PortError
from gpuactors.ports.node import Step


class HttpAnswer(Struct, frozen=True):
    """The answer to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class HttpRequest(Struct, frozen=True):
    """GET of a page."""

    path: str
    """Without its query."""
    is_from_here: bool
    """A process of this machine asks, and it asks for this machine: its address and `Host` are of loopback, or the
    server is a unix socket. A name of another host's would be a page in a browser here that asks for somebody else."""


Answering: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""The answer to a request. Must not raise."""


class HttpError(PortError):
    """The address cannot be had; the text is a sentence with the remedy."""


class HttpServer(Protocol):
    """The server."""

    @property
    def is_local(self) -> bool:
        """Only this machine's own processes reach it."""
        ...

    async def serve(
        self, answering: Answering, listening: Callable[[str], None], turned_away: Callable[[], None]
    ) -> None:
        """Serves until it is cancelled. `listening` is called with the address when it can be dialled, `turned_away`
        for each connection that is closed without an answer as there are too many. Raises `HttpError`."""
        ...


class Meter(Protocol):
    """Counters and timers. Everything else of the metrics is read off the state."""

    @property
    def steps(self) -> int:
        """How many steps the registry has made."""
        ...

    def called(self, method: str, seconds: float, answer: Answer | None) -> None:
        """A call of kubelet's ended after so long with this answer; None: kubelet has given it up."""
        ...

    def stepped(self, step: Step) -> None:
        """The registry made a step."""
        ...

    def restarted(self, actor: str) -> None:
        """An actor failed and starts again."""
        ...

    def turned_away(self) -> None:
        """A connection to the HTTP endpoints was closed without an answer, as there were too many."""
        ...
