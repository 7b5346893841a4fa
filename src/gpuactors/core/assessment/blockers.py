"""Why a virtual machine could not open a device, whoever has it. The device's kind answers what depends on it
(`kinds/`).

Must not decide on holders: that is `holding.py`.
"""

from __future__ import annotations

from gpuactors.core.kinds.dead import dead
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Observed
from gpuactors.core.values.status import Holding, Reason


def is_unbinding(device: Device, use: Observed | None) -> bool:
    """Return whether the device's driver is asked to release it and waits for the process that has it open, by the last
    poll.

    The node counts as well as `enable`, to which any process may have written where there was never a driver
    (`host/bindings.py` decides which count is evidence).
    """
    return device.may_be_unbinding and use is not None and any(u.address in use.open for u in device.units)


def unbinding(device: Device) -> Reason:
    """Return the reason of a waiting unbind, with the remedy. Binding the device is none: that would wait as well."""
    return Reason(
        Cause.UNBINDING,
        "its unbind or unplug waits in the kernel until no process has it open: "
        f"end the process that has /dev/vfio/{device.group} open; nothing can be bound to it before",
    )


def unbinding_under(device: Device, holding: Holding | None) -> Reason:
    """Return the same with the process that it waits for."""
    held, why = holding.reason.message if holding is not None else "free", unbinding(device)
    return Reason(why.cause, f"{held}; {why.message}")


def blocker_of(device: Device, holding: Holding | None, use: Observed | None) -> Reason | None:
    """Return why a VM could not open the device; None if it could. `use` is its group's, as last polled."""
    if (sign := dead(device)) is not None:
        return sign
    if device.fault is not None:
        return Reason(Cause.UNREADABLE, device.fault)
    if is_unbinding(device, use):
        return unbinding_under(device, holding)
    if (blocker := kind_of(device).blocker(device, use)) is not None:
        return blocker
    # Who has it keeps it, and may start a container with it again.
    return Reason(Cause.RESOURCE_MIXED, device.mixed) if device.mixed and holding is None else None
