"""Whether a device is dead, by the passive signs that the kernel shows of its functions
(docs/dev/adr/0024-a-dead-gpu-is-known-by-passive-signs.md).

Each sign lasts until the kernel enumerates the function again: that alone sets up a function that has lost its state.
Must not decide who has the device, nor read any event: an event of an error is a hint.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.kinds.viability import is_companion
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import PciFunction, Sign, device_key
from gpuactors.core.values.status import Reason

_WORDS: Final = {
    Sign.SILENT: "does not answer: its configuration space reads all ones although it is powered",
    Sign.FATAL: "has had a fatal PCIe error (aer_dev_fatal)",
    Sign.PORT: "has had a fatal PCIe error (aer_rootport_total_err_fatal of the port above)",
}


def dead(device: Device) -> Reason | None:
    """Return the sign that the device is dead, whoever has it; None if there is none.

    A device is as dead as the functions that it consists of or is a part of, and as its companions: a virtual machine
    gets these with it, and a reset of the link below one bridge is a reset of each.
    """
    for unit in device.units:
        if (sign := unit.sign) is not None:
            own = device_key(unit.address) == device.key
            return _reason(sign, unit, "it" if own else f"{unit.address}, which it is a part of,")
    if not device.units:
        return None
    function = device.units[0]
    for member in device.members:
        if is_companion(function, member) and (sign := member.sign) is not None:
            return _reason(sign, member, f"{member.address}, which goes with it,")
    return None


def _reason(sign: Sign, function: PciFunction, subject: str) -> Reason:
    return Reason(
        Cause.DEAD,
        f"{subject} {_WORDS[sign]}; see the kernel's log, and have the kernel enumerate {function.address} again: "
        "write 1 to its remove, then to /sys/bus/pci/rescan, or restart the node",
    )
