"""The decision about a device: a cause for programs and a message for people, never parsed from each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuactors.core.assessment.cause import Cause

if TYPE_CHECKING:
    from gpuactors.core.assessment.owner import Owner
    from gpuactors.core.model import Health, Holder


@dataclass(frozen=True, slots=True)
class Blocker:
    """A reason not to offer or allocate a device."""

    cause: Cause
    message: str
    """A sentence with the place and the remedy."""
    owner: Owner | None = None
    """The owner of the device that is in the way; None if that is not the reason."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a claim is not prepared, or not prepared yet."""

    cause: Cause
    message: str
    """A sentence with the place and the remedy."""


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


def causes_of(blockers: Iterable[Blocker]) -> tuple[Cause, ...]:
    """Their causes, each once, sorted."""
    return tuple(sorted({blocker.cause for blocker in blockers}))
