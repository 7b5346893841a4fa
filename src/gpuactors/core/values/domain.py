"""The values of compute domains, as the API server, the driver and the operator state them.

A compute domain is a group of nodes whose GPUs share memory by IMEX. A workload's claim has a *channel* of it, and the
claim of NVIDIA's daemon pod the *daemon* device; by default a node has one of each. Nothing is decided here.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NewType

from msgspec import Struct

DomainUid = NewType("DomainUid", str)
"""The UID of a ComputeDomain object; a UUID (`values/names.py`, `is_domain_id`) before any path is made of it."""

LABEL: Final = "resource.nvidia.com/computeDomain"
"""The label of the Node whose value is the UID of the domain that the node takes part in. NVIDIA's controller starts
the domain's daemon on nodes with the label."""

DRIVER: Final = "compute-domain.nvidia.com"
"""The DRA driver's usual name."""

NAMESPACES: Final = ("dra-driver-nvidia-gpu", "nvidia-dra-driver-gpu")
"""The namespaces into which NVIDIA's documents install its driver: today, and before."""

CHANNELS_MAX: Final = 2048
"""The number of channels that NVIDIA's driver makes by default (NVreg_ImexChannelCount)."""

_DEVICE: Final = re.compile(r"(channel|daemon)-(0|[1-9][0-9]{0,3})")


class DomainMode(StrEnum):
    """The manager of the IMEX daemon; the setting `compute_domains`."""

    OFF = "off"
    ON = "on"
    """NVIDIA's controller: it starts a pod for each domain on each of its nodes, by the label."""
    HOST_MANAGED = "host-managed"
    """The operator, on the host: no label and no daemon device; the host's IMEX control tool shows whether it is
    ready."""


class DeviceKind(StrEnum):
    """The kinds of device that compute domains have; the attribute `type` in the ResourceSlice."""

    CHANNEL = "channel"
    DAEMON = "daemon"


class DomainDevice(Struct, frozen=True, gc=False):
    """A device of a compute domain: `channel-0`, `daemon-0`."""

    kind: DeviceKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.id}"


def device_of(name: str) -> DomainDevice | None:
    """Return the device by its name in the ResourceSlice; None if it is no such name."""
    match = _DEVICE.fullmatch(name)
    return DomainDevice(DeviceKind(match[1]), int(match[2])) if match is not None else None


class DomainSettings(Struct, frozen=True, gc=False):
    """The settings that compute domains need."""

    mode: DomainMode
    node: str
    """The name of this node."""
    namespaces: tuple[str, ...]
    """The namespaces in which the driver's own objects may be: the claims of its daemons, and the
    ComputeDomainCliques. A domain's clique is in the namespace of its daemon's claim."""
    driver: str = DRIVER
    """The name of the DRA driver."""
    channels: int = 1
    """The number of offered channels, from `channel-0` on."""
    directory: str = ""
    """The directory of the domains' directories, as a path of the host: each is mounted into its daemon as /imexd."""
    side_by_side: bool = False
    """The same as `ClaimSettings.side_by_side`."""


class AllocationMode(StrEnum):
    """The channels that the container of a channel claim gets."""

    SINGLE = "Single"
    """The allocated channel."""
    ALL = "All"
    """Every channel of the node."""


class DomainConfig(Struct, frozen=True, gc=False):
    """The configuration of a claim: the domain, and its device in it."""

    kind: DeviceKind
    domain: DomainUid
    mode: AllocationMode = AllocationMode.SINGLE


class ComputeDomain(Struct, frozen=True, gc=False):
    """A ComputeDomain object, reduced to what one node's driver needs."""

    uid: DomainUid
    name: str
    namespace: str
    ready_nodes: frozenset[str] = frozenset()
    """The names in `status.nodes[]` whose `status` is Ready."""
    is_deleted: bool = False
    """True if it has a deletionTimestamp: NVIDIA's controller removes everything of it, also the node's label."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Clique(Struct, frozen=True, gc=False):
    """A ComputeDomainClique object: the daemons of one domain on one NVLink fabric."""

    ready_nodes: frozenset[str] = frozenset()
    """The names in `daemons[].nodeName` whose `status` is Ready."""


def clique_name(uid: DomainUid, clique_id: str) -> str:
    """Return the name of the ComputeDomainClique object, in the driver's namespace."""
    return f"{uid}.{clique_id}"


class NodeLabel(Struct, frozen=True, gc=False):
    """LABEL as the Node has it."""

    value: str | None
    """The label's value; None if the Node has no such label."""


class LabelChange(StrEnum):
    """The effect of a patch of the label."""

    ADD = "add"
    """Add it, which must be absent: the JSON patch `test null`, `add`."""
    REMOVE = "remove"
    """Remove it, which must have the value: the JSON patch `test <value>`, `remove`."""


class LabelPatch(Struct, frozen=True, gc=False):
    """A wanted change of the label."""

    change: LabelChange
    value: DomainUid
    """The value to add, or to remove."""


class ImexFacts(Struct, frozen=True, gc=False):
    """The state of IMEX, by the host's driver."""

    absent: str = ""
    """Why this node has no IMEX, as a sentence; empty if it has. The other fields are valid only if this is empty."""
    channel_major: int | None = None
    """The major number of `nvidia-caps-imex-channels` in /proc/devices; a channel's minor is its number."""
    caps_major: int | None = None
    """The major number of `nvidia-caps` in /proc/devices."""
    mgmt_minor: int | None = None
    """DeviceFileMinor of the capability `fabric-imex-mgmt`; None if the driver has no such capability."""
    clique_id: str = ""
    """`<cluster UUID>.<clique>` of the node's NVLink fabric; empty if the node has no fabric, or it is unknown."""
    clique_source: str = ""
    """The source of the clique, in words."""
    clique_is_past: bool = False
    """True if the clique is from an earlier read of its source in this boot, or from a claim's file."""
    unknown: str = ""
    """Why the clique is unknown, as a sentence with the remedy; empty if it is known. Unknown differs from no clique: a
    container without the node of its channel would fail far from the cause."""
    channels: int = CHANNELS_MAX
    """The number of channels of NVIDIA's driver (NVreg_ImexChannelCount)."""
    management: str = ""
    """The CDI id of the device that gives a domain's daemon the host's nvidia-imex, the driver's libraries and all
    GPUs for management; empty if the daemon's image has them."""
    unmanaged: str = ""
    """Why there is no such device, as a sentence with the remedy; empty if there is one, or none is needed."""
    host_problem: str = ""
    """In mode host-managed: why the host's IMEX daemon is not ready, as a sentence; empty if it is."""


class ClaimedDomain(Struct, frozen=True, gc=False):
    """The reservation of a claim: its domain and its devices, as they were when it was reserved."""

    uid: DomainUid
    name: str
    namespace: str
    devices: tuple[DomainDevice, ...]
    imex: ImexFacts | None
    """The state of IMEX in this boot: the checkpoint of another boot is treated as empty. None while it has not been
    read, after the checkpoint was lost."""
    every: bool = False
    """True if its container gets the node of every channel that the host's driver has (`allocationMode: All`)."""

    @property
    def cdi_ids(self) -> tuple[str, ...]:
        """The CDI ids of another program's CDI file that its container gets beside its own."""
        is_daemon = self.devices[0].kind is DeviceKind.DAEMON
        return (self.imex.management,) if is_daemon and self.imex is not None and self.imex.management else ()
