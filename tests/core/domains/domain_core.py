"""A core that serves claims of compute domains, with what is around it: the API server, the disk and the host."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.claims.opaque_config import API_VERSION
from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.domains.exclusion import DAEMON_SETTLES_S
from gpuactors.core.domains.label import LABEL_LINGERS_S
from gpuactors.core.domains.outputs import DomainsWanted, domains_wanted
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.events import Event
from gpuactors.core.events.claims import (
    ActDone,
    ActFailed,
)
from gpuactors.core.events.domains import (
    DomainRead,
    ImexRead,
    LabelPatched,
    LabelRead,
    NodeTouched,
)
from gpuactors.core.events.host import HostScanned
from gpuactors.core.state.claims import StoredEntry, domain_of
from gpuactors.core.step import initial_state
from gpuactors.core.values.claim import (
    ActFault,
    AllocatedDevice,
    Claim,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    DeviceEdits,
    Json,
    OpaqueConfig,
)
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.domain import (
    DRIVER,
    ClaimedDomain,
    Clique,
    ComputeDomain,
    DomainMode,
    DomainSettings,
    DomainUid,
    ImexFacts,
    LabelChange,
    NodeLabel,
)
from gpuactors.core.values.model import ClaimedDevice, Pod
from tests.core.builders import SETTINGS, ledger_read
from tests.core.claims.calls_core import AWAY, CallsCore
from tests.core.claims.on_disk import read_back

NODE = "node-1"
NAMESPACE = "dra-driver-nvidia-gpu"
RED = DomainUid("11111111-1111-1111-1111-111111111111")
BLUE = DomainUid("22222222-2222-2222-2222-222222222222")
IMEX = ImexFacts(channel_major=501, caps_major=238, mgmt_minor=7, clique_id="cluster.1")
DOMAIN_SETTINGS = DomainSettings(DomainMode.ON, NODE, (NAMESPACE,), directory="/plugins/domains")


def name(claim: str = "one", namespace: str = "default") -> ClaimName:
    return ClaimName(namespace, claim, ClaimUid(f"uid-{claim}"))


def channel(claim: ClaimName, domain: str = RED, device: str = "channel-0", **more: Json) -> Claim:
    """A claim of one channel."""
    parameters: Json = {
        "apiVersion": API_VERSION,
        "kind": "ComputeDomainChannelConfig",
        "domainID": domain,
        **more,
    }
    results = (AllocatedDevice("channel", NODE, device),)
    return Claim(claim, None, 1, results, (OpaqueConfig(False, (), parameters),))


def daemon(claim: ClaimName, domain: str = RED) -> Claim:
    """The claim of a domain's daemon."""
    parameters: Json = {
        "apiVersion": API_VERSION,
        "kind": "ComputeDomainDaemonConfig",
        "domainID": domain,
    }
    results = (AllocatedDevice("daemon", NODE, "daemon-0"),)
    return Claim(claim, None, 1, results, (OpaqueConfig(False, (), parameters),))


DAEMON = name("daemon", NAMESPACE)


def found_by_files(*claims: ClaimName) -> CheckpointWanted:
    """What the checkpoint keeper finds out from the CDI files."""
    entries = tuple(StoredEntry(claim, ClaimState.PREPARED, None, None) for claim in claims)
    return CheckpointWanted(1, entries, ())


class DomainCore(CallsCore):
    """`Core` with compute domains, and these claims in the API server. What surrounds it answers at once, unless it is
    held back (`load`, `read`, `checkpoint`, `files`, `label-read`, `label-patch`, `domain`, `imex`).

    `label` is the node's, as the API server has it; `history` all its values. `away`: the API server does not answer.
    """

    of = ClaimsOf.DOMAINS

    def __init__(self, *claims: Claim, settings: DomainSettings = DOMAIN_SETTINGS) -> None:
        super().__init__()
        self.created(*claims)
        self.domain_settings = settings
        self.label: str | None = None
        self.history: list[str | None] = [None]
        self.domains = {
            RED: ComputeDomain(RED, "red", "default"),
            BLUE: ComputeDomain(BLUE, "blue", "default"),
        }
        self.cliques: dict[DomainUid, Clique] = {}
        self.imex = IMEX
        self.files: dict[ClaimUid, tuple[DeviceEdits, ...]] = {}
        self.directories: set[str] = set()
        self.stuck = False
        """What containers have left in their directories cannot be removed."""
        self.listed: set[ClaimName] | None = None
        """The claims that kubelet lists for pods; None: all that are prepared."""
        self.state = initial_state(SETTINGS, domain_settings=settings)
        self.feed(HostScanned(self.scan, ()))

    def restarted(self, *held_back: str, settings: DomainSettings | None = None) -> DomainCore:
        """A new process on the same node: it knows what is on disk, and what it reads."""
        after = DomainCore(settings=settings or self.domain_settings)
        after.disk = self.disk  # not before: it would be changed by a start without the rest
        after.api, after.label, after.history = self.api, self.label, self.history
        after.domains, after.cliques, after.imex = self.domains, self.cliques, self.imex
        after.files, after.directories, after.away = self.files, self.directories, self.away
        after.claims, after.at, after.tokens = self.claims, self.at, self.tokens
        after.listed = self.listed
        after.held_back, after.effects = {*held_back}, []
        after.state = initial_state(SETTINGS, domain_settings=after.domain_settings)
        after.feed(HostScanned(after.scan, ()))
        return after

    # --- what kubelet, the controller and operators do --------------------------------------------------------

    def ready(self, *nodes: str, domain: DomainUid = RED) -> None:
        """The domain's daemons are Ready on these nodes, and the controller says so."""
        self.cliques[domain] = Clique(frozenset(nodes or (NODE,)))
        self.says_ready(*nodes, domain=domain)

    def says_ready(self, *nodes: str, domain: DomainUid = RED) -> None:
        """The controller says that the domain is Ready on these nodes."""
        self.domains[domain] = replace(self.domains[domain], ready_nodes=frozenset(nodes or (NODE,)))

    def deleted(self, domain: DomainUid = RED) -> None:
        """Somebody deletes the domain: NVIDIA's controller takes its label away."""
        self.domains[domain] = replace(self.domains[domain], is_deleted=True)
        if self.label == domain:
            self.labelled(None)

    def labelled(self, value: str | None) -> None:
        """Somebody else changes the label; our watch of the Node says so."""
        self.set_label(value)
        self.feed(NodeTouched())

    def lingered(self) -> None:
        """The time passes for which the label stays after its last claim."""
        self.pass_time(LABEL_LINGERS_S)

    def settled(self) -> None:
        """The time passes after which a daemon counts that was there before the label."""
        self.pass_time(DAEMON_SETTLES_S + DOMAIN_READ_S)

    def set_label(self, value: str | None) -> None:
        self.label = value
        self.history.append(value)

    def ledger_event(self, read: int) -> Event:
        """Kubelet lists the claims of pods."""
        entries = self.state.domains.claims.entries.values()
        held = {e.name for e in entries if e.claim is not None and e.state in OWNING}
        listed = held if self.listed is None else self.listed
        claims = (
            ClaimedDevice(DRIVER, NODE, "channel-0", str(claim), Pod("default", "pod", ""))
            for claim in sorted(listed, key=str)
        )
        return ledger_read(read, claims=tuple(claims))

    # --- what is seen of it -----------------------------------------------------------------------------------

    def own(self, claim: ClaimName) -> ClaimedDomain:
        entry = self.entry(claim)
        assert entry is not None
        own = domain_of(entry).domain
        assert own is not None
        return own

    @property
    def wanted(self) -> DomainsWanted:
        return domains_wanted(self.state)

    # --- what surrounds it ------------------------------------------------------------------------------------

    def _answer(self) -> Event | None:
        return self._of_disk() or self._of_server() or super()._answer()

    def _of_disk(self) -> Event | None:
        wanted = self.wanted
        claims = wanted.claims
        if claims.disk.load and not self.state.domains.claims.loaded and "load" not in self.held_back:
            return read_back(self.disk, self.of)
        if claims.disk.checkpoint is not None and "checkpoint" not in self.held_back:
            return self.checkpoint_written(claims.disk.checkpoint)
        if claims.files and "files" not in self.held_back:
            claim, act = next(iter(claims.files.items()))
            self.files = {uid: edits for uid, edits in self.files.items() if uid != claim}
            if act.claim is not None:
                self.files[claim] = act.devices
                self.directories |= {*act.directories}
            elif self.stuck and act.directories:
                return ActFailed(
                    act.number, "it is stuck", ActFault.DIRECTORY_LEFT, driver_kind=ClaimsOf.DOMAINS
                )
            else:
                self.directories -= {*act.directories}
            return ActDone(act.number, driver_kind=ClaimsOf.DOMAINS)
        if wanted.imex and "imex" not in self.held_back:
            return ImexRead(wanted.imex, self.imex)
        return None

    def _of_server(self) -> Event | None:
        wanted = self.wanted
        if wanted.claims.reads and "read" not in self.held_back:
            return self.read_event(wanted.claims.reads[0])
        if wanted.label_read and "label-read" not in self.held_back:
            if self.away:
                return LabelRead(wanted.label_read, AWAY)
            return LabelRead(wanted.label_read, NodeLabel(self.label))
        if wanted.label_patch is not None and "label-patch" not in self.held_back:
            return self.patch_event()
        if wanted.domains and "domain" not in self.held_back:
            read = wanted.domains[0]
            if self.away:
                return DomainRead(read.number, read.uid, AWAY)
            clique = self.cliques.get(read.uid) if read.clique_id else None
            return DomainRead(read.number, read.uid, self.domains.get(read.uid), clique)
        return None

    def patch_event(self) -> Event:
        """The patch that is wanted is tried, with its `test`."""
        wanted = self.wanted.label_patch
        assert wanted is not None
        if self.away:
            return LabelPatched(wanted.number, AWAY)
        is_added = wanted.patch.change is LabelChange.ADD
        if self.label != (None if is_added else wanted.patch.value):
            return LabelPatched(wanted.number, "the server rejected our request (422)", conflict=True)
        self.set_label(wanted.patch.value if is_added else None)
        return LabelPatched(wanted.number)


def with_daemon(*claims: Claim, ready: bool = True, settings: DomainSettings = DOMAIN_SETTINGS) -> DomainCore:
    """The daemon of RED has its claim, and is Ready, if it is to be, as soon as the label is there. The API server has
    these other claims."""
    core = DomainCore(daemon(DAEMON), *claims, settings=settings)
    if ready:
        core.ready()
    core.prepare(DAEMON)
    return core
