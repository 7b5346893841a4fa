"""What each reader outside sees of the node's state. Read off, never kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuactors.core.calls import device_id
from gpuactors.core.health import not_offered, verdict
from gpuactors.core.inventory import devices_of, is_offered
from gpuactors.core.model import DeviceId, Frame, Health, NodeState, PciAddress, PciFunction, ResourceName
from gpuactors.core.registration import PluginOrder, is_registered, order


@dataclass(frozen=True, slots=True)
class LooksWanted:
    """The outstanding looks. A reader that missed a version loses nothing: each one lists all of them."""

    scan: int | None
    functions: Mapping[PciAddress, int]


@dataclass(frozen=True, slots=True)
class PluginView:
    """What one plugin actor works from."""

    frame: Frame
    order: PluginOrder


@dataclass(frozen=True, slots=True)
class Outputs:
    """Every standing output, for the registry to put into its cells."""

    looks: LooksWanted
    plugins: Mapping[ResourceName, PluginView]
    stopping: bool


def project(state: NodeState) -> Outputs:
    """The standing outputs that follow from the state."""
    return Outputs(
        looks=LooksWanted(state.looks.scan, state.looks.functions),
        plugins={r: PluginView(state.frames[r], order(p)) for r, p in state.plugins.items()},
        stopping=state.stopping,
    )


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One selected function as an operator sees it."""

    id: DeviceId
    function: PciFunction
    group_members: tuple[PciAddress, ...]
    resource: ResourceName
    health: Health
    reason: str


def report(state: NodeState) -> tuple[DeviceReport, ...]:
    """Every selected function, offered or not, with the one reason, sorted by address."""
    reports = []
    for device in devices_of(state.facts, state.settings.selectors):
        listed = next((a for a in state.frames.get(device.resource, ()) if a.id == device_id(device)), None)
        if listed is not None:
            health, reason = listed.health, listed.reason
        elif is_offered(device):
            health, reason = verdict(device)
        else:
            health, reason = Health.UNHEALTHY, not_offered(device.function)
        reports.append(
            DeviceReport(
                id=device_id(device),
                function=device.function,
                group_members=tuple(m.address for m in device.group),
                resource=device.resource,
                health=health,
                reason=reason,
            )
        )
    return tuple(reports)


def registered(state: NodeState) -> Mapping[ResourceName, bool]:
    """Which resources are registered: accepted by kubelet, with an open stream."""
    return {resource: is_registered(plugin) for resource, plugin in state.plugins.items()}
