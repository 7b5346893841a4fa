"""Dynamic Resource Allocation, wired: its adaptors, and the actors that carry out what the core wants of claims. Once
for each DRA driver: for GPUs, and for compute domains (`domains.py`).

disk cell   -> checkpoint_keeper -> plugins/<driver>/gpuactors-checkpoint.json -> inbox
reads cell  -> claim_reader      -> API server                       -> inbox
acts' cells -> claim_worker      -> drivers, CDI and metadata files  -> inbox
CDI files   -> cdi_watcher                                           -> inbox
state cell  -> class_reader      -> API server, once                 -> log
offer cell  -> slice_publisher   -> API server                       -> inbox
health cell -> claims_plugin     -> kubelet                          -> inbox

Imported with `--dra on` or `--compute-domains` only: it brings the client of the API server with it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import final

import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.actors import (
    cdi_watcher,
    checkpoint_keeper,
    claim_reader,
    claim_worker,
    claims_plugin,
    class_reader,
    relay,
    slice_publisher,
)
from gpuactors.actors.caller import InboxCaller
from gpuactors.actors.claims_caller import ClaimsCaller
from gpuactors.actors.registry import ClaimCells
from gpuactors.acts.blocking_runner import OneThread, StoredCheckpoint, StoredFiles, in_a_thread
from gpuactors.acts.cdi_watch import MountedDirectory
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.files import MOUNTED, ClaimFiles
from gpuactors.acts.modprobe import Modprobe
from gpuactors.acts.persistenced import Persistenced
from gpuactors.acts.state_lock import StateLock
from gpuactors.acts.theirs import TheirClaims
from gpuactors.acts.writes import ProcessWrites
from gpuactors.concurrency.latest import LatestReader
from gpuactors.config import Config
from gpuactors.core.claims.outputs import ServingWanted
from gpuactors.core.events import Event
from gpuactors.core.events.claims import SlicesPublished
from gpuactors.core.gpus.device_classes import REMEDY, DeviceClass, sentence_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimSettings
from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.prebound import OperatorsList, kernel_ids
from gpuactors.core.values.quote import quoted_name
from gpuactors.core.values.slices import Publication
from gpuactors.daemon.api_client import client_of
from gpuactors.grpc_trio import Owner
from gpuactors.host.boot import boot_id, command_line
from gpuactors.host.places import Places
from gpuactors.host.root import HostRoot
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.client import ApiClient
from gpuactors.kube.device_classes import KubeDeviceClasses
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.kubelet.dra.plugin import PLUGINS, UnixClaims
from gpuactors.ports.claims import (
    CheckpointStore,
    ClaimFileStore,
    ClaimsKubelet,
    DriverBinder,
    PluginStatus,
    TouchedFiles,
)
from gpuactors.ports.kube import ClaimApi, DeviceClassApi, NodeApi, SliceApi
from gpuactors.ports.node import Reachable
from gpuactors.process.logger import get_logger

log = get_logger()


INSTANCE_VARIABLE = "POD_UID"
"""Names this instance beside another one of the same driver, during an update: the pod's UID by the downward API."""


class DraOutside(Struct, frozen=True):
    """Everything that claims reach outside the daemon; the simulation brings its own."""

    settings: ClaimSettings
    store: CheckpointStore
    files: ClaimFileStore
    touched: TouchedFiles | None
    """None: changes of the files by others are not watched."""
    binder: DriverBinder | None
    """None: no claim binds a device."""
    claims: ClaimApi
    node: NodeApi
    slices: SliceApi
    kubelet: ClaimsKubelet
    reached_by: tuple[Reachable, ...] = ()
    """The sockets and mounts that the liveness probe checks."""
    classes: DeviceClassApi | None = None
    """None: DeviceClasses are not read, as no device plugin runs beside these claims."""
    gpus: GpuSettings | None = None
    """The settings of claims of GPUs; None: the defaults."""
    keep_connection: Callable[[], Awaitable[None]] | None = None
    """`ApiClient.keep`; None: each request makes a new connection."""


def outside_of(config: Config, node: str, hanging: LatestReader[frozenset[Owner]] | None) -> DraOutside:
    """Make the adaptors for claims of GPUs. Raises `ports.errors.HostError` if the ID of this boot, the API server's
    address or our credentials cannot be read."""
    root = HostRoot(str(config.host_root))
    settings = ClaimSettings(config.driver_name, node, side_by_side=instance() is not None)
    gpus = GpuSettings(
        _operators_list(config.prebound),
        kernel_ids(command_line(root)),
        nvswitch_allowed=config.nvswitch == "allow",
    )

    def binder(lock: StateLock) -> DriverBinder:
        acts = os.path.join(plugin_dir(config, settings.driver), "acts")
        modprobe = Modprobe(root, in_a_thread) if config.load_modules == "on" else None
        persistence = Persistenced(root, str(config.driver_root))
        return SysfsBinder(root, ProcessWrites(acts, taken=lock.taken), persistence, in_a_thread, modprobe)

    client = client_of(config)
    classes = KubeDeviceClasses(client) if config.device_plugin == "on" else None
    return replace(of_driver(config, settings, client, hanging, binder), gpus=gpus, classes=classes)


def of_driver(
    config: Config,
    settings: ClaimSettings,
    client: ApiClient,
    hanging: LatestReader[frozenset[Owner]] | None,
    binder: Callable[[StateLock], DriverBinder] | None = None,
) -> DraOutside:
    """Make the adaptors for one driver's claims. `binder`: None if no claim binds a device. Raises as `outside_of`."""
    driver, node, directory = settings.driver, settings.pool, plugin_dir(config, settings.driver)
    disk, lock = RealDisk(), StateLock(directory)
    files = ClaimFiles(disk, driver=driver, cdi_dir=str(config.cdi_dir), plugin_dir=directory)
    root, cdi_dir = HostRoot(str(config.host_root)), str(config.cdi_dir)
    other_claims = TheirClaims(disk, driver=driver, cdi_dir=cdi_dir, places=Places(root))
    checkpoint = CheckpointFile(disk, directory, boot_id(root), other_claims)
    kubelet = UnixClaims(str(config.kubelet_dir), driver, instance(), _failed, hanging)
    return DraOutside(
        settings=settings,
        store=StoredCheckpoint(checkpoint, OneThread("checkpoint"), lock),
        files=StoredFiles(files, OneThread("claim files"), lock),
        touched=files,
        binder=binder(lock) if binder is not None else None,
        claims=KubeClaims(client, driver, node),
        node=KubeNode(client, node),
        slices=KubeSlices(client, driver, node),
        kubelet=kubelet,
        reached_by=(kubelet, MountedDirectory(cdi_dir)),
        keep_connection=client.keep,
    )


def instance() -> str | None:
    """Return the name of this instance of the driver; None: it has none, and there can be only one at a time."""
    return os.environ.get(INSTANCE_VARIABLE) or None


def plugin_dir(config: Config, driver: str) -> str:
    """Return the driver's directory below kubelet's `plugins`."""
    return os.path.join(config.kubelet_dir, PLUGINS, driver)


def mounted_dir(config: Config, driver: str) -> str:
    """Return the parent of the directories that containers of the driver's claims mount."""
    return os.path.join(plugin_dir(config, driver), MOUNTED)


def _operators_list(texts: tuple[str, ...]) -> OperatorsList:
    addresses = frozenset(PciAddress(text) for text in texts if text != "all")
    return OperatorsList(addresses, everything="all" in texts)


@final
class DraActors:
    """The actors of one driver's claims."""

    def __init__(
        self,
        outside: DraOutside,
        cells: ClaimCells,
        caller: InboxCaller,
        inbox: trio.MemorySendChannel[Event],
        kind: ClaimsOf = ClaimsOf.GPUS,
        read_egms: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint_if_cancelled,
    ) -> None:
        """`kind`: whose claims they are. `read_egms`: the same as of `claim_worker.run`."""
        self._read_egms = read_egms
        self._kind = kind
        self._outside = outside
        self._cells = cells
        self._inbox = inbox
        self._withdrawn = trio.Event()
        self._withdrawn.set()
        self._registered = trio.Event()
        self._plugin = claims_plugin.ClaimsPorts(
            kubelet=outside.kubelet,
            caller=relay.RelayingCaller(ClaimsCaller(caller, kind), outside.kubelet.successor),
            health=cells.health.subscribe(),
            on_status=self._on_status,
            drain_s=lambda: cells.serving.value.drain_s,
            on_serving=lambda names: log.info(
                "claims.serving", driver=outside.settings.driver, sockets=names
            ),
            on_problem=lambda reason: log.warning("claims.unserved", reason=reason),
            on_failure=_failed,
        )

    def start(self, actor: Callable[[str, Callable[[], Awaitable[None]]], None]) -> None:
        """Start each of them by `actor(name, body)`."""
        outside, cells, inbox = self._outside, self._cells, self._inbox
        driver, kind = outside.settings.driver, self._kind
        suffix = "" if kind is ClaimsOf.GPUS else f" of {kind}"
        publisher = slice_publisher.PublisherPorts(outside.slices, outside.node, self._post_publication)
        actor(
            f"checkpoint_keeper{suffix}",
            lambda: checkpoint_keeper.run(cells.disk.subscribe(), outside.store, outside.files, inbox, kind),
        )
        actor(
            f"claim_reader{suffix}",
            lambda: claim_reader.run(cells.reads.subscribe(), outside.claims, inbox, kind),
        )
        actor(
            f"claim_worker{suffix}",
            lambda: claim_worker.run(
                _acts(cells), outside.binder, outside.files, driver, inbox, kind, self._read_egms
            ),
        )
        if outside.keep_connection is not None:
            actor(f"api_connection{suffix}", outside.keep_connection)
        if (touched := outside.touched) is not None:
            actor(f"cdi_watcher{suffix}", lambda: cdi_watcher.run(touched, inbox, kind))
        actor(
            f"slice_publisher{suffix}",
            lambda: self._publish(publisher),
        )
        actor(f"claims_plugin{suffix}", lambda: self._serve(cells.serving.subscribe()))

    async def withdrawn(self) -> None:
        """Return when kubelet sends this daemon no more claims, not even to pass on, and all calls are answered."""
        await self._withdrawn.wait()

    async def _serve(self, serving_wanted: LatestReader[ServingWanted]) -> None:
        """Serve kubelet while the state wants it."""
        async for serving in serving_wanted:
            if not serving.is_serving:
                continue
            stop, self._withdrawn = trio.Event(), trio.Event()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(claims_plugin.run, self._plugin, stop)
                    while serving_wanted.value.is_serving:
                        await serving_wanted.receive()
                    stop.set()
            finally:
                self._withdrawn.set()

    async def _publish(self, publisher: slice_publisher.PublisherPorts) -> None:
        """Publish slices once kubelet has registered this instance: a claim that is scheduled sooner is not prepared,
        and kubelet retries only after 60 to 90 s. Slices of an earlier daemon stay until then."""
        await self._registered.wait()
        await slice_publisher.run(self._cells.offer.subscribe(), publisher)

    def _on_status(self, status: PluginStatus) -> None:
        if status.registered:
            self._registered.set()
            log.info("claims.registered")
        else:
            log.warning("claims.unregistered", reason=status.error)

    async def _post_publication(self, publication: Publication) -> None:
        await self._inbox.send(SlicesPublished(publication, self._kind))


def _acts(cells: ClaimCells) -> claim_worker.Acts:
    return claim_worker.Acts(
        cells.devices.subscribe(), cells.fitness_check.subscribe(), cells.files.subscribe()
    )


async def read_classes(classes: DeviceClassApi, state: LatestReader[NodeState]) -> None:
    """Log for ever which DeviceClasses claim a resource of the device plugin."""
    await class_reader.run(
        state,
        class_reader.ClassPorts(
            classes=classes,
            on_contested=_contested,
            on_problem=lambda reason: log.info("classes.unread", reason=reason),
        ),
    )


def _contested(device_class: DeviceClass) -> None:
    log.warning(
        "resource.contested",
        resource=quoted_name(device_class.extended_resource or ""),
        device_class=quoted_name(device_class.name),
        reason=f"{sentence_of(device_class)}; {REMEDY}",
    )


def _failed(name: str, exc: Exception) -> None:
    log.error("actor.failed", actor=name, exc_info=exc)
