"""Reads whether the host runs the NVLink fabric of a board whose NVSwitches are no PCI functions (HGX B200 and B300).

There the fabric manager reaches the NVSwitches by bridges: functions of Mellanox' vendor ID with an InfiniBand port and
the ids of network cards. Their vital product data (VPD) alone tells them apart: it has `SW_MNG`, by which other public
programs for these boards know them, too. No such board was seen. Implements `ports.node.SetsReader`. Opens no device
node.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

from gpuactors.core.kinds.sets import NO_SETS, KnownSets
from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.root import INFINIBAND, HostRoot
from gpuactors.host.threads import OneByOne
from gpuactors.ports.errors import HostError
from gpuactors.process.plain_files import read_plain

BRIDGES_READ_S: Final = 5.0
"""The deadline of a read, in seconds: the daemon does not serve before the first one. VPD is read by configuration
cycles, some milliseconds for each function."""

VPD_MAX_BYTES: Final = 32 * 1024
"""The maximum length of VPD, in bytes (PCI Local Bus Specification, appendix I: an address has 15 bits)."""

_MARK: Final = b"SW_MNG"
_VENDOR: Final = re.compile(rb"0x15b3\n?")
_INFINIBAND_CLASS: Final = re.compile(rb"0x0207[0-9a-f]{2}\n?")
_ATTRIBUTE_BYTES: Final = 64


@final
class NvlinkBridges:
    """The bridges below one root. The VPD of a function is read once while its directory is the same."""

    def __init__(self, root: HostRoot) -> None:
        self._directory: Final = root.real(INFINIBAND)
        self._thread: Final = OneByOne("NVLink bridges")
        self._marked: dict[tuple[str, int], bool] = {}
        """Whether a function has the mark, by its address and the number of its directory."""

    async def read(self) -> KnownSets:
        """Implement `ports.node.SetsReader.read`. Functions on vfio or no driver are no device of InfiniBand, and so
        none of these."""
        if (call := await self._thread.in_time(self._read, BRIDGES_READ_S)) is None:
            raise HostError(
                f"cannot read {INFINIBAND}: no answer within {BRIDGES_READ_S:g} s, so that it is not known whether the "
                "host runs an NVLink fabric; look for hung tasks in the kernel's log"
            )
        return call.result()

    def _read(self) -> KnownSets:
        try:
            names = os.listdir(self._directory)
        except OSError as error:
            raise_if_short(error, self._directory)
            if error.errno in GONE:
                return NO_SETS
            raise HostError(
                f"cannot read {INFINIBAND}: {error.strerror}; check --host-root and the mount of the host's /sys"
            ) from None
        found = {PciAddress(a) for name in names if (a := self._bridge(f"{self._directory}/{name}/device"))}
        return KnownSets(bridges=tuple(sorted(found)))

    def _bridge(self, directory: str) -> str:
        """Return the address of the function, if it is a bridge; else empty."""
        try:
            address = os.path.basename(os.readlink(directory))
            if not is_pci_address(address):
                return ""
            key = address, os.stat(directory).st_ino
            if key not in self._marked:
                self._marked[key] = _is_marked(directory)
        except OSError as error:
            raise_if_short(error, directory)
            return ""
        return address if self._marked[key] else ""


def _is_marked(directory: str) -> bool:
    """Return whether it is a bridge by its files. Raises `OSError`."""
    if not _VENDOR.fullmatch(read_plain(f"{directory}/vendor", _ATTRIBUTE_BYTES)):
        return False
    if not _INFINIBAND_CLASS.fullmatch(read_plain(f"{directory}/class", _ATTRIBUTE_BYTES)):
        return False
    return _MARK in read_plain(f"{directory}/vpd", VPD_MAX_BYTES)
