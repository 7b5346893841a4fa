"""A core that serves claims, with what is around it: the API server, the disk, and the drivers of the node."""

from __future__ import annotations

from dataclasses import replace

from gpuactors.core.dra.claim import (
    AllocatedDevice,
    BoundFunction,
    Claim,
    ClaimName,
    ClaimUid,
    Prepared,
    Target,
    Unprepared,
)
from gpuactors.core.dra.entries import ClaimSettings, Entry
from gpuactors.core.dra.outputs import CheckpointWanted, ClaimsWanted, DeviceAct, claims_wanted
from gpuactors.core.dra.pool import device_name
from gpuactors.core.dra.table import ClaimState
from gpuactors.core.effects import Effect, Refused, Reply
from gpuactors.core.events import (
    ActDone,
    CheckpointRead,
    CheckpointWritten,
    ClaimMissing,
    ClaimRead,
    Event,
    FunctionInspected,
    HostChanged,
    HostScanned,
    PrepareAsked,
    UnprepareAsked,
)
from gpuactors.core.model import PciAddress, PciFunction, Settings, Token
from gpuactors.core.step import initial_state
from tests.core.builders import SETTINGS, Core

DRIVER = "gpu.nvidia.com"
POOL = "node-1"
CLAIM_SETTINGS = ClaimSettings(DRIVER, POOL)

HELD_BACK = frozenset({"read", "checkpoint", "device", "files"})
"""What a test may hold back, to answer it itself or never."""


def name(claim: str = "one", uid: str = "") -> ClaimName:
    return ClaimName("default", claim, ClaimUid(uid or f"uid-{claim}"))


def allocated(claim: ClaimName, *addresses: str, admin: bool = False) -> Claim:
    """A claim with these devices, one for each request."""
    results = tuple(
        AllocatedDevice(f"gpu-{i}", POOL, device_name(PciAddress(a)), admin_access=admin)
        for i, a in enumerate(addresses)
    )
    return Claim(claim, None, 1, results)


class ClaimCore(Core):
    """`Core` with claims. What surrounds it answers at once, unless it is held back.

    `api` has the claims by namespace and name; `disk` is the checkpoint as it was last written; `functions` are what
    sysfs shows, and change with the acts.
    """

    def __init__(
        self,
        *functions: PciFunction,
        settings: Settings = SETTINGS,
        claim_settings: ClaimSettings = CLAIM_SETTINGS,
        disk: CheckpointWanted | None = None,
    ) -> None:
        super().__init__(settings=settings)
        self.functions = {f.address: f for f in functions}
        self.api: dict[str, Claim] = {}
        self.disk = disk
        self.held_back: set[str] = set()
        self.acts: list[tuple[Target, PciAddress]] = []
        """Every act on a device that was carried out, by its first function."""
        self.tokens = 0
        self.state = initial_state(settings, claim_settings=claim_settings)
        self.feed(HostScanned(self.state.host.inspections.last - 1, functions), self._read_back())

    def _read_back(self) -> CheckpointRead:
        if self.disk is None:
            return CheckpointRead()
        return CheckpointRead(self.disk.entries, self.disk.first_drivers)

    def restarted(self) -> ClaimCore:
        """A new process on the same node: it knows what is on disk, and what it sees. Of the old one's acts those that
        are under way are lost."""
        settings = self.state.claims.settings
        assert settings is not None
        after = ClaimCore(
            *self.functions.values(),
            settings=self.state.daemon.settings,
            claim_settings=settings,
            disk=self.disk,
        )
        after.api, after.ledger, after.enabled = self.api, self.ledger, self.enabled
        return after

    # --- what kubelet does ----------------------------------------------------------------------------------

    def prepare(self, claim: ClaimName) -> Token:
        self.tokens += 1
        token = Token(1000 + self.tokens)
        self.feed(PrepareAsked(token, claim))
        return token

    def unprepare(self, claim: ClaimName) -> Token:
        self.tokens += 1
        token = Token(1000 + self.tokens)
        self.feed(UnprepareAsked(token, claim))
        return token

    def answer(self, token: Token) -> Prepared | Unprepared | Refused | None:
        """The answer to a call; None while it waits."""
        found = [e.answer for e in self.effects if isinstance(e, Reply) and e.token == token]
        assert len(found) <= 1, "a call is answered once"
        if not found:
            return None
        assert isinstance(found[0], Prepared | Unprepared | Refused)
        return found[0]

    def refusal(self, token: Token) -> str:
        answer = self.answer(token)
        assert isinstance(answer, Refused), f"refused, not {answer}"
        return answer.reason

    def entry(self, claim: ClaimName) -> Entry | None:
        return self.state.claims.entries.get(claim.uid)

    def claim_state(self, claim: ClaimName) -> ClaimState:
        entry = self.entry(claim)
        return ClaimState.ABSENT if entry is None else entry.state

    def driver(self, address: str) -> str | None:
        return self.functions[PciAddress(address)].driver

    def pull_out(self, address: PciAddress) -> None:
        """The function is gone, and the kernel says so."""
        del self.functions[address]
        self.feed(HostChanged(address, None, "remove pci"))

    # --- what surrounds it ------------------------------------------------------------------------------------

    @property
    def wanted(self) -> ClaimsWanted:
        return claims_wanted(self.state)

    def release(self, *kinds: str) -> list[Effect]:
        """What was held back is answered now, and from now on."""
        self.held_back -= {*kinds}
        return self.feed_answers()

    def feed_answers(self) -> list[Effect]:
        out: list[Effect] = []
        while (event := self._answer()) is not None:
            out += self._step(event)
        self.effects += out
        return out

    def _answer(self) -> Event | None:
        if (event := self._claims_answer()) is not None:
            return event
        inspections = self.state.host.inspections
        for address, number in inspections.functions.items():
            found = self.functions.get(address)
            group = (
                ()
                if found is None
                else tuple(f for f in self.functions.values() if f.iommu_group == found.iommu_group)
            )
            return FunctionInspected(number, address, group)
        return super()._answer()

    def _claims_answer(self) -> Event | None:
        wanted = self.wanted
        if wanted.load and not self.state.claims.loaded:
            return self._read_back()
        if wanted.reads and "read" not in self.held_back:
            return self.read_event(wanted.reads[0].number, wanted.reads[0].claim)
        if wanted.checkpoint is not None and "checkpoint" not in self.held_back:
            self.disk = wanted.checkpoint
            return CheckpointWritten(wanted.checkpoint.number)
        if wanted.files and "files" not in self.held_back:
            return ActDone(next(iter(wanted.files.values())).number)
        if wanted.devices and "device" not in self.held_back:
            return self.act_event(next(iter(wanted.devices.values())))
        return None

    def read_event(self, number: int, claim: ClaimName) -> Event:
        found = self.api.get(str(claim))
        if found is None or found.name.uid != claim.uid:
            return ClaimMissing(number, f"the API server has no claim {claim} with UID {claim.uid}")
        return ClaimRead(number, found)

    def act_event(self, act: DeviceAct) -> Event:
        """The act is carried out."""
        self.acts.append((act.target, act.functions[0].address))
        bound = []
        for first in act.functions:
            known = self.functions[first.address]
            driver = known.driver if known.vfio_bound and act.target is Target.VFIO else first.driver
            if act.target is Target.VFIO:
                driver = driver if known.vfio_bound else "vfio-pci"
            now = _bound(known, driver)
            self.functions[first.address] = now
            bound.append(BoundFunction(now.address, driver, now.iommu_group, None, vfio=now.vfio_bound))
        return ActDone(act.number, tuple(bound))


def _bound(function: PciFunction, driver: str | None) -> PciFunction:
    vfio = driver == "vfio-pci"
    nodes = ("/dev/vfio/vfio", f"/dev/vfio/{function.iommu_group}") if vfio else ()
    return replace(function, driver=driver, vfio_bound=vfio, nodes=nodes)
