"""The actors' interfaces to the outside, as protocols: the host's files, uevents, kubelet, a predecessor, a journal.

An actor knows only these; `daemon/app.py` passes it the adaptor (`host/`, `kubelet/`) or, in the simulation, a fake.
Must not import anything but the core's values and the latest-value cell.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from msgspec import Struct

from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import ConfigEvent
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.reports.snapshot import Outputs, PollTarget
from gpuactors.core.state import NodeState
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.dead_signs import NO_ERRORS, DeadSigns, KnownErrors
from gpuactors.core.values.device_spec import DeviceSpecs
from gpuactors.core.values.effects import Answer, Effect
from gpuactors.core.values.mediated import HostPart
from gpuactors.core.values.model import (
    NO_PODS,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    DeviceList,
    GroupUse,
    InspectedKey,
    LedgerEntry,
    LedgerFile,
    PciAddress,
    Pod,
    PodAnswer,
    PodClaim,
    ResourceName,
    RunningKubelet,
    SeenPods,
)
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.ports.errors import HostError, KubeletError

InspectionResults: TypeAlias = Mapping[InspectedKey, tuple[HostPart, ...] | HostError]
"""The result of the inspection of each address and key, or its error."""

Selectors: TypeAlias = tuple[Selector, ...] | None
"""The selectors that choose what is read; None: those with which the reader was made."""


class HostReader(Protocol):
    """Reads sysfs and /dev. Never opens a device, never reads what can block on the event path."""

    async def scan(
        self,
        allocated: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        """Return every function that the selectors match or that is `allocated` (a pod has it, whatever is selected
        now), and the other members of their IOMMU groups; every mediated device, and the functions that it is a part
        of. The configuration space of a function is not read after one of the known `errors`, or a new one.

        Raises `HostError` if the bus cannot be listed at all.
        """

    async def inspect(
        self,
        address: InspectedKey,
        allocated: Collection[InspectedKey] = (),
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> tuple[HostPart, ...]:
        """Return the function at `address` and the members of its IOMMU group, if the selectors match any of them or
        any is `allocated`; else nothing. Of the key of a mediated device, return it, and the functions that it is a
        part of. What does not exist is not in the answer. Raises `HostError` if the read failed.
        """

    async def inspect_all(
        self,
        addresses: Sequence[InspectedKey],
        allocated: Collection[InspectedKey] = (),
        poll: Observation | None = None,
        selectors: Selectors = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> InspectionResults:
        """Return the result of `inspect` for each, or its error, in little more than the time of one. A function that
        did not answer at once, and any after it, is left out, and is to be inspected by itself. `poll` is carried out
        after them, and awaited as long as they are; not begun if one of them does not answer."""


class ConfigSource(Protocol):
    """The daemon's configuration file."""

    async def look(self) -> ConfigEvent | None:
        """Return the meaning of a change of the file since the last look; None without one."""


class Observation(Protocol):
    """An observation that `UseReader.begin` made. It is carried out at most once, where it may block."""

    @property
    def is_over(self) -> bool:
        """True if it was carried out to its end."""

    def run(self) -> None:
        """Carry it out. May block; raises nothing."""

    def ended(self) -> None:
        """End it: called in the trio run when `run` has returned, or will never be called."""


class UseReader(Protocol):
    """Finds out which IOMMU groups are in use."""

    async def observe(self, targets: tuple[PollTarget, ...], *, whole: bool) -> tuple[GroupUse, ...]:
        """Return the use of each group, in any order; a group that could not be read is left out. Never blocks for
        long, never opens a group unless the target allows it (and then only where the configuration asks for it).
        `whole`: there are no other groups; the adaptor may drop its results for all others."""

    def begin(self, targets: tuple[PollTarget, ...]) -> Observation:
        """Make an observation of some groups, for another reader to carry out (`HostReader.inspect_all`)."""

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        """Return the use that the observation found, as `observe`; it is carried out now if nobody has begun to."""


class PodsSeen(Protocol):
    """Sees by the kernel which of the node's pods live."""

    def look(self, uids: Collection[str]) -> SeenPods:
        """Look at these pods. May block; never raises: what cannot be read is left out."""


class LedgerReader(Protocol):
    """Reads kubelet's ledger."""

    async def read(self, question: LedgerQuestion) -> LedgerContents:
        """Read the checkpoint file and look at its pods; ask PodResources the question. Does not decide which entries
        count, and keeps nothing.

        Raises `LedgerError` if a kubelet that runs does not answer PodResources, or none runs and the file cannot be
        read.
        """


class CdiReader(Protocol):
    """Reads the CDI directory."""

    async def read(self) -> CdiSpecs | None:
        """Return the nodes that its files give to containers; None if they cannot be read soon. Raises `HostError` for
        want of descriptors or memory."""


class LedgerQuestion(Struct, frozen=True):
    """The questions to PodResources with one read of kubelet's ledger."""

    resources: Collection[ResourceName] = ()
    """The resources of which kubelet's own healthy IDs are wanted (GetAllocatableResources)."""
    pods: Collection[Pod] = ()
    """The pods to ask for (Get), by their names."""
    lists: bool = False
    """True if every pod is to be listed (List). Kubelet then forgets the device of an Allocate in flight, if any other
    pod has ended meanwhile (pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices)."""


class LedgerContents(Struct, frozen=True):
    """Kubelet's ledger as one read found it; all as in `LedgerRead`."""

    kubelet: RunningKubelet | None = None
    listed: tuple[LedgerEntry, ...] = ()
    claims: tuple[ClaimedDevice, ...] = ()
    names_end: str | None = None
    healthy: Mapping[ResourceName, tuple[DeviceId, ...]] | None = None
    file: LedgerFile | None = None
    waiting: tuple[PodClaim, ...] = ()
    """The claims of which List has no device yet, sorted."""
    passive: bool = False
    answers: tuple[PodAnswer, ...] = ()
    has_get: bool = True
    pods: SeenPods = NO_PODS


class Hint(Struct, frozen=True):
    """The subject of one uevent: a function, an IOMMU group, a mediated device, or the EGMs."""

    address: PciAddress | None
    iommu_group: int | None
    cause: str
    mediated: DeviceKey | None = None
    egm: bool = False


class UeventSource(Protocol):
    """An open source of uevents."""

    async def receive(self) -> Sequence[Hint]:
        """Return the hints of all uevents that wait, at least one uevent's worth (which may be no hint at all).

        Raises `UeventsOverflowError` once per overflow; may be called again after it.
        """


OpenUevents = Callable[[], AbstractAsyncContextManager[UeventSource]]
"""Opens the source. Raises `HostError` if it is unavailable."""


class LedgerError(KubeletError):
    """A read of kubelet's ledger failed: which pod has which device is not known."""

    def __init__(self, text: str, file: LedgerFile | None = None, pods: SeenPods = NO_PODS) -> None:
        """`file` and `pods` are as in `LedgerUnreadable`."""
        super().__init__(text)
        self.file = file
        self.pods = pods


class Caller(Protocol):
    """The interface of gRPC handlers: they post an event and wait for the core's answer."""

    async def allocate(
        self, resource: ResourceName, requests: tuple[tuple[DeviceId, ...], ...]
    ) -> Answer: ...

    async def pre_start(self, resource: ResourceName, devices: tuple[DeviceId, ...]) -> Answer: ...

    async def prefer(self, resource: ResourceName, requests: tuple[PreferenceRequest, ...]) -> Answer: ...

    def stream(self, resource: ResourceName) -> AbstractAsyncContextManager[None]:
        """Report that a ListAndWatch stream is open while the context is."""


class Endpoint(Protocol):
    """Our side of one resource's device plugin socket, serving."""

    @property
    def name(self) -> str:
        """The file name of the socket relative to kubelet's device-plugins directory, as Register needs it."""

    def still_there(self) -> bool:
        """Return whether the socket's file is still the one that was made. Kubelet removes all sockets in its directory
        at start."""

    async def wait_disconnected(self) -> None:
        """Wait until no client is connected: kubelet closes its connection when it has noticed a stream's end."""

    async def drain(self, grace_s: float) -> None:
        """Answer calls until none is in flight, for at most LATE_CALL_S; then new calls are refused, those in flight
        finish (at most `grace_s`), and streams end with UNAVAILABLE."""


class Sockets(Struct, frozen=True):
    """The sockets in kubelet's device-plugins directory."""

    kubelet: str | None
    """The identity of kubelet.sock; None while there is none."""
    others: tuple[str, ...] = ()
    """The names of the sockets that are neither kubelet's nor ours, sorted, at most FOREIGN_SOCKETS_MAX."""


class Reachable(Protocol):
    """The ways in which others reach the daemon: kubelet by its sockets, the container runtime by the directory of the
    claims' files. If one fails, the liveness probe fails."""

    async def unreachable(self) -> tuple[str, ...]:
        """Return the ways by which the daemon cannot be reached, each as a sentence. Sockets are dialled, as kubelet
        does."""


class Kubelet(Reachable, Protocol):
    """The node's kubelet, as a device plugin sees it."""

    @property
    def absence(self) -> str:
        """The message while there is no kubelet.sock: which path, and what to check."""

    def sockets(self) -> AbstractAsyncContextManager[AsyncIterator[Sockets]]:
        """Yield the sockets in kubelet's directory now and after every change.

        Raises `KubeletError` if its directory is not there, or disappears.
        """

    def serve(
        self,
        resource: ResourceName,
        device_lists: LatestReader[DeviceList],
        caller: Caller,
        *,
        pre_start: bool,
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Serve the device plugin API for `resource` as long as the context is open; each stream gets a read end of its
        own of `device_lists`.

        Raises `KubeletError` if the socket cannot be made. A later removal of the socket's file is detected by
        `Endpoint.still_there`, not here.
        """

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        """Register the endpoint. Raises `KubeletError`."""


class HeldControl(Protocol):
    """The control socket, while it is ours: `inspect` and `explain` are answered, a successor may ask for it."""

    def still_ours(self) -> bool:
        """Return whether the socket's file is still the one that was made, at each place where it could be made."""

    async def complete(self) -> str:
        """Make it at the places where it is missing; return why it is missing at one, empty if it is not."""

    async def asked(self) -> None:
        """Wait until a successor asks this daemon to hand over."""

    async def give_up(self) -> None:
        """Close the socket, then answer the successor."""


class Control(Protocol):
    """The control socket: one that every daemon of the node finds, and one in the state directory. The daemon that has
    them serves kubelet."""

    async def ask(self) -> str:
        """Ask the running daemon to hand over and wait until it has; return the outcome, for the log. Takes at most
        HAND_OVER_DEADLINE_S; after it this daemon may serve, whatever the answer.

        Raises `ControlBlockedError` if a daemon serves that cannot be asked."""

    def hold(self, state: LatestReader[NodeState]) -> AbstractAsyncContextManager[HeldControl]:
        """Hold and serve the socket as long as the context is open.

        Raises `ControlTakenError` if another live daemon has it, `ControlError` if it cannot be made.
        """

    async def is_held(self) -> bool:
        """Return whether a process listens on it."""


class ServedResources(Protocol):
    """The resources that this node's gpuactors has served, with the models (`10de:2330`) of each, kept from one daemon
    to the next."""

    async def read(self) -> Mapping[ResourceName, frozenset[str]]:
        """Return the resources that this node's daemons have served; none if there was none. Raises `StateFileError`,
        also where the disk does not answer in time."""

    async def write(self, served: Mapping[ResourceName, frozenset[str]]) -> None:
        """Replace the stored resources by these. Raises `StateFileError`."""


class VgpuTypesFile(Protocol):
    """The names of the vGPU types of each physical card, kept from one daemon of this boot to the next."""

    async def read(self) -> Mapping[PciAddress, CardTypes]:
        """Return the names that this node's daemons have read in this boot; none if there was none. Raises
        `StateFileError`, also where the disk does not answer in time."""

    async def write(self, cards: Mapping[PciAddress, CardTypes], /) -> None:
        """Replace the stored names by these. Raises `StateFileError`."""


class DeadSignsFile(Protocol):
    """The signs of dead functions, kept from one daemon of this boot to the next."""

    async def read(self) -> DeadSigns:
        """Return the signs that this node's daemons have kept in this boot; none if there was none. Raises
        `StateFileError`, also where the disk does not answer in time."""

    async def write(self, signs: DeadSigns, /) -> None:
        """Replace the stored signs by these. Raises `StateFileError`."""


class SpecDirectory(Protocol):
    """The CDI files of the device plugin, one of each resource."""

    async def write(self, specs: DeviceSpecs) -> Mapping[ResourceName, str]:
        """Make the directory have these files, durably, and no other one of this kind. Return why each other one could
        not be written or removed, as a sentence. Raises `StateFileError` if the disk does not answer in time."""

    async def find(self, specs: DeviceSpecs) -> Set[ResourceName]:
        """Return the resources whose file is there as it is here. Writes nothing. Raises `StateFileError` if the disk
        does not answer in time."""

    def touches(self) -> AsyncGenerator[frozenset[ResourceName] | None, None]:
        """Yield the resources whose file somebody has touched, also gpuactors itself. None, which is any of them, at
        the start and when the directory was replaced. Never ends."""


class SetsReader(Protocol):
    """A source of sets of devices."""

    async def read(self) -> KnownSets:
        """Return what it names now. Raises `HostError`."""


class FeatureFile(Protocol):
    """The file from which Node Feature Discovery labels our node."""

    async def write(self, labels: Mapping[str, str], until: float) -> None:
        """Replace the file by one with these labels, which expire at `until`, in seconds since 1970. Raises
        `StateFileError`."""


class Step(Struct, frozen=True):
    """One step of the registry, for the journal."""

    before: NodeState
    event: Event
    at: float
    effects: Sequence[Effect] = ()
    outputs: Outputs | None = None
    """The outputs after it; None if it failed."""
    failure: str = ""
    """The exception that it raised, which is a bug and the end of the process."""


class Journal(Protocol):
    """The flight recorder."""

    def record(self, step: Step) -> None:
        """Take a step to be written; never waits and never fails."""

    async def run(self) -> None:
        """Write the taken steps, for ever; when it is cancelled, the last ones as well."""
