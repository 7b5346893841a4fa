"""The states of a claim on this node, and every transition between them (ADR 0009).

A transition says what is requested next, and nothing here does it. A pair of state and event without a row is a bug:
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
    """A prepare came; the claim is read from the API server."""
    WAITING = "Waiting"
    """Another claim or pod has one of its devices."""
    RESERVED = "Reserved"
    """Its devices are its own from now on; that is being written to disk."""
    BINDING = "Binding"
    """Its devices are being bound to a vfio driver."""
    WRITING = "Writing"
    """Its CDI and metadata files are being written."""
    COMMITTING = "Committing"
    """All is done; that is being written to disk."""
    PREPARED = "Prepared"
    """Its containers may run."""
    STOPPED = "Stopped"
    """An act failed, or the checkpoint was lost. The devices stay as they are and its own, until a prepare or an
    unprepare comes."""
    RELEASING = "Releasing"
    """Its files are being removed, and its devices returned to their first drivers."""
    TOMBSTONE = "Unprepared"
    """It was unprepared. Nothing is left; it is remembered for a while, for `explain` and late reads of kubelet's
    ledger."""


class On(StrEnum):
    """The events of a claim."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"
    FETCHED = "fetched"
    """The API server has the claim by this UID, allocated to this node."""
    REFUSED = "refused"
    """It has not; or it asks for what this node cannot give."""
    FREE = "free"
    """No other claim, pod or process has any of its devices."""
    DURABLE = "durable"
    """The present state is on disk."""
    DONE = "done"
    """Every act that was requested has been done."""
    FAILED = "failed"
    """One of them failed."""
    DELAYED = "delayed"
    """One of them could not be done yet: a process still has the device open, or an earlier act has not ended."""
    ABANDONED = "abandoned"
    """No call waits for it any more."""
    RETRY = "retry"
    """An act that failed is due again."""
    FORGOTTEN = "forgotten"
    """Its tombstone has stood long enough."""
    RESTORED = "restored"
    """It was read from disk at the daemon's start."""


class Request(StrEnum):
    """What is requested with a transition."""

    NOTHING = "nothing"
    FETCH = "fetch"
    """A read of the claim from the API server."""
    CHECKPOINT = "checkpoint"
    """That the new state is on disk."""
    BIND = "bind"
    """Each device on a vfio driver, with its companions."""
    WRITE = "write"
    """The CDI and metadata files."""
    UNDO = "undo"
    """The files removed, and each device returned that may be."""
    FORGET = "forget"
    """The new state is on disk without this claim."""


Transition = tuple[ClaimState, Request]

_S, _E, _R = ClaimState, On, Request

TRANSITIONS: Final[Mapping[tuple[ClaimState, On], Transition]] = {
    (_S.ABSENT, _E.PREPARE): (_S.FETCHING, _R.FETCH),
    # It was never seen, or is of another boot, or our state is lost: nothing is touched.
    (_S.ABSENT, _E.UNPREPARE): (_S.TOMBSTONE, _R.NOTHING),
    (_S.FETCHING, _E.PREPARE): (_S.FETCHING, _R.NOTHING),
    (_S.FETCHING, _E.FETCHED): (_S.WAITING, _R.NOTHING),
    (_S.FETCHING, _E.REFUSED): (_S.ABSENT, _R.NOTHING),
    (_S.FETCHING, _E.ABANDONED): (_S.ABSENT, _R.NOTHING),
    (_S.FETCHING, _E.UNPREPARE): (_S.TOMBSTONE, _R.NOTHING),
    (_S.WAITING, _E.PREPARE): (_S.WAITING, _R.NOTHING),
    (_S.WAITING, _E.FREE): (_S.RESERVED, _R.CHECKPOINT),
    (_S.WAITING, _E.REFUSED): (_S.ABSENT, _R.NOTHING),
    (_S.WAITING, _E.ABANDONED): (_S.ABSENT, _R.NOTHING),
    (_S.WAITING, _E.UNPREPARE): (_S.TOMBSTONE, _R.NOTHING),
    (_S.RESERVED, _E.PREPARE): (_S.RESERVED, _R.NOTHING),
    (_S.RESERVED, _E.DURABLE): (_S.BINDING, _R.BIND),
    (_S.RESERVED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    # Of a claim that was under way it is not known how far its act came: the act goes on from what it finds.
    (_S.RESERVED, _E.RESTORED): (_S.BINDING, _R.BIND),
    (_S.BINDING, _E.PREPARE): (_S.BINDING, _R.NOTHING),
    (_S.BINDING, _E.DONE): (_S.WRITING, _R.WRITE),
    (_S.BINDING, _E.FAILED): (_S.STOPPED, _R.NOTHING),
    # Kubelet repeats a prepare that was refused only after 60 to 90 s: what will pass is waited for in the call.
    (_S.BINDING, _E.DELAYED): (_S.BINDING, _R.NOTHING),
    (_S.BINDING, _E.RETRY): (_S.BINDING, _R.BIND),
    (_S.BINDING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.WRITING, _E.PREPARE): (_S.WRITING, _R.NOTHING),
    (_S.WRITING, _E.DONE): (_S.COMMITTING, _R.CHECKPOINT),
    (_S.WRITING, _E.FAILED): (_S.STOPPED, _R.NOTHING),
    (_S.WRITING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.COMMITTING, _E.PREPARE): (_S.COMMITTING, _R.NOTHING),
    (_S.COMMITTING, _E.DURABLE): (_S.PREPARED, _R.NOTHING),
    (_S.COMMITTING, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    # The files are seen, and written where they are missing, before a prepare is answered again (kubernetes 141433).
    (_S.PREPARED, _E.PREPARE): (_S.PREPARED, _R.WRITE),
    (_S.PREPARED, _E.DONE): (_S.PREPARED, _R.NOTHING),
    (_S.PREPARED, _E.FAILED): (_S.PREPARED, _R.NOTHING),
    (_S.PREPARED, _E.RETRY): (_S.PREPARED, _R.WRITE),
    (_S.PREPARED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    (_S.PREPARED, _E.RESTORED): (_S.PREPARED, _R.WRITE),
    (_S.STOPPED, _E.PREPARE): (_S.BINDING, _R.BIND),
    # The checkpoint was lost, and with it what the claim asks for: it was read again from the API server.
    (_S.STOPPED, _E.FETCHED): (_S.BINDING, _R.BIND),
    (_S.STOPPED, _E.UNPREPARE): (_S.RELEASING, _R.CHECKPOINT),
    # A prepare that comes now waits for the release, and is then read anew.
    (_S.RELEASING, _E.PREPARE): (_S.RELEASING, _R.NOTHING),
    (_S.RELEASING, _E.UNPREPARE): (_S.RELEASING, _R.NOTHING),
    # Also after it has failed, and after a restart.
    (_S.RELEASING, _E.DURABLE): (_S.RELEASING, _R.UNDO),
    (_S.RELEASING, _E.DONE): (_S.TOMBSTONE, _R.FORGET),
    (_S.RELEASING, _E.FAILED): (_S.RELEASING, _R.NOTHING),
    (_S.RELEASING, _E.RESTORED): (_S.RELEASING, _R.NOTHING),
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
        _S.STOPPED,
        _S.RELEASING,
    }
)
"""The states in which a claim has its devices: no other claim or pod may get them. These are on disk."""


class NoTransitionError(AssertionError):
    """The table has no row for this state and event: a bug."""


def follow(state: ClaimState, event: On) -> Transition:
    """The next state, and what is requested with it. Raises `NoTransitionError`."""
    if (transition := TRANSITIONS.get((state, event))) is None:
        raise NoTransitionError(f"a claim that is {state} has no transition on {event!s}")
    return transition
