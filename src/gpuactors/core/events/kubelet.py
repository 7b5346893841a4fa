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
    """The running kubelet; None if none runs: then there is no list, and only the file is used."""
    listed: tuple[LedgerEntry, ...]
    """The entries of List, sorted."""
    claims: tuple[ClaimedDevice, ...]
    names_end: str | None = None
    """The common end of the names of all pods in List, also of those without devices; of a single pod the whole name.
    None without a pod. The names themselves would change with every pod of the node."""
    healthy: Mapping[ResourceName, tuple[DeviceId, ...]] | None = None
    """Kubelet's own list: the healthy IDs of each requested resource, in the form of `listing.comparable`. A resource
    without a healthy device is missing. None if kubelet did not list them."""
    file: LedgerFile | None = None
    """Kubelet's ledger file; None if it could not be read. A read without a kubelet and without the file is
    `LedgerUnreadable`."""
    waiting: tuple[PodClaim, ...] = ()
    """The claims for which List has no device yet."""
    cdi: CdiSpecs | None = None
    """The files of the CDI directory, read after the list; None if they could not be read."""
    passive: bool = False
    """True if kubelet runs and was not asked for List: `listed` is empty, and the entries follow from the last List and
    the file."""
    answers: tuple[PodAnswer, ...] = ()
    """Kubelet's answers about the pods that were asked for; a pod without an answer is missing."""
    has_get: bool = True
    """False if kubelet has refused Get as such."""
    pods: SeenPods = NO_PODS
    """The lives of the pods that the file names, as the kernel shows them."""


class LedgerUnreadable(Struct, frozen=True, gc=False):
    """Read number `read` failed: PodResources did not answer, and kubelet's file is not used for owners while kubelet
    runs, or could not be read either."""

    read: int
    reason: str
    file: LedgerFile | None = None
    """Kubelet's ledger file, for the answers to Allocate; None if it could not be read."""
    pods: SeenPods = NO_PODS
    """The lives of the pods that the file names, as the kernel shows them."""
    cdi: CdiSpecs | None = None
    """The same as `LedgerRead.cdi`."""


class KubeletAppeared(Struct, frozen=True, gc=False):
    """kubelet.sock is there; `socket` is its identity, which shows that it was replaced."""

    socket: str


class KubeletGone(Struct, frozen=True, gc=False):
    """kubelet.sock is missing; `reason` names what is missing, and where."""

    reason: str


class ForeignSocketsSeen(Struct, frozen=True, gc=False):
    """The other processes' sockets beside kubelet's have changed; one may have been replaced under its name."""

    sockets: tuple[str, ...]


LedgerEvent = LedgerRead | LedgerUnreadable
KubeletEvent = KubeletAppeared | KubeletGone | ForeignSocketsSeen
