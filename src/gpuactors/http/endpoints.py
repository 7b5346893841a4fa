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
"""The log has one line about connections that were closed for others in this time; the metric has each."""

HTTP_AGAIN_S: Final = 1.0
"""When an address that cannot be had is tried again: in an update on one machine the predecessor has it for a
moment."""

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_LOOKS: Final = 20

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
    """The daemon's. The state changes with nearly every event, and nobody here is to wake for that."""
    meter: Meter
    page: Callable[[NodeState, float, int], Awaitable[bytes]]
    """Every metric of the state at a time of its clock, with how many events wait for the registry, in Prometheus' text
    format."""
    reached_by: tuple[Reachable, ...]
    inbox: Callable[[], int]
    """How many events wait for the registry."""
    debug: Callable[[NodeState, float], bytes]
    """The state at a time of its clock, as JSON."""
    on_listening: Callable[[str], None]
    on_problem: Callable[[str], None]
    """Called with a sentence when the address cannot be had, once for each reason; it is tried again."""
    on_crowd: Callable[[int], None]
    """Called with how many connections were closed as there were too many since it was called last: at the first one,
    then once in HTTP_CROWD_LOG_S at most."""


async def run(ports: EndpointPorts) -> None:
    """Serves for ever.

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
    """Until the address is left to a successor, or is ours again."""
    while (ports.server.is_local and ports.role.value is Role.HANDED_OVER) is not is_left:
        await ports.role.receive()


async def _serve(ports: EndpointPorts) -> None:
    answering, crowd, told = Routes(ports).answer, _Crowd(ports), ""
    while True:
        try:
            await ports.server.serve(answering, ports.on_listening, crowd.turned_away)
        except HttpError as exc:
            if str(exc) != told:
                told = str(exc)
                ports.on_problem(told)
        await trio.sleep(HTTP_AGAIN_S)


@final
class _Crowd:
    """Counts the connections that were closed as there were too many, and tells of them now and then."""

    def __init__(self, ports: EndpointPorts) -> None:
        self._ports = ports
        self._untold = 0
        self._next_at = -math.inf

    def turned_away(self) -> None:
        """As of `ports.http.HttpServer.serve`."""
        self._ports.meter.turned_away()
        self._untold += 1
        if trio.current_time() >= self._next_at:
            self._ports.on_crowd(self._untold)
            self._untold, self._next_at = 0, trio.current_time() + HTTP_CROWD_LOG_S


@final
class Routes:
    """The answers."""

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
        known = "".join(f"  {name}\n" for name in self._routes)
        if path == "/":
            return HttpAnswer(200, f"gpuactors\n{known}".encode())
        return HttpAnswer(404, f"there is no such page here; there are\n{known}".encode())

    async def _metrics(self) -> HttpAnswer:
        state = self._ports.state.value
        page = await self._ports.page(state, trio.current_time(), self._ports.inbox())
        return HttpAnswer(200, page, PROMETHEUS)

    async def _live(self) -> HttpAnswer:
        found: list[str] = []

        async def ask(question: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
            found.extend(await question())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, self._stuck)
            for way in self._ports.reached_by:
                nursery.start_soon(ask, way.unreachable)
        return _verdict("live", "not live", sorted(found))

    async def _stuck(self) -> tuple[str, ...]:
        """Whether events wait for the registry and it takes none."""
        waiting, before = self._ports.inbox(), self._ports.meter.steps
        if not waiting:
            return ()
        for _ in range(_LOOKS):
            await trio.sleep(limits.DIAL_OWN_S / _LOOKS)
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
    return HttpAnswer(503, "".join([f"{bad}:\n", *(f"- {what}\n" for what in missing)]).encode())
