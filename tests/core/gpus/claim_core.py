"""A core that serves claims, with what is around it: the API server, the disk, and the drivers of the node."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.claims.outputs import CheckpointWanted, ClaimsWanted, claims_wanted
from gpuactors.core.claims.view import view_of
from gpuactors.core.events import Event
from gpuactors.core.events.claims import (
    ActDone,
    ActFailed,
)
from gpuactors.core.events.host import FunctionInspected, HostChanged, HostScanned
from gpuactors.core.gpus.driver import GPUS
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state.claims import ClaimSettings
from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.step import initial_state
from gpuactors.core.values.claim import (
    ActFault,
    AllocatedDevice,
    BoundFunction,
    Claim,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    OriginalDriver,
    Target,
)
from gpuactors.core.values.effects import Answer, Effect, Reply
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction, Settings, Token
from tests.core.builders import SETTINGS, A, allocate_call, gpu
from tests.core.claims.calls_core import CallsCore
from tests.core.claims.on_disk import read_back

DRIVER = "gpu.nvidia.com"
POOL = "node-1"
CLAIM_SETTINGS = ClaimSettings(DRIVER, POOL)

ON_HOST = gpu(A, group=1, driver="nvidia")
PRE_BOUND = gpu(A, group=1)

HELD_BACK = frozenset({"load", "read", "checkpoint", "device", "files", "inspection", "ledger"})
"""What a test may hold back, to answer it itself or never."""


def name(claim: str = "one", uid: str = "") -> ClaimName:
    return ClaimName("default", claim, ClaimUid(uid or f"uid-{claim}"))


def allocated(claim: ClaimName, *addresses: str, admin: bool = False) -> Claim:
    """A claim with these devices, one for each request."""
    results = tuple(
        AllocatedDevice(f"gpu-{i}", POOL, slice_name(DeviceKey(a)), admin_access=admin)
        for i, a in enumerate(addresses)
    )
    return Claim(claim, None, 1, results)


class ClaimCore(CallsCore):
    """`Core` with claims. What surrounds it answers at once, unless it is held back.

    `api` has the claims by namespace and name; `disk` is the checkpoint as it was last written; `functions` are what
    sysfs shows, and change with the acts.
    """

    of = ClaimsOf.GPUS

    def __init__(
        self,
        *functions: PciFunction,
        settings: Settings = SETTINGS,
        gpu_settings: GpuSettings | None = None,
        disk: CheckpointWanted | None = None,
    ) -> None:
        super().__init__(settings, disk)
        self.functions: dict[PciAddress, PciFunction] = {f.address: f for f in functions}
        self.mediated: dict[DeviceKey, MediatedDevice] = {}
        """The mediated devices that sysfs shows."""
        self.acts: list[tuple[Target, PciAddress]] = []
        """Every act on a device that was carried out, by its first function."""
        self.state = initial_state(settings, claim_settings=CLAIM_SETTINGS, gpu_settings=gpu_settings)
        if functions:
            self.scanned()

    def restarted(self, *held_back: str, settings: GpuSettings | None = None) -> ClaimCore:
        """A new process on the same node: it knows what is on disk, and what it sees. Of the old one's acts those that
        are under way are lost."""
        settings = settings or self.state.gpus.settings
        after = ClaimCore(settings=self.state.daemon.settings, gpu_settings=settings, disk=self.disk)
        after.functions, after.api, after.claims = self.functions, self.api, self.claims
        after.mediated = self.mediated
        after.ledger, after.enabled = self.ledger, self.enabled
        after.at, after.tokens, after.held_back = self.at, self.tokens, {*held_back}
        after.scanned()
        return after

    def scanned(self) -> list[Effect]:
        """The scan that is outstanding comes back, with what is there."""
        return self.feed(
            HostScanned(self.scan, tuple(self.functions.values()), tuple(self.mediated.values()))
        )

    def changed(self, *functions: PciFunction) -> list[Effect]:
        """These functions are there now as they are here; a uevent says so of each."""
        for function in functions:
            self.functions[function.address] = function
        return self.feed(*(HostChanged(f.address, None, "bind pci") for f in functions))

    def unplugged(self, *addresses: str) -> list[Effect]:
        """These functions are gone."""
        gone = [PciAddress(a) for a in addresses]
        self.functions = {a: f for a, f in self.functions.items() if a not in gone}
        return self.feed(*(HostChanged(a, None, "remove pci") for a in gone))

    def made(self, *devices: MediatedDevice) -> list[Effect]:
        """These mediated devices are there now as they are here; a uevent says so of each."""
        self.mediated |= {device.key: device for device in devices}
        return self.feed(*(HostChanged(None, None, "bind mdev", device.key) for device in devices))

    def removed(self, *keys: DeviceKey) -> list[Effect]:
        """These mediated devices are gone."""
        self.mediated = {key: device for key, device in self.mediated.items() if key not in keys}
        return self.feed(*(HostChanged(None, None, "remove mdev", key) for key in keys))

    # --- what kubelet does ----------------------------------------------------------------------------------

    def driver(self, address: str) -> str | None:
        return self.functions[PciAddress(address)].driver

    def listed(self, claim: ClaimName, *addresses: str) -> None:
        """Kubelet lists the claim for a pod."""
        self.claims |= {slice_name(DeviceKey(a)): claim.name for a in addresses}

    def allocate(self, *addresses: str) -> Token:
        """Kubelet allocates these by the device plugin API."""
        token = self.token()
        self.feed(allocate_call(*addresses, token=token))
        return token

    def allocation(self, token: Token) -> Answer | None:
        """The answer to an Allocate; None while it waits."""
        return next((e.answer for e in self.effects if isinstance(e, Reply) and e.token == token), None)

    # --- what surrounds it ------------------------------------------------------------------------------------

    @property
    def wanted(self) -> ClaimsWanted:
        return claims_wanted(view_of(self.state, GPUS))

    def _answer(self) -> Event | None:
        if (event := self._claims_answer()) is not None:
            return event
        inspections = self.state.host.inspections
        for address, number in inspections.functions.items():
            if "inspection" in self.held_back:
                break
            found = self.functions.get(PciAddress(address))
            group = (
                ()
                if found is None
                else tuple(f for f in self.functions.values() if f.iommu_group == found.iommu_group)
            )
            physical = {f.physical for f in group if f.physical is not None} - {f.address for f in group}
            read = (*group, *(self.functions[a] for a in sorted(physical & self.functions.keys())))
            device = self.mediated.get(DeviceKey(address))
            return FunctionInspected(number, address, read, (device,) if device is not None else ())
        if "ledger" in self.held_back:
            poll = self.state.host.polls.refresh.outstanding
            return None if poll is None else self.poll_event(poll)
        return super()._answer()

    def _claims_answer(self) -> Event | None:
        wanted = self.wanted
        if wanted.disk.load and not self.state.gpus.claims.loaded and "load" not in self.held_back:
            return read_back(self.disk, self.of)
        if wanted.reads and "read" not in self.held_back:
            return self.read_event(wanted.reads[0])
        if wanted.disk.checkpoint is not None and "checkpoint" not in self.held_back:
            return self.checkpoint_written(wanted.disk.checkpoint)
        if wanted.files and "files" not in self.held_back:
            return ActDone(next(iter(wanted.files.values())).number, driver_kind=ClaimsOf.GPUS)
        if wanted.devices and "device" not in self.held_back:
            return self.act_event(next(iter(wanted.devices.values())))
        return None

    def act_event(self, act: DeviceAct) -> Event:
        """The act is carried out."""
        self.acts.append((act.target, act.functions[0].address))
        bound = []
        for first in act.functions:
            if (known := self.functions.get(first.address)) is None:
                return ActFailed(
                    act.number, f"{first.address} is not there", ActFault.GONE, driver_kind=ClaimsOf.GPUS
                )
            driver = driver_after(known, first, act.target)
            now = on_driver(known, driver)
            self.functions[first.address] = now
            bound.append(as_bound(now))
        return ActDone(act.number, tuple(bound), driver_kind=ClaimsOf.GPUS)


def core_with(*functions: PciFunction, **claims: tuple[str, ...]) -> ClaimCore:
    """A core with these functions; the API server has these claims, each with its GPUs."""
    core = ClaimCore(*functions)
    core.created(*(allocated(name(claim), *addresses) for claim, addresses in claims.items()))
    return core


def as_bound(now: PciFunction) -> BoundFunction:
    """What an act says of a function."""
    return BoundFunction(
        now.address, now.driver, now.iommu_group, None, vfio=now.vfio_bound, presence=now.presence
    )


def driver_after(known: PciFunction, first: OriginalDriver, target: Target) -> str | None:
    if target is Target.VFIO:
        return known.driver if known.vfio_bound else "vfio-pci"
    if first.presence and known.presence not in (0, first.presence):
        return known.driver  # plugged in since
    return known.driver if first.vfio and known.driver is not None else first.driver


def on_driver(function: PciFunction, driver: str | None) -> PciFunction:
    vfio = driver == "vfio-pci"
    nodes = ("/dev/vfio/vfio", f"/dev/vfio/{function.iommu_group}") if vfio else ()
    host_nodes = () if vfio else function.host_nodes
    return replace(function, driver=driver, vfio_bound=vfio, nodes=nodes, host_nodes=host_nodes)
