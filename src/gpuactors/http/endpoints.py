"""The routes: /metrics, /livez, /readyz, /debug/state.

Live: the loop runs, the registry takes its events, and the sockets at which kubelet reaches us answer when they are
dialled. A kubelet that is away or another plugin on our name is no reason to end this process: that is readiness, and
its body lists what is missing. Decides nothing: `core/reports/readiness.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.reports.readiness import unmet_prerequisites
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Role
from gpuactors.ports.http import HttpAnswer, HttpError, HttpRequest, HttpServer, Meter
from gpuactors.ports.node import Reachable

HTTP_CROWD_LOG_S: Final = 60.0
"""The minimum interval between log lines about connections that were closed to make room; the metric counts each."""

HTTP_AGAIN_S: Final = 1.0
"""The wait before an address in use is tried again: during an update the predecessor may hold it for a moment."""

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_CHECKS: Final = 20
"""How often `_stuck` checks for a step within `limits.DIAL_OWN_S`."""

JSON: Final = "application/json"

DEBUG: Final = "/debug/state"

_NOT_FROM_HERE: Final = (
    b"the state is served on loopback and on a unix socket only (--http-address), and to those who ask for it there by "
    b"a name or address of loopback\n"
)


class EndpointPorts(Struct, frozen=True):
    """The ports that the endpoints read."""

    server: HttpServer
    state: LatestReader[NodeState]
    role: LatestReader[Role]
    """The daemon's role, in a cell of its own: the state changes with nearly every event."""
    meter: Meter
    page: Callable[[NodeState, float, int], Awaitable[bytes]]
    """Returns all metrics in Prometheus' text format, from the state, the time and the number of waiting events."""
    reached_by: tuple[Reachable, ...]
    """The sockets and mounts that /livez checks."""
    inbox: Callable[[], int]
    """Returns how many events wait for the registry."""
    debug: Callable[[NodeState, float], bytes]
    """Returns the state at a time of its clock, as JSON."""
    on_listening: Callable[[str], None]
    on_problem: Callable[[str], None]
    """Called with the reason when the address cannot be bound, once while the reason stays the same."""
    on_crowd: Callable[[int], None]
    """Called with the number of connections closed for others since the last call, at most once in HTTP_CROWD_LOG_S."""


async def run(ports: EndpointPorts) -> None:
    """Serve for ever.

    A daemon that has handed over leaves a local address to its successor, which is on the same machine. Any other one
    is its pod's own, and stays: a liveness probe that fails would start the old daemon again, against the new one.
    """
    while True:
        await _until(ports, is_left=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, ports)
            await _until(ports, is_left=True)
            nursery.cancel_scope.cancel()


async def _until(ports: EndpointPorts, *, is_left: bool) -> None:
    """Wait until the address is left to a successor (`is_left`), or is ours again."""
    while (ports.server.is_local and ports.role.value is Role.HANDED_OVER) is not is_left:
        await ports.role.receive()


async def _serve(ports: EndpointPorts) -> None:
    answering, crowd, last_problem = Routes(ports).answer, _Crowd(ports), ""
    while True:
        try:
            await ports.server.serve(answering, ports.on_listening, crowd.turned_away)
        except HttpError as exc:
            if str(exc) != last_problem:
                last_problem = str(exc)
                ports.on_problem(last_problem)
        await trio.sleep(HTTP_AGAIN_S)


@final
class _Crowd:
    """Counts the connections that were closed to make room, and reports them by `on_crowd`."""

    def __init__(self, ports: EndpointPorts) -> None:
        self._ports = ports
        self._unreported = 0
        self._next_at = -math.inf

    def turned_away(self) -> None:
        """Count one connection; called as `turned_away` of `ports.http.HttpServer.serve`."""
        self._ports.meter.turned_away()
        self._unreported += 1
        if trio.current_time() >= self._next_at:
            self._ports.on_crowd(self._unreported)
            self._unreported, self._next_at = 0, trio.current_time() + HTTP_CROWD_LOG_S


@final
class Routes:
    """Answers each request by its path."""

    def __init__(self, ports: EndpointPorts) -> None:
        self._ports = ports
        self._routes: dict[str, Callable[[], Awaitable[HttpAnswer]]] = {
            "/metrics": self._metrics,
            "/livez": self._live,
            "/readyz": self._ready,
        }
        if ports.server.is_local:
            self._routes[DEBUG] = self._debug

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Implement `ports.http.Answering`."""
        path = request.path
        if path == DEBUG and not (self._ports.server.is_local and request.is_from_here):
            return HttpAnswer(403, _NOT_FROM_HERE)
        if (route := self._routes.get(path)) is not None:
            return await route()
        routes = "".join(f"  {name}\n" for name in self._routes)
        if path == "/":
            return HttpAnswer(200, f"gpuactors\n{routes}".encode())
        return HttpAnswer(404, f"there is no such page here; there are\n{routes}".encode())

    async def _metrics(self) -> HttpAnswer:
        state = self._ports.state.value
        page = await self._ports.page(state, trio.current_time(), self._ports.inbox())
        return HttpAnswer(200, page, PROMETHEUS)

    async def _live(self) -> HttpAnswer:
        problems: list[str] = []

        async def ask(question: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
            problems.extend(await question())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, self._stuck)
            for way in self._ports.reached_by:
                nursery.start_soon(ask, way.unreachable)
        return _verdict("live", "not live", sorted(problems))

    async def _stuck(self) -> tuple[str, ...]:
        """Return a problem if events wait and the registry takes none."""
        waiting, before = self._ports.inbox(), self._ports.meter.steps
        if not waiting:
            return ()
        for _ in range(_CHECKS):
            await trio.sleep(limits.DIAL_OWN_S / _CHECKS)
            if self._ports.meter.steps != before:
                return ()
        return (f"the registry took no event in {limits.DIAL_OWN_S} s, and {waiting} wait for it",)

    async def _ready(self) -> HttpAnswer:
        return _verdict("ready", "not ready", unmet_prerequisites(self._ports.state.value))

    async def _debug(self) -> HttpAnswer:
        return HttpAnswer(200, self._ports.debug(self._ports.state.value, trio.current_time()), JSON)


def _verdict(good: str, bad: str, missing: list[str] | tuple[str, ...]) -> HttpAnswer:
    if not missing:
        return HttpAnswer(200, f"{good}\n".encode())
    return HttpAnswer(503, "".join([f"{bad}:\n", *(f"- {problem}\n" for problem in missing)]).encode())
