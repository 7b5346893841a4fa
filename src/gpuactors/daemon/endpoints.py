"""Wires the HTTP endpoints: their server, the metrics, the sockets that they dial. Imported only where they are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import trio
from msgspec import Struct

from gpuactors import VERSION
from gpuactors.concurrency.first_use import FirstUse
from gpuactors.concurrency.latest import LatestReader
from gpuactors.config import Config, EverywhereHttp, TcpHttp, UnixHttp
from gpuactors.core.events import Event
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Role
from gpuactors.http.endpoints import EndpointPorts, run
from gpuactors.http.serve import TcpServer, UnixServer
from gpuactors.observe.counts import Counts
from gpuactors.ports.http import HttpServer, Meter
from gpuactors.ports.node import Reachable
from gpuactors.process.logger import get_logger

if TYPE_CHECKING:
    from gpuactors.observe.metrics import Metrics

log = get_logger()


class HttpOutside(Struct, frozen=True):
    """Everything that the endpoints reach outside the daemon."""

    server: HttpServer
    meter: Meter
    metrics: FirstUse[Metrics]
    """Imported with the first scrape."""
    reached_by: tuple[Reachable, ...]
    """The sockets and mounts that the liveness probe checks."""


def outside_of(
    config: Config, reached_by: tuple[Reachable, ...], journal: Callable[[], tuple[int, float]] | None
) -> HttpOutside:
    """Make the adaptors. `journal`: as `Metrics`."""
    counts = Counts()

    def metrics() -> Metrics:
        from gpuactors.observe.metrics import Metrics  # with Prometheus' client library

        return Metrics(VERSION, counts, journal=journal)

    return HttpOutside(_server(config), counts, FirstUse(metrics), reached_by)


def _server(config: Config) -> HttpServer:
    match config.http:
        case UnixHttp(path):
            return UnixServer(str(path))
        case TcpHttp(host, port):
            return TcpServer(host, port)
        case EverywhereHttp(port):
            return TcpServer(None, port)
        case None:
            raise ValueError("the endpoints are off")


async def serve(
    outside: HttpOutside,
    state: LatestReader[NodeState],
    role: LatestReader[Role],
    inbox: trio.MemorySendChannel[Event],
) -> None:
    """Serve for ever."""

    async def page(node_state: NodeState, at: float, waiting: int) -> bytes:
        return (await outside.metrics.get()).page(node_state, at, waiting)

    await run(
        EndpointPorts(
            server=outside.server,
            state=state,
            role=role,
            meter=outside.meter,
            page=page,
            reached_by=outside.reached_by,
            inbox=lambda: inbox.statistics().current_buffer_used,
            debug=_view,
            on_listening=lambda address: log.info("http.listening", address=address),
            on_problem=lambda reason: log.warning("http.unavailable", reason=reason),
            on_crowd=lambda closed: log.warning("http.crowded", closed=closed),
        )
    )


def _view(state: NodeState, at: float) -> bytes:
    from gpuactors.control.node_view import view_of  # with the first request

    return msgspec.json.encode(view_of(state, at))
