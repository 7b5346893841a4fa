"""The device plugin of one resource: its endpoint, its registration, its streams, and kubelet's calls."""

from __future__ import annotations

from dataclasses import dataclass

from gpuactors.core.requests import Failure
from gpuactors.core.values.model import DeviceId, ResourceName, Token


@dataclass(frozen=True, slots=True)
class SocketBound:
    """The plugin's endpoint serves (answer to bind order `bind`)."""

    resource: ResourceName
    bind: int


@dataclass(frozen=True, slots=True)
class SocketFailed:
    """The plugin's endpoint could not be made, or failed (answer to bind order `bind`)."""

    resource: ResourceName
    bind: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegisterAnswered:
    """Kubelet answered Register (order `register`). If it failed, kubelet may have dropped a running client as well."""

    resource: ResourceName
    register: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A client, usually kubelet, opened ListAndWatch."""

    resource: ResourceName
    stream: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """That stream has ended, on either side."""

    resource: ResourceName
    stream: int


@dataclass(frozen=True, slots=True)
class AllocateAsked:
    """Allocate; one tuple of device IDs per container."""

    token: Token
    resource: ResourceName
    requests: tuple[tuple[DeviceId, ...], ...]


@dataclass(frozen=True, slots=True)
class PreStartAsked:
    """PreStartContainer, before every start of a container."""

    token: Token
    resource: ResourceName
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class PreferenceRequest:
    """One container's part of GetPreferredAllocation. The lists come in no order."""

    available: tuple[DeviceId, ...]
    must_include: tuple[DeviceId, ...]
    size: int


@dataclass(frozen=True, slots=True)
class PreferenceAsked:
    """GetPreferredAllocation; one request per container."""

    token: Token
    resource: ResourceName
    requests: tuple[PreferenceRequest, ...]


@dataclass(frozen=True, slots=True)
class CallAbandoned:
    """The caller of an unanswered call has gone."""

    token: Token


PluginEvent = SocketBound | SocketFailed | RegisterAnswered | StreamOpened | StreamEnded
CallEvent = AllocateAsked | PreStartAsked | PreferenceAsked | CallAbandoned
