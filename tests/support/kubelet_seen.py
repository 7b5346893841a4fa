"""What a kubelet stand-in has seen and answered, as frozen values. No gRPC, no threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Snapshot = Mapping[str, Mapping[str, str]]
"""Resource name → device ID → health, as kubelet has it in its device lists. Immutable."""


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One device of a frame. `numa_nodes` is None where the plugin sent no topology."""

    id: str
    health: str
    numa_nodes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One ListAndWatchResponse. `at_ns` is time.monotonic_ns() at its arrival; `client` numbers the registration
    (from 0) whose stream brought it."""

    resource: str
    at_ns: int
    devices: tuple[ListedDevice, ...]
    client: int

    @property
    def ids(self) -> tuple[str, ...]:
        """Device IDs in the order sent."""
        return tuple(device.id for device in self.devices)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A ListAndWatch stream that is over. `code` is gRPC's name for it; `noticed` says whether the device lists
    followed (kubelet marks all devices Unhealthy) or kubelet had forgotten the client (they stay as they are)."""

    resource: str
    at_ns: int
    code: str
    details: str
    client: int
    noticed: bool


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """What GetDevicePluginOptions answered; kubelet takes them from there and not from the RegisterRequest."""

    pre_start_required: bool
    get_preferred_allocation_available: bool


@dataclass(frozen=True, slots=True)
class Registration:
    """One Register call: when it came and when it was answered (time.monotonic_ns), and `error` where it failed."""

    resource: str
    endpoint: str
    version: str
    client: int
    received_ns: int
    answered_ns: int
    options: PluginOptions | None
    error: str | None


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node that a container gets."""

    container_path: str
    host_path: str
    permissions: str


@dataclass(frozen=True, slots=True)
class Allocated:
    """A ContainerAllocateResponse. `mounts` are (host path, container path, read only)."""

    envs: Mapping[str, str]
    devices: tuple[DeviceNode, ...]
    mounts: tuple[tuple[str, str, bool], ...]
    annotations: Mapping[str, str]
    cdi_devices: tuple[str, ...]
