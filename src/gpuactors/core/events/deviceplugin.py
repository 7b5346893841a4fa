"""The device plugin of one resource: its endpoint, its registration, its streams, and kubelet's calls."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpuactors.core.requests import Failure
from gpuactors.core.values.device_spec import DeviceSpecs
from gpuactors.core.values.model import DeviceId, ResourceName, Token


class SocketBound(Struct, frozen=True, gc=False):
    """The plugin's endpoint serves (answer to bind order `bind`)."""

    resource: ResourceName
    bind: int


class SocketFailed(Struct, frozen=True, gc=False):
    """The plugin's endpoint could not be made, or failed (answer to bind order `bind`)."""

    resource: ResourceName
    bind: int
    reason: str


class RegisterAnswered(Struct, frozen=True, gc=False):
    """Kubelet answered Register (order `register`). If it failed, kubelet may have dropped a running client as well."""

    resource: ResourceName
    register: int
    failure: Failure | None = None


class StreamOpened(Struct, frozen=True, gc=False):
    """A client, usually kubelet, opened ListAndWatch."""

    resource: ResourceName
    stream: int


class StreamEnded(Struct, frozen=True, gc=False):
    """The stream has ended, on either side."""

    resource: ResourceName
    stream: int


class AllocateAsked(Struct, frozen=True, gc=False):
    """Allocate; one tuple of device IDs per container."""

    token: Token
    resource: ResourceName
    requests: tuple[tuple[DeviceId, ...], ...]


class PreStartAsked(Struct, frozen=True, gc=False):
    """PreStartContainer, before every start of a container."""

    token: Token
    resource: ResourceName
    devices: tuple[DeviceId, ...]


class PreferenceRequest(Struct, frozen=True, gc=False):
    """One container's part of GetPreferredAllocation. The lists come in no order."""

    available: tuple[DeviceId, ...]
    must_include: tuple[DeviceId, ...]
    size: int


class PreferenceAsked(Struct, frozen=True, gc=False):
    """GetPreferredAllocation; one request per container."""

    token: Token
    resource: ResourceName
    requests: tuple[PreferenceRequest, ...]


class CallAbandoned(Struct, frozen=True, gc=False):
    """The caller of an unanswered call has gone."""

    token: Token


class SpecsWritten(Struct, frozen=True, gc=False):
    """The CDI files of the device plugin were written, or found to be as they are to be."""

    specs: DeviceSpecs
    """The files that are there."""
    unwritten: Mapping[ResourceName, str]
    """Why each other one could not be written, as a sentence. What is there under its name is not known."""


PluginEvent = SocketBound | SocketFailed | RegisterAnswered | StreamOpened | StreamEnded
CallEvent = AllocateAsked | PreStartAsked | PreferenceAsked | CallAbandoned
