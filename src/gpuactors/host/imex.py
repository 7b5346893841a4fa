"""The host's facts about IMEX: device numbers, the fabric's clique, and whether the operator's own daemon is ready.

IMEX shares GPU memory between nodes of one NVLink fabric. Its channels are character devices, whose major numbers
NVIDIA's driver gets when it is loaded. The clique is asked of those who may know it, in a stated order
(`CliqueSource`), then of files. All is read anew each time, in a thread. Must not open a device, and must not
decide what the facts mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, final

import trio
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.domains import clique
from gpuactors.core.domains.clique import Said, found_by, of_claims, parsed, remembered
from gpuactors.core.values.domain import CHANNELS_MAX, ImexFacts
from gpuactors.core.values.quote import quoted
from gpuactors.core.values.text import encodable
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.imex_ctl import ImexCtl
from gpuactors.host.management import ManagementDevice
from gpuactors.host.root import DEVICE_NUMBERS, FABRIC_IMEX_MGMT, GPU_FEATURES, NVIDIA_PARAMS, HostRoot
from gpuactors.host.threads import OneByOne
from gpuactors.ports.errors import HostError
from gpuactors.process.plain_files import read_plain

IMEX_READ_S: Final = 5.0
"""Deadline of a read of the host's facts, 5 s: three small files. After it one of them is reported to hang."""

IMEX_FILE_MAX_BYTES: Final = 65536
"""Limit on a file that is read, 64 KiB: /proc/devices has 1 to 2 KB, the file of GPU Feature Discovery as much."""

_CHANNELS: Final = "nvidia-caps-imex-channels"
_CAPS: Final = "nvidia-caps"
"""Names in /proc/devices (kernel-open/nvidia/nv-caps.c and nv-caps-imex.c of NVIDIA's driver)."""

_MINOR: Final = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,7})\s*$", re.MULTILINE)

_MAJOR: Final = re.compile(r"[0-9]{1,10}")

_CHANNEL_COUNT: Final = re.compile(r"^ImexChannelCount:\s*([0-9]{1,5})\s*$", re.MULTILINE)
"""The number of channels in /proc/driver/nvidia/params."""


_CLIQUE_ID: Final = re.compile(r"\bCLIQUE_ID=([0-9a-f.-]{1,64})")
"""The daemon's variable in a CDI file, YAML or JSON."""


class CliqueSource(Protocol):
    """One of those who may know the clique of the node's fabric."""

    async def said(self) -> Said:
        """Read its value now. Raises `HostShortError`."""


@final
class Operators:
    """A `CliqueSource`: the setting `clique`."""

    def __init__(self, setting: str) -> None:
        self._said = parsed("--clique", setting)

    async def said(self) -> Said:
        await trio.lowlevel.checkpoint()
        return self._said


@final
class ImexFiles:
    """The files that say it, below the host's root."""

    def __init__(self, root: HostRoot, clique_file: str = GPU_FEATURES) -> None:
        """`clique_file`: the host's path of the file that names the clique."""
        self._root = root
        self._clique_file = clique_file

    @property
    def names(self) -> tuple[str, ...]:
        """The files and programs that are read, for sentences."""
        return self._root.real(DEVICE_NUMBERS), self._root.real(self._clique_file)

    def read(self) -> ImexFacts:
        """Read the facts, except whether the operator's own daemon is ready. May block. Raises `HostError`."""
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
            channels=self._channel_count(),
        )

    def _mgmt_minor(self) -> int | None:
        path = self._root.real(FABRIC_IMEX_MGMT)
        text = _text(path)
        if text is None:
            return None
        minor = _MINOR.search(text)
        if minor is None:
            raise HostError(
                f"{path} has no DeviceFileMinor: {quoted(text)}; check which NVIDIA driver is loaded"
            )
        return int(minor[1])

    def _channel_count(self) -> int:
        setting = _CHANNEL_COUNT.search(_text(self._root.real(NVIDIA_PARAMS)) or "")
        count = int(setting[1]) if setting is not None else 0
        return min(count, limits.IMEX_CHANNELS_MAX) or CHANNELS_MAX

    def clique(self) -> Said:
        """Read the clique from the features file. May block. Raises `HostShortError`."""
        path = self._root.real(self._clique_file)
        try:
            content = read_plain(path, IMEX_FILE_MAX_BYTES)
        except OSError as error:
            raise_if_short(error, path)
            if error.errno not in GONE:
                return Said(self._clique_file, why=f"cannot be read ({error.strerror})")
            content = b""
        for line in _decoded(content).splitlines():
            # An operator's own file may have the clique alone.
            label, equals, value = line.strip().rpartition("=")
            if value and (not equals or label == clique.LABEL):
                return parsed(self._clique_file, value)
        return Said(self._clique_file, why="does not name it")


@final
class CliqueOfClaims:
    """The clique by the CDI files of the daemons' claims here, gpuactors' own and those of NVIDIA's driver: it is
    `CLIQUE_ID` of their containers. The directory is empty after a boot."""

    def __init__(self, cdi_dir: str, driver: str) -> None:
        self._cdi_dir = cdi_dir
        self._prefix = f"k8s.{driver}-claim_"

    def read(self) -> Said:
        """Read the clique from the files. May block. Raises `HostShortError`."""
        source = f"{self._prefix}* in {self._cdi_dir}"
        try:
            names = sorted(name for name in os.listdir(self._cdi_dir) if name.startswith(self._prefix))
        except OSError as error:
            raise_if_short(error, self._cdi_dir)
            return Said(source, why=f"cannot be listed ({error.strerror})")
        cliques: list[str] = []
        for name in names[: limits.CDI_SPECS_MAX]:
            path = os.path.join(self._cdi_dir, name)
            try:
                cliques += _CLIQUE_ID.findall(_decoded(read_plain(path, IMEX_FILE_MAX_BYTES)))
            except OSError as error:  # its claim has just ended, or it is somebody else's
                raise_if_short(error, path)
        return of_claims(source, cliques)


@final
class HostImex:
    """`ports.claims.ImexReader` on a real host: in a thread, as a read may hang, and by child processes."""

    def __init__(
        self,
        root: HostRoot,
        *,
        clique_file: str = GPU_FEATURES,
        ctl: ImexCtl | None = None,
        sources: Sequence[CliqueSource] = (),
        management: ManagementDevice | None = None,
        claims: CliqueOfClaims | None = None,
        deadline_s: float = IMEX_READ_S,
    ) -> None:
        """`clique_file` as of `ImexFiles`. `ctl`: None unless the operator runs IMEX. `sources` are asked for the
        clique before that file, in their order, and `claims` after it. `management`: None where no daemon is
        served."""
        self._files = ImexFiles(root, clique_file)
        self._ctl = ctl
        self._sources = sources
        self._management = management
        self._claims = claims
        self._deadline_s = deadline_s
        self._before: Said | None = None
        """The last answer of NVML or the Node's label; a process does not outlive its boot. A file that is there and
        does not name the clique says so itself."""
        self._thread = OneByOne("imex")

    async def read(self) -> ImexFacts:
        read = await self._thread.in_time(self._read, self._deadline_s)
        if read is None:
            raise HostError(
                f"{' and '.join(self._files.names)} could not be read within {self._deadline_s:g} s: a read "
                "hangs; look for hung tasks in the kernel's log; it is tried again"
            )
        facts, in_files = read.result()
        if facts.absent:
            return facts
        facts = with_clique(facts, [*await self._ask_sources(), *in_files])
        by_others = facts.clique_source not in {said.source for said in in_files}
        if facts.clique_id and by_others:
            self._before = remembered(facts.clique_source, facts.clique_id)
        if self._ctl is None:
            return facts
        return replace(facts, host_problem=await self._ctl.problem())

    def _read(self) -> tuple[ImexFacts, list[Said]]:
        """Read the facts, and what files and earlier answers say about the clique."""
        facts, in_files = self._files.read(), [self._files.clique()]
        if self._before is not None:
            in_files.append(self._before)
        if self._claims is not None and not facts.absent:
            in_files.append(self._claims.read())
        if self._management is not None and not facts.absent:
            management, unmanaged = self._management.find()
            facts = replace(facts, management=management, unmanaged=unmanaged)
        return facts, in_files

    async def _ask_sources(self) -> list[Said]:
        """Ask the sources that precede the file, until one settles the clique."""
        answers: list[Said] = []
        for source in self._sources:
            answers.append(await source.said())
            if answers[-1].clique_id is not None or answers[-1].is_last:
                break
        return answers


def with_clique(facts: ImexFacts, said: Iterable[Said]) -> ImexFacts:
    """Add the clique to the facts, by what each source says."""
    decision = found_by(said)
    return replace(
        facts,
        clique_id=decision.clique_id,
        clique_source=decision.source,
        clique_is_past=decision.is_past,
        unknown=decision.unknown,
    )


def character_majors(listed: str) -> dict[str, int]:
    """Return the major numbers of the character devices in /proc/devices, by name. Block devices have numbers of their
    own."""
    characters, _, _ = listed.partition("Block devices:")
    lines = (line.split() for line in characters.splitlines())
    return {words[1]: int(words[0]) for words in lines if len(words) == 2 and _MAJOR.fullmatch(words[0])}


def _decoded(content: bytes) -> str:
    return encodable(content.decode("utf-8", "surrogateescape"))


def _text(path: str) -> str | None:
    """Read the file; None if it is not there. Raises `HostError`."""
    try:
        with open(path, "rb") as file:
            return _decoded(file.read(IMEX_FILE_MAX_BYTES))
    except OSError as error:
        if error.errno in GONE:
            return None
        raise_if_short(error, path)
        raise HostError(
            f"{path} cannot be read: {error.strerror}; check its permissions; it is tried again"
        ) from error
