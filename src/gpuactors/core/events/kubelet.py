"""Kubelet: its socket, the sockets beside it, and its ledger."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.model import (
    NO_PODS,
    ClaimedDevice,
    DeviceId,
    LedgerEntry,
    LedgerFile,
    PodAnswer,
    PodClaim,
    ResourceName,
    RunningKubelet,
    SeenPods,
)


class LedgerRead(Struct, frozen=True, gc=False):
    """Read number `read` of kubelet's ledger came back: the entries of List and those of the ledger file.
    `ledger/kubelet_startup.py` decides which of them are valid."""

    read: int
    kubelet: RunningKubelet | None
    """None if no kubelet runs: then there is no list, and only the file is used."""
    listed: tuple[LedgerEntry, ...]
    """The entries of List, sorted."""
    claims: tuple[ClaimedDevice, ...]
    names_end: str | None = None
    """The common end of the names of all pods in List, those without devices included: of a single pod its whole name;
    None if it has no pod. The names themselves change with every pod of the node."""
    healthy: Mapping[ResourceName, tuple[DeviceId, ...]] | None = None
    """Kubelet's own list: the healthy IDs of each requested resource, in the form of `listing.comparable`; a resource
    without a healthy device is not in here. None if kubelet did not list them."""
    file: LedgerFile | None = None
    """None if it could not be read. A read without a kubelet and without its file is `LedgerUnreadable`."""
    waiting: tuple[PodClaim, ...] = ()
    """Claims of which List has no device yet."""
    cdi: CdiSpecs | None = None
    """The files of the CDI directory, read after the list; None if they could not be."""
    passive: bool = False
    """Kubelet runs and was not asked for List: there is no list here, and what is in its file is known since the last
    one."""
    answers: tuple[PodAnswer, ...] = ()
    """Of the pods that were asked for, those of which kubelet said something."""
    has_get: bool = True
    """False: kubelet has refused Get as such."""
    pods: SeenPods = NO_PODS
    """Of the pods that the file names."""


class LedgerUnreadable(Struct, frozen=True, gc=False):
    """Read number `read` failed: PodResources did not answer, and kubelet's file is not used for owners while kubelet
    runs, or could not be read either."""

    read: int
    reason: str
    file: LedgerFile | None = None
    """None if it could not be read. The answers to Allocate are there, whether PodResources answers or not."""
    pods: SeenPods = NO_PODS
    """Those of the file, whether they live: the kernel shows that as well."""
    cdi: CdiSpecs | None = None
    """See `LedgerRead.cdi`."""


class KubeletAppeared(Struct, frozen=True, gc=False):
    """kubelet.sock is there; `socket` is its identity, so that a replaced one is seen as new."""

    socket: str


class KubeletGone(Struct, frozen=True, gc=False):
    """kubelet.sock is not there; `reason` names what is missing, and where."""

    reason: str


class ForeignSocketsSeen(Struct, frozen=True, gc=False):
    """The other processes' sockets beside kubelet's are these now; one may have been replaced under its name."""

    sockets: tuple[str, ...]


LedgerEvent = LedgerRead | LedgerUnreadable
KubeletEvent = KubeletAppeared | KubeletGone | ForeignSocketsSeen
