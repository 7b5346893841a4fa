"""The owner of a device: the entries of kubelet's ledger that name it, by any ID and API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import ClaimedDevice, DeviceId, Pod, ResourceName
from gpuactors.core.values.quote import first_of, quoted_id, quoted_name
from gpuactors.core.values.virtual_machine import virtual_machine

Named = tuple[ResourceName, DeviceId]
"""A device as kubelet's ledger names it."""

NO_RESOURCE: Final = ResourceName("")
"""The resource of a claim, and of a device that no list has."""

_NVIDIAS: Final = r"(?:MIG-)?(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:::[0-9]+|/[0-9]+/[0-9]+)?"

_MIG_DEVICE: Final = r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:::[0-9]+)?"


def gpu_uuid(device: DeviceId | str) -> str | None:
    """Return the UUID in an ID of NVIDIA's device plugin for containers: `GPU-…`, for a shared GPU `GPU-…::2`, for a
    part of one by the older naming `MIG-GPU-…/1/0`. None for any other ID: the newer `MIG-…` does not name its GPU."""
    match = re.fullmatch(_NVIDIAS, device)
    return match[1] if match is not None else None


def is_mig_device(device: DeviceId | str) -> bool:
    """Return whether it is an ID of NVIDIA's device plugin for a part of a GPU: `MIG-` and the UUID of the part, also
    of a shared one."""
    return re.fullmatch(_MIG_DEVICE, device) is not None


def vm_of(pod: Pod) -> str:
    """Return the virtual machine that the pod runs: `default/vm-1`; empty if none is known."""
    name = virtual_machine(pod.name)
    return f"{quoted_name(pod.namespace)}/{name}" if name else ""


class OwnClaims(Struct, frozen=True, gc=False):
    """The claims of GPUs that are known here."""

    driver: str = ""
    """The name of the DRA driver of GPUs; empty if it is off."""
    uids: frozenset[str] = frozenset()
    """The UIDs of the claims that own their devices, or have ended."""
    names: frozenset[str] = frozenset()
    """The namespace and name of each of these claims."""
    unplaced: tuple[ClaimedDevice, ...] = ()
    """The devices of claims that were taken over from NVIDIA's driver whose PCI address is unknown."""

    def knows(self, claimed: ClaimedDevice) -> bool:
        """Return whether a listed device belongs to one of these claims: by its UID, or by its name if it has none."""
        if claimed.driver != self.driver:
            return False
        return claimed.uid in self.uids if claimed.uid else claimed.claim in self.names


class Allocation(Struct, frozen=True, gc=False):
    """The allocation of a device to a pod, as a resource's device, or to a DRA claim: by an entry of kubelet's ledger,
    an answer of this daemon, or the claim's CDI file."""

    resource: ResourceName | None
    """The resource; None for a DRA claim."""
    device: str
    """The ID, or the name of the claim."""
    to: Pod | ClaimedDevice | None
    """The pod or claim; None if an answer allocated it that is not in kubelet's ledger yet."""
    doubt: str = ""
    """Why the ID may mean another device, as a sentence; empty if it is certain."""

    @property
    def is_by_hosts_driver(self) -> bool:
        """True if a container has it by NVIDIA's device plugin, and so by its host's driver."""
        is_nvidias = gpu_uuid(self.device) is not None or is_mig_device(self.device)
        return self.resource is not None and is_nvidias

    @property
    def cause(self) -> Cause:
        """The cause of the device that is listed by that ID."""
        return Cause.ALLOCATED if self.to is not None else Cause.JUST_ALLOCATED

    @property
    def message(self) -> str:
        """The allocation as a part of a sentence: `allocated to pod default/vm-1`."""
        return f"may be {self._message}: {self.doubt}" if self.doubt else self._message

    @property
    def _message(self) -> str:
        match self.to:
            case None:
                return "just allocated"
            case Pod():
                return f"allocated to pod {self.to}"
            case ClaimedDevice():
                of_pod = f" of pod {self.to.pod}" if self.to.pod is not None else ""
                return f"in use by the claim {self.to.called}{of_pod}"

    @property
    def pod(self) -> Pod | None:
        """The pod that has it, also by a claim; None if it is unknown."""
        return self.to.pod if isinstance(self.to, ClaimedDevice) else self.to

    @property
    def owner(self) -> str:
        """The name of the pod that has it: `default/vm-1`; the claim's if its pod is unknown."""
        if (pod := self.pod) is not None:
            return str(pod) if pod.name else f"the pod {pod}"
        if isinstance(self.to, ClaimedDevice):
            return f"claim {self.to.called}"
        return "a pod that kubelet does not list yet"

    @property
    def vm(self) -> str:
        """The virtual machine that its pod runs: `default/vm-1`; empty if none is known."""
        return vm_of(self.pod) if self.pod is not None else ""


class Owner(Struct, frozen=True, gc=False):
    """The pods and claims that kubelet has given a device to. Its ledger may name a device more than once, as every
    plugin and driver on the node has its own list."""

    entries: tuple[Allocation, ...]
    """The allocations, sorted, as the order of kubelet's pods has no meaning."""

    def cause(self, resource: ResourceName) -> Cause:
        """Return the cause in a list of that resource: kubelet counts the device in `allocated` there, or elsewhere."""
        causes = {e.cause for e in self.entries if e.resource == resource}
        if not causes:
            return Cause.CLAIMED_ELSEWHERE
        return Cause.ALLOCATED if Cause.ALLOCATED in causes else Cause.JUST_ALLOCATED

    @property
    def name(self) -> str:
        """The names of the owners: `default/vm-1`."""
        return ", ".join(first_of([*dict.fromkeys(entry.owner for entry in self.entries)]))

    @property
    def vm(self) -> str:
        """The virtual machines that the owners run: `default/vm-1`; empty if none is known."""
        return ", ".join(first_of([*dict.fromkeys(entry.vm for entry in self.entries if entry.vm)]))

    def message(self, resource: ResourceName) -> str:
        """Return the sentence for a list of `resource`: its own entries first, then the others with their resource. If
        it is empty, all are with their resource."""
        own = [e for e in self.entries if e.resource == resource]
        others = [e for e in self.entries if e.resource != resource]
        parts = [e.message + (f" as {quoted_id(e.device)}" if len(own) > 1 else "") for e in own]
        parts += [e.message + (f" as {quoted_name(e.resource)}" if e.resource else "") for e in others]
        return "; also ".join(first_of(parts))


def owner_of(entries: Iterable[Allocation]) -> Owner:
    """Return the owner of a device with these entries, at least one."""
    return Owner(tuple(sorted(entries, key=_order)))


def _order(entry: Allocation) -> tuple[str, str]:
    return (entry.resource or "", entry.device)
