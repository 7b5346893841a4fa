"""The part of a node for compute domains: IMEX, NVIDIA's controller, the node's label, and what every driver's claims
need (`dra_node.py`).

A node of a history has it if the seed says so (`DOMAINS`). What can happen is in `domain_events.py`, what must hold in
`domain_check.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from gpuactors.acts.files import MOUNTED
from gpuactors.core.values.domain import DRIVER, LABEL, AllocationMode, DomainMode, DomainSettings
from gpuactors.daemon.domains import DomainsOutside
from gpuactors.host.root import HostRoot
from gpuactors.kube.domains import KubeDomains
from gpuactors.ports.claims import ClaimsKubelet
from gpuactors_simulation.domain_controller import DomainController
from gpuactors_simulation.host.imex import ImexTree
from gpuactors_simulation.host.tree import HostTree
from gpuactors_simulation.kube import domain_objects
from gpuactors_simulation.kube.status import DOMAINS as DOMAIN_OBJECTS
from tests.histories.dra_node import NAMESPACE, NODE, DraNode
from tests.support.inline_host import InlineImex

DOMAINS: Final = 1 << 33
"""The bit of a history's seed by which its daemons serve compute domains."""

NAMES: Final = ("left", "right")
"""Of the ComputeDomains that there are at the beginning."""

STRANGER: Final = "5bad0000-0000-4000-8000-00000000000"
"""With a digit behind it: a value of the label that no claim here has."""


@dataclass(frozen=True, slots=True)
class ChannelClaim:
    """The purpose of a pod's claim."""

    domain: str
    """The UID of its domain."""
    device: str
    """The channel that the scheduler has given it."""
    mode: AllocationMode


@final
class DomainsNode(DraNode):
    """The parts of one node that compute domains need."""

    def __init__(self, tree: HostTree, seed: int) -> None:
        super().__init__(DRIVER, seed)
        self._root = str(tree.root)
        self.imex = ImexTree(tree.root)
        self.imex.load()
        self.imex.join()
        self.channels: Final = 1 + (seed >> 8) % 2
        """How many the node offers."""
        self.controller = DomainController(self.api, NODE)
        self.made: dict[str, ChannelClaim] = {}
        """Every claim of a pod that was ever made, by UID."""
        self.uids: dict[str, str] = {}
        """Their UIDs, by name: each has that of its pod."""
        self.edits: set[int] = set()
        """The versions of our Node at which somebody else had edited it."""
        self.forgotten: set[str] = set()
        """The claims and the domains' directories that were there when the checkpoint was lost: what one is for is
        known only if its claim can still be read."""
        self.has_imex = True
        for name in NAMES:
            self.make_domain(name)

    # --- domains and claims ---------------------------------------------------------------------------------

    @property
    def domains(self) -> dict[str, str]:
        """The ComputeDomains that there are: UID by name."""
        found = self.api.store.objects(DOMAIN_OBJECTS)
        return {o["metadata"]["name"]: o["metadata"]["uid"] for o in found}

    @property
    def live_domains(self) -> set[str]:
        """The UIDs of those that are not being deleted."""
        found = self.api.store.objects(DOMAIN_OBJECTS)
        return {o["metadata"]["uid"] for o in found if "deletionTimestamp" not in o["metadata"]}

    def make_domain(self, name: str) -> None:
        """A user makes a ComputeDomain."""
        self.api.add_domain(NAMESPACE, name)

    def delete_domain(self, name: str) -> None:
        """It is deleted, whatever became of its pods."""
        self.api.delete_domain(NAMESPACE, name)

    def allocate(
        self, name: str, domain: str, device: str, mode: AllocationMode = AllocationMode.SINGLE
    ) -> None:
        """A claim for a channel of the domain with this UID is made, and the scheduler gives it this one."""
        uid = domain_objects.add_channel(
            self.api, NODE, name, domain, NAMESPACE, device=device, allocationMode=str(mode)
        )
        self.given[uid] = (device,)
        self.made[uid] = ChannelClaim(domain, device, mode)
        self.uids[name] = uid

    def hand_on(self, old: str, name: str) -> None:
        """Implement `DraNode.hand_on`: of the same domain."""
        claim = self.made[old]
        self.allocate(name, claim.domain, claim.device, claim.mode)

    def channel_names(self) -> tuple[str, ...]:
        """Those that the node offers."""
        return tuple(f"channel-{n}" for n in range(self.channels))

    def devices_of(self, uid: str) -> tuple[str, ...]:
        """The devices of a claim once it is prepared, by its UID."""
        claim = self.made.get(uid)
        if claim is None:
            return (domain_objects.DAEMON,)
        return self.channel_names() if claim.mode is AllocationMode.ALL else (claim.device,)

    # --- the disk -------------------------------------------------------------------------------------------

    def lose_checkpoint(self) -> None:
        """Implement `DraNode.lose_checkpoint`."""
        super().lose_checkpoint()
        self.forgotten.update(self.directories(), self.made)

    def spoil_checkpoint(self, at: int) -> None:
        """Implement `DraNode.spoil_checkpoint`."""
        super().spoil_checkpoint(at)
        self.forgotten.update(self.directories(), self.made)

    @property
    def unknowable(self) -> set[str]:
        """The claims of which the daemon cannot know what they are for: they were there when the checkpoint was lost,
        and the API server has them no more."""
        return self.forgotten - {*self.claims.values()}

    # --- the host -------------------------------------------------------------------------------------------

    def set_imex(self, *, there: bool) -> None:
        """NVIDIA's driver is loaded, or unloaded under everything that uses it."""
        self.has_imex = there
        if there:
            self.imex.load()
        else:
            self.imex.unload()

    # --- the node's label -----------------------------------------------------------------------------------

    @property
    def label(self) -> str | None:
        """The value that our Node has now."""
        return domain_objects.label_of(self.api, NODE)

    def set_label(self, value: str | None) -> None:
        """Somebody else does."""
        made = self.api.label_node(NODE, LABEL, value)
        self.edits.add(int(made["metadata"]["resourceVersion"]))

    # --- what is there --------------------------------------------------------------------------------------

    def end_faults(self) -> None:
        """Implement `DraNode.end_faults`, and the host and the controller are well."""
        super().end_faults()
        self.set_imex(there=True)
        self.controller.say(ready=True)
        self.controller.go_on()

    def directories(self) -> tuple[str, ...]:
        """The domains' directories, and whatever else is beside them."""
        try:
            return self.disk.names(f"{self.plugin_dir}/{MOUNTED}")
        except FileNotFoundError:
            return ()

    def offered(self) -> list[dict[str, Any]]:
        """The devices in the node's ResourceSlices."""
        return [d for s in self.api.slices(self.driver) for d in s["spec"].get("devices") or ()]

    def outside_of(self, daemon: str, kubelet: ClaimsKubelet) -> DomainsOutside:
        """All that a daemon reaches for compute domains."""
        client = self.network.client(daemon)
        directory = f"{self.plugin_dir}/{MOUNTED}"
        namespace = domain_objects.NAMESPACE
        return DomainsOutside(
            settings=DomainSettings(
                DomainMode.ON,
                NODE,
                (namespace,),
                channels=self.channels,
                directory=directory,
                side_by_side=True,
            ),
            claims=self.dra_outside(client, kubelet, None),
            domains=KubeDomains(client),
            imex=InlineImex(HostRoot(self._root)),
        )
