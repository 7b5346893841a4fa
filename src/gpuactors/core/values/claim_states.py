"""The states of a claim on this node, and every transition between them (ADR 0009).

A transition names what is requested next; nothing here does it. A pair of state and event without a row is a bug:
`follow` raises `NoTransitionError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class ClaimState(StrEnum):
    """The state of a claim, as `explain` and the log show it."""

    ABSENT = "Absent"
    """Nothing is known of it."""
    FETCHING = "Fetching"
    """A prepare came; gpuactors reads the claim from the API server."""
    WAITING = "Waiting"
    """Another claim, a pod or a process has one of its devices."""
    RESERVED = "Reserved"
    """It owns its devices from now on; gpuactors writes that to disk."""
    BINDING = "Binding"
    """Its devices are being bound to a vfio driver. Of a compute domain: it waits for the label and the domain's
    daemon."""
    WRITING = "Writing"
    """Its CDI and metadata files are being written."""
    COMMITTING = "Committing"
    """All acts are done; gpuactors writes that to disk."""
    PREPARED = "Prepared"
    """Its containers may run."""
    VERIFYING = "Verifying"
    """It was prepared, and a prepare came again: its devices and files are being checked."""
    DRIFTED = "Drifted"
    """It was prepared, and one of its devices is not where its files say: these are removed, as a number in them may be
    another tenant's by now. It keeps its devices. Its files are written again when these are back on vfio, or when a
    prepare comes."""
    TAKEN_OVER = "TakenOver"
    """NVIDIA's DRA driver has prepared it, and its pod may run. It owns its devices; gpuactors has done nothing for
    it."""
    STOPPED = "Stopped"
    """An act failed, or the checkpoint was lost. It keeps its devices as they are, until a prepare or an unprepare
    comes."""
    RELEASING = "Releasing"
    """Its files are being removed, and its devices returned to their original drivers."""
    CLEARING = "Clearing"
    """It was unprepared, and has no devices: files that may be left of it (the checkpoint was lost, or is of another
    boot) are being removed."""
    TOMBSTONE = "Unprepared"
    """It was unprepared. Nothing is left; it is remembered for a while, for `explain` and late reads of kubelet's
    ledger."""


class ClaimTrigger(StrEnum):
    """The events of a claim."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"
    FETCHED = "fetched"
    """The API server has the claim by this UID, allocated to this node."""
    REFUSED = "refused"
    """The API server does not have it, or this node cannot satisfy it."""
    FREE = "free"
    """No other claim, pod or process has any of its devices."""
    IN_PLACE = "in place"
    """Its devices are on a vfio driver, where its files say."""
    DRIFT = "drift"
    """One of its devices is gone, another model, off its vfio driver, or has another group or node than its files
    say."""
    DURABLE = "durable"
    """The present state is on disk."""
    DONE = "done"
    """Every act that was requested has been done."""
    FAILED = "failed"
    """A requested act failed."""
    DELAYED = "delayed"
    """A requested act could not be done yet: a process still has the device open, or an earlier act has not ended."""
    ABANDONED = "abandoned"
    """No call waits for it any more."""
    RETRY = "retry"
    """An act that failed is due again."""
    FORGOTTEN = "forgotten"
    """Its tombstone has expired."""
    RESTORED = "restored"
    """It was read from disk at the daemon's start."""


class Request(StrEnum):
    """The request that goes with a transition."""

    NOTHING = "nothing"
    FETCH = "fetch"
    """Read the claim from the API server."""
    CHECKPOINT = "checkpoint"
    """Write the new state to disk."""
    BIND = "bind"
    """Bind each device, with its companions, to a vfio driver."""
    WRITE = "write"
    """Write the CDI and metadata files."""
    UNDO = "undo"
    """Remove the files, and return each device that may be returned."""
    FORGET = "forget"
    """Write the state to disk without this claim."""
    CLEAR = "clear"
    """Remove the files only. Needs no intent on disk: it concerns this claim's UID only, and may be repeated."""


Transition = tuple[ClaimState, Request]

_S, _E, _R = ClaimState, ClaimTrigger, Request

TRANSITIONS: Final[Mapping[tuple[ClaimState, ClaimTrigger], Transition]] = {
    (_S.ABSENT, _E.PREPARE): (_S.FETCHING, _R.FETCH),
    # It was never seen, or is of another boot, or the state is lost: no device is touched.
    (_S.ABSENT, _E.UNPREPARE): (_S.CLEARING, _R.CLEAR),
    (_S.FETCHING, _E.PREPARE): (_S.FETCHING, _R.NOTHING),
    (_S.FETCHING, _E.FETCHED): (_S.WAITING, _R.NOTHING),
    (_S.FETCHING, _E.REFUSED): (_S.ABSENT, _R.NOTHING),
    (_S.FETCHING, _E.ABANDONED): (_S.ABSENT, _R.NOTHING),
    (_S.FETCHING, _E.UNPREPARE): (_S.CLEARING, _R.CLEAR),
    (_S.WAITING, _E.PREPARE): (_S.WAITING, _R.NOTHING),
    (_S.WAITING, _E.FREE): (_S.RESERVED, _R.CHECKPOINT),
    (_S.WAITING, _E.REFUSED): (_S.ABSENT, _R.NOTHING),
    (_S.WAITING, _E.ABANDONED): (_S.ABSENT, _R.NOTHING),
    (_S.WAITING, _E.UNPREPARE): (_S.CLEARING, _R.CLEAR),
    (_S.RESERVED, _E.PREPARE): (_S.RESERVED, _R.NOTHING),
    (_S.RESERVED, _E.DURABLE): (_S.BINDING, _R.BIND),
    (_S.RESERVED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    # Of a claim that was under way it is not known how far its act came: the act goes on from what it finds.
    (_S.RESERVED, _E.RESTORED): (_S.BINDING, _R.BIND),
    (_S.BINDING, _E.PREPARE): (_S.BINDING, _R.NOTHING),
    (_S.BINDING, _E.DONE): (_S.WRITING, _R.WRITE),
    (_S.BINDING, _E.FAILED): (_S.STOPPED, _R.NOTHING),
    # Kubelet repeats a refused prepare only after 60 to 90 s: the call waits for a conflict that will pass.
    (_S.BINDING, _E.DELAYED): (_S.BINDING, _R.NOTHING),
    (_S.BINDING, _E.RETRY): (_S.BINDING, _R.BIND),
    (_S.BINDING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.WRITING, _E.PREPARE): (_S.WRITING, _R.NOTHING),
    (_S.WRITING, _E.DONE): (_S.COMMITTING, _R.CHECKPOINT),
    (_S.WRITING, _E.FAILED): (_S.STOPPED, _R.NOTHING),
    (_S.WRITING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.WRITING, _E.DRIFT): (_S.DRIFTED, _R.CLEAR),
    (_S.COMMITTING, _E.PREPARE): (_S.COMMITTING, _R.NOTHING),
    (_S.COMMITTING, _E.DURABLE): (_S.PREPARED, _R.NOTHING),
    (_S.COMMITTING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.COMMITTING, _E.DRIFT): (_S.DRIFTED, _R.CLEAR),
    # A GPU may have been unplugged and plugged in again, or bound to another driver by hand, since it was prepared. The
    # files are seen as well, and written where they are missing, before the answer (kubernetes 141433).
    (_S.PREPARED, _E.PREPARE): (_S.VERIFYING, _R.WRITE),
    (_S.PREPARED, _E.DONE): (_S.PREPARED, _R.NOTHING),
    (_S.PREPARED, _E.FAILED): (_S.PREPARED, _R.NOTHING),
    (_S.PREPARED, _E.RETRY): (_S.PREPARED, _R.WRITE),
    (_S.PREPARED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.PREPARED, _E.RESTORED): (_S.PREPARED, _R.WRITE),
    # A container that restarts gets the files without a call.
    (_S.PREPARED, _E.DRIFT): (_S.DRIFTED, _R.CLEAR),
    (_S.VERIFYING, _E.PREPARE): (_S.VERIFYING, _R.NOTHING),
    (_S.VERIFYING, _E.DONE): (_S.VERIFYING, _R.NOTHING),
    (_S.VERIFYING, _E.FAILED): (_S.PREPARED, _R.NOTHING),
    (_S.VERIFYING, _E.RETRY): (_S.VERIFYING, _R.WRITE),
    (_S.VERIFYING, _E.IN_PLACE): (_S.PREPARED, _R.NOTHING),
    # A device is not where the files say, and has no other owner: it is bound again, once that intent is on disk.
    (_S.VERIFYING, _E.FREE): (_S.RESERVED, _R.CHECKPOINT),
    (_S.VERIFYING, _E.REFUSED): (_S.PREPARED, _R.NOTHING),
    (_S.VERIFYING, _E.ABANDONED): (_S.PREPARED, _R.NOTHING),
    (_S.VERIFYING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.VERIFYING, _E.DRIFT): (_S.DRIFTED, _R.CLEAR),
    (_S.DRIFTED, _E.PREPARE): (_S.DRIFTED, _R.NOTHING),
    (_S.DRIFTED, _E.DONE): (_S.DRIFTED, _R.NOTHING),
    (_S.DRIFTED, _E.FAILED): (_S.DRIFTED, _R.NOTHING),
    (_S.DRIFTED, _E.RETRY): (_S.DRIFTED, _R.CLEAR),
    (_S.DRIFTED, _E.FREE): (_S.RESERVED, _R.CHECKPOINT),
    (_S.DRIFTED, _E.REFUSED): (_S.DRIFTED, _R.NOTHING),
    (_S.DRIFTED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.TAKEN_OVER, _E.RESTORED): (_S.TAKEN_OVER, _R.NOTHING),
    # It is answered as the driver that prepared it did: nothing under its pod is touched.
    (_S.TAKEN_OVER, _E.PREPARE): (_S.TAKEN_OVER, _R.NOTHING),
    (_S.TAKEN_OVER, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.STOPPED, _E.PREPARE): (_S.BINDING, _R.BIND),
    # The checkpoint was lost, and with it what the claim asks for: it was read again from the API server.
    (_S.STOPPED, _E.FETCHED): (_S.BINDING, _R.BIND),
    (_S.STOPPED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.STOPPED, _E.DRIFT): (_S.DRIFTED, _R.CLEAR),
    # The act on another device of it than the one that has failed.
    (_S.STOPPED, _E.DONE): (_S.STOPPED, _R.NOTHING),
    (_S.STOPPED, _E.FAILED): (_S.STOPPED, _R.NOTHING),
    # A prepare that comes now waits for the release; then the claim is read again.
    (_S.RELEASING, _E.PREPARE): (_S.RELEASING, _R.NOTHING),
    (_S.RELEASING, _E.UNPREPARE): (_S.RELEASING, _R.NOTHING),
    # Also after it has failed, and after a restart.
    (_S.RELEASING, _E.DURABLE): (_S.RELEASING, _R.UNDO),
    (_S.RELEASING, _E.DONE): (_S.TOMBSTONE, _R.FORGET),
    (_S.RELEASING, _E.FAILED): (_S.RELEASING, _R.NOTHING),
    (_S.RELEASING, _E.RESTORED): (_S.RELEASING, _R.NOTHING),
    # A prepare that comes now waits for the removal; then the claim is read again.
    (_S.CLEARING, _E.PREPARE): (_S.CLEARING, _R.NOTHING),
    (_S.CLEARING, _E.UNPREPARE): (_S.CLEARING, _R.NOTHING),
    (_S.CLEARING, _E.DONE): (_S.TOMBSTONE, _R.NOTHING),
    (_S.CLEARING, _E.FAILED): (_S.CLEARING, _R.NOTHING),
    (_S.CLEARING, _E.RETRY): (_S.CLEARING, _R.CLEAR),
    (_S.TOMBSTONE, _E.PREPARE): (_S.FETCHING, _R.FETCH),
    (_S.TOMBSTONE, _E.UNPREPARE): (_S.TOMBSTONE, _R.NOTHING),
    (_S.TOMBSTONE, _E.FORGOTTEN): (_S.ABSENT, _R.NOTHING),
}
"""Every transition."""

OWNING: Final = frozenset(
    {
        _S.RESERVED,
        _S.BINDING,
        _S.WRITING,
        _S.COMMITTING,
        _S.PREPARED,
        _S.VERIFYING,
        _S.DRIFTED,
        _S.TAKEN_OVER,
        _S.STOPPED,
        _S.RELEASING,
    }
)
"""The states in which a claim owns its devices: no other claim or pod may get them. These are on disk."""


REMOVING: Final = frozenset({_S.RELEASING, _S.CLEARING, _S.DRIFTED})
"""The states in which the act on a claim's files removes them."""


RESTING: Final = frozenset({_S.PREPARED, _S.TAKEN_OVER, _S.TOMBSTONE})
"""The states in which nothing more is to be done for a claim: it may stay there for as long as its pod runs."""


ENDED: Final = frozenset({_S.CLEARING, _S.TOMBSTONE})
"""The states of a claim that was unprepared, and has at most files left."""


class NoTransitionError(AssertionError):
    """The table has no row for this state and event: a bug."""

    uid: str = ""
    """The claim's UID; empty if unknown."""


def follow(state: ClaimState, event: ClaimTrigger) -> Transition:
    """Return the next state and its request. Raises `NoTransitionError`."""
    if (transition := TRANSITIONS.get((state, event))) is None:
        raise NoTransitionError(f"a claim that is {state} has no transition on {event!s}")
    return transition
