"""The composition root: every channel, cell, actor and adaptor, wired in one place.

uevents -> udev_watcher ----+                  +-> inspections  -> sysfs_inspector -> inbox
/sys    -> sysfs_inspector -+-> inbox -> REGISTRY -> plugin cells -> plugins -> kubelet
kubelet -> kubelet_watcher -+     step()       +-> state cell   -> other readers
gRPC    -> InboxCaller -----+                  +-> replies      -> gRPC
                                               +-> journal      -> files
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import trio
from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors import VERSION, limits
from gpuactors.actors import (
    hand_over,
    kubelet_watcher,
    plugin,
    pod_resources,
    registry,
    served_keeper,
    sysfs_inspector,
    udev_watcher,
)
from gpuactors.actors.caller import InboxCaller
from gpuactors.actors.raises_only import raises_only
from gpuactors.actors.sets_reader import EgmReads
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.concurrency.replies import Replies
from gpuactors.concurrency.supervise import RestartPolicy, supervise
from gpuactors.config import Config
from gpuactors.control.about import About
from gpuactors.control.dead_signs import dead_signs_json
from gpuactors.control.path import node_socket_path, path_problem
from gpuactors.control.served import ServedFile
from gpuactors.control.unix import UnixControl
from gpuactors.control.vgpu_types import vgpu_types_json
from gpuactors.core.deviceplugin.device_lists import is_ready
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import ShutdownRequested
from gpuactors.core.events.host import UeventsUnavailable
from gpuactors.core.kinds.sets import SetSource
from gpuactors.core.reports.readiness import OFFERS_NOTHING, offers_anything
from gpuactors.core.reports.snapshot import asks_more, project
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.effects import Answer, Level, Log
from gpuactors.core.values.model import PciAddress, ResourceName, Role, Settings
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.daemon import startup_checks
from gpuactors.daemon.about import about, node_of
from gpuactors.grpc_trio import Owner
from gpuactors.host.boot import boot_id
from gpuactors.host.cdi import CdiFiles
from gpuactors.host.egm import EgmReader
from gpuactors.host.mdev import NVIDIAS_MARKERS, PartsReader
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.pod_cgroups import PodCgroups
from gpuactors.host.reader import ThreadedReader
from gpuactors.host.root import BOOT_ID, HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.uevents import open_uevents
from gpuactors.host.use import SysfsUse
from gpuactors.kubelet.dialled import served_endpoints
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.observe.journal import DIRECTORY, FileJournal, Origin
from gpuactors.ports.errors import HostError, StateFileError
from gpuactors.ports.node import (
    CdiReader,
    ConfigSource,
    Control,
    DeadSignsFile,
    FeatureFile,
    HostReader,
    Journal,
    Kubelet,
    LedgerReader,
    OpenUevents,
    Reachable,
    ServedResources,
    SetsReader,
    SpecDirectory,
    Step,
    UseReader,
    VgpuTypesFile,
)
from gpuactors.process import startup_signals
from gpuactors.process.logger import get_logger
from gpuactors.process.resource_exhaustion import shortage

if TYPE_CHECKING:
    from gpuactors.daemon.claims import DraActors, DraOutside
    from gpuactors.daemon.config_file import ConfigFile
    from gpuactors.daemon.domains import DomainActors, DomainsOutside
    from gpuactors.daemon.endpoints import HttpOutside
    from gpuactors.daemon.kube_events import EventsOutside
    from gpuactors.ports.partitions import FabricManager, PartitionIntentsFile

RESTART_BACKOFF_INITIAL_S: Final = 0.1
RESTART_BACKOFF_MAX_S: Final = 10.0
RESTART_MAX_FAILURES: Final = 5
RESTART_WITHIN_S: Final = 60.0
"""If an actor of `_AT_STAKE` fails more often than this, the process exits with code 70 and its supervisor restarts it.
Every other actor is restarted for ever."""

STOP_DEADLINE_S: Final = 8.0
"""From SIGTERM to the end of the process at the latest; Kubernetes kills after 30 s. Ending streams takes DRAIN_S."""

log = get_logger()

_POLICY = RestartPolicy(
    max_failures=None,
    within_s=RESTART_WITHIN_S,
    backoff_initial_s=RESTART_BACKOFF_INITIAL_S,
    backoff_max_s=RESTART_BACKOFF_MAX_S,
)

_AT_STAKE = ("checkpoint_keeper", "hand_over")
"""Prefixes of the names of actors without which the state cannot be trusted: what is on disk, and which daemon serves.
If one keeps failing, the process ends, and the next one reads everything anew (ADR 0013)."""


_LEVELS: Mapping[Level, int] = {
    Level.DEBUG: logging.DEBUG,
    Level.INFO: logging.INFO,
    Level.WARNING: logging.WARNING,
    Level.ERROR: logging.ERROR,
}

_File = TypeVar("_File")
_Value = TypeVar("_Value")
_ReadValue = TypeVar("_ReadValue", covariant=True)


class _Kept(Protocol[_ReadValue]):
    """A file that one daemon of a node writes and the next one reads."""

    async def read(self) -> _ReadValue: ...


class Outside(Struct, frozen=True):
    """Everything that the daemon reaches outside itself; the simulation brings its own."""

    host: HostReader
    use: UseReader
    ledger: LedgerReader
    open_uevents: OpenUevents | None
    """None: uevents are off, and only the periodic scan finds changes."""
    kubelet: Kubelet
    cdi: CdiReader | None = None
    """None: the CDI directory is not read for GPUs that others use."""
    keep_ledger: Callable[[], Awaitable[None]] | None = None
    """`KubeletLedger.keep`; None: each read makes a new connection."""
    control: Control | None = None
    """The control socket; None: there is no hand-over."""
    journal: Journal | None = None
    served: ServedResources | None = None
    """None: a new daemon does not know the names that the last one served."""
    vgpu_types: VgpuTypesFile | None = None
    """None: a new daemon does not know the names of vGPU types that the last one has read."""
    dead_signs: DeadSignsFile | None = None
    """None: a new daemon does not know the dead functions that show no sign of it now."""
    sets: Mapping[SetSource, SetsReader] = field(default_factory=dict)
    """The sources of sets of devices."""
    egms: SetsReader | None = None
    """The EGMs of the host; None: they are not read."""
    partitions: PartitionsOutside | None = None
    """None: no partitions of the NVLink fabric are activated. The fabric manager is one of `sets` as well."""
    dra: DraOutside | None = None
    """None: GPUs are not offered as claims."""
    domains: DomainsOutside | None = None
    """None: compute domains are off."""
    http: HttpOutside | None = None
    """None: there are no HTTP endpoints."""
    features: FeatureFile | None = None
    """None: Node Feature Discovery gets no file."""
    events: EventsOutside | None = None
    """None: no Kubernetes Events are posted."""
    config: ConfigSource | None = None
    """None: the configuration file is not read again."""
    specs: SpecDirectory | None = None
    """None: Allocate answers by device nodes."""


class PartitionsOutside(Struct, frozen=True):
    """The outside of the partitions of an NVLink fabric."""

    file: PartitionIntentsFile
    manager: FabricManager


class Daemon(Struct, frozen=True):
    """A running daemon, for its caller."""

    state: LatestReader[NodeState]
    stop: Callable[[], None]
    """Asks the daemon to stop: calls in flight finish, streams end, sockets are removed."""


def settings_of(config: Config, *, hand_over: bool = False) -> Settings:
    """Return the settings of the core."""
    return Settings(
        selectors=config.selectors,
        resync_interval_s=config.resync_interval_s,
        pre_start_gate=config.pre_start_gate == "on" and config.wait_in == "pre-start",
        device_plugin=config.device_plugin == "on",
        hand_over=hand_over,
        strict=False,
        vgpu_types=config.vgpu_types,
        allocates_by_cdi=_allocates_by_cdi(config),
        waits_in_allocate=config.wait_in == "allocate",
        sets_required=config.sets == "require",
        activates_partitions=config.partition_activation == "on",
    )


def sysfs_of(config: Config) -> PartsReader:
    """Make the reader of sysfs. Raises `ports.errors.HostError` if the configured pci.ids file cannot be read."""
    root = HostRoot(str(config.host_root))
    functions = SysfsReader(root, config.selectors, PciIds.open(config.pci_ids))
    return PartsReader(root, functions, os.path.join(config.kubelet_dir, NVIDIAS_MARKERS))


def outside_of(config: Config, sources: Mapping[str, str], file: ConfigFile | None = None) -> Outside:
    """Make the adaptors. Raises `ports.errors.HostError`."""
    at_start = about(config, sources)
    hanging: Latest[frozenset[Owner]] = Latest(frozenset())
    state_dir = _usable_state_dir(config)
    control = _control_of(state_dir, config, hanging, file.about if file is not None else lambda: at_start)
    kubelet, journal = (
        UnixKubelet(str(config.device_plugin_dir), hanging.subscribe()),
        _journal_of(config) if config.journal == "on" else None,
    )
    of_gpus = _dra_of(config, hanging) if config.dra == "on" else None
    of_domains = _domains_of(config, hanging) if config.compute_domains != "off" else None
    of_claims = (of_gpus, of_domains.claims if of_domains is not None else None)
    reached = tuple(checked for claims in of_claims if claims is not None for checked in claims.reached_by)
    if _allocates_by_cdi(config):
        reached += (_cdi_dir_of(config),)
    return Outside(
        host=ThreadedReader(sysfs_of(config)),
        use=SysfsUse(HostRoot(str(config.host_root)), config.holders),
        ledger=(
            ledger := KubeletLedger(
                str(config.kubelet_dir),
                str(config.device_plugin_dir),
                pods=PodCgroups(HostRoot(str(config.host_root))),
            )
        ),
        keep_ledger=ledger.keep,
        cdi=CdiFiles(HostRoot(str(config.host_root)), str(config.cdi_dir)),
        open_uevents=open_uevents(config.uevents),
        kubelet=kubelet,
        control=control,
        journal=journal,
        served=_served_of(config, state_dir),
        vgpu_types=_of_boot(vgpu_types_json, config, state_dir, _vgpu_types_unkept),
        dead_signs=_of_boot(dead_signs_json, config, state_dir, _dead_signs_unkept),
        egms=EgmReader(HostRoot(str(config.host_root))),
        sets=(sets := _sets_of(config)),
        partitions=_partitions_of(config, sets) if config.partition_activation == "on" else None,
        dra=of_gpus,
        domains=of_domains,
        http=_http_of(config, (kubelet, *dict.fromkeys(reached)), journal)
        if config.http is not None
        else None,
        features=_features_of(config.nfd_file) if config.nfd_file is not None else None,
        events=_events_of(config) if config.events == "on" else None,
        specs=_specs_of(config) if _allocates_by_cdi(config) else None,
        config=file,
    )


def _allocates_by_cdi(config: Config) -> bool:
    return config.allocate_as == "cdi" and config.device_plugin == "on"


def _specs_of(config: Config) -> SpecDirectory:
    from gpuactors.daemon import specs  # as in `_dra_of`

    return specs.directory_of(config)


def _cdi_dir_of(config: Config) -> Reachable:
    from gpuactors.daemon import specs  # as in `_dra_of`

    return specs.reached_by(config)


def _dra_of(config: Config, hanging: Latest[frozenset[Owner]]) -> DraOutside:
    from gpuactors.daemon import claims  # with the API server's client, which only DRA needs

    return claims.outside_of(config, node_of(config), hanging.subscribe())


def _domains_of(config: Config, hanging: Latest[frozenset[Owner]]) -> DomainsOutside:
    from gpuactors.daemon import domains  # as in `_dra_of`

    return domains.outside_of(config, node_of(config), hanging.subscribe())


def _events_of(config: Config) -> EventsOutside:
    from gpuactors.daemon import kube_events  # as in `_dra_of`

    return kube_events.outside_of(config, node_of(config))


def _sets_of(config: Config) -> Mapping[SetSource, SetsReader]:
    sources: dict[SetSource, SetsReader] = {}
    if config.sets_file is not None:
        from gpuactors.host.sets_file import SetsFile  # as in `_dra_of`

        sources[SetSource.OPERATOR] = SetsFile(config.sets_file)
    if config.partition_command is not None:
        from gpuactors.host.partition_command import PartitionCommand  # as in `_dra_of`

        state_dir = config.state_dir if config.partition_activation == "on" else None
        sources[SetSource.FABRIC_MANAGER] = PartitionCommand(config.partition_command, state_dir=state_dir)
    if config.dra == "on" and config.nvswitch == "refuse":
        from gpuactors.host.nvlink_bridges import NvlinkBridges  # as in `_dra_of`

        sources[SetSource.SWITCHES] = NvlinkBridges(HostRoot(str(config.host_root)))
    return sources


def _partitions_of(config: Config, sets: Mapping[SetSource, SetsReader]) -> PartitionsOutside:
    """Make the adaptors for the activation of partitions. Raises `HostError` where no boot of the host is known: an
    intent of another boot must not count."""
    from gpuactors.control.partition_intents import partition_intents_json  # as in `_dra_of`
    from gpuactors.host.partition_command import PartitionCommand

    manager = sets[SetSource.FABRIC_MANAGER]
    assert isinstance(manager, PartitionCommand)
    boot = boot_id(HostRoot(str(config.host_root)))
    return PartitionsOutside(partition_intents_json(str(config.state_dir), boot), manager)


def _features_of(path: Path) -> FeatureFile:
    from gpuactors.observe.nfd import NfdFile  # as in `_dra_of`

    return NfdFile(path)


def _http_of(config: Config, reached_by: tuple[Reachable, ...], journal: FileJournal | None) -> HttpOutside:
    from gpuactors.daemon import endpoints  # with the client library of Prometheus, which only they need

    return endpoints.outside_of(config, reached_by, journal.kept if journal is not None else None)


def _control_of(
    state_dir: str | None, config: Config, hanging: Latest[frozenset[Owner]], about: Callable[[], About]
) -> UnixControl:
    plugins = str(config.device_plugin_dir)
    return UnixControl(
        state_dir,
        hanging,
        device_plugin_dir=plugins,
        endpoints=partial(served_endpoints, plugins),
        about=about,
    )


def _served_of(config: Config, state_dir: str | None) -> ServedFile:
    nodes = os.path.dirname(node_socket_path(str(config.device_plugin_dir)))
    return ServedFile(*filter(None, (nodes, state_dir)))


def _of_boot(
    make: Callable[[str, str], _File], config: Config, state_dir: str | None, unkept: Callable[[str], None]
) -> _File | None:
    """Make a file of this boot; None without a state directory, and where no boot of the host is known."""
    try:
        boot = boot_id(HostRoot(str(config.host_root)))
    except HostError as exc:
        unkept(str(exc))
        return None
    return make(state_dir, boot) if state_dir is not None else None


def _usable_state_dir(config: Config) -> str | None:
    """Make the state directory if it is missing, and return it; log and return None if it is not usable."""
    state_dir = str(config.state_dir)
    with suppress(OSError):
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
    if (problem := path_problem(state_dir)) is not None:
        log.warning("control.unavailable", reason=problem)
        return None
    return state_dir


def _journal_of(config: Config) -> FileJournal:
    """Make the flight recorder, which logs its own failures to write."""
    boot = ""
    with suppress(OSError), open(BOOT_ID, encoding="ascii") as file:
        boot = file.read(64).strip()
    origin = Origin(
        version=VERSION,
        run=os.urandom(8).hex(),
        boot=boot,
        pid=os.getpid(),
        node=node_of(config),
    )
    return FileJournal(str(config.state_dir / DIRECTORY), origin)


async def run(
    config: Config,
    sources: Mapping[str, str] | None = None,
    file: ConfigFile | None = None,
    *,
    task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the daemon on this node until it is stopped or cancelled. `sources` as in `about`; `file`: the configuration
    file, if it is read again."""
    outside = outside_of(config, sources or {}, file)
    settings = settings_of(config, hand_over=outside.control is not None)
    await run_daemon(settings, outside, task_status=task_status)


async def run_until_signal(
    config: Config, sources: Mapping[str, str], file: ConfigFile | None = None
) -> None:
    """Call `run` until a signal stops it: SIGTERM, SIGINT, SIGQUIT or SIGHUP.

    Raises `AbsentError` if a required part of the node was missing for its bound.
    """
    # Around the nursery: until the last socket is removed no signal may have its default effect.
    with trio.open_signal_receiver(*startup_signals.handled()) as signals:
        startup_signals.hand_over()
        async with trio.open_nursery() as nursery:
            daemon: Daemon = await nursery.start(_run_and_end, config, sources, file, nursery.cancel_scope)
            nursery.start_soon(startup_checks.await_host, sysfs_of(config), daemon.state)
            nursery.start_soon(startup_checks.await_kubelet_directory, str(config.device_plugin_dir))
            log.info(
                "daemon.started",
                pid=os.getpid(),
                kubelet_dir=str(config.kubelet_dir),
                device_plugin_dir=str(config.device_plugin_dir),
            )
            if not offers_anything(daemon.state.value):
                log.warning("daemon.offers_nothing", reason=OFFERS_NOTHING)
            async for number in signals:
                name = signal.Signals(number).name
                if number in startup_signals.STOPPING:
                    log.info("signal.received", signal=name)
                    daemon.stop()
                else:
                    log.info("signal.ignored", signal=name, reason="this daemon ignores it")


async def _run_and_end(
    config: Config,
    sources: Mapping[str, str],
    file: ConfigFile | None,
    scope: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[Daemon],
) -> None:
    await run(config, sources, file, task_status=task_status)
    scope.cancel()


async def run_daemon(
    settings: Settings,
    outside: Outside,
    *,
    log_line: Callable[[Log], None] | None = None,
    task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the daemon with any adaptors until it is stopped or cancelled.

    Raises any exception of the registry (a bug), and `ActorBrokenError` if an actor of `_AT_STAKE` keeps failing.
    """
    claim_settings = outside.dra.settings if outside.dra is not None else None
    gpu_settings = outside.dra.gpus if outside.dra is not None else None
    domain_settings = outside.domains.settings if outside.domains is not None else None
    state = initial_state(
        settings,
        await _served_before(outside),
        claim_settings,
        domain_settings,
        gpu_settings,
        await _vgpu_types_before(outside),
        await _dead_signs_before(outside),
    )
    outputs = project(state)
    # The worst case of the inbox is in limits.py. Producers wait when it is full, the registry never sends.
    post, inbox = trio.open_memory_channel[Event](limits.INBOX_EVENTS)
    replies: Replies[Answer] = Replies()
    cells = registry.Cells(
        inspections=Latest(outputs.inspections, asks_more),
        ledger=Latest(outputs.ledger),
        claims=registry.ClaimCells.of(outputs.claims) if outputs.claims is not None else None,
        domains=registry.DomainCells.of(outputs.domains) if outputs.domains is not None else None,
        partitions=Latest(outputs.partitions) if outputs.partitions is not None else None,
        take_over=Latest(outputs.take_over),
        plugins=Latest({}),
        state=Latest(state),
        role=Latest(state.daemon.role),
        served=Latest(None),
        vgpu_types=Latest(None),
        dead_signs=Latest(None),
        specs=Latest(None),
    )
    http = outside.http
    ended = http.meter.called if http is not None else None
    caller = InboxCaller(post, replies, ended)
    ports = plugin.PluginPorts(
        kubelet=outside.kubelet,
        caller=caller,
        inbox=post,
        pre_start=settings.pre_start_gate,
        on_failure=lambda name, exc: log.error("actor.failed", actor=name, exc_info=exc),
    )

    running: Latest[frozenset[ResourceName]] = Latest(frozenset())
    egms = EgmReads(outside.egms, post)
    plugins_of_claims = list(_plugins_of_claims(outside, cells, post, caller, egms))

    async with trio.open_nursery() as nursery:

        def restarting(name: str, exc: Exception, wait_s: float) -> None:
            if http is not None:
                http.meter.restarted(name)
            _restarting(name, exc, wait_s)

        def actor(name: str, body: Callable[[], Awaitable[None]]) -> None:
            at_stake = name.startswith(_AT_STAKE)
            policy = replace(_POLICY, max_failures=RESTART_MAX_FAILURES) if at_stake else _POLICY
            nursery.start_soon(supervise, name, body, policy, restarting, _is_shortage)

        async def plugins() -> None:
            await plugin.run_all(cells.plugins.subscribe(), ports, running)
            for served in plugins_of_claims:
                await served.withdrawn()
            nursery.cancel_scope.cancel()

        async def stop() -> None:
            await post.send(ShutdownRequested())
            passes_on = plugins_of_claims and cells.role.value is Role.HANDED_OVER
            deadline_s = limits.STOP_HANDED_OVER_S if passes_on else STOP_DEADLINE_S
            await trio.sleep(deadline_s)
            log.warning("daemon.stopped_late", after_s=deadline_s)
            nursery.cancel_scope.cancel()

        journal = outside.journal
        record = _recorder(journal, http)
        nursery.start_soon(registry.run, state, inbox, cells, replies, log_line or write_log, record)
        nursery.start_soon(plugins)
        for source, reader in outside.sets.items():
            from gpuactors.actors import sets_reader  # as in `_dra_of`

            first = await sets_reader.observed(source, reader)
            await post.send(first)  # before every other event: no call is answered without the sets
            if source is SetSource.FABRIC_MANAGER and outside.partitions is not None:
                continue  # the partition worker reads them again
            actor("sets_reader", partial(sets_reader.run, reader, first, post))
        await egms.read()
        if outside.egms is not None:
            actor("egm_reader", egms.run)
        if (fabric := outside.partitions) is not None and cells.partitions is not None:
            from gpuactors.actors import partition_worker  # as in `_dra_of`

            orders = cells.partitions.subscribe()
            actor("partition_worker", lambda: partition_worker.run(orders, fabric.file, fabric.manager, post))
        scans = trio.Event()

        async def inspect_host() -> None:
            await scans.wait()
            wanted = cells.inspections.subscribe()
            await sysfs_inspector.run(wanted, outside.host, outside.use, post, egms.read)

        actor("sysfs_inspector", inspect_host)
        if (uevents := outside.open_uevents) is not None:
            actor("udev_watcher", lambda: udev_watcher.run(uevents, post, scans, egms.changed))
        else:
            await post.send(UeventsUnavailable("switched off (--uevents=off)", scan_begun=False))
            scans.set()
        actor(
            "pod_resources",
            lambda: pod_resources.run(cells.ledger.subscribe(), outside.ledger, post, outside.cdi),
        )
        if (source_of_config := outside.config) is not None:
            from gpuactors.actors import config_watcher  # as in `_dra_of`

            actor("config_watcher", lambda: config_watcher.run(source_of_config, post))
        if outside.keep_ledger is not None:
            actor("ledger_connection", outside.keep_ledger)
        actor("kubelet_watcher", lambda: kubelet_watcher.run(outside.kubelet, post))
        for served in plugins_of_claims:
            served.start(actor)
        if outside.dra is not None and (classes := outside.dra.classes) is not None:
            from gpuactors.daemon import claims  # as in `_dra_of`

            actor("class_reader", lambda: claims.read_classes(classes, cells.state.subscribe()))
        if journal is not None:
            actor("journal", journal.run)
        if http is not None:
            from gpuactors.daemon import endpoints  # as in `_dra_of`

            actor(
                "http", lambda: endpoints.serve(http, cells.state.subscribe(), cells.role.subscribe(), post)
            )
        if (features := outside.features) is not None:
            from gpuactors.actors import feature_keeper  # as in `_dra_of`

            keeping = feature_keeper.FeaturePorts(features, _features_unwritten, time.time)
            actor("feature_keeper", lambda: feature_keeper.run(cells.state.subscribe(), keeping))
        if (events := outside.events) is not None:
            from gpuactors.daemon import kube_events  # as in `_dra_of`

            actor("event_poster", lambda: kube_events.post(events, cells.state.subscribe()))
        if outside.control is not None:
            handing = hand_over.HandOverPorts(
                control=outside.control,
                state=cells.state.subscribe(),
                ready=cells.take_over.subscribe(),
                running=running.subscribe(),
                inbox=post,
                served=lambda: _served_before(outside),
                vgpu_types=lambda: _vgpu_types_before(outside),
                dead_signs=lambda: _dead_signs_before(outside),
                on_problem=lambda reason: log.warning("control.unavailable", reason=reason),
                on_blocked=lambda reason: log.warning("hand_over.blocked", reason=reason),
            )
            actor("hand_over", lambda: hand_over.run(handing))
        else:
            nursery.start_soon(_log_serving, cells.state.subscribe(), log_line or write_log)
        if (directory := outside.specs) is not None:
            from gpuactors.actors import spec_keeper  # as in `_dra_of`

            actor("spec_keeper", lambda: spec_keeper.run(cells.specs.subscribe(), directory, post))
        if (file := outside.served) is not None:
            actor("served_keeper", lambda: served_keeper.run(cells.served.subscribe(), file, _served_unkept))
        if (types := outside.vgpu_types) is not None:
            actor(
                "vgpu_keeper",
                lambda: served_keeper.run(cells.vgpu_types.subscribe(), types, _vgpu_types_unkept),
            )
        if (signs := outside.dead_signs) is not None:
            actor(
                "signs_keeper",
                lambda: served_keeper.run(cells.dead_signs.subscribe(), signs, _dead_signs_unkept),
            )
        task_status.started(Daemon(cells.state.subscribe(), lambda: nursery.start_soon(stop)))


def _plugins_of_claims(
    outside: Outside,
    cells: registry.Cells,
    inbox: trio.MemorySendChannel[Event],
    caller: InboxCaller,
    egms: EgmReads,
) -> Iterator[DraActors | DomainActors]:
    """Yield the actors of each DRA driver that is on; imported as in `_dra_of`."""
    if outside.dra is not None and cells.claims is not None:
        from gpuactors.daemon import claims

        yield claims.DraActors(outside.dra, cells.claims, caller, inbox, read_egms=egms.read)
    if outside.domains is not None and cells.domains is not None:
        from gpuactors.daemon import domains

        yield domains.DomainActors(outside.domains, cells.domains, caller, inbox)


async def _served_before(outside: Outside) -> Mapping[ResourceName, frozenset[str]]:
    """Read the resources that this node's daemons have served until now, and their models."""
    return await _kept(outside.served, "served_keeper", {}, _served_unkept)


async def _vgpu_types_before(outside: Outside) -> Mapping[PciAddress, CardTypes]:
    """Read the names of vGPU types that this node's daemons have read until now."""
    return await _kept(outside.vgpu_types, "vgpu_keeper", {}, _vgpu_types_unkept)


async def _dead_signs_before(outside: Outside) -> DeadSigns:
    """Read the signs of dead functions that this node's daemons have kept until now."""
    return await _kept(outside.dead_signs, "signs_keeper", {}, _dead_signs_unkept)


async def _kept(
    file: _Kept[_Value] | None, keeper: str, nothing: _Value, unkept: Callable[[str], None]
) -> _Value:
    """Read what the keeper has written, also that of another daemon. A file that cannot be read has nothing."""
    try:
        with raises_only(StateFileError, keeper):
            return await file.read() if file is not None else nothing
    except StateFileError as exc:
        unkept(str(exc))
        return nothing


def _dead_signs_unkept(reason: str) -> None:
    log.warning("dead_signs.unkept", reason=reason)


def _vgpu_types_unkept(reason: str) -> None:
    log.warning("vgpu_types.unkept", reason=reason)


def _served_unkept(reason: str) -> None:
    log.warning("served.unkept", reason=reason)


def _features_unwritten(reason: str) -> None:
    log.warning("features.unwritten", reason=reason)


async def _log_serving(state: LatestReader[NodeState], log_line: Callable[[Log], None]) -> None:
    """Log `daemon.serving` once the first list is ready, which the hand-over does if there is a control socket."""
    while not is_ready(state.value):
        await state.receive()
    fields = {"predecessor": "none was asked, as there is no control socket"}
    log_line(Log(Level.INFO, "daemon.serving", fields))


def write_log(line: Log) -> None:
    """Write one line of the core to the log."""
    log.write(_LEVELS[line.level], line.name, line.fields)


def _is_shortage(exc: Exception) -> bool:
    return shortage(exc) is not None


def _recorder(journal: Journal | None, http: HttpOutside | None) -> Callable[[Step], None] | None:
    """Return the recorder of the registry's steps: the journal, the metrics, both or none."""
    recorders = [*([journal.record] if journal else []), *([http.meter.stepped] if http else [])]
    if len(recorders) < 2:
        return recorders[0] if recorders else None

    def record(step: Step) -> None:
        for recorder in recorders:
            recorder(step)

    return record


def _restarting(name: str, exc: Exception, wait_s: float) -> None:
    if (reason := shortage(exc)) is not None:
        log.warning("actor.waiting", actor=name, wait_s=round(wait_s, 2), reason=reason)
        return
    log.error("actor.restarting", actor=name, wait_s=round(wait_s, 2), exc_info=exc)
