"""The decision about a device: a cause for programs and a message for people, never parsed from each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import Health, Holder
from gpuactors.core.values.owner import Owner


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a device is not offered, or a call or claim cannot have it, or not yet."""

    cause: Cause
    message: str
    """A sentence with the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a claim cannot have its devices now."""

    why: Reason
    is_final: bool = False
    """It will not pass by waiting: the claim asks for what this node cannot give."""
    is_owner: bool = False
    """Somebody has a device; else it is not known yet whether somebody has."""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The one status of a device, in every list, call and view."""

    health: Health
    cause: Cause
    message: str
    owner: Owner | None
    """The owner by kubelet's ledger, whatever the cause."""
    holders: tuple[Holder, ...]
    """The processes that have its group open; none where that is not read."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner or holder of a device, as cause and sentence."""

    cause: Cause
    """One of the first of them, from FREE to HOLDER_UNKNOWN."""
    message: str
    owner: Owner | None = None
    """The pod or claim that kubelet has given it to, by any ID and API."""

    @property
    def is_allocated(self) -> bool:
        """Kubelet counts it in `allocated` of its resource."""
        return self.cause in (Cause.ALLOCATED, Cause.JUST_ALLOCATED)


@dataclass(frozen=True, slots=True)
class Assessment:
    """All that is decided of a device."""

    ownership: Ownership
    blocker: Reason | None
    """The reason not to allocate it, whatever its owner; None if there is none."""
    status: DeviceStatus


def causes_of(blockers: Iterable[Reason]) -> tuple[Cause, ...]:
    """Their causes, each once, sorted."""
    return tuple(sorted({blocker.cause for blocker in blockers}))
