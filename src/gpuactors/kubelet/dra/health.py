"""The health stream of a DRA plugin, v1 and v1alpha1: kubelet writes what it reads here into the status of pods.

Each message is the complete list. Kubelet takes a device for Unknown when its last update is older than the timeout in
it (30 s where there is none), and forgets all devices of a driver whose stream has ended. So the list is sent at once
when it changes, again every HEALTH_AGAIN_S, and the stream stays open to the end of the plugin. Must not decide how a
device is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Final, final

import trio
from grpclib.const import Handler

from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.values.claim import DeviceHealth, DraHealth
from gpuactors.core.values.text import cut
from gpuactors.grpc_trio import TrioService
from gpuactors.kubelet.dra.service import in_package
from gpuactors.kubelet.pb.dra_health_v1 import v1

HEALTH_AGAIN_S: Final = 20.0
"""The interval after which a list of health is sent again, 20 s: by default kubelet takes a device for Unknown after 30
s."""

HEALTH_TIMEOUT_S: Final = 60
"""The time after which kubelet takes a device for Unknown, 60 s: a list may be lost and the next one late."""

assert 2 * HEALTH_AGAIN_S < HEALTH_TIMEOUT_S

HEALTH_MESSAGE_MAX_BYTES: Final = 1024
"""The reason of a device in a list of health. Kubelet's bound is 1024 characters; ours counts their bytes."""

PACKAGES: Final = ("v1", "v1alpha1")
"""The proto packages of the service, one for each version that kubelet may call."""

HealthReader = LatestReader[tuple[DeviceHealth, ...]]

_STATUS: Final = {
    DraHealth.HEALTHY: v1.HealthStatus.HEALTHY,
    DraHealth.UNHEALTHY: v1.HealthStatus.UNHEALTHY,
    DraHealth.UNKNOWN: v1.HealthStatus.UNKNOWN,
}


@final
class Health(TrioService, v1.DraResourceHealthBase):
    """`v1.DRAResourceHealth` (kubelet 1.37) and `v1alpha1.DRAResourceHealth` (kubelet 1.34 to 1.36), which has the same
    messages. `now` is the time of day in seconds since 1970."""

    def __init__(self, health: HealthReader, now: Callable[[], float]) -> None:
        self._health = health
        self._now = now

    def __mapping__(self) -> dict[str, Handler]:
        methods = super().__mapping__()
        return {in_package(name, path): handler for name in PACKAGES for path, handler in methods.items()}

    async def node_watch_resources(
        self, message: v1.NodeWatchResourcesRequest
    ) -> AsyncIterator[v1.NodeWatchResourcesResponse]:
        async with aclosing(_lists(self._health.subscribe())) as lists:
            async for devices in lists:
                yield v1.NodeWatchResourcesResponse(
                    devices=[
                        v1.DeviceHealth(
                            device=v1.DeviceIdentifier(pool_name=d.pool, device_name=d.device),
                            health=_STATUS[d.health],
                            last_updated_time=int(self._now()),
                            health_check_timeout_seconds=HEALTH_TIMEOUT_S,
                            message=cut(d.message, HEALTH_MESSAGE_MAX_BYTES),
                        )
                        for d in devices
                    ]
                )


async def _lists(health: HealthReader) -> AsyncGenerator[Sequence[DeviceHealth], None]:
    """Yield the list now, after each change, and again where it has not changed for HEALTH_AGAIN_S. Never ends: the
    last list is repeated after the cell is closed."""
    while True:
        try:
            with trio.move_on_after(HEALTH_AGAIN_S):
                await health.receive()
        except trio.EndOfChannel:
            await trio.sleep(HEALTH_AGAIN_S)
        yield health.value
