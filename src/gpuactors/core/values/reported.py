"""The words in which claims and compute domains are reported, and the host's state of IMEX. The commands know them, and
nothing else that reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

OFFERED: Final = "offered"
CLAIMED: Final = "claimed"
"""The offer of a device to claims: it is in a slice; a claim has it, or had it until its driver is seen."""


class Readiness(StrEnum):
    """The API server's view of a domain's daemon on this node."""

    READY = "Ready"
    NOT_READY = "NotReady"
    UNREAD = "Unread"
    """It has not been read since the label was added: what was read before is no fact of this daemon."""


class DomainStatus(StrEnum):
    """Whether the channels of a domain can be used on this node."""

    READY = "Ready"
    """Nothing is missing."""
    NOT_READY = "NotReady"
    UNREAD = "Unread"
    """Label and daemon are there. Readiness was not read since, as no claim waits for it."""
    UNUSED = "Unused"
    """No claim here is for a channel of it."""


class LabelStatus(StrEnum):
    """The node's label as far as known."""

    UNREAD = "Unread"
    """It has not been read since this daemon serves."""
    UNSURE = "Unsure"
    """A patch has failed, or met another label: it is read again."""
    ABSENT = "Absent"
    ADDING = "Adding"
    SET = "Set"
    """It names the domain of a claim that is here, or was; or whose it is is not known before every claim is read."""
    REMOVING = "Removing"
    FOREIGN = "Foreign"
    """No claim here has set it, and it is not touched."""


class ImexReport(Struct, frozen=True, gc=False):
    """The host's state of IMEX."""

    known: bool
    """It has said something."""
    present: bool
    """The node has IMEX: its devices are offered."""
    clique_id: str
    """`<cluster UUID>.<clique>`; empty on a node without fabric."""
    reason: str
    """Why no container gets the node of a channel, as a sentence; empty if it does."""
    host_problem: str
    """In mode host-managed: why the host's IMEX daemon is not ready, as a sentence; empty if it is."""
    problem: str
    """Why it could not be read the last time, as a sentence; empty if it could."""
