"""The words in which claims, compute domains and IMEX are reported. A file of its own: the commands import it, and
nothing else that reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

OFFERED: Final = "offered"
CLAIMED: Final = "claimed"
"""The offer of a device: it is in a slice; or a claim has it, or had it and its driver has not been seen since."""


class Readiness(StrEnum):
    """The API server's view of a domain's daemon on this node."""

    READY = "Ready"
    NOT_READY = "NotReady"
    UNREAD = "Unread"
    """It has not been read since the label was added: an earlier read is not about this daemon."""


class DomainStatus(StrEnum):
    """Whether the channels of a domain can be used on this node."""

    READY = "Ready"
    """Nothing is missing."""
    NOT_READY = "NotReady"
    UNREAD = "Unread"
    """Label and daemon are there. Readiness was not read since, as no claim waits for it."""
    UNUSED = "Unused"
    """No claim here has a channel of it."""


class LabelStatus(StrEnum):
    """The last known state of the node's label."""

    UNREAD = "Unread"
    """It has not been read since this daemon serves."""
    UNSURE = "Unsure"
    """A patch failed, or found another label: it is read again."""
    ABSENT = "Absent"
    ADDING = "Adding"
    SET = "Set"
    """It names the domain of a present or former claim here; or its owner is unknown until all claims have been
    read."""
    REMOVING = "Removing"
    FOREIGN = "Foreign"
    """No claim here has set it: it is left alone."""


class ImexReport(Struct, frozen=True, gc=False):
    """The state of IMEX on the host."""

    known: bool
    """True if it has been read."""
    present: bool
    """True if the node has IMEX: its devices are offered."""
    clique_id: str
    """`<cluster UUID>.<clique>`; empty on a node without fabric."""
    reason: str
    """Why no container gets the node of a channel, as a sentence; empty if containers do."""
    host_problem: str
    """In mode host-managed: why the host's IMEX daemon is not ready, as a sentence; empty if it is."""
    problem: str
    """Why the last read failed, as a sentence; empty if it did not."""
