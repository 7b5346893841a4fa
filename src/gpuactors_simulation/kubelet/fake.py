"""A model of kubelet 1.36's device manager that speaks the real protocol: the node's kubelet in `gpuactors simulate`,
in the tests and in `replay`.

Its parts, each in its own file: the device manager's state (`device_manager.py`, no clock, no tasks), the plugins
(`plugins.py`), the pods (`pods.py`), PodResources (`pod_resources.py`), the ledger's file (`checkpoint.py`), and what
is not kubelet: the containers (`containers.py`). Here is the life of the process: start, stop, what survives a restart
(the ledger's file, the pods, their containers), and what can be done and seen from outside. Must not decide anything
itself.

What the model leaves out: the delay of a node status update (kubelet posts capacity every 10 s; here the scheduler sees
it at once), the topology manager, several containers in a pod, and a reboot of the node. DRA claims are prepared where
there are `Surroundings` for it (`dra/`); a pod may be given another driver's claim, which PodResources lists.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, final

import msgspec
import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.grpc_trio import Server
from gpuactors_simulation.host.pod_cgroups import CgroupTree
from gpuactors_simulation.kubelet.checkpoint import CorruptCheckpointError
from gpuactors_simulation.kubelet.containers import Containers, Tenancy
from gpuactors_simulation.kubelet.device_manager import DeviceManager
from gpuactors_simulation.kubelet.dra.drivers import DriverManager
from gpuactors_simulation.kubelet.dra.manager import ClaimManager
from gpuactors_simulation.kubelet.dra.values import DraCall, DraView, Release, Surroundings
from gpuactors_simulation.kubelet.dra.worker import ClaimWorker
from gpuactors_simulation.kubelet.plugins import DIAL_DEADLINE_S, PluginManager
from gpuactors_simulation.kubelet.pod_resources import PodResourcesService
from gpuactors_simulation.kubelet.pods import CdiNodes, PodClaims, PodWorker
from gpuactors_simulation.kubelet.transport import CHECKPOINT_FILE, KubeletTransport
from gpuactors_simulation.kubelet.values import (
    Checkpoint,
    Claim,
    DoubleHandOut,
    KubeletPanicError,
    KubeletView,
    Phase,
    Pod,
)

__all__ = ["CHECKPOINT_FILE", "FakeKubelet", "open_fake_kubelet"]

DRAIN_S: Final = 0.1
"""Kubelet does not end its services gracefully; this only bounds the last bytes."""

_NO_DRA: Final = DraView()

_TRANSITIONAL: Final = frozenset({Phase.PENDING, Phase.ADMITTING, Phase.STARTING})


@dataclass(eq=False, slots=True)
class _Life:
    """One process of kubelet."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    plugins: PluginManager | None = None
    pods: PodWorker | None = None
    drivers: DriverManager | None = None


class _Dra(Struct, frozen=True):
    """Kubelet's DRA manager: what outlives its process."""

    surroundings: Surroundings
    claims: ClaimManager
    calls: list[DraCall] = msgspec.field(default_factory=list)


@asynccontextmanager
async def open_fake_kubelet(
    transport: KubeletTransport,
    *,
    seed: int = 0,
    tenancy: Tenancy | None = None,
    dial_deadline_s: float = DIAL_DEADLINE_S,
    dra: Surroundings | None = None,
    cgroups: CgroupTree | None = None,
    cdi: CdiNodes | None = None,
) -> AsyncIterator[FakeKubelet]:
    """A kubelet that is not started yet; it ends with the context, and so do all containers.

    `seed` orders what kubelet has in no order. `tenancy` is what a pod's virtual machine does with its devices; without
    one it holds nothing. `dial_deadline_s` is how long Register waits for a listener at the endpoint.
    `dra` is what its DRA manager needs; without it there is none. `cgroups` are those of its pods; without them it runs
    with --cgroups-per-qos=false. `cdi` is how the container runtime finds the CDI names in a plugin's answer; without
    it a container has none of their devices.
    """
    async with trio.open_nursery() as nursery:
        yield FakeKubelet(
            transport,
            nursery,
            seed=seed,
            tenancy=tenancy,
            dial_deadline_s=dial_deadline_s,
            dra=dra,
            cgroups=cgroups,
            cdi=cdi,
        )
        nursery.cancel_scope.cancel()


@final
class FakeKubelet:
    """Made by `open_fake_kubelet`. Only the pods, their containers and the ledger's file outlive `stop` and `start`."""

    def __init__(
        self,
        transport: KubeletTransport,
        nursery: trio.Nursery,
        *,
        seed: int,
        tenancy: Tenancy | None,
        dial_deadline_s: float,
        dra: Surroundings | None = None,
        cgroups: CgroupTree | None = None,
        cdi: CdiNodes | None = None,
    ) -> None:
        self._cdi = cdi
        self._transport = transport
        self._nursery = nursery
        self._dial_deadline_s = dial_deadline_s
        self._cgroups = cgroups
        self._rng = random.Random(seed)
        release = Release() if dra is None else dra.release
        self._manager = DeviceManager(self._rng, get_tells_ended=release.get_tells_ended)
        claims = ClaimManager(unpatched=release.unpatched, passes_over=release.passes_over)
        self._dra = None if dra is None else _Dra(dra, claims)
        self._containers = Containers(nursery, tenancy, self._exited)
        self._view = Latest(self._manager.view(trio.current_time()))
        self._written = self._manager.checkpoint
        self._opens_after_s: dict[str, float] = {}
        self._deaths: dict[str, float | None] = {}
        """How long the container of a deleted pod takes to end, by UID."""
        self._exits: dict[str, str | None] = {}
        """Why containers ended, by pod UID: kubelet may not have seen it yet."""
        self._life: _Life | None = None
        self.slow_registers_s = 0.0
        """How much longer Register takes, in lives that begin from now on."""
        self.late_lists_s = 0.0
        """How long after its arrival a device list is handled."""
        self._api_server = trio.Event()
        self._api_server.set()
        self.panics: list[str] = []
        """Where kubelet's process ended by a crash."""
        self.warnings: list[str] = []
        """The lines of kubelet's log about a ledger file that it cannot read."""

    # --- the process --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start kubelet: read its ledger's file, remove the sockets of its directory, listen, have no device of any
        plugin.

        Raises `RuntimeError` if it runs, `OSError` if its socket cannot be made.
        """
        if self._life is not None:
            raise RuntimeError("kubelet runs already; stop it first")
        await self._nursery.start(self._live)

    async def stop(self) -> None:
        """Kubelet's process ends at once; its sockets' files stay, as after a crash. Containers run on.

        Raises `RuntimeError` if it does not run.
        """
        if self._life is None:
            raise RuntimeError("kubelet does not run; start it first")
        life = self._life
        life.scope.cancel()
        await life.ended.wait()

    async def _live(self, *, task_status: trio.TaskStatus[None]) -> None:
        life = _Life()
        try:
            with life.scope:
                await self._serve(life, task_status)
        except* KubeletPanicError as panic:
            self.panics.extend(str(error) for error in _leaves(panic))
        finally:
            self._life = None
            self._manager.halt()
            self._publish()
            life.ended.set()

    async def _serve(self, life: _Life, task_status: trio.TaskStatus[None]) -> None:
        async with (
            self._transport.listen_pod_resources() as pod_resources,
            self._transport.listen() as registration,
            trio.open_nursery() as nursery,
        ):
            again = self._manager.boot(trio.current_time(), self._read_checkpoint())
            self._written = self._manager.checkpoint
            plugins = PluginManager(
                self._manager, self._transport, nursery, self._publish, self._dial_deadline_s
            )
            plugins.slow_s, plugins.late_s = self.slow_registers_s, lambda: self.late_lists_s
            pods = PodWorker(
                self._manager,
                plugins,
                self._containers,
                nursery,
                self._publish,
                self._view.subscribe,
                self._opens_after_s,
                self._rng,
                self._hears_api_server,
                self._boot_dra(life, nursery),
                self._cdi,
            )
            lister = PodResourcesService(self._manager, None if self._dra is None else self._dra.claims)
            await nursery.start(Server([lister], drain_s=DRAIN_S).serve, pod_resources)
            await nursery.start(Server([plugins], drain_s=DRAIN_S).serve, registration)
            nursery.start_soon(pods.run, again, self._settle_containers)
            nursery.start_soon(plugins.expire_later)
            life.plugins, life.pods = plugins, pods
            self._life = life
            self._publish()
            task_status.started()

    def _boot_dra(self, life: _Life, nursery: trio.Nursery) -> PodClaims | None:
        """Kubelet's DRA manager begins, if it has one."""
        if self._dra is None:
            return None
        dra = self._dra
        dra.claims.boot()
        life.drivers = DriverManager(
            self._transport,
            nursery,
            self._publish,
            self._rng,
            dra.surroundings,
            self._api_server_is_there,
            dra.calls,
        )
        worker = ClaimWorker(
            dra.claims,
            life.drivers,
            dra.surroundings,
            self._rng,
            self._publish,
            self._api_server_is_there,
            lambda: self._manager.active,
        )
        nursery.start_soon(life.drivers.run)
        nursery.start_soon(worker.reconcile)
        return PodClaims(worker, lambda pod: dra.surroundings.nodes(_cdi_ids(dra.claims, pod)))

    def _api_server_is_there(self) -> bool:
        return self._api_server.is_set()

    def _read_checkpoint(self) -> Checkpoint | None:
        try:
            return self._transport.read_checkpoint()
        except CorruptCheckpointError as error:
            self.warnings.append(
                "Continue after failing to read checkpoint file. Device allocation info may NOT be up-to-date: "
                f"{error}"
            )
            return None

    @property
    def streams_ended(self) -> int:
        """How many ListAndWatch streams of this life are over, also those whose end kubelet does not notice."""
        plugins = None if self._life is None else self._life.plugins
        return 0 if plugins is None else plugins.streams_ended

    def lose_stream(self, resource: str) -> None:
        """The connection to a resource's plugin breaks. Raises `KeyError` if there is none."""
        if self._life is None or self._life.plugins is None:
            raise KeyError(resource)
        self._life.plugins.lose_stream(resource)

    def power_off(self) -> None:
        """The node goes down while kubelet does not run: no container outlives it, and the pods stay. Kubelet's next
        start makes the containers anew, with what Allocate returned before. Raises `RuntimeError` if kubelet runs."""
        if self._life is not None:
            raise RuntimeError("kubelet runs; stop it first")
        self._containers.lose()
        self._manager.power_off()
        self._publish()

    # --- the API server -----------------------------------------------------------------------------------------

    def lose_api_server(self) -> None:
        """The API server goes away: a kubelet that starts from now on gets no pod until it is back.

        PodResources lists none until then, although their containers run (seen: kubelet 1.35.3). A kubelet that runs
        keeps its pods.
        """
        if self._api_server.is_set():
            self._api_server = trio.Event()

    def find_api_server(self) -> None:
        """The API server is back."""
        self._api_server.set()

    @property
    def has_api_server(self) -> bool:
        """It is there."""
        return self._api_server.is_set()

    @property
    def knows_pods(self) -> bool:
        """Kubelet has its pods from the API server."""
        return self._manager.knows_pods

    async def _hears_api_server(self) -> None:
        await self._api_server.wait()

    # --- pods ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        requests: Mapping[str, int],
        *,
        claims: tuple[Claim, ...] = (),
        uses: tuple[str, ...] = (),
        opens_after_s: float = 0.0,
        namespace: str = "default",
        bound: bool = False,
    ) -> Pod:
        """Creates a pod that asks for devices: it runs as soon as there is room for it, and the ResourceClaims that it
        `uses` are prepared. Its virtual machine opens them when its container starts, or so much later. A `bound` pod
        names its node, so that no scheduler looks for room. Raises `ValueError`."""
        pod = self._manager.submit(name, requests, trio.current_time(), claims, uses, namespace, bound)
        self._opens_after_s[pod.uid] = opens_after_s
        self._publish()
        return pod

    async def admit(self, name: str, requests: Mapping[str, int], *, opens_after_s: float = 0.0) -> Pod:
        """Creates a pod and waits until it runs, fails, waits for room, or is held up at its container's start."""
        self.submit(name, requests, opens_after_s=opens_after_s)
        return await self.settled(name)

    def adopt(
        self,
        name: str,
        devices: Mapping[str, tuple[str, ...]],
        *,
        claims: tuple[Claim, ...] = (),
        nodes: tuple[str, ...] = (),
    ) -> Pod:
        """A pod of another plugin's, or another driver's, runs: kubelet's ledger has these device IDs for it, by
        resource, and its virtual machine opens `nodes`. Raises `ValueError`."""
        pod = self._manager.adopt(name, devices, claims, nodes)
        self._containers.start(pod, [i for ids in devices.values() for i in ids], nodes, 0.0)
        self._publish()
        return pod

    async def settled(self, name: str) -> Pod:
        """Wait until a pod runs, has ended, or has a message. Raises `KeyError` if it is deleted meanwhile."""
        async for view in self._view.subscribe():
            pod = view.pods[name]
            if pod.phase not in _TRANSITIONAL or pod.message:
                return pod
        raise AssertionError("unreachable: a subscription never ends")

    def delete(self, name: str, *, dies_after_s: float | None = 0.0) -> None:
        """Deletes a pod: kubelet ends its container, which takes so long (None: it ignores SIGTERM); the pod is
        Terminating until then, and gone 0.1 s later. Deleting it again changes nothing.

        Raises `KeyError` if there is no such pod.
        """
        pod = self._manager.pod(name)
        if pod is None:
            raise KeyError(name)
        if pod.phase is not Phase.TERMINATING and self._manager.terminate(name):
            self._deaths[pod.uid] = dies_after_s
            # One that is being admitted or started is released by that task.
            if self._life is not None and pod.phase is Phase.RUNNING:
                self._end_container(pod)
        self._publish()

    def force_delete(self, name: str, *, dies_after_s: float | None = None) -> None:
        """Deletes a pod with a grace of 0 and by force: it is gone at once, and kubelet gives its devices to the next
        pod. Its container ends after so long; None lives on until `end_process`. Raises `KeyError`.
        """
        pod = self._manager.pod(name)
        if pod is None:
            raise KeyError(name)
        self._manager.delete(name)
        self._deaths[pod.uid] = dies_after_s
        if self._life is not None:
            self._containers.kill(pod, dies_after_s)
        self._publish()

    def end_process(self, name: str) -> None:
        """The virtual machine of a pod of that name (the oldest, if a deleted one is left) ends, by SIGKILL or from
        inside. Raises `KeyError` if there is none."""
        self._containers.end(name)

    @property
    def containers(self) -> tuple[Pod, ...]:
        """The pods whose container runs, deleted ones included."""
        return self._containers.pods

    @property
    def double_handouts(self) -> list[DoubleHandOut]:
        """Each virtual machine that met EBUSY on a device that kubelet had given to its pod."""
        return self._containers.double_handouts

    def _exited(self, pod: Pod, why: str | None) -> None:
        self._exits[pod.uid] = why
        self._release_soon(pod)
        self._publish()

    def _end_container(self, pod: Pod) -> None:
        if self._containers.is_running(pod):
            self._containers.kill(pod, self._deaths[pod.uid])
        else:
            self._release_soon(pod)

    def _release_soon(self, pod: Pod) -> None:
        """A kubelet that is just ending begins nothing; the next one sees it."""
        life = self._life
        if life is not None and life.pods is not None and not life.scope.cancel_called:
            life.pods.release_soon(pod, self._exits.get(pod.uid))

    def _settle_containers(self) -> None:
        """Kubelet has its pods from the API server: it ends containers that should not run, and sees those that have
        ended."""
        life = self._life
        if life is None or life.pods is None:
            return
        pods = {pod.uid: pod for pod in self._manager.view(trio.current_time()).pods.values()}
        for pod in self._containers.pods:
            if pod.uid not in pods:
                self._containers.kill(pod, self._deaths.get(pod.uid))
        for pod in pods.values():
            if pod.phase is Phase.TERMINATING:
                self._end_container(pod)
            elif pod.phase is Phase.RUNNING and not self._containers.is_running(pod):
                life.pods.release_soon(pod, self._exits.get(pod.uid))

    # --- claims -------------------------------------------------------------------------------------------------

    def lose_claims(self) -> None:
        """The file of the DRA manager is lost while kubelet does not run: no claim that was prepared is ever
        unprepared. Raises `RuntimeError` if kubelet runs."""
        if self._life is not None:
            raise RuntimeError("kubelet runs; stop it first")
        if self._dra is not None:
            self._dra.claims.forget()

    @property
    def dra_calls(self) -> Sequence[DraCall]:
        """Every prepare and unprepare that is over, of all lives."""
        return () if self._dra is None else self._dra.calls

    @property
    def dra_errors(self) -> Sequence[str]:
        """The lines of this life's log about DRA plugins: registrations and health streams that failed."""
        return () if self._life is None or self._life.drivers is None else self._life.drivers.errors

    # --- what can be seen ---------------------------------------------------------------------------------------

    @property
    def view(self) -> KubeletView:
        """Kubelet's view now."""
        return self._view.value

    def changes(self) -> LatestReader[KubeletView]:
        """Kubelet's view now, and after every change."""
        return self._view.subscribe()

    async def until(self, condition: Callable[[KubeletView], bool]) -> KubeletView:
        """Kubelet's first view from now on for which `condition` holds. Waits for ever; the caller has a deadline."""
        async for view in self._view.subscribe():
            if condition(view):
                return view
        raise AssertionError("unreachable: a subscription never ends")

    def _dra_view(self) -> DraView:
        if self._dra is None:
            return _NO_DRA
        drivers = None if self._life is None else self._life.drivers
        return DraView(
            claims=self._dra.claims.claims,
            instances=() if drivers is None else drivers.instances,
            health={} if drivers is None else drivers.health,
            calls=len(self._dra.calls),
        )

    def _publish(self) -> None:
        if self._cgroups is not None:
            running = [pod.uid for pod in self._containers.pods]
            self._cgroups.show(self._manager.lives(running))
        self._view.set(replace(self._manager.view(trio.current_time()), dra=self._dra_view()))
        checkpoint = self._manager.checkpoint
        if self._life is not None and checkpoint is not self._written:
            if checkpoint != self._written:
                self._transport.write_checkpoint(checkpoint)
            self._written = checkpoint


def _cdi_ids(claims: ClaimManager, pod: Pod) -> list[str]:
    return [i for claim in claims.of_pod(pod.uid) for device in claim.devices for i in device.cdi_ids]


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves
