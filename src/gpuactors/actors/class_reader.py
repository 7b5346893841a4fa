"""The class reader: asks the API server once which DeviceClasses there are, and says which of them take a resource of
our device plugin.

Nothing depends on the answer, so it is asked CLASSES_TRIES times at most. Must not decide which classes those are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio
from msgspec import Struct

from gpuactors.actors.api_retry import backoff_s
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.gpus.device_classes import DeviceClass, contested, own_resources
from gpuactors.core.state import NodeState
from gpuactors.ports.kube import ApiError, DeviceClassApi

CLASSES_TRIES: Final = 7
"""Limit on the requests for the DeviceClasses at a daemon's start: with API_BACKOFF_S a minute, so that an API server
that has just started has read its roles. An older role has no right to list them, and then nothing is lost."""


class ClassPorts(Struct, frozen=True):
    classes: DeviceClassApi
    on_contested: Callable[[DeviceClass], None]
    """Called with each class that takes a resource of gpuactors; must not raise, as the other one."""
    on_problem: Callable[[str], None]
    """Called once with the reason why the classes are unknown."""


async def run(state: LatestReader[NodeState], ports: ClassPorts) -> None:
    """Run for ever; do nothing after the answer."""
    while own_resources(state.value) is None:
        await state.receive()
    classes = await _listed(ports)
    for device_class in contested(classes, own_resources(state.value) or ()):
        ports.on_contested(device_class)
    await trio.sleep_forever()


async def _listed(ports: ClassPorts) -> tuple[DeviceClass, ...]:
    """Return the classes; none where the server does not say which."""
    problem = ""
    for failures in range(1, CLASSES_TRIES + 1):
        try:
            with raises_only(ApiError, "class_reader"):
                return await ports.classes.list_classes()
        except ApiError as exc:
            problem = str(exc)
            if failures < CLASSES_TRIES:
                await trio.sleep(backoff_s(failures, exc))
    ports.on_problem(problem)
    return ()
