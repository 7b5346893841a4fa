"""The interfaces to the outside that only claims and compute domains need, as protocols: kubelet's DRA API, the
checkpoint and the files of claims, the drivers of PCI functions, the host's IMEX.

A file of its own: it names the values of claims, which a daemon without them does not import. As `node.py` otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.checkpoint import Checkpoint, Restored
from gpuactors.core.claims.files import ClaimContents, FoundFiles
from gpuactors.core.values.claim import (
    ActFault,
    BoundFunction,
    ClaimName,
    ClaimUid,
    DeviceHealth,
    FitnessFinding,
    OriginalDriver,
    Prepared,
    Target,
    Unprepared,
)
from gpuactors.core.values.domain import DomainUid, ImexFacts
from gpuactors.core.values.effects import Refused
from gpuactors.core.values.model import PciAddress
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import Reachable


class ClaimCaller(Protocol):
    """The interface of DRA's gRPC handlers: each claim of a call is an event of its own, in the order of arrival."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused:
        """Return the answer for one claim: within CLAIM_ANSWER_S, as kubelet gives up after 45 s without showing a
        reason. Cancelling ends the wait, and nothing else."""

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused:
        """Unprepare the claim; see `prepare`. A claim that was never seen is a success."""


class Successor(Protocol):
    """The daemon that has taken over the claims of a DRA driver from this one, as kubelet would call it."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused | None:
        """Return its answer for one claim; None if nobody answers there, which says nothing about the claim."""

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | None:
        """Unprepare the claim; see `prepare`."""


class PluginStatus(Struct, frozen=True):
    """Kubelet's verdict about the registration of our DRA plugin (NotifyRegistrationStatus)."""

    registered: bool
    error: str = ""
    """The text of kubelet's error; empty if it is registered."""


class ClaimsEndpoint(Protocol):
    """Both sockets of our DRA plugin, serving."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sockets' paths."""

    async def lost(self) -> None:
        """Wait until the file of a socket is not the one that was made: it was removed, or its directory was."""

    async def mend(self) -> None:
        """Make the sockets again whose files are gone; calls on open connections go on. Raises `KubeletError`."""

    async def withdraw(self, grace_s: float) -> None:
        """Remove the registration socket when no call is in flight, at the latest after `grace_s`: kubelet then
        deregisters the plugin and breaks the calls in flight (cm/dra/plugin, DRAPluginManager.remove). Wait until it
        has, at most DEREGISTERED_S more; calls are answered until then."""

    async def drain(self, grace_s: float) -> None:
        """See `Endpoint.drain`."""


class ClaimsKubelet(Reachable, Protocol):
    """The node's kubelet, as a DRA plugin sees it: it finds the plugin's registration socket by itself, also after a
    restart, and calls."""

    @property
    def successor(self) -> Successor:
        """The daemon that serves the same driver on this node after this one."""

    def serve_claims(
        self,
        caller: ClaimCaller,
        health: LatestReader[tuple[DeviceHealth, ...]],
        on_status: Callable[[PluginStatus], None],
    ) -> AbstractAsyncContextManager[ClaimsEndpoint]:
        """Serve the DRA API and then its registration, as long as the context is open; at its end the registration
        socket goes first. `on_status` is called at each verdict of kubelet's and must not raise.

        Raises `KubeletError` if a socket cannot be made.
        """


class CheckpointStore(Protocol):
    """The checkpoint of the claims on disk."""

    async def read(self, *, owns: bool) -> Restored:
        """Read the checkpoint of the previous daemon. `owns`: only this daemon writes from now on, and a corrupt one is
        set aside; else another one serves, and nothing is touched. Raises `StateFileError` if it is a newer daemon's,
        or cannot be read: no GPU may be touched then."""

    async def write(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint durably. Raises `StateFileError`; the old one may be there then, or (the disk does not
        answer) the new one later."""


class ClaimFileStore(Protocol):
    """The CDI and metadata files of the claims. Raises `StateFileError` where a file cannot be written or removed."""

    async def found(self, *, owns: bool) -> Mapping[ClaimUid, FoundFiles]:
        """List each claim's files, complete or not. `owns` as in `CheckpointStore.read`: what a killed daemon left half
        written is removed."""

    async def write(self, contents: ClaimContents) -> None:
        """Write the files of a claim durably. Correct files are left alone, so this is called before each answer, and
        for each claim at the start."""

    async def remove(self, uid: ClaimUid, directories: Iterable[str] = ()) -> None:
        """Remove the files of the claim, and these directories; it is no error if there are none. Raises
        `DirectoryLeftError` if only a part of a directory is left."""

    async def clear_mounted(self, kept: Collection[DomainUid] | None) -> tuple[str, ...]:
        """Remove the directories that containers of ended claims had mounted. `kept` None: all, of a boot that has
        ended; else those of domains that are not `kept`, and that no CDI file of any driver names. Return a sentence
        for each that cannot be removed: its claim has ended."""


class TouchedFiles(Protocol):
    """The directory of the CDI files, which others may touch."""

    def touches(self) -> AsyncGenerator[frozenset[ClaimUid] | None, None]:
        """Yield the claims whose CDI files somebody has touched, also gpuactors itself. None, which is any claim, at
        the start and when the directory was replaced. Never ends."""


class ActError(HostError):
    """An act on a device did not reach its goal; the device stays where it is then. The text names what, where and the
    remedy."""

    def __init__(self, fault: ActFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault
        self.moved: tuple[BoundFunction, ...] = ()
        """See `ActFailed.moved`."""


class DriverBinder(Protocol):
    """Binds GPUs to drivers."""

    async def bring(
        self,
        device: PciAddress,
        target: Target,
        firsts: Collection[OriginalDriver],
        beside: Collection[PciAddress] = (),
    ) -> tuple[BoundFunction, ...]:
        """Bring a GPU and its companions (`core/kinds/viability.py`), and the GPUs `beside` it of the same claim and
        IOMMU group with theirs, to `target`, from wherever they are. Return what they are bound to then, the GPU first.
        `firsts` are the original drivers of these functions, written to disk before; a function without one is never
        touched. Nothing is written to a function of another slot, unless it is returned from an act of an older
        version.

        Raises `ActError`. When cancelled the wait ends at once; a write that has begun goes on in its process, and
        nothing is written after it.
        """

    async def check_fitness(self, devices: Collection[PciAddress]) -> tuple[FitnessFinding, ...]:
        """Return a finding for each GPU: whether it could be brought to vfio now. Does nothing to them, in one pass
        over all processes. What stops the check of one GPU is its finding, and stops no other."""


class ImexReader(Protocol):
    """Reads what the host says of IMEX."""

    async def read(self) -> ImexFacts:
        """Read the present facts; nothing is kept from one read to the next. That there is no IMEX on this node, or
        that the host's daemon is not ready, is an answer and no error.

        Raises `HostError` if a file is there and cannot be read or understood.
        """
