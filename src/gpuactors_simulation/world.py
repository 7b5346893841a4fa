"""A whole node in one process: a fake host tree, a fake kubelet, and the real daemon between them, over real sockets.

The daemon runs as in production (`app.run`): it reads a real directory with sysfs' links, takes uevents from a
datagram socket and speaks gRPC with kubelet over unix sockets. It is started and stopped in this process, so a restart
here lacks only the start of a Python interpreter. Needs no root. Must not judge: what must hold is in
`expectations.py`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, final

import trio
from msgspec import Struct, field
from trio.testing import wait_all_tasks_blocked

from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.config import Config
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import Health, ResourceName, Role
from gpuactors.daemon import app
from gpuactors_simulation.claims import ClaimsSide, open_claims
from gpuactors_simulation.domains import DomainsSide, open_domains
from gpuactors_simulation.host.pod_cgroups import CgroupTree
from gpuactors_simulation.host.tree import VFIO_DRIVERS, HostTree, PciSpec, Uevent
from gpuactors_simulation.host.uevents import UeventSender
from gpuactors_simulation.kubelet.containers import TreeTenancy
from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import UnixTransport
from gpuactors_simulation.kubelet.values import KubeletView, Pod
from gpuactors_simulation.log_tail import LogTail
from gpuactors_simulation.other_plugins import OtherPlugin
from gpuactors_simulation.situation import ClaimsSeen, Expectation, Situation

DIRECTORY_MAX_CHARS: Final = 24
"""Sockets with names of up to 63 characters lie two levels below the world's directory, and the path of a unix socket
may have 107 bytes."""

QUIET_S: Final = 0.02
"""Kubelet's view counts as settled when no task of the process has run for so long."""

_GPU_CLASSES: Final = ("03", "0680")


class Moment(Struct, frozen=True):
    """The facts shown of one moment."""

    at_s: float
    """Seconds since the scenario began."""
    view: KubeletView
    reasons: Mapping[str, str]
    """Why a device is Unhealthy, in the daemon's words."""
    claims: ClaimsSeen = field(default_factory=ClaimsSeen)
    """On a node that serves claims."""


class Outcome(Struct, frozen=True):
    """How a step ended."""

    unmet: tuple[str, ...]
    """The expectations that are not met, as sentences."""
    settled_s: float
    """From the step's beginning until everything was as expected, or until the time was up."""


@asynccontextmanager
async def open_world(
    seed: int, log: LogTail, *, claims: bool = False, domains: bool = False
) -> AsyncIterator[World]:
    """An empty node: no functions, kubelet and daemon not started. Everything ends with the context.

    `log` is where the daemon's log goes; an error in it is a fault. `claims`: it serves claims of GPUs; `domains`: it
    has compute domains instead.
    """
    with _short_directory() as directory:
        (directory / "h").mkdir()
        tree = HostTree(directory / "h")
        with UeventSender(directory / "u0") as first_sender, UeventSender(directory / "u1") as second_sender:
            async with trio.open_nursery() as nursery:

                def tell(uevents: Sequence[Uevent]) -> None:
                    for sender in (first_sender, second_sender):
                        nursery.start_soon(sender.send_all, uevents)

                transport = UnixTransport(directory / "k")
                async with AsyncExitStack() as stack:
                    side: ClaimsSide | DomainsSide | None = None
                    if claims:
                        side = await stack.enter_async_context(open_claims(directory, tree, tell))
                    elif domains:
                        side = await stack.enter_async_context(open_domains(directory, tree.root))
                    kubelet = await stack.enter_async_context(
                        open_fake_kubelet(
                            transport,
                            seed=seed,
                            tenancy=TreeTenancy(tree, tell),
                            cgroups=CgroupTree(tree.root),
                            dra=side.around() if side is not None else None,
                        )
                    )
                    world = World(
                        directory, transport, kubelet, tree, (first_sender, second_sender), nursery, log, side
                    )
                    nursery.start_soon(world.watch_free_count)
                    if isinstance(side, DomainsSide):
                        nursery.start_soon(side.controller.run, kubelet)
                    yield world
                    await world.close()
                    nursery.cancel_scope.cancel()


@contextmanager
def _short_directory() -> Iterator[Path]:
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(parent)) <= DIRECTORY_MAX_CHARS - len("/gpua-12345678") and os.access(
            parent, os.W_OK
        ):
            with tempfile.TemporaryDirectory(prefix="gpua-", dir=parent) as name:
                yield Path(name)
            return
    raise OSError("no directory with a short path can be written to; /tmp must be writable for unix sockets")


@final
class World:
    """Made by `open_world`."""

    def __init__(
        self,
        directory: Path,
        transport: UnixTransport,
        kubelet: FakeKubelet,
        tree: HostTree,
        senders: tuple[UeventSender, UeventSender],
        nursery: trio.Nursery,
        log: LogTail,
        side: ClaimsSide | DomainsSide | None = None,
    ) -> None:
        self.kubelet = kubelet
        self.tree = tree
        self._claims = side if isinstance(side, ClaimsSide) else None
        self._domains = side if isinstance(side, DomainsSide) else None
        self._transport = transport
        self._senders = senders
        """Netlink sends to every listener. A datagram socket has one owner, so daemons take turns with two of them: in
        an upgrade two daemons run side by side."""
        self._nursery = nursery
        self._log = log
        self._configs = itertools.cycle(
            Config(
                host_root=directory / "h",
                kubelet_dir=directory / "k",
                device_plugin_dir=directory / "k/device-plugins",
                state_dir=directory / "s",
                uevents=f"unix:{directory / socket}",
                holders="proc",
                **(side.settings if side is not None else {}),
            )
            for socket in ("u0", "u1")
        )
        self._began_at = trio.current_time()
        self._daemon: app.Daemon | None = None
        self._daemon_ended = trio.Event()
        self._state: NodeState | None = None
        self._states = Latest(0)
        """Counts the daemon's states, so that a wait wakes on each."""
        self._negative_s = 0.0
        self._negative_since: float | None = None
        self._faults: list[str] = []
        self._failed = trio.Event()

    # --- the daemon ---------------------------------------------------------------------------------------------

    async def start_daemon(self) -> None:
        """Start the daemon; return when it runs, which is before its first scan."""
        if self._daemon is not None:
            raise RuntimeError("the daemon runs already; stop it first")
        await self._launch()

    async def stop_daemon(self) -> None:
        """Stop it as SIGTERM does; return when it has ended and kubelet has noticed."""
        if self._daemon is None:
            raise RuntimeError("the daemon does not run; start it first")
        self._daemon.stop()
        await self._daemon_ended.wait()
        await self.until(
            lambda view: not view.running or not view.connected, "kubelet notices the daemon's end"
        )

    async def restart_daemon(self) -> None:
        """A new daemon in place of the old one."""
        await self.stop_daemon()
        await self.start_daemon()

    async def close(self) -> None:
        """Stop the daemon if it runs."""
        if self._daemon is not None:
            self._daemon.stop()
            await self._daemon_ended.wait()

    async def upgrade_daemon(self, within_s: float = 15.0) -> None:
        """A new daemon starts beside the old one, has it hand over, and the old one is stopped, as by a DaemonSet with
        maxSurge 1. Raises `TimeoutError` if it is not handed over."""
        if self._daemon is None:
            raise RuntimeError("the daemon does not run; start it first")
        old, old_ended = self._daemon, self._daemon_ended
        await self._launch()
        with trio.move_on_after(within_s) as waited:
            async for _ in self._states.subscribe():
                if self._state is not None and self._state.daemon.role is Role.SERVING:
                    break
        old.stop()
        await old_ended.wait()
        if waited.cancelled_caught:
            raise TimeoutError(f"waited {within_s:g} s in vain until the old daemon handed over")

    async def _launch(self) -> None:
        self._daemon_ended = trio.Event()
        self._state = None
        self._daemon = await self._nursery.start(self._run_daemon)

    async def _run_daemon(self, *, task_status: trio.TaskStatus[app.Daemon]) -> None:
        stopping = running = False
        ended = self._daemon_ended

        async def watched(*, task_status: trio.TaskStatus[app.Daemon]) -> None:
            config = next(self._configs)
            if self._claims is None:
                await app.run(config, task_status=task_status)
            else:
                outside = self._claims.within(app.outside_of(config, {}))
                settings = app.settings_of(config, hand_over=outside.control is not None)
                await app.run_daemon(settings, outside, task_status=task_status)
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                daemon: app.Daemon = await nursery.start(watched)

                def stop() -> None:
                    nonlocal stopping
                    stopping = True
                    daemon.stop()

                task_status.started(app.Daemon(daemon.state, stop))
                running = True
                async for state in daemon.state:
                    if self._daemon_ended is not ended:  # a successor runs
                        continue
                    self._state = state
                    self._states.set(self._states.value + 1)
        except Exception as error:
            if not running:
                raise
            self._fail(f"the daemon died: {_innermost(error)!r}")
        else:
            if not stopping:
                self._fail("the daemon ended by itself")
        finally:
            if self._daemon_ended is ended:
                self._daemon = self._state = None
            ended.set()

    def _fail(self, fault: str) -> None:
        self._faults.append(fault)
        self._failed.set()
        self._states.set(self._states.value + 1)

    async def start_other_plugin(self, resource: str, devices: Iterable[str]) -> OtherPlugin:
        """Another plugin registers a resource; returns when kubelet has its list."""
        listed = tuple(devices)
        plugin = OtherPlugin(self._transport, resource, listed)
        await self._nursery.start(plugin.run)
        await self.until(
            lambda view: (
                {row.id for row in view.devices if row.resource == resource and row.health == "Healthy"}
                == set(listed)
            ),
            "kubelet has the other plugin's list",
        )
        return plugin

    # --- the host -----------------------------------------------------------------------------------------------

    async def plug(self, *specs: PciSpec) -> None:
        """Functions are plugged in."""
        for spec in specs:
            if self._claims is not None:
                self._claims.plug(spec)
            else:
                await self._tell(self.tree.plug_steps(spec))

    async def unplug(self, address: str) -> None:
        """A function is unplugged."""
        await self._tell(self.tree.unplug_steps(address))

    async def bind(self, address: str, driver: str) -> None:
        """A function is bound to a driver, from the one it had if it had one."""
        if self.tree.driver_of(address) is not None:
            await self._tell(self.tree.unbind_steps(address))
        await self._tell(self.tree.bind_steps(address, driver))

    async def unbind(self, address: str, *, uevents: bool = True) -> None:
        """A function is unbound from its driver; without `uevents` all of them are lost."""
        if uevents:
            await self._tell(self.tree.unbind_steps(address))
        else:
            self.tree.unbind(address)

    async def _tell(self, uevents: Iterable[Uevent]) -> None:
        """Send each uevent while the tree is as it is at that moment; it is lost if no daemon listens."""
        for uevent in uevents:
            for sender in self._senders:
                await sender.send_all((uevent,))

    def take(self, address: str, pid: int, command: str = "python3", *, device: bool = True) -> None:
        """An external process opens a GPU, or only its group, which sysfs does not show.

        Raises `OSError` (EBUSY) if a process has it open.
        """
        self.tree.open_group(self._group(address), pid, command, device=device)

    def holders(self) -> Mapping[str, int]:
        """Return the process that has a GPU's group open, by the GPU's address."""
        groups = {a: spec.group for a, spec in self.tree.functions.items() if spec.group is not None}
        holders = {address: self.tree.holder_of(group) for address, group in groups.items()}
        return {address: pid for address, pid in holders.items() if pid is not None}

    async def release(self, address: str, pid: int) -> None:
        """That process closes the GPU, and lives on."""
        await self._tell(self.tree.close_group(self._group(address), pid))

    async def kill(self, pid: int) -> None:
        """A process ends with all that it has open. (`end_process` does so for a pod's virtual machine.)"""
        await self._tell(self.tree.kill(pid))

    def truth(self) -> frozenset[str]:
        """The GPUs that should be listed Healthy: a VM could open them, or the pod that has them by kubelet's ledger
        could or does. On a vfio driver, with no host driver in the group, held by no external process, and no
        claim's."""
        gpus = (a for a, spec in self.tree.functions.items() if spec.class_code.startswith(_GPU_CLASSES))
        free = frozenset(address for address in gpus if self._usable(address) and self._available(address))
        return free - self._claims_seen().taken

    def _usable(self, address: str) -> bool:
        group = self.tree.functions[address].group
        members = self.tree.group_members(group) if group is not None else frozenset[str]()
        drivers = {self.tree.driver_of(member) for member in members}
        return self.tree.driver_of(address) in VFIO_DRIVERS and drivers <= {*VFIO_DRIVERS, None}

    def _available(self, address: str) -> bool:
        allocated = any(row.id == address and row.pod is not None for row in self.kubelet.view.devices)
        return allocated or self.tree.holder_of(self._group(address)) is None

    def _group(self, address: str) -> int:
        group = self.tree.functions[address].group
        if group is None:
            raise ValueError(f"{address} is in no IOMMU group, so no process can open it; give it one")
        return group

    # --- claims -------------------------------------------------------------------------------------------------

    @property
    def claims(self) -> ClaimsSide:
        """The API server and the kernel of a node that serves claims. Raises `RuntimeError` on another one."""
        if self._claims is None:
            raise RuntimeError("this scenario serves no claims; say so in its `claims`")
        return self._claims

    @property
    def domains(self) -> DomainsSide:
        """The API server and the controller of a node with compute domains. Raises `RuntimeError` on another one."""
        if self._domains is None:
            raise RuntimeError("this scenario has no compute domains; say so in its `domains`")
        return self._domains

    def _claims_seen(self) -> ClaimsSeen:
        if self._domains is not None:
            return self._domains.seen(self.kubelet.view, self._state, self.kubelet.dra_calls)
        if self._claims is not None:
            return self._claims.seen(self.kubelet.view, self._state)
        return ClaimsSeen()

    # --- pods ---------------------------------------------------------------------------------------------------

    async def start_pod(self, name: str, requests: Mapping[str, int]) -> Pod:
        """A pod is created; returns when it runs, has failed, or waits for room or for its container's start."""
        return await self.kubelet.admit(name, requests)

    def end_pod(self, name: str, *, dies_after_s: float | None = 0.0) -> None:
        """A pod is deleted; its virtual machine takes so long to end."""
        self.kubelet.delete(name, dies_after_s=dies_after_s)

    def force_delete_pod(self, name: str, *, dies_after_s: float | None = None) -> None:
        """A pod is deleted by force: it is gone at once, its virtual machine ends later, or with `end_process`."""
        self.kubelet.force_delete(name, dies_after_s=dies_after_s)

    def end_process(self, pod: str) -> None:
        """The virtual machine of a pod of that name ends by itself."""
        self.kubelet.end_process(pod)

    # --- watching -----------------------------------------------------------------------------------------------

    def causes(self) -> Mapping[str, Cause]:
        """Return why a device is listed as it is, by device ID."""
        lists = self._state.published.device_lists.values() if self._state is not None else ()
        return {d.id: d.cause for device_list in lists for d in device_list}

    @property
    def now_s(self) -> float:
        """Seconds since the scenario began."""
        return trio.current_time() - self._began_at

    def moment(self) -> Moment:
        """Show this moment."""
        return Moment(self.now_s, self.kubelet.view, self.reasons(), self._claims_seen())

    def reasons(self) -> Mapping[str, str]:
        """Return why a device is Unhealthy, in the daemon's words, by device ID."""
        lists = self._state.published.device_lists.values() if self._state is not None else ()
        return {d.id: d.reason for device_list in lists for d in device_list if d.health is Health.UNHEALTHY}

    async def until(
        self, condition: Callable[[KubeletView], bool], goal: str, within_s: float = 15.0
    ) -> KubeletView:
        """Kubelet's first view for which `condition` holds. Raises `TimeoutError`, whose text has `goal`."""
        with trio.move_on_after(within_s):
            return await self.kubelet.until(condition)
        raise TimeoutError(f"waited {within_s:g} s in vain until {goal}")

    async def until_free(self, resource: str, within_s: float = 15.0) -> str:
        """Return the first GPU that the daemon knows to be free and no orphan. Raises `TimeoutError`."""
        with trio.move_on_after(within_s):
            async for _ in self._states.subscribe():
                if self._state is None:
                    continue
                allocated = {row.id for row in self.kubelet.view.devices if row.pod is not None}
                for device in self._state.published.device_lists.get(ResourceName(resource), ()):
                    if device.cause is Cause.FREE and device.key not in {
                        *allocated,
                        *self._state.kubelet.orphans,
                    }:
                        return device.key
        raise TimeoutError(f"waited {within_s:g} s in vain until a GPU of {resource} is free")

    async def until_in_ledger(self, pod: str, within_s: float = 15.0) -> None:
        """Wait until the daemon has read of a pod in kubelet's ledger. Of a kubelet that has just started the daemon
        believes the ledger's file as well, where a pod stays that ended before it was listed. Raises `TimeoutError`."""
        with trio.move_on_after(within_s):
            async for _ in self._states.subscribe():
                if self._state is not None and any(
                    p.name == pod for p in self._state.kubelet.ledger.entries.values()
                ):
                    return
        raise TimeoutError(
            f"waited {within_s:g} s in vain until the daemon has read of {pod} in kubelet's ledger"
        )

    async def until_polled(self, times: int, within_s: float = 15.0) -> None:
        """Wait until the daemon has polled the groups so many times more. Raises `TimeoutError`."""
        done = -1
        with trio.move_on_after(within_s):
            async for _ in self._states.subscribe():
                if self._state is not None and self._state.host.polls.done != done:
                    done, times = self._state.host.polls.done, times - 1
                if times < 0:
                    return
        raise TimeoutError(f"waited {within_s:g} s in vain until the daemon has polled its groups")

    async def settle(
        self, expected: Sequence[Expectation], before: KubeletView, within_s: float, since: float
    ) -> Outcome:
        """Wait until everything is as expected and nothing moves any more, or until the time is up.

        `since` is the step's beginning on trio's clock.
        """
        met_at = since
        with trio.move_on_after(within_s):
            while not self._failed.is_set():
                await self._until_met(expected, before)
                met_at = trio.current_time()
                await wait_all_tasks_blocked(QUIET_S)
                if not self._unmet(expected, before):
                    break
        unmet = self._unmet(expected, before)
        ended_at = trio.current_time() if unmet else met_at
        return Outcome(tuple(unmet), ended_at - since)

    async def _until_met(self, expected: Sequence[Expectation], before: KubeletView) -> None:
        """Compares after every change; a fault ends the wait, as waiting longer is in vain."""
        async with trio.open_nursery() as nursery:

            async def inspect(changes: LatestReader[KubeletView] | LatestReader[int]) -> None:
                async for _ in changes:
                    if self._failed.is_set() or not self._unmet(expected, before):
                        nursery.cancel_scope.cancel()

            nursery.start_soon(inspect, self.kubelet.changes())
            nursery.start_soon(inspect, self._states.subscribe())

    async def watch_free_count(self) -> None:
        """Measures for how long a free count was below zero. Never returns."""
        async for view in self.kubelet.changes():
            negative = view.running and any(figures.free < 0 for figures in view.resources.values())
            if negative and self._negative_since is None:
                self._negative_since = trio.current_time()
            elif not negative and self._negative_since is not None:
                self._negative_s += trio.current_time() - self._negative_since
                self._negative_since = None

    @property
    def negative_s(self) -> float:
        """For how long, since the scenario began, the scheduler would have seen a free count below zero."""
        open_s = trio.current_time() - self._negative_since if self._negative_since is not None else 0.0
        return self._negative_s + open_s

    def _unmet(self, expected: Sequence[Expectation], before: KubeletView) -> list[str]:
        crashes = (f"kubelet crashed: {panic}" for panic in self.kubelet.panics)
        doubles = (f"handed out twice: {d.pod}: {d.message}" for d in self.kubelet.double_handouts)
        situation = Situation(
            view=self.kubelet.view,
            truth=self.truth(),
            before=before,
            reasons=self.reasons(),
            causes=self.causes(),
            holders=self.holders(),
            claims=self._claims_seen(),
            faults=(
                *self._faults,
                *crashes,
                *doubles,
                *(f"the log has an error: {line}" for line in self._log.complaints),
            ),
        )
        return [
            f"expected: {expectation}; but {problem}"
            for expectation in expected
            if (problem := expectation.unmet(situation)) is not None
        ]


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
