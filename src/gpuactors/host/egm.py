"""Reads which EGMs the host has, and the GPUs of each: the memory of a Grace superchip that its virtual machine gets.

No kernel of kernel.org has EGM yet: NVIDIA's kernels list the GPUs of `egm4` in the file `gpu_devices`, one PCI address
a line; the version that was proposed for Linux last has a link by the address of each GPU instead. Both are read.
Implements `ports.node.SetsReader`. Must not open the device node: the first open clears hundreds of GiB, and a second
one may be refused.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

import trio

from gpuactors.core.kinds.set_sources import egm_sets
from gpuactors.core.kinds.sets import NO_SETS, KnownSets
from gpuactors.core.values.model import is_pci_address
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.root import DEV, EGMS, HostRoot
from gpuactors.host.threads import Running
from gpuactors.ports.errors import HostError
from gpuactors.process.plain_files import read_plain

EGM_READ_S: Final = 0.2
"""The deadline of a read, in seconds: Allocate and a claim may wait for it. A read takes some 0.2 ms."""

EGMS_MAX: Final = 64
"""Limit on the EGMs that are read: a node has one for each Grace superchip, 4 at most."""

EGM_LIST_MAX_BYTES: Final = 4096
"""The maximum length of `gpu_devices`, in bytes: an attribute in sysfs is a page."""

_NAME: Final = re.compile(r"egm[0-9]{1,10}")
_LIST: Final = "gpu_devices"


@final
class EgmReader:
    """The EGMs below one root. A read may hang in the kernel: its thread stays until the kernel answers, and until then
    no other is begun."""

    def __init__(self, root: HostRoot) -> None:
        self._root: Final = root
        self._directory: Final = root.real(EGMS)
        self._one_at_a_time: Final = trio.Lock()
        self._hanging: Running[KnownSets] | None = None

    async def read(self) -> KnownSets:
        """Implement `ports.node.SetsReader.read`."""
        if not self._is_there():
            await trio.lowlevel.checkpoint_if_cancelled()
            return NO_SETS
        async with self._one_at_a_time:
            if self._hanging is None or self._hanging.over.is_set():
                reading = Running(self._read, name="EGM", ended=lambda: None)
                self._hanging = reading
                if await reading.ends_within(EGM_READ_S):
                    self._hanging = None
                    return reading.result()
        raise HostError(
            f"cannot read {EGMS}: no answer within {EGM_READ_S:g} s, so that containers get the EGMs that were read "
            "last; look for hung tasks in the kernel's log"
        )

    def _is_there(self) -> bool:
        """Return whether the host has EGMs: one look-up in sysfs, which enters no driver, and so no thread."""
        return os.path.isdir(self._directory)

    def _read(self) -> KnownSets:
        lists: dict[str, tuple[str, ...]] = {}
        problems: list[str] = []
        for name in self._names():
            try:
                lists[name] = _gpus(f"{self._directory}/{name}")
            except OSError as error:
                raise_if_short(error, f"{EGMS}/{name}")
                if error.errno not in GONE:
                    problems.append(
                        f"{EGMS}/{name}, list of GPUs: {error.strerror}; it is not used: see the kernel's log"
                    )
        read = egm_sets(lists, frozenset(name for name in lists if self._has_node(name)))
        return KnownSets(read.sets, problems=(*problems, *read.problems))

    def _names(self) -> list[str]:
        """Return the names of the EGMs, sorted by number. Raises `HostError` if they cannot be listed."""
        try:
            names = [name for name in os.listdir(self._directory) if _NAME.fullmatch(name)]
        except OSError as error:
            raise_if_short(error, self._directory)
            if error.errno in GONE:
                return []
            raise HostError(
                f"cannot read {EGMS}: {error.strerror}; check --host-root and, in a pod, the mount of the host's /sys"
            ) from None
        return sorted(names, key=lambda name: int(name[3:]))[:EGMS_MAX]

    def _has_node(self, name: str) -> bool:
        """Return whether its device node exists, without opening it."""
        return os.path.exists(self._root.real(f"{DEV}/{name}"))


def _gpus(directory: str) -> tuple[str, ...]:
    """Return the addresses of an EGM's GPUs as the kernel has them. Raises `OSError`."""
    names = os.listdir(directory)
    if _LIST in names:
        text = read_plain(f"{directory}/{_LIST}", EGM_LIST_MAX_BYTES).decode(errors="replace")
        return tuple(text.split())
    return tuple(sorted(name for name in names if is_pci_address(name)))
