"""The pod side of the fake kubelet: places pods, allocates devices to them, starts their containers, and releases them.

Plays the scheduler (one node), devicemanager/manager.go's Allocate and a pod worker of kubelet 1.36: pods are admitted
one after another, an error of Allocate is final for the pod, an error of PreStartContainer is tried again, a pod keeps
its devices until its container has ended. Must not do arithmetic (`device_manager.py`), and must not know how a
plugin is reached (`plugins.py`) or what a container does (`containers.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias, final

import trio
from msgspec import Struct

from gpuactors.concurrency.latest import LatestReader
from gpuactors_simulation.kubelet.checkpoint import allocated_of
from gpuactors_simulation.kubelet.containers import Containers
from gpuactors_simulation.kubelet.device_manager import DeviceManager
from gpuactors_simulation.kubelet.dra.worker import ClaimWorker
from gpuactors_simulation.kubelet.plugins import PluginCallError, PluginManager
from gpuactors_simulation.kubelet.values import (
    AdmissionError,
    Choice,
    KubeletView,
    LedgerEntry,
    Phase,
    Pod,
)

PRE_START_RETRY_S: Final = (0.3, 11.7, 15.0)
"""Waits between kubelet's attempts to start a container that PreStartContainer refused: seen at 0, 0.3, 12 and 27 s.
The last one repeats."""

READMIT_AFTER_S: Final = (0.03, 1.0)
"""After its start kubelet gets its pods from the API server, and admits those anew whose container does not run: seen
between these bounds."""

RELEASE_S: Final = 0.1
"""From the end of a container to the moment at which its pod is gone, and out of PodResources: seen."""


CHECKPOINT_S: Final = 0.001
"""After each Allocate kubelet writes its ledger's file, under its lock, before it goes on: an fsync and a rename."""


CdiNodes: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
"""Finds the device nodes of CDI names, as Kata or a container runtime does. Raises `LookupError` for a name that it
does not find, or finds twice."""


class PodClaims(Struct, frozen=True):
    """The needs of a pod's claims: the drivers that prepare them, and the device nodes that the runtime finds for
    them."""

    worker: ClaimWorker
    nodes: Callable[[Pod], Sequence[str]]
    """Raises `LookupError` for a CDI id without a file."""


@final
class PodWorker:
    """Lives as long as kubelet's process: `nursery` is the process, `publish` is called after each change.

    `opens_after_s` is how long a pod's virtual machine takes from its start until it opens its devices. `hears` returns
    when the API server can be reached. `cdi` finds the device nodes of the names that plugins have answered by; None:
    none is looked for.
    """

    def __init__(
        self,
        manager: DeviceManager,
        plugins: PluginManager,
        containers: Containers,
        nursery: trio.Nursery,
        publish: Callable[[], None],
        changes: Callable[[], LatestReader[KubeletView]],
        opens_after_s: Mapping[str, float],
        rng: random.Random,
        hears: Callable[[], Awaitable[None]],
        claims: PodClaims | None = None,
        cdi: CdiNodes | None = None,
    ) -> None:
        self._manager = manager
        self._plugins = plugins
        self._containers = containers
        self._nursery = nursery
        self._publish = publish
        self._changes = changes
        self._opens_after_s = opens_after_s
        self._rng = rng
        self._hears = hears
        self._claims = claims
        self._cdi = cdi

    async def run(self, again: tuple[str, ...], settle: Callable[[], None]) -> None:
        """Gets the pods from the API server and calls `settle`, admits the pods `again` anew, then places every pod for
        which there is room, for ever.

        Raises `KubeletPanicError` where kubelet would end.
        """
        if not self._manager.knows_pods:
            await trio.sleep(self._rng.uniform(*READMIT_AFTER_S))
            await self._hears()
            self._manager.learn_pods()
        if self._claims is not None:
            self._claims.worker.meet(self._manager.uids)
        settle()
        for name in again:
            if (pod := self._manager.pod(name)) is not None:
                await self._admit(pod)
        async for _ in self._changes():
            while (pod := self._manager.place(trio.current_time())) is not None:
                self._publish()
                await self._admit(pod)
            self._publish()

    # --- admission --------------------------------------------------------------------------------------------

    async def _admit(self, pod: Pod) -> None:
        if self._claims is not None:
            self._claims.worker.meet({pod.uid})
        try:
            for resource, size in pod.requests:
                if self._manager.is_wanted(pod):
                    await self._give(pod, resource, size)
        except AdmissionError as error:
            if self._manager.is_wanted(pod):
                self._manager.failed(pod.name, str(error), error.asked_for)
        if self._manager.is_wanted(pod):
            self._manager.admitted(pod.name)
            self._nursery.start_soon(self._start_container, pod)
        else:
            self.release_soon(pod)
        self._publish()

    async def _give(self, pod: Pod, resource: str, size: int) -> None:
        """Devices of one resource for one pod. Raises `AdmissionError`."""
        choice = self._manager.choose(pod.name, resource, size)
        if choice is None:
            return
        devices: tuple[str, ...] = ()
        try:
            preferred = await self._plugins.preferred(choice.endpoint, resource, choice.available, size)
            devices = self._manager.take(choice, preferred)
            await self._allocate(choice, devices)
        except PluginCallError as error:
            raise AdmissionError(str(error), devices) from None

    async def _allocate(self, choice: Choice, devices: tuple[str, ...]) -> None:
        answered = False
        try:
            response = await self._plugins.allocate(choice.endpoint, choice.resource, devices)
            answered = True
        finally:
            if not answered:
                self._manager.roll_back()
        if not response.container_responses:
            # Kubelet does not roll back here: the devices are lost until it makes its books anew. Its sentence ends
            # with the empty answer.
            raise AdmissionError("no containers return in allocation response ", devices)
        self._manager.commit(choice, devices, allocated_of(response.container_responses[0]))
        self._publish()
        await trio.sleep(CHECKPOINT_S)

    # --- the container ----------------------------------------------------------------------------------------

    async def _start_container(self, pod: Pod) -> None:
        """Returns when it runs, fails, or is not wanted any more. A PreStartContainer in flight is waited for in any
        case: the pod worker does one thing after another."""
        if not await self._prepare_claims(pod):
            self.release_soon(pod)
            return
        waits = itertools.chain(PRE_START_RETRY_S, itertools.repeat(PRE_START_RETRY_S[-1]))
        for wait_s in waits:
            problem = await self._pre_start(pod) or self._unresolvable(pod)
            if not self._manager.is_wanted(pod):
                break
            if problem is None:
                self._run_container(pod)
                return
            self._manager.not_started(pod.name, f"CreateContainerConfigError: {problem}")
            self._publish()
            with trio.move_on_after(wait_s):
                await self._until_unwanted(pod)
                break
        self.release_soon(pod)

    async def _prepare_claims(self, pod: Pod) -> bool:
        """Until the pod's claims are prepared. False if the pod is not wanted any more."""
        if self._claims is None or not pod.uses:
            return True
        while True:
            problem = await self._claims.worker.prepare(pod, lambda: self._until_unwanted(pod))
            if not self._manager.is_wanted(pod):
                return False
            if problem is None:
                return True
            self._manager.not_started(pod.name, problem)
            self._publish()
            with trio.move_on_after(self._claims.worker.prepare_again_s()):
                await self._until_unwanted(pod)
                return False

    def _unresolvable(self, pod: Pod) -> str | None:
        """Return why the container runtime cannot make the container of the pod's CDI ids."""
        try:
            self._cdi_nodes(pod)
        except LookupError as error:
            return f"failed to inject CDI devices: unresolvable CDI devices {error}"
        return None

    def _cdi_nodes(self, pod: Pod) -> Sequence[str]:
        """Return the device nodes of the pod's claims, and of the CDI names that plugins have answered by. Raises
        `LookupError`."""
        of_claims = () if self._claims is None else self._claims.nodes(pod)
        if self._cdi is None:
            return of_claims
        return [*of_claims, *self._cdi([i for holding in self._holdings(pod) for i in holding.cdi_ids])]

    def _holdings(self, pod: Pod) -> list[LedgerEntry]:
        return [h for resource, _ in pod.requests if (h := self._manager.holding(pod.name, resource))]

    async def _pre_start(self, pod: Pod) -> str | None:
        for resource, _ in pod.requests:
            holding = self._manager.holding(pod.name, resource) if self._manager.is_wanted(pod) else None
            if holding is None:
                continue
            try:
                await self._plugins.pre_start(resource, holding.devices)
            except PluginCallError as error:
                return str(error)
        return None

    def _run_container(self, pod: Pod) -> None:
        holdings = self._holdings(pod)
        problem = self._containers.start(
            pod,
            devices=[device for holding in holdings for device in holding.devices],
            nodes=[*(node for holding in holdings for node in holding.nodes), *self._cdi_nodes(pod)],
            opens_after_s=self._opens_after_s.get(pod.uid, 0.0),
        )
        if problem is None:
            self._manager.started(pod.name)
        else:
            self._manager.ended(pod.name, problem)
        self._publish()

    async def _until_unwanted(self, pod: Pod) -> None:
        async for _ in self._changes():
            if not self._manager.is_wanted(pod):
                return

    # --- the end ----------------------------------------------------------------------------------------------

    def release_soon(self, pod: Pod, why: str | None = None) -> None:
        """The pod has no container, or none any more; `why` is set if that is an error. Done after `RELEASE_S`."""
        self._nursery.start_soon(self._release, pod, why)

    async def _release(self, pod: Pod, why: str | None) -> None:
        await trio.sleep(RELEASE_S)
        if self._claims is not None:
            released = await self._claims.worker.release(pod, lambda why: self._manager.noted(pod, why))
            if not released:
                return
        current = self._manager.pod(pod.name)
        if current is None or current.uid != pod.uid:
            return
        if current.phase is Phase.TERMINATING:
            self._manager.delete(pod.name)
        elif current.phase is Phase.RUNNING:
            self._manager.ended(pod.name, why)
        self._publish()
