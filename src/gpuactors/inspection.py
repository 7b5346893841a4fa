"""What `gpuactors inspect` shows: one look at the node, judged by the same core that the daemon runs."""

from __future__ import annotations

import json

from gpuactors.app import settings_of, sysfs_of
from gpuactors.config import Config
from gpuactors.core.events import HostScanned
from gpuactors.core.snapshot import DeviceReport, report
from gpuactors.core.step import initial_state, step


def inspect(config: Config) -> tuple[DeviceReport, ...]:
    """Every selected function of the node. Raises `ports.HostError` if the node cannot be looked at."""
    functions = sysfs_of(config).scan()
    state, _ = step(initial_state(settings_of(config)), HostScanned(1, functions), at=0.0)
    return report(state)


def as_json(found: tuple[DeviceReport, ...]) -> str:
    """`{"devices": [{"address", …}]}`."""
    return json.dumps({"devices": [_as_dict(device) for device in found]}, indent=2)


def _as_dict(device: DeviceReport) -> dict[str, object]:
    function = device.function
    return {
        "address": function.address,
        "vendor": function.vendor,
        "device": function.device,
        "class": function.class_code,
        "driver": function.driver,
        "iommu_group": function.iommu_group,
        "group_members": list(device.group_members),
        "numa_node": function.numa_node,
        "model": function.model,
        "resource": device.resource,
        "health": str(device.health),
        "reason": device.reason,
    }


_COLUMNS = ("ADDRESS", "ID", "DRIVER", "GROUP", "NUMA", "RESOURCE", "HEALTH", "REASON")


def as_table(found: tuple[DeviceReport, ...]) -> str:
    """One line per device, columns aligned."""
    if not found:
        return "No PCI function on this node is chosen by the selectors (see gpuactors config show)."
    rows = [_COLUMNS, *(_row(device) for device in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(device: DeviceReport) -> tuple[str, ...]:
    function = device.function
    return (
        function.address,
        f"{function.vendor}:{function.device}",
        function.driver or "-",
        "-" if function.iommu_group is None else str(function.iommu_group),
        "-" if function.numa_node is None else str(function.numa_node),
        device.resource,
        str(device.health),
        device.reason,
    )
