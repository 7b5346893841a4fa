"""The routes: /metrics, /livez, /readyz, /debug/state.

Live: the loop runs, the registry takes its events, and the sockets at which kubelet reaches us answer when they are
dialled. A kubelet that is away or another plugin on our name is no reason to end this process: that is readiness, and
its body lists what is missing. Decides nothing: `core/readiness.py` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.model import Role
from gpuactors.core.readiness import lacking
from gpuactors.core.state import NodeState
from gpuactors.ports import OwnSockets
from gpuactors.ports_http import Answering, HttpAnswer, HttpError, HttpServer, Meter

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_LOOKS: Final = 20

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class EndpointPorts:
    """What the endpoints read."""

    server: HttpServer
    state: LatestReader[NodeState]
    role: LatestReader[Role]
    """The daemon's. The state changes with nearly every event, and nobody here is to wake for that."""
    meter: Meter
    sockets: tuple[OwnSockets, ...]
    inbox: Callable[[], int]
    """How many events wait for the registry."""
    debug: Callable[[NodeState, float], bytes]
    """The state at a time of its clock, as JSON."""
    on_listening: Callable[[str], None]
    on_problem: Callable[[str], None]
    """Called with a sentence when the address cannot be had, once for each reason; it is tried again."""


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
    answering, told = Routes(ports).answer, ""
    while True:
        try:
            await ports.server.serve(answering, ports.on_listening)
        except HttpError as exc:
            if str(exc) != told:
                told = str(exc)
                ports.on_problem(told)
        await trio.sleep(limits.HTTP_AGAIN_S)


@final
class Routes:
    """The answers."""

    def __init__(self, ports: EndpointPorts) -> None:
        self._ports = ports
        self._routes: dict[str, Answering] = {
            "/metrics": self._metrics,
            "/livez": self._live,
            "/readyz": self._ready,
        }
        if ports.server.is_local:
            self._routes["/debug/state"] = self._debug

    async def answer(self, path: str) -> HttpAnswer:
        """The answer to GET of `path`."""
        if (route := self._routes.get(path)) is not None:
            return await route(path)
        known = "".join(f"  {name}\n" for name in self._routes)
        if path == "/":
            return HttpAnswer(200, f"gpuactors\n{known}".encode())
        if path == "/debug/state":
            why = "the state is served on loopback and on a unix socket only (--http-address)"
            return HttpAnswer(403, f"{why}\n".encode())
        return HttpAnswer(404, f"there is no such page here; there are\n{known}".encode())

    async def _metrics(self, _: str) -> HttpAnswer:
        state = self._ports.state.value
        page = self._ports.meter.page(state, trio.current_time(), self._ports.inbox())
        return HttpAnswer(200, page, PROMETHEUS)

    async def _live(self, _: str) -> HttpAnswer:
        found: list[str] = []

        async def ask(question: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
            found.extend(await question())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, self._stuck)
            for sockets in self._ports.sockets:
                nursery.start_soon(ask, sockets.deaf)
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

    async def _ready(self, _: str) -> HttpAnswer:
        return _verdict("ready", "not ready", lacking(self._ports.state.value))

    async def _debug(self, _: str) -> HttpAnswer:
        return HttpAnswer(200, self._ports.debug(self._ports.state.value, trio.current_time()), JSON)


def _verdict(good: str, bad: str, missing: list[str] | tuple[str, ...]) -> HttpAnswer:
    if not missing:
        return HttpAnswer(200, f"{good}\n".encode())
    return HttpAnswer(503, "".join([f"{bad}:\n", *(f"- {what}\n" for what in missing)]).encode())
