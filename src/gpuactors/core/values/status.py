"""The decision about a device: a cause for programs and a message for people, never parsed from each other."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import DeviceKey, Health, Holder, Pod
from gpuactors.core.values.owner import Owner


class Reason(Struct, frozen=True, gc=False):
    """Why a device is not offered, or a call or claim cannot have it, or not yet."""

    cause: Cause
    message: str
    """A sentence with the place and the remedy."""


class Conflict(Struct, frozen=True, gc=False):
    """Why a claim cannot have its devices now."""

    why: Reason
    is_final: bool = False
    """True if waiting does not help: this node cannot satisfy the claim."""
    is_owner: bool = False
    """True if a device has another owner; False if that is unknown yet."""
    outdates: bool = False
    """True if reads of the device during the conflict must be repeated after it: a pod that has just got a device opens
    it later."""


class DeviceStatus(Struct, frozen=True, gc=False):
    """The one status of a device, in every list, call and view."""

    health: Health
    cause: Cause
    message: str
    owner: Owner | None
    """The owner by kubelet's ledger, whatever the cause."""
    holders: tuple[Holder, ...]
    """The processes that have its group open; empty if that is not read."""


class Holding(Struct, frozen=True, gc=False):
    """The holder of a device, and so of its IOMMU group: a group opens once."""

    holder: Owner | Pod | tuple[Holder, ...]
    """The owner by any ID and API; the pod that has left kubelet's ledger and may still have it open; or the processes
    that have it open, empty if they are unknown."""
    device: DeviceKey
    """The device that the owner has, which may be another one of the group."""
    reason: Reason
    """One of the first causes, from ALLOCATED to HOLDER_UNKNOWN."""

    @property
    def is_allocated(self) -> bool:
        """True if kubelet counts the device in `allocated` of its resource."""
        return self.reason.cause in (Cause.ALLOCATED, Cause.JUST_ALLOCATED)


class Assessment(Struct, frozen=True, gc=False):
    """The decisions about a device."""

    holding: Holding | None
    """The first holder; None if it is free."""
    blocker: Reason | None
    """Why a virtual machine could not open it, whoever has it; None if one could."""
    status: DeviceStatus


def causes_of(blockers: Iterable[Reason]) -> tuple[Cause, ...]:
    """Return the causes, each once, sorted."""
    return tuple(sorted({blocker.cause for blocker in blockers}))
