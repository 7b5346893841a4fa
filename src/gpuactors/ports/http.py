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
    """A GET request for a page."""

    path: str
    """The path, without its query."""
    is_from_here: bool
    """True if a process of this machine asks, for this machine: its address and `Host` are of loopback, or the server
    is a unix socket. Another host's name shows a page in a local browser that asks for somebody else."""


Answering: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""The answer to a request. Must not raise."""


class HttpError(PortError):
    """The address cannot be had; the text is a sentence with the remedy."""


class HttpServer(Protocol):
    """The server."""

    @property
    def is_local(self) -> bool:
        """True if only this machine's own processes reach it."""

    async def serve(
        self, answering: Answering, listening: Callable[[str], None], turned_away: Callable[[], None]
    ) -> None:
        """Serve until it is cancelled. `listening` is called with the address when it can be dialled, `turned_away` for
        each connection that is closed without an answer as there are too many. Raises `HttpError`."""


class Meter(Protocol):
    """Counters and timers. All other metrics are read from the state."""

    @property
    def steps(self) -> int:
        """The number of steps that the registry has made."""

    def called(self, method: str, seconds: float, answer: Answer | None) -> None:
        """Count a call of kubelet's that ended after so long with this answer; None: kubelet has given it up."""

    def stepped(self, step: Step) -> None:
        """Count a step of the registry."""

    def restarted(self, actor: str) -> None:
        """Count an actor that failed and starts again."""

    def turned_away(self) -> None:
        """Count a connection to the HTTP endpoints that was closed without an answer, as there were too many."""
