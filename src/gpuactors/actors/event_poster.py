"""The event poster: posts the conditions of the state as Kubernetes Events, when `event_series.py` says so.

It looks at the newest state only, once in EVENT_LOOK_S at most, so nothing queues and nobody waits for it. Must not
decide what is told, or when. A failure costs nobody anything: it is logged once while it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.actors.api_retry import backoff_s
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.reports.event_series import NOTHING_POSTED, due, failed, look, next_at, posted
from gpuactors.core.reports.kube_events import KubeEvent, OurNode, PodsOf, kube_events
from gpuactors.core.state import NodeState
from gpuactors.ports.kube import ApiError, ApiRefused, ClaimApi, EventApi, EventNote, ObjectRef

EVENT_FORBIDDEN_TRIES: Final = 5
"""A 403 counts as the server's last word after so many in a row: one that has just started knows no role yet."""

EVENT_LOOK_S: Final = 2.0
"""The minimum interval between two looks at the state, in seconds, whatever happens on the node."""


class PosterPorts(Struct, frozen=True):
    events: EventApi
    claims: ClaimApi
    """The source of the pods that claims are reserved for."""
    on_problem: Callable[[str], None]
    """Called once per outage with the reason why events cannot be posted; must not raise."""
    now: Callable[[], float]
    """The time of day in seconds since 1970."""


async def run(state: LatestReader[NodeState], ports: PosterPorts) -> None:
    """Run for ever."""
    poster, rest_until = _Poster(ports), -math.inf
    while True:
        with trio.move_on_at(poster.next_at):
            await state.receive()
        # Here and not after each look: an idle node would be woken twice for each change.
        await trio.sleep_until(rest_until)
        rest_until = await poster.look(state.value)


@final
class _Poster:
    def __init__(self, ports: PosterPorts) -> None:
        self._ports = ports
        self._told = NOTHING_POSTED
        self._failures = 0
        self._forbidden: dict[KubeEvent, int] = {}
        """The number of 403 answers in a row, by event."""

    @property
    def next_at(self) -> float:
        """The time at which something is due whatever happens."""
        return next_at(self._told)

    async def look(self, state: NodeState) -> float:
        """Post what is due, until a request fails; return until when to rest."""
        self._told = look(self._told, kube_events(state), trio.current_time())
        while True:
            self._told, event = due(self._told, trio.current_time())
            if event is None:
                return trio.current_time() + EVENT_LOOK_S
            try:
                with raises_only(ApiError, "event_poster"):
                    count = await self._tell(event)
            except ApiError as exc:
                return self._failed(event, exc)
            self._failures = 0
            self._forbidden.pop(event, None)
            self._told = posted(self._told, event, count, trio.current_time())

    async def _tell(self, event: KubeEvent) -> int:
        """Post the fact on every object that it is about; return how often it was posted. Raises `ApiError`."""
        series, at, now = self._told.series[event], trio.current_time(), self._ports.now()
        first_at = now if math.isinf(series.first_at) else now - (at - series.first_at)
        count = series.count + 1
        for about in await self._about(event):
            note = EventNote(about, event.reason, event.message, series.count + 1, first_at, now)
            count = max(count, await self._ports.events.tell(note))
        return count

    async def _about(self, event: KubeEvent) -> tuple[ObjectRef, ...]:
        match event.about:
            case OurNode():
                return (self._ports.events.node,)
            case PodsOf(claim):
                return await self._ports.claims.reserved_for(claim)

    def _failed(self, event: KubeEvent, error: ApiError) -> float:
        if not self._failures:
            self._ports.on_problem(str(error))
        self._failures += 1
        wait_s = backoff_s(self._failures, error)
        again_s = limits.EVENT_AGAIN_S if self._is_lasting(event, error) else wait_s
        self._told = failed(self._told, event, trio.current_time() + again_s)
        return trio.current_time() + wait_s

    def _is_lasting(self, event: KubeEvent, error: ApiError) -> bool:
        """Return whether the server will refuse it again a second later: a missing right, a namespace that ends; but
        not for 429, nor for the first 403s: an API server that has just started answers so until it has read RBAC."""
        if not isinstance(error, ApiRefused) or error.code >= 500 or error.code == 429:
            return False
        if error.code != 403:
            return True
        tries = self._forbidden.get(event, 0) + 1
        reported = self._told.series.keys()
        self._forbidden = {e: n for e, n in self._forbidden.items() if e in reported} | {event: tries}
        return tries >= EVENT_FORBIDDEN_TRIES
