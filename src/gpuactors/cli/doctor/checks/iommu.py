"""The IOMMU as a whole; what follows from it for one GPU is in `gpus.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuactors.cli.doctor.facts import Facts, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, sentence, warned
from gpuactors.core.kinds.pci_function import SWITCH_ON
from gpuactors.core.values.cause import MEANINGS, Cause
from gpuactors.core.values.quote import first_of, quoted
from gpuactors.host.vfio import VfioHost

_OFF: Final = frozenset({"iommu=off", "iommu=0", "intel_iommu=off", "amd_iommu=off"})
"""The kernel parameters that switch the IOMMU off (Documentation/admin-guide/kernel-parameters.txt)."""

_PARAMETERS: Final = ("iommu", "intel_iommu", "amd_iommu")


def check(facts: Facts) -> Iterator[Finding]:
    """Check IOMMU groups as the kernel has made them."""
    if isinstance(facts.host, Unknown):
        yield failed(
            Check.HOST_READABLE,
            facts.host.reason,
            "Run this as root on the node; in a pod check --host-root and the mounts of the host's /sys and /dev.",
        )
        return
    yield _groups(facts.host)
    if facts.host.unsafe_noiommu:
        yield warned(
            Check.NO_IOMMU_MODE,
            "the parameter enable_unsafe_noiommu_mode of the module vfio is on: a device without an IOMMU may be "
            "given to a process, which can access all of the node's memory",
            MEANINGS[Cause.NO_IOMMU_MODE].remedy,
        )


def _groups(host: VfioHost) -> Finding:
    words = host.command_line.split()
    if not host.groups:
        off = [word for word in words if word in _OFF]
        why = f"; the kernel command line has {' '.join(off)}" if off else ""
        return failed(
            Check.IOMMU_ON,
            f"the kernel has no IOMMU group{why}",
            sentence(SWITCH_ON) + " Then restart the node.",
        )
    named = [quoted(word, 64) for word in words if word.partition("=")[0] in _PARAMETERS]
    by = f", by {', '.join(first_of(host.iommus))}" if host.iommus else ""
    line = f"; kernel command line: {' '.join(named)}" if named else ""
    return passed(Check.IOMMU_ON, f"IOMMU groups: {host.groups}{by}{line}")
