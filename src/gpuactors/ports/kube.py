"""The actors' interface to the Kubernetes API server, as protocols, and the errors of its adaptor (`kube/`).

A file of its own, so that a daemon without DRA (`--dra off`) imports nothing for it. Must not import anything but the
core's values.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from gpuactors.core.gpus.device_classes import DeviceClass
from gpuactors.core.values.claim import ClaimAnswer, ClaimName
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid
from gpuactors.core.values.slices import SliceSpec, StoredSlice
from gpuactors.ports.errors import PortError


class ApiError(PortError):
    """A request to the API server was in vain; the text names what was asked, of which server, why, and the remedy."""


class ApiAway(ApiError):
    """No answer: the server cannot be reached, broke the connection off, or did not answer in time. A write may have
    been carried out."""


class Refusal(Struct, frozen=True):
    """The server's error: the HTTP status, and what its `Status` object says, if the answer was one."""

    code: int
    reason: str = ""
    """The reason as one word for programs: `NotFound`, `Conflict`."""
    message: str = ""
    """The server's own words."""
    kind: str = ""
    """The resource that it is about, in the plural: `resourceclaims`."""
    name: str = ""
    """The object that it is about."""
    retry_after_s: float | None = None
    """The wait that the server asked for, in seconds (429, 503); None if it did not ask."""


class ApiRefused(ApiError):
    """The server answered with an error."""

    def __init__(self, text: str, refusal: Refusal) -> None:
        super().__init__(text)
        self.refusal = refusal

    @property
    def code(self) -> int:
        """The HTTP status; in a watch that of the ERROR event."""
        return self.refusal.code


class ApiMalformed(ApiError):
    """The server answered with success, and with something that is not the object that was asked for."""


class NodeMetadata(Struct, frozen=True):
    """The metadata of our Node object."""

    uid: str
    labels: Mapping[str, str]


class LabelConflict(Struct, frozen=True):
    """The label is not what a patch of it expects: somebody else has changed it. Nothing was changed."""


class ObjectRef(Struct, frozen=True):
    """An object that an event is about."""

    kind: str
    """The kind, `Node` or `Pod`."""
    namespace: str
    """The namespace; empty for a node."""
    name: str
    uid: str


class EventNote(Struct, frozen=True):
    """An event as it is to be at the API server. Its object, reason and message are its identity."""

    about: ObjectRef
    reason: str
    message: str
    count: int
    """The number of times that it was posted, this one included."""
    first_at: float
    """The time of the first post, in seconds since 1970."""
    last_at: float


class ClaimApi(Protocol):
    """Reads ResourceClaims, one by one."""

    async def read(self, claim: ClaimName) -> ClaimAnswer:
        """Read the claim; that there is none, or another one by this name, is an answer and no error. Raises
        `ApiError`."""

    async def reserved_for(self, claim: ClaimName) -> tuple[ObjectRef, ...]:
        """Return the pods that may use the claim (`status.reservedFor`); none if the claim is gone, or is another one.
        Raises `ApiError`."""


class EventApi(Protocol):
    """Kubernetes Events."""

    @property
    def node(self) -> ObjectRef:
        """Our node, as events about it name it."""

    async def tell(self, note: EventNote) -> int:
        """Make the event, or change the count and time of the existing one by its identity; return its count then. An
        event that another daemon of this node made before keeps its count. Raises `ApiError`."""


class NodeApi(Protocol):
    """Our Node object."""

    async def read(self) -> NodeMetadata:
        """Read the node's metadata. Raises `ApiError`; `ApiRefused` with code 404 if there is no such node."""

    async def set_label(
        self, label: str, *, expected: str | None, value: str | None
    ) -> NodeMetadata | LabelConflict:
        """Give the label `value` (None: remove it) if it is `expected` now (None: absent), in one request; return the
        node as it is then. That it is not as expected is an answer and no error. Raises `ApiError`."""

    def watch_node(self) -> AbstractAsyncContextManager[AsyncIterator[NodeMetadata]]:
        """Yield the node's metadata as it is now and after every change, for ever; again from the beginning where the
        watch cannot go on. A node that does not exist yields nothing. The iteration raises `ApiError`."""


class DomainApi(Protocol):
    """NVIDIA's objects of compute domains (`resource.nvidia.com/v1beta1`), which its controller and daemons write."""

    async def find_domain(self, uid: DomainUid) -> ComputeDomain | None:
        """Return the ComputeDomain with this UID, in whatever namespace; None if the server has none. Raises
        `ApiError`, also where the server does not know ComputeDomains."""

    async def read_clique(self, uid: DomainUid, clique_id: str, namespace: str) -> Clique | None:
        """Return the domain's ComputeDomainClique of one fabric, in this namespace of NVIDIA's driver; None if there is
        none, as before the first daemon has written it. Raises `ApiError`."""

    def watch_domain(self, uid: DomainUid) -> AbstractAsyncContextManager[AsyncIterator[None]]:
        """Yield once for the present ComputeDomain with this UID, then for each change of it, for ever; again from the
        beginning where the watch cannot go on. A domain that does not exist yields nothing. The iteration raises
        `ApiError`."""


class DeviceClassApi(Protocol):
    """The DeviceClasses of the cluster."""

    async def list_classes(self) -> tuple[DeviceClass, ...]:
        """Return all DeviceClasses. Raises `ApiError`."""


class SlicesListed(Struct, frozen=True):
    """All present slices; they replace what was known before."""

    slices: tuple[StoredSlice, ...]


class SliceStored(Struct, frozen=True):
    """A slice was created or changed, by anyone."""

    slice: StoredSlice


class SliceDeleted(Struct, frozen=True):
    """A slice was deleted, by anyone."""

    name: str


SliceEvent = SlicesListed | SliceStored | SliceDeleted


class SliceApi(Protocol):
    """The ResourceSlices of our driver on our node."""

    def follow(self) -> AbstractAsyncContextManager[AsyncIterator[SliceEvent]]:
        """Yield the slices as they are now, then every change, for ever, in the server's order. A watch that ends in
        the usual way is renewed; if its version is too old (410), all are listed anew. The iteration raises
        `ApiError`."""

    async def create(self, spec: SliceSpec, index: int, owner: str, *, dry_run: bool = False) -> StoredSlice:
        """Create the slice number `index` of the pool, owned by the Node with the UID `owner`; return it as the server
        stored it. Raises `ApiError`."""

    async def update(self, stored: StoredSlice, spec: SliceSpec, owner: str) -> StoredSlice:
        """Give the slice another content; return it as the server stored it. Raises `ApiRefused` with code 409 if it is
        not `stored` any more, 404 if it is gone, else `ApiError`."""

    async def delete(self, stored: StoredSlice) -> None:
        """Delete the slice if it is `stored` still; a slice that is gone is no error. Raises `ApiError`."""
