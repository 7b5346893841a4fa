"""The DRA plugin: serves its two sockets, and makes them again when somebody has removed them.

Nothing is registered from here: kubelet finds the registration socket, asks, and says whether it will call. Must not
decide anything about a claim. Whatever fails is tried again for ever; it never ends another actor.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.values.claim import DeviceHealth
from gpuactors.ports.claims import ClaimCaller, ClaimsEndpoint, ClaimsKubelet, PluginStatus
from gpuactors.ports.errors import KubeletError


class ClaimsPorts(Struct, frozen=True):
    kubelet: ClaimsKubelet
    caller: ClaimCaller
    health: LatestReader[tuple[DeviceHealth, ...]]
    on_status: Callable[[PluginStatus], None]
    """Called at each verdict of kubelet's about the registration; must not raise."""
    drain_s: Callable[[], float]
    """How long calls in flight may take when the plugin ends."""
    on_serving: Callable[[tuple[str, ...]], None]
    """Called with the paths of the sockets when they are there, and when they have been made again."""
    on_problem: Callable[[str], None]
    """Called with a sentence when they cannot be made; it is tried again."""
    on_failure: Callable[[str, Exception], None]
    """Called with an unexpected exception: a bug, to be logged with its traceback."""


async def run(ports: ClaimsPorts, stop: trio.Event) -> None:
    """Serve until `stop` is set; then give kubelet time to turn away, and calls in flight time to finish."""
    failures = 0
    while not stop.is_set():
        try:
            async with ports.kubelet.serve_claims(ports.caller, ports.health, ports.on_status) as endpoint:
                failures = 0
                await _attend(endpoint, ports, stop)
        except KubeletError as exc:
            ports.on_problem(str(exc))
        except Exception as exc:
            ports.on_failure("claims_plugin", exc)
        with trio.move_on_after(limits.SERVE_BACKOFF_S[min(failures, len(limits.SERVE_BACKOFF_S) - 1)]):
            await stop.wait()
        failures += 1


async def _attend(endpoint: ClaimsEndpoint, ports: ClaimsPorts, stop: trio.Event) -> None:
    """Keep the sockets there until `stop` is set. Raises `KubeletError` where a missing socket cannot be made again."""
    ports.on_serving(endpoint.names)
    while await _lost(endpoint, stop):
        await endpoint.mend()
        ports.on_serving(endpoint.names)
    await endpoint.withdraw(ports.drain_s())
    await endpoint.drain(limits.DRAIN_S)


async def _lost(endpoint: ClaimsEndpoint, stop: trio.Event) -> bool:
    """Wait for either: return True if a socket is gone, False if the plugin is to end."""
    async with trio.open_nursery() as nursery:

        async def end_wait() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(end_wait)
        await endpoint.lost()
        nursery.cancel_scope.cancel()
    return not stop.is_set()
