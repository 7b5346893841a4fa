"""Whether a pod that failed had to fail: each reason needs an event that can have caused it.

Kubelet never tries an Allocate again: a pod that is refused, or whose call is cut off, is Failed for good. So a refusal
without a cause is a fault even if kubelet's view is right, and a daemon that is asked to stop completes the calls in
flight.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Final

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Refused
from gpuactors.core.values.model import Pod
from tests.histories.administrator import UNBINDS
from tests.histories.config_events import CHOOSES, NAMES
from tests.histories.dead_events import COMES_AGAIN, DIES
from tests.histories.fabric_events import ACTIVATES, LATE
from tests.histories.group_events import COMES, IS_BOUND
from tests.histories.kata_events import TAKES, UNWRITTEN
from tests.histories.move_events import COMES_WITH_FREED, PULLED, SWAPPED
from tests.histories.other_plugin_events import SECOND_PLUGIN
from tests.histories.part_events import CHANGED_BY, OPENED
from tests.histories.vgpu_events import CHANGED_BY as VGPUS_CHANGED_BY
from tests.histories.vgpu_events import OPENED_BY
from tests.histories.world import OLDER_POD, UNTOLD
from tests.memory.faults import Fault, PlannedCrashError

CUTS_CALLS_OFF: Final = (
    "a daemon crashes",
    "a stream is lost",
    "a stream is cut within a message",
    "kubelet stops",
    "an inspection hangs",  # longer than a call in flight is waited for
    "descriptors run out",  # as long
    "the clock jumps",
    "the node reboots",
    *SECOND_PLUGIN,
)
"""The ends of a call that has reached the daemon before it is answered."""

UNREAD: Final = (
    "reads of the ledger fail",
    "reads of the ledger take long",
    "the ledger is answered with nonsense",
    "the next List is cut",
    "the reader of the ledger crashes",
    "descriptors run out",
)
"""After these the ledger may not have been read in time: the last known one decides, or a call waits for a read."""

_SHORTENS_CALLS: Final = (
    "the daemon is told to stop",
    "the predecessor is told to stop",
    "the successor is told to stop",
    "a successor starts",
    "a daemon starts with another state directory",
)
"""After these a call in flight waits less."""

_STOPS: Final = (*CUTS_CALLS_OFF, *_SHORTENS_CALLS)

_HELD: Final = (
    "an external process opens a card",
    "an external process opens only a group",
    OPENED,
    *OPENED_BY,
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
    "the ledger file is damaged",  # kubelet loses its ledger
    "kubelet stops",
    "an older plugin has given a card away",
    "the node reboots",
)

_OTHERS: Final = (
    "another plugin gives a card away",
    "a claim takes a card",
    "another driver prepares a card for a claim",
    "a pod with a claim comes",
    "a pod with a claim for two cards comes",
    "a pod and a claim race for a card",
)

_CHANGED: Final = (
    *UNBINDS,
    "unbind",
    "unbind slowly",
    "unplug",
    "unplug slowly",
    "half gone",
    "bind the companion to a host driver",
    COMES,
    IS_BOUND,
    PULLED,
    SWAPPED,
    COMES_AGAIN,
    *UNTOLD,
    "plug a second card into the group",
    "both cards of a group are released",
    *CHANGED_BY,
    *VGPUS_CHANGED_BY,
    "an attribute turns unreadable",
    "the node reboots",
    "a card comes back in another group",
    "the next daemon selects other cards",
    "the next daemon has another pci.ids",
    CHOOSES,
    NAMES,
    "our resource has an odd ID",
)

_IN_USE: Final = (*_HELD, *_OTHERS, "plug a second card into the group", "both cards of a group are released")

_OPENED_ANOTHERS: Final = (SWAPPED, COMES_WITH_FREED)
"""After these a virtual machine may have opened another card's group: no daemon could know that the card of its pod had
moved when its container was started (`starts.py`)."""

_EVENTS: Final[Mapping[Cause, tuple[str, ...]]] = {
    Cause.ALLOCATED: _OTHERS,
    Cause.CLAIMED_ELSEWHERE: _OTHERS,
    Cause.GROUP_IN_USE: _IN_USE,
    Cause.CARD_IN_USE: _IN_USE,
    Cause.ORPHANED: _IN_USE,
    Cause.STILL_ALLOCATED: (*_HELD, "both cards of a group are released", "another program lists"),
    Cause.HELD_BY_OTHER: (*_IN_USE, *_OPENED_ANOTHERS),
    Cause.HOLDER_UNKNOWN: (*_IN_USE, *_OPENED_ANOTHERS),
    Cause.DEAD: DIES,
    Cause.UNREADABLE: (
        *_CHANGED,
        "inspections fail",
        "an inspection hangs",
        "the clock jumps",
        "descriptors run out",
    ),
    Cause.UNBINDING: _CHANGED,
    Cause.NOT_BOUND: _CHANGED,
    Cause.NOT_SELECTED: _CHANGED,
    Cause.NO_IOMMU_GROUP: _CHANGED,
    Cause.VIRTUAL_FUNCTIONS: _CHANGED,
    Cause.VIRTUAL_FUNCTION: _CHANGED,
    Cause.PHYSICAL_FUNCTION_NOT_READY: _CHANGED,
    Cause.PHYSICAL_FUNCTION_ON_VFIO: _CHANGED,
    Cause.GROUP_NOT_VIABLE: _CHANGED,
    Cause.RESERVED_REGION: _CHANGED,
    Cause.NODE_MISSING: _CHANGED,
    Cause.USE_UNREADABLE: (*_CHANGED, "polls can read nothing", "descriptors run out"),
    Cause.GONE: _CHANGED,
    Cause.REPLACED_BY_ANOTHER: _CHANGED,
    Cause.UNKNOWN_ID: _CHANGED,
    Cause.GROUP_CHANGED: _CHANGED,
    Cause.SHORTAGE: ("descriptors run out", "the clock jumps"),
    Cause.INSPECTION_LATE: ("an inspection hangs", "the clock jumps"),
    Cause.USE_LATE: ("polls can read nothing", "the clock jumps", "descriptors run out"),
    Cause.LEDGER_LATE: ("descriptors run out", "the clock jumps"),
    Cause.CHECKPOINT_LATE: ("descriptors run out", "the clock jumps"),
    Cause.PARTITION_LATE: (*LATE, *_STOPS, *_HELD),
    Cause.PARTITION_IN_USE: (ACTIVATES,),
    Cause.PARTITION_LOST: LATE,
    Cause.NOT_SERVING: _STOPS,
    Cause.CDI_FILE_UNWRITTEN: (*UNWRITTEN, *_CHANGED),
    Cause.CDI_NAME_TAKEN: (TAKES,),
}
"""The events that can lead to a refusal with that cause. No event can lead to a cause that is not here."""

_SLOW: Final[Mapping[Cause, str]] = {
    Cause.INSPECTION_LATE: "inspections and scans take long",
    Cause.USE_LATE: "polls take long",
    Cause.LEDGER_LATE: "reads of the ledger take long",
}
"""What takes `SLOW_S` is in time for every Allocate but one that a daemon has while it hands over or stops."""

_CRASHES: Final[Mapping[Fault, str]] = {
    Fault.INSPECTOR_CRASHES: "the inspector crashes",
    Fault.POLLER_CRASHES: "the poller crashes",
    Fault.LEDGER_CRASHES: "the reader of the ledger crashes",
}
"""An actor's unexpected exception ends its request, and the Allocate that waits for it is refused with that exception.
These are the actors an Allocate waits for. The event excuses only a refusal that names its exception."""

_KUBELETS: Final = (
    (r"code = (Canceled|Unavailable)|endpoint .* has been stopped", _STOPS),
    (r"Device or resource busy", (*SECOND_PLUGIN, "the node reboots")),
    (r"No such file", _CHANGED),
    (r"Operation not permitted", _CHANGED),
    (
        r"no healthy devices present|Available: \d+|no longer healthy|unregistered device",
        (*_STOPS, *_HELD, *_CHANGED, *_OTHERS, *DIES),
    ),
)
"""The messages of kubelet and of the container runtime, where no daemon refused; they have no cause."""

_ENDS: Final = (
    "a pod ends",
    "a pod ends slowly",
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
)

_OLDER: Final = "an older plugin has given a card away"
_REBOOTS: Final = "the node reboots"


def failed_for_nothing(
    message: str, refused: Refused | None, happened: Container[str], *, by_older_id: bool = False
) -> bool:
    """Whether a pod failed without a cause: none of the events that can lead to it has happened.

    `refused` is the daemon's answer to its Allocate, None if the daemon did not refuse it. `by_older_id`: kubelet asked
    for a card by a group's number.
    """
    if refused is not None:
        kinds = {kind for cause in refused.causes for kind in _EVENTS.get(cause, ())}
        if any(kind in happened for kind in _SHORTENS_CALLS):
            kinds |= {_SLOW[cause] for cause in refused.causes if cause in _SLOW}
        kinds |= {kind for fault, kind in _CRASHES.items() if str(PlannedCrashError(fault)) in refused.reason}
        unknowable = _is_unknowable(refused, happened, by_older_id=by_older_id)
        return not (unknowable or any(kind in happened for kind in kinds))
    kinds = {kind for pattern, events in _KUBELETS if re.search(pattern, message) for kind in events}
    return not any(kind in happened for kind in kinds)


def _is_unknowable(refused: Refused, happened: Container[str], *, by_older_id: bool) -> bool:
    """Until it has read the ledger once, a daemon cannot know of a pod that was there before it: a card that the pod
    has by another ID, and has not opened yet, is listed Healthy, and refused as soon as the ledger can be read.
    Kubelet's
    file has only the UID of that pod, which may have ended since: only List would show it. So a card that the file
    still gives to a pod that has ended, and that another pod has by another ID, is listed by both.

    After a reboot the number of a group means another card, and kubelet admits each living pod anew, for which its
    device must be Healthy. Until List shows that the pod of the number has ended, the card of that group is Healthy by
    the number, too, though another pod has it by its address: kubelet may ask for it when no other card is free."""
    pods = [given.to for given in refused.owners if isinstance(given.to, Pod)]
    older = any(not pod.name or pod.name.startswith(OLDER_POD) for pod in pods)
    if _OLDER not in happened:
        return False
    if by_older_id and pods and _REBOOTS in happened:
        return True
    return older and any(kind in happened for kind in (*UNREAD, *_ENDS))
