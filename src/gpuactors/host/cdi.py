"""Reads the CDI directory: which device nodes of GPUs the files of any DRA driver, or of a toolkit, give to containers.

The files are others', in YAML or JSON. They are searched for the few words that matter and not parsed: what a file
means beside that is the container runtime's to read, and no file can cost more than its own bytes. What is known of a
file is kept while it is the same one. Must not decide whose a GPU is.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

from gpuactors import limits
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.quote import quoted
from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import HostRoot
from gpuactors.host.threads import OneByOne
from gpuactors.process.plain_files import read_plain

CDI_READ_DEADLINE_S: Final = 1.0
"""Deadline of a read of all CDI files with kubelet's ledger, in seconds; it takes milliseconds. A disk that hangs
delays a call by this much."""

ENDINGS: Final = (".json", ".yaml", ".yml")
KIND: Final = re.compile(r"""["']?\bkind["']?\s*:\s*["']?([A-Za-z0-9._/-]+)""")
"""The kind of a file's devices. In YAML and in JSON, as the others."""

_NAME: Final = re.compile(r"""(?<![A-Za-z])["']?name["']?\s*:\s*["']?([A-Za-z0-9][A-Za-z0-9._:-]*)""")
_NODE: Final = re.compile(
    r"/dev/(?:vfio/[0-9]{1,9}|vfio/devices/vfio[0-9]{1,9}|nvidia[0-9]{1,5}|dri/(?:card|renderD)[0-9]{1,5})(?![0-9A-Za-z])"
)
"""A device node of one GPU: its IOMMU group's, its vfio device's, or its host driver's."""

_KINDS_MAX: Final = 8
"""A file has one kind, and the word may be elsewhere in it as well."""
_DEVICES_MAX: Final = 1024
"""Limit on the devices of one file; no claim's file has more. Further ones are treated as if their file were
missing."""

Identity = tuple[int, int, int, int]


@final
class CdiFiles:
    """The CDI directory of a node. Implements `ports.node.CdiReader`."""

    def __init__(self, root: HostRoot, directory: str) -> None:
        """`directory`: the host's own path; a daemon that writes claims' files has it at the same path."""
        self._root = root
        self._directory = directory
        self._cached: dict[str, tuple[Identity, CdiSpec | None]] = {}
        self._thread = OneByOne("cdi")

    async def read(self) -> CdiSpecs | None:
        """Implement `ports.node.CdiReader.read`, within `CDI_READ_DEADLINE_S`."""
        read = await self._thread.in_time(self.read_now, CDI_READ_DEADLINE_S)
        return read.result() if read is not None else None

    def read_now(self) -> CdiSpecs:
        """Read every file now. May block. Raises `HostShortError` for want of descriptors or memory."""
        directory = next(filter(os.path.isdir, (self._root.real(self._directory), self._directory)), None)
        if directory is None:
            self._cached.clear()
            return CdiSpecs(problem=f"{self._directory} does not exist")
        try:
            names = sorted(n for n in os.listdir(directory) if n.endswith(ENDINGS) and n[0] != ".")
        except OSError as error:
            raise_if_short(error, directory)
            return CdiSpecs(problem=f"{self._directory} cannot be read ({error.strerror})")
        unread = [] if len(names) <= limits.CDI_SPECS_MAX else [f"more than {limits.CDI_SPECS_MAX} files"]
        by_path: dict[str, tuple[Identity, CdiSpec | None]] = {}
        for name in names[: limits.CDI_SPECS_MAX]:
            path = f"{self._directory}/{name}"
            try:
                cached = self._spec(path, f"{directory}/{name}")
            except (FileNotFoundError, NotADirectoryError):
                continue  # its claim has just ended
            except OSError as error:
                raise_if_short(error, path)
                unread.append(f"{quoted(name)} ({error.strerror})")
                if path not in self._cached:
                    continue
                cached = self._cached[path]
            by_path[path] = cached
        self._cached = by_path
        specs = tuple([spec for _, spec in by_path.values() if spec is not None])
        return CdiSpecs(specs, f"in {self._directory} {unread[0]} cannot be read" if unread else "")

    def _spec(self, path: str, real: str) -> tuple[Identity, CdiSpec | None]:
        status = os.stat(real)
        identity = status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
        if (cached := self._cached.get(path)) is not None and cached[0] == identity:
            return cached
        return identity, spec_of(path, read_plain(real, limits.CDI_SPEC_MAX_BYTES))


def spec_of(path: str, content: bytes) -> CdiSpec | None:
    """Search a file for the GPUs that it gives to containers; None if it defines no device."""
    text = content.decode(errors="replace").replace("\\/", "/")
    kinds, names = sorted({*KIND.findall(text)})[:_KINDS_MAX], sorted({*_NAME.findall(text)})[:_DEVICES_MAX]
    devices = tuple(sorted(f"{kind}={name}" for kind in kinds for name in names)[:_DEVICES_MAX])
    if not devices:
        return None
    return CdiSpec(path, devices, tuple(sorted({*_NODE.findall(text)})))
