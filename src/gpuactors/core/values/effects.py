"""The effects of a step, which must happen exactly once: answering a call, and writing a log line.

An output that lasts (device lists, orders to plugins, outstanding inspections) is not an effect: `snapshot.project`
derives it from the state, and it is put into latest-value cells, which keep only the newest value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.model import DeviceId, ResourceName, Token
from gpuactors.core.values.owner import Allocation


class Refusal(StrEnum):
    """Why a call is refused, in the words of gRPC's status codes (the kubelet adaptor maps them by name)."""

    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAVAILABLE = "UNAVAILABLE"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"


class Grant(Struct, frozen=True, gc=False):
    """The grant of one container."""

    envs: tuple[tuple[str, str], ...]
    nodes: tuple[str, ...]
    """The device nodes, by the same path on the host and in the container, with permissions mrw."""
    cdi_ids: tuple[str, ...] = ()
    """The CDI ids of the devices, instead of variables and device nodes."""


class Granted(Struct, frozen=True, gc=False):
    """Allocate's answer, one grant per container."""

    containers: tuple[Grant, ...]
    lists: tuple[ResourceName, ...] = ()
    """The resources whose other devices change their health by this grant, as they share a group with its devices.
    Kubelet must have handled these lists before it admits the next pod, so the answer waits for them."""


class Preferred(Struct, frozen=True, gc=False):
    """GetPreferredAllocation's answer, one choice per container."""

    containers: tuple[tuple[DeviceId, ...], ...]


class Ready(Struct, frozen=True, gc=False):
    """PreStartContainer's answer: the container may start."""


class Refused(Struct, frozen=True, gc=False):
    """The call is refused; `reason` is the sentence that the operator reads."""

    status: Refusal
    reason: str
    causes: tuple[Cause, ...]
    """The causes, each once, sorted. For the log and the metrics."""
    owners: tuple[Allocation, ...] = ()
    """The owners of the requested devices, if the call is refused because of them."""


class Elsewhere(Struct, frozen=True, gc=False):
    """The call is about a claim that this daemon has handed over: its successor answers (ADR 0015)."""


Answer = Granted | Preferred | Ready | Prepared | Unprepared | Refused | Elsewhere


class Reply(Struct, frozen=True, gc=False):
    """The answer to the call `token`; dropped if no caller waits any more."""

    token: Token
    answer: Answer


class Level(StrEnum):
    """Levels of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Field = str | int | float | bool | tuple[str, ...] | None
"""The type of a field of the log."""


class Log(Struct, frozen=True, gc=False):
    """One line in the log: an event name `noun.verb` and fields."""

    level: Level
    name: str
    fields: Mapping[str, Field]


Effect = Reply | Log
