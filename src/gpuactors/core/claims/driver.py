"""The differences between the claims of DRA drivers: the questions that the machine of claims asks (ADR 0011). The
machine is `machine.py`, `progress.py`, `transitions.py` and `values/claim_states.py`; it knows no kind of device.

Answered in `gpus/` for GPUs and in `domains/` for compute domains. Every answer follows from the state; none does
anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gpuactors.core.claims.files import PlacedFile
from gpuactors.core.events.claims import ActDone, ActFailed, CheckpointRead
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, OwedReturn, StoredEntry
from gpuactors.core.values.claim import Claim, ClaimsOf, DeviceEdits, FitnessCheck, OriginalDriver, Target
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.status import Conflict, Reason

Stepped = tuple[NodeState, list[Effect]]


class DeviceAct(Struct, frozen=True, gc=False):
    """An act on a device and its companions: bind them to the target."""

    number: int
    target: Target
    functions: tuple[OriginalDriver, ...]
    """The functions to bind, sorted by address."""
    beside: tuple[DeviceKey, ...] = ()
    """The claim's other devices of its IOMMU group, which the act brings as well."""


class Claiming(Protocol):
    """Decides which devices a claim gets, and whether it still has them."""

    def on_state_changed(self, before: NodeState, state: NodeState) -> NodeState:
        """Apply to these claims what has changed in the rest of the state, and to the rest what has changed in them.
        `before` is the state before the event."""

    def validate(self, state: NodeState, claim: Claim) -> Reason | None:
        """Return why an allocated claim can never be prepared here; None if it can."""

    def with_claim(self, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        """Keep the claim as it was read, with what this driver needs of it at every event."""

    def found_again(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        """Keep a claim that was read again after its entry was restored from its files, as the checkpoint is lost."""

    def request_reads(self, state: NodeState, entry: ClaimRecord, at: float) -> tuple[NodeState, ClaimRecord]:
        """Request new reads of the devices that the claim has or is to get: earlier ones are not used for it. Returns
        the state and the entry, with the number since which reads are used."""

    def conflict(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        """Return the first reason why the claim cannot reserve its devices now; None if it can."""

    def reserve(self, state: NodeState, entry: ClaimRecord) -> tuple[NodeState, ClaimRecord]:
        """Give the claim its devices, as they are seen now: they are its own from now on."""

    def binding(self, entry: ClaimRecord) -> Sequence[str]:
        """Return the keys of the acts that make its devices usable: addresses, or `state.claims.AWAITED`."""

    def unmet_prerequisite(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        """Return what the act AWAITED still waits for, or why it will never be done; None if nothing is missing."""

    def undoing(self, state: NodeState, entry: ClaimRecord) -> Sequence[str]:
        """Return the keys of the acts that return its devices, without those that somebody else has."""

    def is_seen(self, state: NodeState, entry: ClaimRecord) -> bool:
        """Return whether the devices of a prepared claim have been read since that was requested."""

    def drift(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        """Return why the files of a prepared claim are wrong: a device is not where they say. None if all are."""

    def unusable(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        """Return why no container could use a device of a prepared claim, although all are in place; None if one
        could."""


class Files(Protocol):
    """Decides the content of a claim's files: CDI, metadata, and what its containers mount."""

    def may_write(self, state: NodeState, entry: ClaimRecord) -> bool:
        """Return whether a claim's files may be written now."""

    def unmet(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        """Return what no container may start without, and so the files wait for; None if nothing is missing."""

    def devices(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> tuple[DeviceEdits, ...]:
        """Return the content of the files for each result of the claim, in their order."""

    def directories(self, state: NodeState, entry: ClaimRecord) -> tuple[str, ...]:
        """Return the host's directories that are made before the claim's files and removed after them."""

    def placed(self, state: NodeState, entry: ClaimRecord) -> tuple[PlacedFile, ...]:
        """Return the files to write into those directories before the claim's containers start."""


class HostActs(Protocol):
    """Decides the acts on the host's devices, and keeps what is left of them beside the claims: the original drivers
    and the returns that are owed. A driver whose devices nobody binds has none."""

    def restored(self, state: NodeState, event: CheckpointRead) -> tuple[NodeState, Sequence[StoredEntry]]:
        """Restore what the checkpoint has beside the claims: `state`, whose claims have no entries yet, with that; and
        the entries as they are valid now, in their order."""

    def kept(self, state: NodeState) -> tuple[tuple[OriginalDriver, ...], tuple[OwedReturn, ...]]:
        """Return what the checkpoint has beside the claims, each sorted by address: the original drivers of functions
        that gpuactors may have bound, and the returns that are owed."""

    def device_acts(self, state: NodeState, acting: Iterable[ClaimRecord]) -> Mapping[DeviceKey, DeviceAct]:
        """Return the act on each device, by address: those of the `acting` claims, whose intent is on disk, and those
        of no claim."""

    def fitness_check(self, state: NodeState) -> FitnessCheck | None:
        """Return the outstanding check of devices that a claim would bind; None while there is none."""

    def in_place(self, state: NodeState, device: DeviceKey) -> bool:
        """Return whether a device is as a prepare leaves it. Where the checkpoint is lost it may be of an earlier
        boot."""

    def drifted(self, before: NodeState, state: NodeState) -> Sequence[tuple[ClaimRecord, Reason]]:
        """Return the claims whose files are to be removed at once, each with the reason. `before` is the state before
        the event."""

    def acted(
        self, state: NodeState, entry: ClaimRecord, event: ActDone, at: float
    ) -> tuple[NodeState, ClaimRecord, list[Effect]]:
        """Keep what an act has done to devices of this claim, and request new reads of them."""

    def failed(
        self, state: NodeState, entry: ClaimRecord, event: ActFailed, at: float
    ) -> tuple[NodeState, ClaimRecord, list[Effect]]:
        """Keep what a failed act has done to devices of this claim, and its reason for later requests of them."""

    def owes(self, state: NodeState, entry: ClaimRecord, event: ActFailed, at: float) -> Stepped | None:
        """Record what is left to do later, after a claim's last act failed without holding its release. None: it is
        tried again."""

    def other_act_over(self, state: NodeState, event: ActDone | ActFailed, at: float) -> Stepped:
        """Handle the end of an act that belongs to no claim, or to no claim any more."""

    def due(self, state: NodeState, at: float) -> Stepped:
        """Do what is due for devices without a claim."""

    def deadline(self, state: NodeState) -> float:
        """Return when that is next due; infinite if never."""


class Driver(Struct, frozen=True, gc=False):
    """One DRA driver: the kind of its claims, and who answers about them."""

    kind: ClaimsOf
    claiming: Claiming
    files: Files
    acts: HostActs | None = None
    """The acts on the host's devices; None if others make its devices usable (`state.claims.AWAITED`)."""
