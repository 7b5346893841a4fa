"""Reads the facts that the checks judge: the only I/O of `gpuactors doctor`. Nothing is written, no device is opened.

Each read has a deadline, after which the fact is unknown and the rest is still checked: a sysfs or a kubelet that hangs
is what an operator calls the doctor for. The terminal names a read that takes long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, final

import trio

from gpuactors import limits
from gpuactors.cli.doctor import settings
from gpuactors.cli.doctor.checks.daemon import is_unsettled
from gpuactors.cli.doctor.facts import (
    ApiServer,
    Claims,
    Devices,
    Facts,
    Known,
    KubeVirt,
    ModelNames,
    NewerCheckpoint,
    NoDaemon,
    Place,
    State,
    TheirFile,
    Unknown,
    offers_by_both,
    wants_claims,
)
from gpuactors.cli.inspect.own import assessed
from gpuactors.cli.progress import Progress
from gpuactors.config import Config, Resolved
from gpuactors.control.client import NoDaemonError, Running, read_status
from gpuactors.control.path import path_problem, socket_path
from gpuactors.core.gpus.device_classes import DeviceClass
from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.values.domain import NAMESPACES, DomainUid, ImexFacts
from gpuactors.core.values.inventory import is_selected, named
from gpuactors.core.values.mediated import HostPart, functions_of
from gpuactors.core.values.model import PciFunction, ResourceName
from gpuactors.core.values.own_resources import resource_of
from gpuactors.daemon.about import node_of
from gpuactors.daemon.app import sysfs_of
from gpuactors.host import pci_ids, preflight, runtime, variants, vfio
from gpuactors.host.boot import boot_id
from gpuactors.host.egm import EgmReader
from gpuactors.host.pod_cgroups import PodCgroups
from gpuactors.host.reader import ThreadedReader
from gpuactors.host.root import HostRoot
from gpuactors.host.threads import in_thread
from gpuactors.host.use import SysfsUse
from gpuactors.kubelet import look
from gpuactors.kubelet.dra.plugin import PLUGINS, REGISTRY
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.observe.journal import DIRECTORY
from gpuactors.ports.errors import PortError
from gpuactors.ports.node import LedgerContents, LedgerError, LedgerQuestion

if TYPE_CHECKING:
    from gpuactors.ports.kube import NodeApi

DOCTOR_READ_S: Final = 10.0
"""The deadline of one read of the host, in seconds; each takes milliseconds, and an operator waits before a
terminal."""

DOCTOR_API_S: Final = 20.0
"""The deadline of all requests to the API server, in seconds: two or three, each with API_REQUEST_S of its own."""

T = TypeVar("T")

_NO_DOMAIN: Final = DomainUid("00000000-0000-0000-0000-000000000000")
"""The UID of no domain, read to see whether the API server knows ComputeDomains at all."""


async def gather(
    resolved: Resolved,
    *,
    pre: bool,
    progress: Progress,
    kubevirt: Known[KubeVirt] | None = None,
    before_nvidia: bool = False,
) -> Facts:
    """Read all facts. What may be well a moment later, as kubelet's list in the middle of a change, is read again
    then."""
    daemon = None if pre else await _daemon(resolved.config, progress)
    judged = settings.of_daemon(resolved, daemon) if isinstance(daemon, Running) else settings.own(resolved)
    reading = _Reading(judged.config, progress)
    parts = await reading.parts()
    functions = parts if isinstance(parts, Unknown) else functions_of(parts)
    resources = _resources(judged.config, functions, daemon)
    lists = not isinstance(daemon, Running)
    ledger = await reading.ledger(resources, lists=lists)
    if isinstance(daemon, Running) and is_unsettled(daemon, ledger):
        await trio.sleep(limits.KUBELET_LIST_AGAIN_S)
        daemon, ledger = (
            await _daemon(resolved.config, progress),
            await reading.ledger(resources, lists=False),
        )
    with_claims = wants_claims(judged.config) and not pre
    node = daemon.about.node if isinstance(daemon, Running) else node_of(judged.config)
    api = await reading.api(node) if with_claims else None
    with_classes = offers_by_both(judged.config) and isinstance(api, ApiServer)
    return Facts(
        pre=pre,
        config=judged.config,
        node=node,
        user=os.geteuid(),
        settings=judged.source,
        host=await reading.host(),
        devices=await reading.devices(parts, ledger),
        names=await reading.names(functions),
        directory=await reading.directory(),
        resources=resources,
        ledger=ledger,
        daemon=daemon,
        claims=await reading.claims() if with_claims else None,
        api=api,
        classes=await reading.classes() if with_classes else None,
        imex=await reading.imex() if judged.config.compute_domains != "off" else None,
        state=await reading.state() if not pre else None,
        egms=await reading.egms(),
        variants=await reading.variants(functions),
        egm_module=await reading.egm_module(),
        preflight=await reading.preflight(functions),
        runtimes=await reading.runtimes() if wants_claims(judged.config) else None,
        kubevirt=kubevirt,
        before_nvidia=await reading.their_checkpoints() if before_nvidia else None,
    )


async def read_kubevirt(path: str, progress: Progress) -> Known[KubeVirt]:
    """Read the custom resource KubeVirt from a file; `-` is standard input, which waits for as long as it does."""
    name = "standard input" if path == "-" else path

    def read() -> KubeVirt:
        from gpuactors.cli.doctor import custom_resource  # YAML, which other examinations do not need

        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return custom_resource.parse(text)

    async def in_own_thread() -> KubeVirt:
        return await in_thread(read, name=name)

    try:
        return await progress.during(name, in_own_thread)
    except PortError as exc:
        return Unknown(str(exc))
    except OSError as exc:
        return Unknown(f"{name} cannot be read: {exc.strerror}")
    except ValueError as exc:
        return Unknown(f"{name} is not KubeVirt's custom resource: {exc}")


def _resources(
    config: Config, functions: Known[tuple[PciFunction, ...]], daemon: Known[Running] | NoDaemon | None
) -> frozenset[ResourceName]:
    """Return the resources whose list to request from kubelet: those of this node's devices, and the daemon's."""
    selected = {named(function, config.selectors) for function in _selected(config, functions)}
    served = {r.name for r in daemon.view.resources} if isinstance(daemon, Running) else set()
    return frozenset(selected | {ResourceName(name) for name in served})


def _selected(config: Config, functions: Known[tuple[PciFunction, ...]]) -> list[PciFunction]:
    readable = () if isinstance(functions, Unknown) else functions
    return [function for function in readable if is_selected(config.selectors, function)]


async def _daemon(config: Config, progress: Progress) -> Known[Running] | NoDaemon:
    path = socket_path(str(config.state_dir))

    async def read() -> Running | NoDaemon:
        try:
            return await trio.to_thread.run_sync(read_status, path, abandon_on_cancel=True)
        except NoDaemonError as exc:
            return NoDaemon(str(exc))

    deadline_s = limits.CONTROL_CONNECT_S + 2 * limits.CONTROL_CALL_S  # it has its own, and better words
    return await _known("the running daemon", read, progress, deadline_s)


async def _known(
    what: str, read: Callable[[], Awaitable[T]], progress: Progress, deadline_s: float
) -> Known[T]:
    """Call `read`; return the error's text if it fails."""
    result: Known[T] = Unknown(
        f"{what} could not be read within {deadline_s:g} s: it hangs; look for hung tasks in the kernel's log (dmesg)"
    )
    with trio.move_on_after(deadline_s):
        try:
            result = await progress.during(what, read)
        except PortError as exc:
            result = Unknown(str(exc))
        except OSError as exc:
            result = Unknown(
                f"{what} cannot be read: {exc.strerror}" + f" ({exc.filename})" * bool(exc.filename)
            )
    return result


@final
class _Reading:
    """The reads that depend on the settings."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._root = HostRoot(str(config.host_root))
        self._kubelet_dir = str(config.kubelet_dir)
        self._device_plugin_dir = str(config.device_plugin_dir)

    async def _blocking(self, what: str, call: Callable[[], T]) -> Known[T]:
        """Call in a thread of its own, which is left behind if it hangs."""

        async def read() -> T:
            return await in_thread(call, name=what)

        return await _known(what, read, self._progress, DOCTOR_READ_S)

    # --- the host -----------------------------------------------------------------------------------------

    async def host(self) -> Known[vfio.VfioHost]:
        return await self._blocking("the host's IOMMU, modules and nodes", lambda: vfio.read(self._root))

    async def parts(self) -> Known[tuple[HostPart, ...]]:
        async def read() -> tuple[HostPart, ...]:
            return await ThreadedReader(sysfs_of(self._config)).scan()

        return await _known(f"the PCI bus of {self._root.prefix}", read, self._progress, DOCTOR_READ_S)

    async def devices(
        self, parts: Known[tuple[HostPart, ...]], ledger: Known[LedgerContents]
    ) -> Known[Devices]:
        if isinstance(parts, Unknown):
            return parts
        use = SysfsUse(self._root, "proc" if self._config.holders == "proc" else "passive")

        async def read() -> Devices:
            return Devices(functions_of(parts), await assessed(self._config, parts, _Read(ledger), use))

        deadline_s = 2 * limits.POLL_DEADLINE_S  # a poll has its own, and better words
        return await _known("which GPUs are in use", read, self._progress, deadline_s)

    async def preflight(self, functions: Known[tuple[PciFunction, ...]]) -> Known[preflight.Preflight]:
        selected = [function.address for function in _selected(self._config, functions)]
        return await self._blocking(
            "the host's framebuffer, interrupts and limits", lambda: preflight.read(self._root, selected)
        )

    async def egms(self) -> Known[KnownSets]:
        return await _known("the EGMs", EgmReader(self._root).read, self._progress, DOCTOR_READ_S)

    async def variants(
        self, functions: Known[tuple[PciFunction, ...]]
    ) -> Known[tuple[variants.Variant, ...]]:
        selected = [function.address for function in _selected(self._config, functions)]
        return await self._blocking("the variants of vfio-pci", lambda: variants.read(self._root, selected))

    async def egm_module(self) -> Known[bool]:
        return await self._blocking("the module of EGM", lambda: variants.lacks_egm_module(self._root))

    async def runtimes(self) -> Known[tuple[runtime.Runtime, ...]]:
        return await self._blocking("the container runtime's configuration", lambda: runtime.read(self._root))

    async def names(self, functions: Known[tuple[PciFunction, ...]]) -> Known[ModelNames]:
        selected, selectors = _selected(self._config, functions), self._config.selectors
        models = {(f.vendor, f.device) for f in selected if resource_of(selectors, f) is None}
        used = pci_ids.SHIPPED if self._config.pci_ids is None else Path(self._config.pci_ids)

        def read() -> ModelNames:
            newer = pci_ids.newest_other(used, self._root)
            return ModelNames(
                pci_ids.names_in(used, models), pci_ids.names_in(newer, models) if newer is not None else None
            )

        return await self._blocking("the names of PCI ids", read)

    async def imex(self) -> Known[ImexFacts]:
        from gpuactors.daemon.imex_sources import host_imex  # which other nodes do not need

        imex = host_imex(self._config, _node_of(self._config))
        return await _known("the host's IMEX", imex.read, self._progress, DOCTOR_READ_S)

    # --- kubelet ------------------------------------------------------------------------------------------

    async def directory(self) -> Known[look.PluginDirectory]:
        return await self._blocking(
            "kubelet's directory of device plugins", lambda: look.look(self._device_plugin_dir)
        )

    async def ledger(self, resources: Collection[ResourceName], *, lists: bool) -> Known[LedgerContents]:
        """Read kubelet's ledger. `lists`: no daemon of ours runs, so that no Allocate of ours can be in flight
        (`core/host/asking.py`)."""

        async def read() -> LedgerContents:
            pods = PodCgroups(self._root)
            ledger = KubeletLedger(self._kubelet_dir, self._device_plugin_dir, pods=pods)
            return await ledger.read(LedgerQuestion(resources, lists=lists))

        deadline_s = 2 * limits.LEDGER_DEADLINE_S  # as in `devices`
        return await _known("kubelet's ledger", read, self._progress, deadline_s)

    # --- what claims need ---------------------------------------------------------------------------------

    async def claims(self) -> Known[Claims]:
        config, plugins = self._config, self._plugin_directories()

        def read() -> Claims:
            from gpuactors.acts.checkpoint import newer_checkpoint  # which other nodes do not need
            from gpuactors.acts.disk import RealDisk

            directories = list(plugins.values())
            newer = filter(None, (newer_checkpoint(directory, RealDisk()) for directory in directories))
            return Claims(
                cdi=_place(str(config.cdi_dir)),
                registry=_place(os.path.join(self._kubelet_dir, REGISTRY)),
                plugins=tuple(map(_place, directories)),
                newer=tuple(NewerCheckpoint(path, version) for path, version in newer),
            )

        return await self._blocking("the directories of claims", read)

    def _plugin_directories(self) -> dict[str, str]:
        """Return the directory of each DRA driver that is on, by its name."""
        config, plugins = self._config, os.path.join(self._kubelet_dir, PLUGINS)
        drivers = [config.driver_name] * (config.dra == "on")
        drivers += [config.domains_driver] * (config.compute_domains != "off")
        return {driver: os.path.join(plugins, driver) for driver in drivers}

    async def their_checkpoints(self) -> Known[tuple[TheirFile, ...]]:
        directories = self._plugin_directories()

        def read() -> tuple[TheirFile, ...]:
            from gpuactors.acts.disk import RealDisk  # which other nodes do not need
            from gpuactors.acts.theirs import prepared_by

            boot, disk = boot_id(self._root), RealDisk()
            found = {driver: prepared_by(disk, path, driver, boot) for driver, path in directories.items()}
            return tuple(TheirFile(path, driver, uids) for driver, (path, uids) in found.items())

        return await self._blocking("NVIDIA's checkpoints", read)

    async def api(self, node: str) -> Known[ApiServer]:
        async def read() -> ApiServer:
            return await _ask_api_server(self._config, node)

        return await _known("the API server", read, self._progress, DOCTOR_API_S)

    async def classes(self) -> Known[tuple[DeviceClass, ...]]:
        from gpuactors.daemon.api_client import client_of  # as in `_ask_api_server`
        from gpuactors.kube.device_classes import KubeDeviceClasses

        async def read() -> tuple[DeviceClass, ...]:
            return await KubeDeviceClasses(client_of(self._config)).list_classes()

        return await _known("the DeviceClasses", read, self._progress, DOCTOR_API_S)

    # --- the daemon's own ---------------------------------------------------------------------------------

    async def state(self) -> Known[State]:
        return await self._blocking("the state directory", lambda: _state(str(self._config.state_dir)))


@final
class _Read:
    """A ledger that was read already. Implements `ports.node.LedgerReader`."""

    def __init__(self, ledger: Known[LedgerContents]) -> None:
        self._ledger = ledger

    async def read(self, question: LedgerQuestion) -> LedgerContents:
        """Implement `LedgerReader.read`."""
        await trio.lowlevel.checkpoint()
        if isinstance(self._ledger, Unknown):
            raise LedgerError(self._ledger.reason)
        return self._ledger


def _node_of(config: Config) -> NodeApi | None:
    """Return the port of our Node; None where the API server is not known, which another check reports."""
    from gpuactors.daemon.api_client import client_of
    from gpuactors.kube.nodes import KubeNode

    try:
        return KubeNode(client_of(config), node_of(config))
    except PortError:
        return None


async def _ask_api_server(config: Config, node: str) -> ApiServer:
    """Read from the API server what a daemon with these settings reads first. Raises `PortError`."""
    from gpuactors.daemon.api_client import client_of  # which other nodes do not need
    from gpuactors.kube.domains import KubeDomains
    from gpuactors.kube.nodes import KubeNode
    from gpuactors.kube.slices import KubeSlices

    client = client_of(config)
    await KubeNode(client, node).read()
    driver = config.driver_name if config.dra == "on" else config.domains_driver
    async with KubeSlices(client, driver, node).follow() as slices:
        await anext(slices)
    if config.compute_domains != "off":
        await KubeDomains(client).find_domain(_NO_DOMAIN)
    if config.compute_domains == "on":  # a driver of NVIDIA's that is too old has no cliques
        await KubeDomains(client).read_clique(_NO_DOMAIN, "none", config.domains_namespace or NAMESPACES[0])
    return ApiServer(client.server)


def _place(path: str) -> Place:
    nearest = os.path.abspath(path)
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    writable = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    return Place(path, os.path.isdir(path), nearest, writable)


def _state(directory: str) -> State:
    place = _place(directory)
    problem = path_problem(directory) or ""
    too_long = len(os.fsencode(socket_path(directory))) > limits.SOCKET_PATH_MAX_BYTES
    if place.writable and not place.is_directory and not too_long:
        problem = ""  # the daemon makes it
    disk = os.statvfs(place.nearest)
    return State(place, problem, disk.f_bavail * disk.f_frsize, _size(os.path.join(directory, DIRECTORY)))


def _size(directory: str) -> int:
    """Return the bytes of the files in a directory."""
    size = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):  # removed meanwhile
                size += entry.stat().st_size
    return size
