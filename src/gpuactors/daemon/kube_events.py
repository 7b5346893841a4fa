"""Kubernetes Events, wired: state cell -> event_poster -> API server. Imported with `--events on` only: it brings the
client of the API server with it."""

from __future__ import annotations

import time

from msgspec import Struct

from gpuactors.actors import event_poster
from gpuactors.concurrency.latest import LatestReader
from gpuactors.config import Config
from gpuactors.core.state import NodeState
from gpuactors.daemon.api_client import client_of
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.events import KubeEvents
from gpuactors.ports.kube import ClaimApi, EventApi
from gpuactors.process.logger import get_logger

log = get_logger()


class EventsOutside(Struct, frozen=True):
    """Everything that events reach outside the daemon."""

    events: EventApi
    claims: ClaimApi


def outside_of(config: Config, node: str) -> EventsOutside:
    """Make the adaptors. Raises `ports.errors.HostError` if the API server's address or our credentials cannot be
    read."""
    client = client_of(config)
    return EventsOutside(KubeEvents(client, node), KubeClaims(client, config.driver_name, node))


async def post(outside: EventsOutside, state: LatestReader[NodeState]) -> None:
    """Post Events for ever."""
    await event_poster.run(
        state,
        event_poster.PosterPorts(
            events=outside.events,
            claims=outside.claims,
            on_problem=lambda reason: log.warning("events.unposted", reason=reason),
            now=time.time,
        ),
    )
