"""Whether a pod that kubelet gave up had to fail: each reason needs an event that can have brought it about.

Kubelet never tries an Allocate again: a pod that is refused, or whose call is cut off, is Failed for good. So a refusal
without a cause is a fault even if all books are right, and a daemon that is told to stop finishes the calls in flight.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from gpuactors.simulation.histories.neighbour_events import SECOND_PLUGIN

CUTS_CALLS_OFF: Final = (
    "a daemon crashes",
    "a stream is lost",
    "a stream is cut within a message",
    "kubelet stops",
    "a look hangs",  # longer than a call in flight is waited for
    "descriptors run out",  # as long
    "the clock jumps",
    "the node reboots",
    *SECOND_PLUGIN,
)
"""What ends a call that has reached the daemon before it is answered."""

UNREAD: Final = (
    "reads of the ledger fail",
    "reads of the ledger take long",
    "the ledger is answered with nonsense",
    "the next List is cut",
    "the reader of the ledger crashes",
    "descriptors run out",
)
"""After these the ledger may not have been read in time: the last known one decides, or a call waits until it may."""

_STOPS: Final = (
    *CUTS_CALLS_OFF,
    "the daemon is told to stop",
    "the predecessor is told to stop",
    "the successor is told to stop",
    "a successor starts",
)

_HELD: Final = (
    "a stranger opens a card",
    "a stranger opens a group alone",
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
    "the ledger file is damaged",  # kubelet forgets who has what
    "kubelet stops",
    "an older plugin has given a card away",
    "the node reboots",
)

_OTHERS: Final = ("another plugin gives a card away", "a claim takes a card")

_CHANGED: Final = (
    "unbind",
    "unbind slowly",
    "unplug",
    "unplug slowly",
    "half gone",
    "bind the companion to a host driver",
    "plug a second card into the group",
    "mates are released together",
    "an attribute turns unreadable",
    "the node reboots",
    "a card comes back in another group",
    "the next daemon selects other cards",
    "the next daemon has another pci.ids",
    "our resource has an odd ID",
)

_CAUSES: Final = (
    (r"was told to fail", ("looks fail",)),
    (r"Too many open files|did not tell its ledger", ("descriptors run out", "the clock jumps")),
    (r"did not end in time|sysfs did not answer", ("a look hangs", "the clock jumps")),
    (
        r"could not be found out in time who uses",
        ("polls can look at nothing", "the clock jumps", "descriptors run out"),
    ),
    (r"code = (Canceled|Unavailable)|endpoint .* has been stopped", _STOPS),
    (r"its unbind or unplug waits", _CHANGED),
    (r"no selector chooses it", _CHANGED),
    (r"Device or resource busy", (*SECOND_PLUGIN, "the node reboots")),
    (
        r"IOMMU group \d+ is (still )?(held|in use)",
        (*_HELD, *_OTHERS, "plug a second card into the group", "mates are released together"),
    ),
    (r"in use by the claim|allocated to pod", _OTHERS),
    (
        r"is gone from this node|bound to|is not viable|another device is there|cannot be read|does not exist"
        r"|no such device|in no IOMMU group|changed from|No such file",
        _CHANGED,
    ),
    (
        r"no healthy devices present|Available: \d+|no longer healthy|unregistered device",
        (*_STOPS, *_HELD, *_CHANGED, *_OTHERS),
    ),
)

_TOGETHER: Final = (
    # Until it has read the ledger once, a daemon cannot know of a pod that was there before it: what kubelet has by
    # another ID, and nobody has open yet, is offered, and refused as soon as the ledger can be read. From kubelet's
    # file only the UID of that pod is known, which may have ended since: List alone would say so.
    (r"allocated to pod (\S+/older-\d+\b|with UID )", "an older plugin has given a card away", UNREAD),
)
"""Events of which one alone is no cause: it takes one of the others as well."""


def without_cause(message: str, happened: Container[str]) -> bool:
    """Whether a pod that failed with this message failed for nothing: none of the events that can lead to it has
    happened."""
    for pattern, kind, others in _TOGETHER:
        if kind in happened and any(other in happened for other in others) and re.search(pattern, message):
            return False
    for pattern, causes in _CAUSES:
        if re.search(pattern, message):
            return not any(kind in happened for kind in causes)
    return True
