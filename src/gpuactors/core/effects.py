"""What is to be done once, as values. Imperative.

Whatever is a *standing* wish or a published view (frames, orders to plugins, outstanding looks) is not an effect: it
is read off the state by `snapshot.project` and put into latest-value cells, where only the newest one counts. What
remains are the two things that must happen exactly once: answering a call, and saying something in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.owner import Given
from gpuactors.core.model import DeviceId, Token


class Refusal(StrEnum):
    """Why a call is refused, in the words of gRPC's status codes (the kubelet adaptor maps them by name)."""

    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAVAILABLE = "UNAVAILABLE"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one container gets."""

    envs: tuple[tuple[str, str], ...]
    nodes: tuple[str, ...]
    """Device nodes, host path = container path, permissions mrw."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Allocate's answer, one grant per container."""

    containers: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Preferred:
    """GetPreferredAllocation's answer, one choice per container."""

    containers: tuple[tuple[DeviceId, ...], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """PreStartContainer may go on."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The call is refused; `reason` is the sentence that the operator reads."""

    status: Refusal
    reason: str
    causes: tuple[Cause, ...]
    """What for, each once, sorted. Sent nowhere: for the log."""
    owners: tuple[Given, ...] = ()
    """To whom kubelet has given what is in the way, as far as it is refused for that."""


Answer = Granted | Preferred | Ready | Refused


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the call `token`. Nobody may be waiting any more; then it is dropped."""

    token: Token
    answer: Answer


class Level(StrEnum):
    """Levels of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Field = str | int | float | bool | tuple[str, ...] | None
"""What may stand in a field of the log."""


@dataclass(frozen=True, slots=True)
class Say:
    """One line in the log: an event name `noun.verb` and fields."""

    level: Level
    name: str
    fields: Mapping[str, Field]


Effect = Reply | Say
