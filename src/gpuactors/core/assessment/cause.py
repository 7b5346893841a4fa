"""The reason for a device's health, or for a refused call, as a word for programs: labels of metrics, taints, alerts.

One cause for each remedy. `MEANINGS` has the meaning and the remedy of each; `just causes` makes docs/causes.md from
it. A cause is never parsed from a sentence, and no sentence is ever compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Cause(StrEnum):
    """The causes, written as Kubernetes writes the reason of a condition."""

    # --- owners and holders
    FREE = "Free"
    ALLOCATED = "Allocated"
    JUST_ALLOCATED = "JustAllocated"
    CLAIMED_ELSEWHERE = "ClaimedElsewhere"
    GROUP_IN_USE = "GroupInUse"
    ORPHANED = "Orphaned"
    HELD_BY_OTHER = "HeldByOther"
    HOLDER_UNKNOWN = "HolderUnknown"
    # --- what of its files forbids it
    UNREADABLE = "Unreadable"
    UNBINDING = "Unbinding"
    NOT_BOUND = "NotBound"
    NOT_SELECTED = "NotSelected"
    NO_IOMMU_MODE = "NoIommuMode"
    NO_IOMMU_GROUP = "NoIommuGroup"
    BEHIND_VMD = "BehindVmd"
    GROUP_NOT_VIABLE = "GroupNotViable"
    NODE_MISSING = "NodeMissing"
    USE_UNREADABLE = "UseUnreadable"
    FABRIC_OF_HOST = "FabricOfHost"
    # --- that it is not what it was
    GONE = "Gone"
    REPLACED_BY_ANOTHER = "ReplacedByAnother"
    UNKNOWN_ID = "UnknownId"
    LISTED_AS_OTHER = "ListedAsOther"
    ID_RELEASED = "IdReleased"
    SET_ASIDE = "SetAside"
    # --- of calls only
    GROUP_CHANGED = "GroupChanged"
    STALE_NODES = "StaleNodes"
    SHORTAGE = "Shortage"
    INSPECTION_LATE = "InspectionLate"
    USE_LATE = "UseLate"
    LEDGER_LATE = "LedgerLate"
    CHECKPOINT_LATE = "CheckpointLate"
    INVALID_REQUEST = "InvalidRequest"
    NOT_SERVING = "NotServing"


HEALTHY, UNHEALTHY, AS_BEFORE, CALL = "Healthy", "Unhealthy", "as before", "-"
"""The health that a device with a cause is advertised with; CALL: the cause of a refused call only."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row of the table of causes."""

    health: str
    """HEALTHY, UNHEALTHY, AS_BEFORE or CALL."""
    means: str
    remedy: str


MEANINGS: Final[Mapping[Cause, Meaning]] = {
    Cause.FREE: Meaning(
        HEALTHY, "It is neither allocated nor in use, and a virtual machine could open it.", "Nothing."
    ),
    Cause.ALLOCATED: Meaning(
        HEALTHY,
        "Kubelet's ledger gives it to a pod under this resource. It stays Healthy, as kubelet subtracts it already.",
        "Nothing.",
    ),
    Cause.JUST_ALLOCATED: Meaning(
        HEALTHY,
        "Allocate has given it to a pod that kubelet's ledger does not name yet.",
        "Nothing: it lasts seconds.",
    ),
    Cause.CLAIMED_ELSEWHERE: Meaning(
        UNHEALTHY,
        "A pod has it by a DRA claim, or as a device of another resource. Kubelet counts it there.",
        "Nothing, if that is meant. Otherwise let only one plugin or driver offer this GPU, and end that pod.",
    ),
    Cause.GROUP_IN_USE: Meaning(
        UNHEALTHY,
        "Another function of its IOMMU group is allocated. A group is given to one virtual machine as a whole.",
        "Nothing: it is free when that pod has ended.",
    ),
    Cause.ORPHANED: Meaning(
        UNHEALTHY,
        "Its pod has left kubelet's ledger, and its IOMMU group is still open: a forced deletion, or a slow end.",
        "Wait until the process has ended, or end it. `gpuactors explain` names it where --holders allows.",
    ),
    Cause.HELD_BY_OTHER: Meaning(
        UNHEALTHY,
        "Its IOMMU group is open, and kubelet has given it to no pod.",
        "End the process if it should not have the GPU. `gpuactors explain` names it where --holders allows.",
    ),
    Cause.HOLDER_UNKNOWN: Meaning(
        AS_BEFORE,
        "Its IOMMU group is open, and kubelet's ledger has not been read since, so its owner is not known.",
        "Nothing at first. If it persists, make kubelet's ledger readable.",
    ),
    Cause.UNREADABLE: Meaning(
        UNHEALTHY,
        "A file of it in sysfs cannot be read.",
        "See the message: it names the file. For a driver that hangs see dmesg.",
    ),
    Cause.UNBINDING: Meaning(
        UNHEALTHY,
        "An unbind or unplug waits in the kernel until no process has it open.",
        "End the process that has its IOMMU group open. Nothing can be bound to it before.",
    ),
    Cause.NOT_BOUND: Meaning(
        UNHEALTHY, "It is bound to no driver, or to one that is no vfio driver.", "Bind it to vfio-pci."
    ),
    Cause.NOT_SELECTED: Meaning(
        UNHEALTHY,
        "No selector matches it, or none under this name, and a pod still has it or a pending call names it.",
        "Nothing, if that is meant. Otherwise see --select, and whether pci.ids was renewed.",
    ),
    Cause.NO_IOMMU_MODE: Meaning(
        UNHEALTHY,
        "vfio drives it without an IOMMU: the GPU of a VM could access all of the node's memory.",
        "Switch the IOMMU on, and remove enable_unsafe_noiommu_mode.",
    ),
    Cause.NO_IOMMU_GROUP: Meaning(
        UNHEALTHY,
        "It is in no IOMMU group.",
        "Switch the IOMMU on in the firmware and on the kernel command line.",
    ),
    Cause.BEHIND_VMD: Meaning(
        UNHEALTHY,
        "It is behind an Intel VMD controller, whose devices are in no IOMMU group of their own.",
        "Switch VMD off for its slot in the firmware.",
    ),
    Cause.GROUP_NOT_VIABLE: Meaning(
        UNHEALTHY,
        "Another function of its IOMMU group is bound to a host driver, so the kernel refuses to open the group.",
        "Bind that function to vfio-pci or to no driver. The message names both.",
    ),
    Cause.NODE_MISSING: Meaning(
        UNHEALTHY,
        "Its device node below /dev/vfio does not exist.",
        "Mount the host's /dev into the container, and load the modules vfio and vfio_pci.",
    ),
    Cause.USE_UNREADABLE: Meaning(
        UNHEALTHY,
        "Whether its IOMMU group is open cannot be determined.",
        "See the message: it names what cannot be read.",
    ),
    Cause.FABRIC_OF_HOST: Meaning(
        UNHEALTHY,
        "It is on its host's driver, in an NVLink fabric whose NVSwitches the host runs. It is given to no claim.",
        "Bind GPUs and NVSwitches to vfio-pci at boot, or allow it by --nvswitch allow.",
    ),
    Cause.GONE: Meaning(
        UNHEALTHY,
        "No PCI function is at its address any more. It is listed as long as a pod has it or a pending call names it.",
        "Delete the pod: its GPU will not come back to it.",
    ),
    Cause.REPLACED_BY_ANOTHER: Meaning(
        UNHEALTHY,
        "Another model is at its address now.",
        "Delete the pod that has it. The new device is listed under its own resource.",
    ),
    Cause.UNKNOWN_ID: Meaning(
        UNHEALTHY,
        "Kubelet's ledger or a call names an ID that means no device of this node.",
        "Find the pod, and the plugin that served this resource before.",
    ),
    Cause.LISTED_AS_OTHER: Meaning(
        UNHEALTHY,
        "The device is listed by another ID now. This one stays while kubelet may be using it in a call.",
        "Nothing: it lasts seconds.",
    ),
    Cause.ID_RELEASED: Meaning(
        UNHEALTHY, "No pod has the device by this ID any more, and the ID left the list.", "Nothing."
    ),
    Cause.SET_ASIDE: Meaning(
        UNHEALTHY,
        "A rule of the device list did not hold for it. It is not allocated, and the rest is served.",
        "This is a bug in gpuactors: report it with the journal.",
    ),
    Cause.GROUP_CHANGED: Meaning(
        CALL, "The device's IOMMU group has another number than when the call came.", "Ask again."
    ),
    Cause.STALE_NODES: Meaning(
        CALL,
        "The container would get device nodes of an Allocate from before a restart of the node, or a new binding.",
        "Delete the pod, so that its devices are allocated again.",
    ),
    Cause.SHORTAGE: Meaning(
        CALL,
        "The daemon could not inspect the device in time, as it lacks descriptors, memory or threads.",
        "See the message, and raise that limit of the daemon's container.",
    ),
    Cause.INSPECTION_LATE: Meaning(
        CALL, "sysfs did not answer in time for the device.", "A driver may be stuck: see dmesg."
    ),
    Cause.USE_LATE: Meaning(
        CALL,
        "The device's users could not be determined in time.",
        "Check that its `enable` can be read in sysfs.",
    ),
    Cause.LEDGER_LATE: Meaning(
        CALL,
        "Kubelet did not return its ledger in time (PodResources List).",
        "Check whether kubelet hangs.",
    ),
    Cause.CHECKPOINT_LATE: Meaning(
        CALL,
        "The daemon's own checkpoint of the claims, which may have the device, could not be read in time.",
        "Check the disk of kubelet's `plugins` directory; `gpuactors inspect` has the reason.",
    ),
    Cause.INVALID_REQUEST: Meaning(
        CALL, "The call names no device, or one twice.", "Nothing on this node: find the client that called."
    ),
    Cause.NOT_SERVING: Meaning(CALL, "The daemon is stopping, or hands over to its successor.", "Ask again."),
}
"""Every cause, in the order of the table."""


_HEAD: Final = """\
# Causes

Made by `just causes` from `src/gpuactors/core/assessment/cause.py`: change it there.

The cause of a device's health is in the log (`cause` of `device.changed` and `device.gone`) and in the output of
`gpuactors inspect` and `gpuactors explain` as JSON. The causes of a refused call are in the log (`causes` of
`call.refused`). A cause is stable across versions. The sentence beside it is for people, and may change.

Health is what a device with this cause is advertised as: `as before` leaves it unchanged, and `-` is a cause of calls
only. A device that kubelet has given to a pod is Healthy as long as it is bound to a vfio driver, whatever else is
wrong with it: kubelet subtracts it already.
"""


def document() -> str:
    """docs/causes.md: every cause with its meaning."""
    rows = (f"| `{cause}` | {row.health} | {row.means} | {row.remedy} |" for cause, row in MEANINGS.items())
    return "\n".join(
        [_HEAD, "| Cause | Health | What it means | What to do |", "|---|---|---|---|", *rows, ""]
    )


if __name__ == "__main__":
    print(document(), end="")
