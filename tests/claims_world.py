"""A daemon that serves claims, whole, on a fake node in memory that outlives it: kernel, disk, API server.

The daemon is the real one (`app.run_daemon`) on trio's mock clock, with its own adaptors for the API server, the disk
and the drivers. Its calls come from `Kubelet`, as from the DRA plugin's gRPC handlers. Whatever it writes, to the disk
or to sysfs, is counted in one row (`FakeDisk.operations`), and it can be killed before any of these operations.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace

from gpuactors.acts.blocking_runner import StoredCheckpoint, StoredFiles
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.theirs import TheirClaims
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.state.claims import ClaimSettings
from gpuactors.core.values.claim import ClaimName, ClaimUid, DeviceHealth, Prepared, Unprepared
from gpuactors.core.values.effects import Log
from gpuactors.core.values.model import DeviceList, ResourceName, Settings
from gpuactors.core.values.selector import parse_selector
from gpuactors.daemon import app
from gpuactors.daemon.claims import DraOutside
from gpuactors.host.mdev import PartsReader
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.places import Places
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.client import ApiClient
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.ports.claims import ClaimCaller, ClaimsKubelet, PluginStatus
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import Caller, Endpoint, LedgerContents, LedgerQuestion, Sockets
from gpuactors_simulation.host.kernel import FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.memory.acts import MemoryPersistence, MemoryWrites, NoLock, inline
from tests.memory.disk import FakeDisk, StoppedError
from tests.memory.kube import MemoryApiServer
from tests.support.inline_host import InlineReader, InlineUse
from tests.support.successors import FakeSuccessor

DRIVER: Final = "gpu.nvidia.com"
NODE: Final = "node-1"
CDI_DIR: Final = "/var/run/cdi"
PLUGINS: Final = "/var/lib/kubelet/plugins"

SETTINGS: Final = Settings((parse_selector("vendor=10de,class=03"),), 300.0, True)


class ClaimsWorld:
    """One node, over the lives of its daemons."""

    driver = DRIVER

    def __init__(self, directory: Path, specs: Iterable[PciSpec]) -> None:
        self._directory = directory
        self._specs = tuple(specs)
        self._boots = 0
        self.disk = FakeDisk(in_memory=("/run", "/var/run"))
        for made in (plugin_dir(self.driver), "/var/run"):
            self.disk.put(f"{made}/.made", b"")
        self.api = FakeApiServer()
        self.api.add_node(NODE)
        self.log: list[Log] = []
        self.boot()

    def boot(self) -> None:
        """The node starts: each function is on the driver that the boot gives it."""
        self._boots += 1
        root = self._directory / f"boot-{self._boots}"
        root.mkdir()
        self.tree = HostTree(root)
        self.kernel = FakeKernel(self.tree)
        for spec in self._specs:
            self.kernel.plug(spec)
        self.writes = MemoryWrites(self.kernel, before=self.disk.count)

    def swap_card(self, spec: PciSpec) -> None:
        """At the next boot this function is at its address."""
        self._specs = tuple(spec if known.address == spec.address else known for known in self._specs)

    @property
    def drivers(self) -> dict[str, str | None]:
        """What each function is bound to."""
        return {spec.address: self.tree.driver_of(spec.address) for spec in self._specs}

    @property
    def at_home(self) -> dict[str, str | None]:
        """The same as the boot gives it."""
        return {spec.address: spec.driver for spec in self._specs}

    def left_over(self, *, but: Collection[str] = ("gpuactors-checkpoint.json", ".made")) -> list[str]:
        """The files that are there, without the checkpoint."""
        return [path for path in self.disk.files if Path(path).name not in but]

    def overrides(self) -> list[str]:
        """The functions whose `driver_override` is set."""
        return [spec.address for spec in self._specs if self.kernel.override(spec.address).strip()]

    def claim(self, name: str, *addresses: str) -> ClaimName:
        """A claim that the scheduler has given these devices, one for each request."""
        requests = [
            {"name": f"gpu-{i}", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}
            for i, _ in enumerate(addresses)
        ]
        made = self.api.add_claim(
            {"metadata": {"namespace": "default", "name": name}, "spec": {"devices": {"requests": requests}}}
        )
        results = [
            {"request": f"gpu-{i}", "driver": DRIVER, "pool": NODE, "device": device_of(a)}
            for i, a in enumerate(addresses)
        ]
        self.api.set_claim_status("default", name, {"allocation": {"devices": {"results": results}}})
        return ClaimName("default", name, ClaimUid(made["metadata"]["uid"]))

    # --- the daemon -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[ClaimCaller]:
        """A daemon, as long as the context is open: then it is killed. Raises StoppedError if it was killed before
        an operation; whoever waits for an answer of it is cancelled then."""
        api, kubelet = MemoryApiServer(self.api), _Kubelet()
        outside = self.with_claims(self._without_claims(), api.client(), kubelet)
        killed = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(api.run)

                async def run() -> None:
                    nonlocal killed
                    try:
                        await app.run_daemon(SETTINGS, outside, log_line=self.log.append)
                    except BaseExceptionGroup as group:
                        if group.split(StoppedError)[0] is None:
                            raise
                        killed = True
                        nursery.cancel_scope.cancel()

                nursery.start_soon(run)
                yield await kubelet.calls()
                nursery.cancel_scope.cancel()
        finally:
            self.disk.restart()
            self.writes.settle()
        if killed:
            raise StoppedError("the daemon")

    def _without_claims(self) -> app.Outside:
        root = HostRoot(str(self.tree.root))
        return app.Outside(
            host=InlineReader(PartsReader(root, SysfsReader(root, SETTINGS.selectors, PciIds.open(None)))),
            use=InlineUse(HostRoot(str(self.tree.root)), "passive"),
            ledger=_Ledger(),
            open_uevents=None,
            kubelet=_NoKubelet(),
        )

    def with_claims(self, outside: app.Outside, client: ApiClient, kubelet: ClaimsKubelet) -> app.Outside:
        """The outside of a daemon that serves claims of GPUs."""
        binder = SysfsBinder(
            HostRoot(str(self.tree.root)), self.writes, MemoryPersistence(self.kernel), inline
        )
        return replace(outside, dra=replace(self.claims_of(client, kubelet), binder=binder))

    def claims_of(self, client: ApiClient, kubelet: ClaimsKubelet) -> DraOutside:
        """The outside of the driver's claims, without what binds devices."""
        driver, directory = self.driver, plugin_dir(self.driver)
        files = ClaimFiles(self.disk, driver=driver, cdi_dir=CDI_DIR, plugin_dir=directory)
        theirs = TheirClaims(
            self.disk, driver=driver, cdi_dir=CDI_DIR, places=Places(HostRoot(str(self.tree.root)))
        )
        checkpoint = CheckpointFile(self.disk, directory, f"boot-{self._boots}", theirs)
        return DraOutside(
            settings=ClaimSettings(driver, NODE),
            store=StoredCheckpoint(checkpoint, inline, NoLock()),
            files=StoredFiles(files, inline, NoLock()),
            touched=None,
            binder=None,
            claims=KubeClaims(client, driver, NODE),
            node=KubeNode(client, NODE),
            slices=KubeSlices(client, driver, NODE),
            kubelet=kubelet,
        )


def plugin_dir(driver: str) -> str:
    """The driver's directory below kubelet's `plugins`."""
    return f"{PLUGINS}/{driver}"


def device_of(address: str) -> str:
    return f"gpu-{address.replace(':', '-').replace('.', '-')}"


def crash_points(nth: int) -> Iterator[int]:
    """The operations at which the daemon is killed: each with `EVERY_ERROR=1` (`just failures`), else one in eight, for
    the `nth` of eight plays those that the others leave out."""
    return itertools.count() if os.environ.get("EVERY_ERROR") else itertools.count(nth % 8, 8)


async def prepared(caller: ClaimCaller, claim: ClaimName) -> Prepared:
    answer = await caller.prepare(claim)
    assert isinstance(answer, Prepared), answer
    return answer


async def unprepared(caller: ClaimCaller, claim: ClaimName) -> None:
    answer = await caller.unprepare(claim)
    assert isinstance(answer, Unprepared), answer


class _Kubelet:
    """Implements `ports.claims.ClaimsKubelet`: takes the caller, and calls it directly."""

    async def unreachable(self) -> tuple[str, ...]:
        return ()

    def __init__(self) -> None:
        self.successor = FakeSuccessor()
        self._caller: ClaimCaller | None = None
        self._served = trio.Event()

    async def calls(self) -> ClaimCaller:
        """As soon as claims are served."""
        await self._served.wait()
        assert self._caller is not None
        return self._caller

    @asynccontextmanager
    async def serve_claims(
        self,
        caller: ClaimCaller,
        health: LatestReader[tuple[DeviceHealth, ...]],
        told: Callable[[PluginStatus], None],
    ) -> AsyncIterator[_Endpoint]:
        self._caller = caller
        self._served.set()
        yield _Endpoint()


class _Endpoint:
    """Implements `ports.claims.ClaimsEndpoint`."""

    names = ("dra.sock", "reg.sock")

    async def lost(self) -> None:
        await trio.sleep_forever()

    async def mend(self) -> None:
        raise AssertionError("nothing is lost")

    async def withdraw(self, grace_s: float) -> None:
        await trio.lowlevel.checkpoint()

    async def drain(self, grace_s: float) -> None:
        await trio.lowlevel.checkpoint()


class _NoKubelet:
    """Implements `ports.node.Kubelet`: there is no device plugin socket of kubelet's."""

    async def unreachable(self) -> tuple[str, ...]:
        return ()

    absence = "no kubelet"

    def sockets(self) -> AbstractAsyncContextManager[AsyncIterator[Sockets]]:
        return _never()

    def serve(
        self,
        resource: ResourceName,
        device_lists: LatestReader[DeviceList],
        caller: Caller,
        *,
        pre_start: bool,
    ) -> AbstractAsyncContextManager[Endpoint]:
        raise KubeletError("no kubelet")

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        raise KubeletError("no kubelet")


@asynccontextmanager
async def _never() -> AsyncIterator[AsyncIterator[Sockets]]:
    send, receive = trio.open_memory_channel[Sockets](0)
    async with send:
        yield aiter(receive)


class _Ledger:
    """Implements `ports.node.LedgerReader`: no pod has a device by the device plugin."""

    async def read(self, question: LedgerQuestion) -> LedgerContents:
        await trio.lowlevel.checkpoint()
        return LedgerContents()
