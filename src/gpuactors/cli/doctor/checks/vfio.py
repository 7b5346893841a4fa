"""The driver vfio-pci, its parameter, the nodes below /dev/vfio. That a GPU's own node is missing is in `gpus.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuactors.cli.doctor.facts import Facts, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, warned
from gpuactors.config import Config
from gpuactors.core.values.model import PciFunction
from gpuactors.core.values.quote import first_of
from gpuactors.host.root import CDEV_NODES, IOMMUFD_NODE
from gpuactors.host.vfio import DeviceNode, VfioHost

_CONTAINER_MODE: Final = 0o666
"""The mode of /dev/vfio/vfio, as the kernel makes it (drivers/vfio/container.c)."""
_OF_OTHERS: Final = 0o007

_LOAD: Final = "modprobe vfio-pci, and at each boot: echo vfio-pci > /etc/modules-load.d/vfio-pci.conf"


def check(facts: Facts) -> Iterator[Finding]:
    """Check vfio; nothing if the host could not be read, which `iommu.py` reports."""
    if isinstance(facts.host, Unknown):
        return
    functions = () if isinstance(facts.devices, Unknown) else facts.devices.functions
    bound = [function for function in functions if function.vfio_bound]
    yield _driver(facts.host, bound, facts.config)
    if facts.host.disable_idle_d3 is not None:
        yield _idle_d3(facts.host.disable_idle_d3, facts.config.holders)
    if facts.host.container is not None or facts.host.group_nodes:
        yield _modes(facts.host)
    if bound:
        yield _iommufd(facts.host, bound)


def _driver(host: VfioHost, bound: list[PciFunction], config: Config) -> Finding:
    if host.loaded:
        return passed(Check.VFIO_PCI, "vfio-pci is loaded")
    if host.installed is False:
        return failed(
            Check.VFIO_PCI,
            "the running kernel has no module vfio-pci",
            "Install the kernel's package of extra modules, or a kernel with CONFIG_VFIO_PCI.",
        )
    if config.dra == "on" and config.load_modules == "on" and host.installed is None:
        return warned(
            Check.VFIO_PCI,
            "vfio-pci is not loaded, and it is not known whether the running kernel has it: no /lib/modules is here",
            "Run this on the node; in a pod mount the host's /lib/modules.",
        )
    if config.dra == "on" and config.load_modules == "on":
        return passed(
            Check.VFIO_PCI, "vfio-pci is not loaded, and will be for the first claim (--load-modules on)"
        )
    if config.dra == "on":
        return failed(
            Check.VFIO_PCI, "vfio-pci is not loaded, and a claim binds GPUs to it", f"As root: {_LOAD}"
        )
    if bound:
        drivers = sorted({function.driver or "" for function in bound})
        return passed(
            Check.VFIO_PCI, f"vfio-pci is not loaded, and not needed: GPUs are on {', '.join(drivers)}"
        )
    return warned(
        Check.VFIO_PCI, "vfio-pci is not loaded, so that no GPU can be bound to it", f"As root: {_LOAD}"
    )


def _idle_d3(disabled: bool, holders: str) -> Finding:
    if not disabled:
        return passed(Check.IDLE_D3, "vfio-pci suspends GPUs that are not in use (disable_idle_d3=N)")
    if holders == "proc":
        return passed(
            Check.IDLE_D3,
            "vfio-pci leaves GPUs awake (disable_idle_d3=Y); --holders proc sees all the same when one is closed",
        )
    return warned(
        Check.IDLE_D3,
        "vfio-pci leaves GPUs awake (disable_idle_d3=Y): a GPU counts as free while the kernel still resets it after a "
        "virtual machine, and for these seconds the next one cannot open it",
        "Remove disable_idle_d3 from the options of vfio-pci (/etc/modprobe.d, or vfio-pci.disable_idle_d3 on the "
        "kernel command line) unless the GPU does not wake up from D3; or run with --holders proc.",
    )


def _modes(host: VfioHost) -> Finding:
    container = host.container
    if container is not None and container.mode & _CONTAINER_MODE != _CONTAINER_MODE:
        return warned(
            Check.NODE_MODES,
            f"{_shown(container)} is not for everybody as the kernel makes it ({_CONTAINER_MODE:04o}): a virtual "
            "machine whose process is not root may be unable to open it",
            f"As root: chmod 666 {container.path}, and find the udev rule that changes it.",
        )
    if opened := [node for node in (*host.group_nodes, *host.cdevs) if node.mode & _OF_OTHERS]:
        return warned(
            Check.NODE_MODES,
            f"every process of the node may open {', '.join(first_of([_shown(node) for node in opened]))}: a GPU "
            "can be taken by anybody",
            f"As root: chmod o= {' '.join(node.path for node in opened)}; and find the udev rule that changes them.",
        )
    modes = ", ".join(sorted({f"{node.mode:04o}" for node in (*host.group_nodes, *host.cdevs)}))
    first = f"{_shown(container)}; " if container is not None else ""
    return passed(
        Check.NODE_MODES, f"{first}group nodes: {len(host.group_nodes)}" + (f" ({modes})" if modes else "")
    )


def _shown(node: DeviceNode) -> str:
    return f"{node.path} ({node.mode:04o})"


def _iommufd(host: VfioHost, bound: list[PciFunction]) -> Finding:
    if host.iommufd is None:
        return passed(
            Check.IOMMUFD, f"no {IOMMUFD_NODE}: virtual machines get the nodes of their IOMMU groups"
        )
    without = [f.address for f in bound if not any(node.startswith(f"{CDEV_NODES}/") for node in f.nodes)]
    if without:
        return warned(
            Check.IOMMUFD,
            f"{IOMMUFD_NODE} is there, but no node below {CDEV_NODES} for {', '.join(first_of(without))}: virtual "
            "machines get the nodes of their IOMMU groups, and none that wants iommufd can start",
            "Run a kernel with CONFIG_VFIO_DEVICE_CDEV; in a pod check the mount of the host's /dev.",
        )
    return passed(Check.IOMMUFD, f"{IOMMUFD_NODE}, and a node below {CDEV_NODES} for each function on vfio")
