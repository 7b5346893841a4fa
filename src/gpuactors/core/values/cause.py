"""The reason for a device's health, or for a refused call, as a word for programs: labels of metrics, taints, alerts.

One cause for each remedy. `MEANINGS` has the meaning and the remedy of each; `just tables` writes the table of
docs/reference.md#causes. A cause is never parsed from a sentence, and no sentence is ever compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct


class Cause(StrEnum):
    """The causes, written as Kubernetes writes the reason of a condition."""

    # --- owners and holders
    FREE = "Free"
    ALLOCATED = "Allocated"
    JUST_ALLOCATED = "JustAllocated"
    CLAIMED_ELSEWHERE = "ClaimedElsewhere"
    GROUP_IN_USE = "GroupInUse"
    CARD_IN_USE = "CardInUse"
    ORPHANED = "Orphaned"
    HELD_BY_OTHER = "HeldByOther"
    HOLDER_UNKNOWN = "HolderUnknown"
    # --- the state of its functions and nodes
    DEAD = "Dead"
    UNREADABLE = "Unreadable"
    UNBINDING = "Unbinding"
    NOT_BOUND = "NotBound"
    NOT_SELECTED = "NotSelected"
    NO_IOMMU_MODE = "NoIommuMode"
    NO_IOMMU_GROUP = "NoIommuGroup"
    BEHIND_VMD = "BehindVmd"
    GROUP_NOT_VIABLE = "GroupNotViable"
    RESERVED_REGION = "ReservedRegion"
    NODE_MISSING = "NodeMissing"
    USE_UNREADABLE = "UseUnreadable"
    FABRIC_OF_HOST = "FabricOfHost"
    VIRTUAL_FUNCTION = "VirtualFunction"
    VIRTUAL_FUNCTIONS = "VirtualFunctions"
    PHYSICAL_FUNCTION_ON_VFIO = "PhysicalFunctionOnVfio"
    VGPU_UNNAMED = "VgpuUnnamed"
    PHYSICAL_FUNCTION_NOT_READY = "PhysicalFunctionNotReady"
    MEDIATED_DEVICES = "MediatedDevices"
    RESOURCE_MIXED = "ResourceMixed"
    CDI_FILE_UNWRITTEN = "CdiFileUnwritten"
    CDI_NAME_INVALID = "CdiNameInvalid"
    CDI_NAME_TAKEN = "CdiNameTaken"
    # --- it is gone, or another one
    GONE = "Gone"
    REPLACED_BY_ANOTHER = "ReplacedByAnother"
    UNKNOWN_ID = "UnknownId"
    LISTED_AS_OTHER = "ListedAsOther"
    ID_RELEASED = "IdReleased"
    SET_ASIDE = "SetAside"
    # --- of calls only
    GROUP_CHANGED = "GroupChanged"
    STALE_NODES = "StaleNodes"
    STILL_ALLOCATED = "StillAllocated"
    SHORTAGE = "Shortage"
    INSPECTION_LATE = "InspectionLate"
    USE_LATE = "UseLate"
    LEDGER_LATE = "LedgerLate"
    CHECKPOINT_LATE = "CheckpointLate"
    INVALID_REQUEST = "InvalidRequest"
    NOT_SERVING = "NotServing"
    NOT_A_SET = "NotASet"
    PARTITION_LATE = "PartitionLate"
    PARTITION_IN_USE = "PartitionInUse"
    PARTITION_LOST = "PartitionLost"
    # --- of calls about claims only
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CLAIM_NOT_ALLOCATED = "ClaimNotAllocated"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    NOT_OFFERED = "NotOffered"
    UNPREPARED = "Unprepared"
    API_SERVER_FAILED = "ApiServerFailed"
    CLAIMS_UNSERVED = "ClaimsUnserved"
    CHECKPOINT_UNWRITTEN = "CheckpointUnwritten"
    FILES_UNWRITTEN = "FilesUnwritten"
    DIRECTORY_LEFT = "DirectoryLeft"
    IN_USE_ON_HOST = "InUseOnHost"
    WRITE_HANGS = "WriteHangs"
    WRITE_REFUSED = "WriteRefused"
    DRIVER_NOT_LOADED = "DriverNotLoaded"
    # --- of compute domains only
    DOMAIN_NOT_FOUND = "DomainNotFound"
    DOMAIN_NOT_READY = "DomainNotReady"
    OTHER_DOMAIN = "OtherDomain"
    FOREIGN_LABEL = "ForeignLabel"
    IMEX_MISSING = "ImexMissing"


HEALTHY, UNHEALTHY, AS_BEFORE, CALL = "Healthy", "Unhealthy", "as before", "-"
"""The advertised health of a device with a cause; CALL for a cause of refused calls only."""


OF_A_PART: Final = frozenset({Cause.VIRTUAL_FUNCTIONS, Cause.MEDIATED_DEVICES})
"""The causes of a device that is no whole one: it is not allocated, and its present owner keeps it."""


class Meaning(Struct, frozen=True, gc=False):
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
        "Kubelet has allocated it to a pod under this resource. It stays Healthy, as kubelet subtracts it already.",
        "Nothing.",
    ),
    Cause.JUST_ALLOCATED: Meaning(
        HEALTHY,
        "An Allocate has just given it to a pod that kubelet's ledger does not list yet.",
        "Nothing: it lasts seconds.",
    ),
    Cause.CLAIMED_ELSEWHERE: Meaning(
        UNHEALTHY,
        "A pod has it by a DRA claim, or as a device of another resource. Kubelet counts it there. `may be`: a pod "
        "has a GPU, and nothing says which one.",
        "Nothing, if intended. Otherwise let only one plugin or driver offer this GPU, and end that pod. "
        "`may be`: mount the CDI directory that the message names, or end that pod.",
    ),
    Cause.GROUP_IN_USE: Meaning(
        UNHEALTHY,
        "Another function of its IOMMU group is allocated. A group is given to one virtual machine as a whole.",
        "Nothing: it is free when that pod has ended.",
    ),
    Cause.CARD_IN_USE: Meaning(
        UNHEALTHY,
        "A part of it is allocated, or the device that it is a part of: a physical function and its virtual functions, "
        "a parent and its mediated devices. Two parts of one card do not exclude each other.",
        "Nothing: it is free when the pod that the message names has ended.",
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
    Cause.DEAD: Meaning(
        UNHEALTHY,
        "It does not answer, or has had a fatal PCIe error: it, a device that it is a part of, or a companion. It is "
        "offered again only when the kernel has enumerated that function again, even if it answers before.",
        "See the kernel's log. Write 1 to the function's `remove`, then to `/sys/bus/pci/rescan`, or restart the node. "
        "If it dies again, replace the card.",
    ),
    Cause.UNREADABLE: Meaning(
        UNHEALTHY,
        "One of its files in sysfs cannot be read.",
        "See the message: it names the file. If a driver hangs, see dmesg.",
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
        "No selector matches it, or none under this name, but a pod still has it or a pending call names it.",
        "Nothing, if intended. Otherwise see --select, and whether pci.ids was renewed.",
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
        "Another member of its IOMMU group is bound to a host driver, so no virtual machine gets the group.",
        "The message names it. Bind a companion of the GPU to vfio-pci or to no driver. Leave anything else to the "
        "host: give the GPU an IOMMU group of its own, by another slot or by ACS in the firmware.",
    ),
    Cause.RESERVED_REGION: Meaning(
        UNHEALTHY,
        "Firmware reserves memory one to one for its IOMMU group (`direct`), so no virtual machine gets the group.",
        "Update the firmware, or switch off there what reserves the memory: pre-boot or kernel DMA protection with an "
        "AMD CPU, legacy USB and option ROMs, the management controller's shared memory for that slot.",
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
        "It is on a host driver, in an NVLink fabric whose NVSwitches the host runs. No claim gets it.",
        "Bind GPUs and NVSwitches to vfio-pci at boot, or allow it by --nvswitch allow.",
    ),
    Cause.VIRTUAL_FUNCTION: Meaning(
        UNHEALTHY,
        "It is an SR-IOV virtual function on NVIDIA's driver, which makes vGPUs of such. gpuactors never unbinds it.",
        "Nothing, if intended. To offer it as a vGPU, set its type.",
    ),
    Cause.VGPU_UNNAMED: Meaning(
        UNHEALTHY,
        "It has a vGPU type whose name is not known, as its card was full before gpuactors first read a list of types. "
        "No list and no slice has it.",
        "Name the type by --vgpu-type, as the message shows.",
    ),
    Cause.VIRTUAL_FUNCTIONS: Meaning(
        UNHEALTHY,
        "Its SR-IOV virtual functions are active: it cannot be allocated as a whole, and an unbind would remove them.",
        "Allocate its virtual functions, or write 0 to its sriov_numvfs when they are not in use.",
    ),
    Cause.PHYSICAL_FUNCTION_ON_VFIO: Meaning(
        UNHEALTHY,
        "It is a virtual function whose physical function is on a vfio driver: to open it a VM would need a token, "
        "which neither KubeVirt nor Kata can give.",
        "Bind the physical function to its host's driver, and create the virtual functions by that.",
    ),
    Cause.PHYSICAL_FUNCTION_NOT_READY: Meaning(
        UNHEALTHY,
        "It is a virtual function whose physical function is on no driver, cannot be read, or is not known.",
        "Bind the physical function to its host's driver; see the message for what cannot be read.",
    ),
    Cause.MEDIATED_DEVICES: Meaning(
        UNHEALTHY,
        "Mediated devices were made of it: no claim takes it from its host's driver, as that would remove them.",
        "Remove them when they are not in use, or keep claims from it by a selector.",
    ),
    Cause.RESOURCE_MIXED: Meaning(
        UNHEALTHY,
        "The operator's resource has devices that KubeVirt cannot use under one name: whole functions with virtual "
        "ones, GPUs of Grace superchips with others, or mediated devices with PCI functions. Claims get it.",
        "Give one of them another name by --resource, as the message shows.",
    ),
    Cause.CDI_FILE_UNWRITTEN: Meaning(
        UNHEALTHY,
        "With --allocate-as cdi: the CDI file of its resource does not have it yet, so no runtime could resolve it.",
        "Nothing at first: it lasts milliseconds. If it persists, see the message: the disk or the mount of --cdi-dir.",
    ),
    Cause.CDI_NAME_INVALID: Meaning(
        UNHEALTHY,
        "With --allocate-as cdi: the name of its resource is no CDI kind, whose vendor and class begin with a letter.",
        "Give its model another name by --resource-name, as the message shows.",
    ),
    Cause.CDI_NAME_TAKEN: Meaning(
        UNHEALTHY,
        "With --allocate-as cdi: another program's CDI file has a device of the same name, so no runtime resolves it.",
        "Remove the file that the message names, or end the plugin that writes it.",
    ),
    Cause.GONE: Meaning(
        UNHEALTHY,
        "No PCI function is at its address any more. It is listed as long as a pod has it or a pending call names it.",
        "Delete the pod: its GPU will not come back to it.",
    ),
    Cause.REPLACED_BY_ANOTHER: Meaning(
        UNHEALTHY,
        "Another model is at its address now.",
        "Delete the pod that has it, and the claim it was made with. The new device is listed under its own resource.",
    ),
    Cause.UNKNOWN_ID: Meaning(
        UNHEALTHY,
        "Kubelet's ledger or a call names an ID that matches no device of this node.",
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
        "A rule of the device list, or of claims, did not hold for it. It is not allocated, and the rest is served.",
        "This is a bug in gpuactors: report it with the journal.",
    ),
    Cause.GROUP_CHANGED: Meaning(
        CALL,
        "The device's IOMMU group has a new number since the call began, or a function that its claim does not know.",
        "Repeat the call. For a claim, delete the pod, so that it is prepared again.",
    ),
    Cause.STALE_NODES: Meaning(
        CALL,
        "The container would get device nodes from before a restart of the node or a new binding.",
        "Delete the pod, so that its devices are allocated again.",
    ),
    Cause.STILL_ALLOCATED: Meaning(
        CALL,
        "A pod that lives has the device, and kubelet has forgotten that: it asks to allocate it to another pod.",
        "Nothing: its controller replaces the refused pod. If it comes often, find the program that calls "
        "PodResources List.",
    ),
    Cause.SHORTAGE: Meaning(
        CALL,
        "The daemon could not inspect the device in time, because it lacks descriptors, memory or threads.",
        "See the message, and raise that limit of the daemon's container.",
    ),
    Cause.INSPECTION_LATE: Meaning(
        CALL,
        "The device was not inspected in time: the daemon is behind, or sysfs does not answer.",
        "See the load of the node, the CPU limit of the daemon's container, and dmesg for hung tasks of a driver.",
    ),
    Cause.USE_LATE: Meaning(
        CALL,
        "The device's users could not be determined in time.",
        "Check that its `enable` can be read in sysfs.",
    ),
    Cause.LEDGER_LATE: Meaning(
        CALL,
        "Kubelet's ledger could not be read in time.",
        "Check whether kubelet, or the disk of its directory, hangs.",
    ),
    Cause.CHECKPOINT_LATE: Meaning(
        CALL,
        "The daemon's own checkpoint of the claims, which may have the device, could not be read in time.",
        "Check the disk of kubelet's `plugins` directory; `gpuactors inspect` has the reason.",
    ),
    Cause.INVALID_REQUEST: Meaning(
        CALL,
        "The call names no device, names one twice, or names a claim by an invalid name.",
        "Nothing on this node: find the client that called.",
    ),
    Cause.NOT_SERVING: Meaning(
        CALL, "The daemon is stopping, or hands over to its successor.", "Repeat the call."
    ),
    Cause.NOT_A_SET: Meaning(
        CALL,
        "The requested GPUs are not exactly one partition of the NVLink fabric, or only some of the node's NVSwitches.",
        "Request a set that the message names: in a claim by matchAttribute `partition2`, by the device plugin with as "
        "many GPUs as a partition has. Or allow it by --sets prefer.",
    ),
    Cause.PARTITION_LATE: Meaning(
        CALL,
        "The partition of the requested GPUs was not shown active in time.",
        "See the message, the fabric manager's log, and whether the command for partitions works.",
    ),
    Cause.PARTITION_IN_USE: Meaning(
        CALL,
        "Another program has activated the partition of the requested GPUs, or one that overlaps it.",
        "Deactivate it by the fabric manager's tool if no virtual machine uses it.",
    ),
    Cause.PARTITION_LOST: Meaning(
        CALL,
        "gpuactors activated the partition of the GPU for its owner, and it is not active any more.",
        "Restart the virtual machine: the partition is activated again before it starts. See why the fabric manager "
        "was restarted.",
    ),
    Cause.CLAIM_NOT_FOUND: Meaning(
        CALL, "The API server has no such claim, or another one by this name.", "Nothing: its pod is ending."
    ),
    Cause.CLAIM_NOT_ALLOCATED: Meaning(
        CALL,
        "The claim has no allocation, or no device of this driver on this node.",
        "Nothing on this node: see the claim's status, and who changed it.",
    ),
    Cause.INVALID_CONFIGURATION: Meaning(
        CALL,
        "The claim, or the configuration of it or of its DeviceClass, requests what this driver does not support.",
        "Correct it: the message names the field.",
    ),
    Cause.NOT_OFFERED: Meaning(
        CALL,
        "The claim has a channel or daemon that this node is not configured to offer.",
        "See --imex-channels and --compute-domains.",
    ),
    Cause.UNPREPARED: Meaning(
        CALL, "The claim was unprepared while it was being prepared.", "Nothing: its pod is ending."
    ),
    Cause.API_SERVER_FAILED: Meaning(
        CALL,
        "The API server did not return what the call needs: the claim, its ComputeDomain, or the Node.",
        "See the message: the server's address, the token, and the rights of the daemon's account.",
    ),
    Cause.CLAIMS_UNSERVED: Meaning(
        CALL,
        "Claims are switched off, or their checkpoint is one that this version cannot read.",
        "See --dra, or install the version that wrote it.",
    ),
    Cause.CHECKPOINT_UNWRITTEN: Meaning(
        CALL,
        "The checkpoint of the claims could not be written, so nothing was done for the claim.",
        "Check the disk of kubelet's `plugins` directory.",
    ),
    Cause.FILES_UNWRITTEN: Meaning(
        CALL,
        "The claim's CDI or metadata file could not be written.",
        "Check the disk and the mounts of /var/run/cdi and of kubelet's `plugins` directory.",
    ),
    Cause.DIRECTORY_LEFT: Meaning(
        CALL,
        "The directory of the compute domain, which an ended daemon had mounted, cannot be removed. Other domains are "
        "served.",
        "Look for mounts and immutable files (lsattr) in the directory that the message names, or remove it by hand.",
    ),
    Cause.IN_USE_ON_HOST: Meaning(
        CALL,
        "A process has the GPU open by its host driver, or the daemon cannot see whether one has. Nothing was changed.",
        "End the process that the message names, or give the daemon the rights to see it.",
    ),
    Cause.WRITE_HANGS: Meaning(
        CALL,
        "The kernel has not completed a bind or unbind yet: usually it waits until a process closes the device.",
        "End that process: `gpuactors explain` or lsof finds it. The claim then continues by itself.",
    ),
    Cause.WRITE_REFUSED: Meaning(
        CALL,
        "The kernel refused to bind or unbind the GPU, or did not do it.",
        "See the message, and dmesg. Then delete the pod.",
    ),
    Cause.DRIVER_NOT_LOADED: Meaning(
        CALL,
        "The driver that the GPU needs is not loaded.",
        "Load it with modprobe, and at boot by /etc/modules-load.d.",
    ),
    Cause.DOMAIN_NOT_FOUND: Meaning(
        CALL,
        "There is no ComputeDomain with the UID that the claim names.",
        "Nothing, if it was deleted. Otherwise correct domainID in the claim.",
    ),
    Cause.DOMAIN_NOT_READY: Meaning(
        CALL,
        "The domain's daemon does not run on this node yet, or is not Ready.",
        "See that daemon's pod and NVIDIA's controller, or the host's nvidia-imex.",
    ),
    Cause.OTHER_DOMAIN: Meaning(
        CALL,
        "The node takes part in another ComputeDomain. It can be in one at a time.",
        "Nothing: it is free when the pods of that one have ended.",
    ),
    Cause.FOREIGN_LABEL: Meaning(
        CALL,
        "The node's label of compute domains has a value that no claim here has set.",
        "Remove it, or have the client remove it that set it.",
    ),
    Cause.IMEX_MISSING: Meaning(
        CALL,
        "The host's driver has no IMEX, is too old for it, or has not been read.",
        "Load or update NVIDIA's driver on the host; see the message.",
    ),
}
"""Every cause, in the order of the table."""

MAY_LAST: Final = frozenset(
    {
        Cause.CLAIMED_ELSEWHERE,
        Cause.GROUP_IN_USE,
        Cause.CARD_IN_USE,
        Cause.HOLDER_UNKNOWN,
        Cause.NOT_SELECTED,
        Cause.VIRTUAL_FUNCTION,
        Cause.VIRTUAL_FUNCTIONS,
        Cause.MEDIATED_DEVICES,
        Cause.LISTED_AS_OTHER,
        Cause.ID_RELEASED,
    }
)
"""The causes of an Unhealthy device that may last while all is well: it is in use, or as its operator has set it up.
Any other one needs a hand, and has an alert."""
