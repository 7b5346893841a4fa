"""The composition root: every channel, cell, actor and adaptor, wired in one place.

uevents -> udev_watcher ----+                  +-> looks cell   -> sysfs_inspector -> inbox
/sys    -> sysfs_inspector -+-> inbox -> REGISTRY -> plugin cells -> plugins -> kubelet
kubelet -> kubelet_watcher -+     step()       +-> state cell   -> whoever wants to know
gRPC    -> InboxCaller -----+                  +-> replies      -> gRPC
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from gpuactors import limits
from gpuactors.actors import kubelet_watcher, plugin, registry, sysfs_inspector, udev_watcher
from gpuactors.actors.caller import InboxCaller
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.concurrency.replies import Replies
from gpuactors.concurrency.supervise import RestartPolicy, supervise
from gpuactors.config import Config
from gpuactors.core.effects import Answer, Level, Say
from gpuactors.core.events import Event, ShutdownRequested
from gpuactors.core.model import NodeState, Settings
from gpuactors.core.snapshot import project
from gpuactors.core.step import initial_state
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.reader import ThreadedReader
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.uevents import open_uevents
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.observe.log import get_logger
from gpuactors.ports import HostReader, Kubelet, OpenUevents

log = get_logger()

_POLICY = RestartPolicy(
    max_failures=limits.RESTART_MAX_FAILURES,
    within_s=limits.RESTART_WITHIN_S,
    backoff_initial_s=limits.RESTART_BACKOFF_INITIAL_S,
    backoff_max_s=limits.RESTART_BACKOFF_MAX_S,
)


@dataclass(frozen=True, slots=True)
class Outside:
    """Everything that the daemon reaches outside itself; the simulation brings its own."""

    host: HostReader
    open_uevents: OpenUevents
    kubelet: Kubelet


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon, for whoever started it."""

    state: LatestReader[NodeState]
    stop: Callable[[], None]
    """Asks it to stop: calls in flight finish, streams end, sockets are removed."""


def settings_of(config: Config) -> Settings:
    """What of the configuration the core needs."""
    return Settings(
        selectors=config.selectors,
        resync_interval_s=config.resync_interval_s,
        pre_start_gate=config.pre_start_gate,
    )


def sysfs_of(config: Config) -> SysfsReader:
    """The reader of the host's files. Raises `ports.HostError` if the pci.ids file that was named cannot be read."""
    root = HostRoot(str(config.host_root))
    return SysfsReader(root, config.selectors, PciIds.open(config.pci_ids, root))


def outside_of(config: Config) -> Outside:
    """The real outside. Raises `ports.HostError`."""
    return Outside(
        host=ThreadedReader(sysfs_of(config)),
        open_uevents=open_uevents(config.uevents),
        kubelet=UnixKubelet(str(config.kubelet_dir)),
    )


async def run(config: Config, *, task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED) -> None:
    """Runs the daemon against the real outside until it is stopped or cancelled."""
    await run_daemon(settings_of(config), outside_of(config), task_status=task_status)


async def run_until_signal(config: Config) -> None:
    """As `run`, until SIGTERM or SIGINT."""
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            daemon: Daemon = await nursery.start(_run_and_end, config, nursery.cancel_scope)
            log.info("daemon.started", pid=os.getpid(), kubelet_dir=str(config.kubelet_dir))
            async for _ in signals:
                daemon.stop()


async def _run_and_end(
    config: Config, scope: trio.CancelScope, *, task_status: trio.TaskStatus[Daemon]
) -> None:
    await run(config, task_status=task_status)
    scope.cancel()


async def run_daemon(
    settings: Settings,
    outside: Outside,
    *,
    say: Callable[[Say], None] | None = None,
    task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs the daemon against any outside until it is stopped or cancelled.

    Raises whatever the registry raises (a bug), and `ActorBrokenError` when another actor fails again and again.
    """
    state = initial_state(settings)
    outputs = project(state)
    # The worst case of the inbox is reasoned in limits.py. Producers wait when it is full, the registry never sends.
    post, inbox = trio.open_memory_channel[Event](limits.INBOX_EVENTS)
    replies: Replies[Answer] = Replies()
    cells = registry.Cells(looks=Latest(outputs.looks), plugins=Latest({}), state=Latest(state))
    ports = plugin.PluginPorts(
        kubelet=outside.kubelet,
        caller=InboxCaller(post, replies),
        inbox=post,
        pre_start=settings.pre_start_gate,
        on_failure=lambda name, exc: log.error("actor.failed", actor=name, exc_info=exc),
    )

    async with trio.open_nursery() as nursery:

        def actor(name: str, body: Callable[[], Awaitable[None]]) -> None:
            nursery.start_soon(supervise, name, body, _POLICY, _restarting)

        async def plugins() -> None:
            await plugin.run_all(cells.plugins.subscribe(), ports)
            nursery.cancel_scope.cancel()

        async def stop() -> None:
            await post.send(ShutdownRequested())
            await trio.sleep(limits.STOP_DEADLINE_S)
            log.warning("daemon.stopped_late", after_s=limits.STOP_DEADLINE_S)
            nursery.cancel_scope.cancel()

        nursery.start_soon(registry.run, state, inbox, cells, replies, say or say_in_log)
        nursery.start_soon(plugins)
        actor("sysfs_inspector", lambda: sysfs_inspector.run(cells.looks.subscribe(), outside.host, post))
        actor("udev_watcher", lambda: udev_watcher.run(outside.open_uevents, post))
        actor("kubelet_watcher", lambda: kubelet_watcher.run(outside.kubelet, post))
        task_status.started(Daemon(cells.state.subscribe(), lambda: nursery.start_soon(stop)))


def say_in_log(line: Say) -> None:
    """One line of the core in the log."""
    match line.level:
        case Level.DEBUG:
            log.debug(line.name, **line.fields)
        case Level.INFO:
            log.info(line.name, **line.fields)
        case Level.WARNING:
            log.warning(line.name, **line.fields)
        case Level.ERROR:
            log.error(line.name, **line.fields)


def _restarting(name: str, exc: Exception, wait_s: float) -> None:
    log.error("actor.restarting", actor=name, wait_s=round(wait_s, 2), exc_info=exc)
