"""What the host says of IMEX: device numbers, the fabric's clique, and whether the operator's own daemon is ready.

IMEX shares GPU memory between nodes of one NVLink fabric. Its channels are character devices, whose major numbers
NVIDIA's driver gets when it is loaded; the clique is what GPU Feature Discovery has learnt from the same driver, or
what the operator has written into a file. All is read anew each time, in a thread. Must not open a device, and must not
decide what the facts mean.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.domains.model import ImexFacts
from gpuactors.core.quote import quoted
from gpuactors.core.text import encodable
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.imex_ctl import ImexCtl
from gpuactors.host.root import DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES, HostRoot
from gpuactors.host.threads import OneByOne
from gpuactors.ports import HostError

_CHANNELS: Final = "nvidia-caps-imex-channels"
_CAPS: Final = "nvidia-caps"
"""Names in /proc/devices (kernel-open/nvidia/nv-caps.c and nv-caps-imex.c of NVIDIA's driver)."""

_MINOR: Final = re.compile(r"^DeviceFileMinor:\s*([0-9]+)\s*$", re.MULTILINE)

_CLIQUE_LABEL: Final = "nvidia.com/gpu.clique"
_CLIQUE: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.[0-9]+")
_NO_CLUSTER: Final = "00000000-0000-0000-0000-000000000000"
"""The cluster of a GPU that has NVLink within its node alone."""


@final
class ImexFiles:
    """The files that say it, below the host's root."""

    def __init__(self, root: HostRoot, clique_file: str = GPU_FEATURES) -> None:
        """`clique_file`: the host's path of the file that names the clique."""
        self._root = root
        self._clique_file = clique_file

    @property
    def names(self) -> tuple[str, ...]:
        """What is read, for sentences."""
        return self._root.real(DEVICE_NUMBERS), self._root.real(self._clique_file)

    def read(self) -> ImexFacts:
        """All of it but whether the operator's own daemon is ready. May block. Raises `HostError`."""
        path = self._root.real(DEVICE_NUMBERS)
        listed = _text(path)
        if listed is None:
            raise HostError(
                f"{path} is not there: check --host-root and, in a pod, the mount of the host's /proc"
            )
        majors = character_majors(listed)
        if _CHANNELS not in majors:
            return ImexFacts(
                absent=f"{path} has no {_CHANNELS}, so this node has no IMEX channels: NVIDIA's driver is not loaded, "
                "or is older than 550; load it, or set --compute-domains off for this node"
            )
        return ImexFacts(
            channel_major=majors[_CHANNELS],
            caps_major=majors.get(_CAPS),
            mgmt_minor=self._mgmt_minor(),
            clique_id=self._clique_id(),
        )

    def _mgmt_minor(self) -> int | None:
        path = self._root.real(FABRIC_IMEX_MGMT)
        said = _text(path)
        if said is None:
            return None
        found = _MINOR.search(said)
        if found is None:
            raise HostError(
                f"{path} has no DeviceFileMinor: {quoted(said)}; check which NVIDIA driver is loaded"
            )
        return int(found[1])

    def _clique_id(self) -> str:
        path = self._root.real(self._clique_file)
        for line in (_text(path) or "").splitlines():
            # An operator's own file may have the clique alone.
            label, equals, value = line.strip().rpartition("=")
            if not value or (equals and label != _CLIQUE_LABEL):
                continue
            found = _CLIQUE.fullmatch(value)
            if found is None:
                raise HostError(
                    f"{path} names the clique {quoted(value)}, which is none: it is the cluster's UUID, a dot and a "
                    "number; check GPU Feature Discovery, or whoever writes this file"
                )
            return "" if found[1] == _NO_CLUSTER else value
        return ""


@final
class HostImex:
    """`ports.ImexReader` on a real host: in a thread, as a read may hang, and by the host's control tool."""

    def __init__(
        self,
        root: HostRoot,
        *,
        clique_file: str = GPU_FEATURES,
        ctl: ImexCtl | None = None,
        deadline_s: float = limits.IMEX_READ_S,
    ) -> None:
        """`clique_file` as of `ImexFiles`. `ctl`: None unless the operator runs IMEX."""
        self._files = ImexFiles(root, clique_file)
        self._ctl = ctl
        self._deadline_s = deadline_s
        self._thread = OneByOne("imex")

    async def read(self) -> ImexFacts:
        """As `ports.ImexReader.read`."""
        with trio.move_on_after(self._deadline_s) as waiting:
            facts = await self._thread(self._files.read)
        if waiting.cancelled_caught:
            raise HostError(
                f"what {' and '.join(self._files.names)} say of IMEX was not read within {self._deadline_s:g} s: a "
                "read hangs; look for hung tasks in the kernel's log; it is tried again"
            )
        if facts.absent or self._ctl is None:
            return facts
        return replace(facts, host_problem=await self._ctl.problem())


@final
class InlineImex:
    """`ports.ImexReader` without threads and child processes, for a tree of ordinary files on the mock clock."""

    def __init__(self, root: HostRoot, clique_file: str = GPU_FEATURES) -> None:
        self._files = ImexFiles(root, clique_file)
        self.host_problem = ""
        """What the host's control tool would say."""

    async def read(self) -> ImexFacts:
        """As `ports.ImexReader.read`."""
        await trio.lowlevel.checkpoint()
        facts = self._files.read()
        return facts if facts.absent else replace(facts, host_problem=self.host_problem)


def character_majors(listed: str) -> dict[str, int]:
    """The major numbers of the character devices in /proc/devices, by name. Block devices have numbers of their own."""
    characters, _, _ = listed.partition("Block devices:")
    found = (line.split() for line in characters.splitlines())
    return {words[1]: int(words[0]) for words in found if len(words) == 2 and words[0].isdecimal()}


def _text(path: str) -> str | None:
    """What the file says; None if it is not there. Raises `HostError`."""
    try:
        with open(path, "rb") as file:
            return encodable(file.read(limits.IMEX_FILE_MAX_BYTES).decode("utf-8", "surrogateescape"))
    except OSError as error:
        if error.errno in GONE:
            return None
        raise_if_short(error, path)
        raise HostError(
            f"{path} cannot be read: {error.strerror}; check its permissions; it is tried again"
        ) from error
