"""The pod side of the fake kubelet: places pods, gives them devices, starts their containers.

Plays the scheduler (one node), devicemanager/manager.go's Allocate and the container's start of kubelet 1.36: admission
is one pod after another, an error of Allocate is final for the pod, an error of PreStartContainer is tried again. Must
not do arithmetic (`kubelet_books.py`) and must not know how a plugin is reached (`kubelet_plugins.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Final, final

import trio

from gpuactors.concurrency.latest import LatestReader
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import AllocateResponse
from gpuactors.simulation.kubelet_books import (
    AdmissionError,
    Allocated,
    BooksView,
    Choice,
    KubeletBooks,
    Pod,
)
from gpuactors.simulation.kubelet_plugins import PluginCallError, PluginManager

PRE_START_RETRY_S: Final = (0.3, 11.7, 15.0)
"""Waits between kubelet's attempts to start a container that PreStartContainer refused: seen at 0, 0.3, 12 and 27 s.
The last one repeats."""

READMIT_AFTER_S: Final = (0.03, 1.0)
"""After its start kubelet admits anew the pods whose container does not run: seen between these bounds."""


@final
class PodWorker:
    """Lives as long as kubelet's process: `nursery` is the process, `publish` is called after each change."""

    def __init__(
        self,
        books: KubeletBooks,
        plugins: PluginManager,
        nursery: trio.Nursery,
        publish: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._books = books
        self._plugins = plugins
        self._nursery = nursery
        self._publish = publish
        self._rng = rng

    async def run(self, again: tuple[str, ...], changes: LatestReader[BooksView]) -> None:
        """Admits the pods `again` anew, then places every pod for which there is room, for ever.

        Raises `KubeletPanicError` where kubelet would end.
        """
        if again:
            await trio.sleep(self._rng.uniform(*READMIT_AFTER_S))
        for name in again:
            pod = self._books.pod(name)
            if pod is not None:
                await self._admit(pod)
        async for _ in changes:
            while (pod := self._books.place(trio.current_time())) is not None:
                self._publish()
                await self._admit(pod)
            self._publish()

    async def _admit(self, pod: Pod) -> None:
        try:
            for resource, size in pod.requests:
                await self._give(pod.name, resource, size)
        except AdmissionError as error:
            if self._books.pod(pod.name) is not None:
                self._books.failed(pod.name, str(error))
        else:
            if self._books.pod(pod.name) is not None:
                self._books.admitted(pod.name)
                self._nursery.start_soon(self._start_container, pod)
        self._publish()

    async def _give(self, pod: str, resource: str, size: int) -> None:
        """Devices of one resource for one pod. Raises `AdmissionError`."""
        choice = self._books.choose(pod, resource, size)
        if choice is None:
            return
        try:
            preferred = await self._plugins.preferred(choice.endpoint, resource, choice.available, size)
            devices = self._books.take(choice, preferred)
            await self._allocate(choice, devices)
        except PluginCallError as error:
            raise AdmissionError(str(error)) from None

    async def _allocate(self, choice: Choice, devices: tuple[str, ...]) -> None:
        committed = False
        try:
            response = await self._plugins.allocate(choice.endpoint, choice.resource, devices)
            if not response.container_responses:
                raise AdmissionError("no containers return in allocation response")
            self._books.commit(choice, devices, _allocated(response))
            committed = True
        finally:
            if not committed:
                self._books.roll_back(choice, devices)

    async def _start_container(self, pod: Pod) -> None:
        waits = itertools.chain(PRE_START_RETRY_S, itertools.repeat(PRE_START_RETRY_S[-1]))
        for wait_s in waits:
            problem = await self._pre_start(pod)
            if self._books.pod(pod.name) is None:
                return
            if problem is None:
                self._books.started(pod.name)
                self._publish()
                return
            self._books.not_started(pod.name, f"CreateContainerConfigError: {problem}")
            self._publish()
            await trio.sleep(wait_s)

    async def _pre_start(self, pod: Pod) -> str | None:
        for resource, _ in pod.requests:
            holding = self._books.holding(pod.name, resource)
            if holding is None:
                continue
            try:
                await self._plugins.pre_start(resource, holding.devices)
            except PluginCallError as error:
                return str(error)
        return None


def _allocated(response: AllocateResponse) -> Allocated:
    container = response.container_responses[0]
    return Allocated(
        envs=dict(container.envs),
        nodes=tuple(device.host_path for device in container.devices),
        response=bytes(container),
    )
