"""Names of PCI ids, from a pci.ids file: the operator's, the host's, or the one that is shipped.

Must not parse more than it is asked for: the file has 40,000 lines, and a node has GPUs of one vendor. Format and
origin: https://pci-ids.ucw.cz/ (vendor lines at the start of a line, device lines after one tab).
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final, final

from gpuactors.host.root import PCI_IDS_PLACES, HostRoot
from gpuactors.ports import HostError

SHIPPED: Final = Path(str(resources.files("gpuactors.host") / "data" / "pci.ids"))
"""The snapshot that comes with the program; its licence is beside it."""

_DEVICE = re.compile(rb"\t([0-9a-f]{4})[ \t]+(.*)")
_NOTHING: Final[Mapping[str, str]] = {}


@final
class PciIds:
    """Looks names up in `files`, in this order. A vendor's section is read when it is first asked for, then kept."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self._sections: dict[tuple[Path, str], Mapping[str, str]] = {}

    @classmethod
    def open(cls, explicit: str | os.PathLike[str] | None, root: HostRoot) -> PciIds:
        """The names for this run.

        An `explicit` file is the only source. Otherwise the host's own file comes first, as its operator may have
        updated it, and the shipped one knows what the host's does not. Raises `HostError` if the explicit file cannot
        be read.
        """
        if explicit is not None:
            path = Path(explicit)
            _read(path)
            return cls((path,))
        places = (Path(root.real(place)) for place in PCI_IDS_PLACES)
        found = next((path for path in places if os.access(path, os.R_OK) and path.is_file()), None)
        return cls((SHIPPED,) if found is None else (found, SHIPPED))

    def lookup(self, vendor: str, device: str) -> str | None:
        """The name of a device id; both ids are four hex digits in lower case.

        Raises `HostError` if a file has become unreadable: a GPU must not change its resource's name because of that.
        """
        for path in self.files:
            name = self._section(path, vendor).get(device)
            if name is not None:
                return name
        return None

    def _section(self, path: Path, vendor: str) -> Mapping[str, str]:
        # Looks run in threads side by side; two that read a section at once put the same mapping there twice.
        section = self._sections.get((path, vendor))
        if section is None:
            section = self._sections[path, vendor] = _parse(_read(path), vendor)
        return section


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise HostError(
            f"the names of PCI ids cannot be read from {path} ({problem}): give a readable pci.ids file with "
            "--pci-ids, or leave the option out to use the host's or the shipped one"
        ) from error


def _parse(content: bytes, vendor: str) -> Mapping[str, str]:
    """Device names of one vendor. The first of two equal ids counts, as in NVIDIA's plugin."""
    heading = re.compile(rb"^" + re.escape(vendor.encode()) + rb"\s", re.MULTILINE).search(content)
    if not vendor or heading is None:
        return _NOTHING
    names: dict[str, str] = {}
    position = content.find(b"\n", heading.end()) + 1
    while position > 0:
        end = content.find(b"\n", position)
        line = content[position:end] if end >= 0 else content[position:]
        if line.strip() and not line.startswith((b"\t", b"#")):
            break
        device = _DEVICE.match(line)
        if device is not None:
            names.setdefault(device[1].decode(), _text(device[2]))
        position = end + 1
    return names


def _text(line: bytes) -> str:
    # UTF-8 by its maintainers' word; older copies have single lines in Latin-1.
    try:
        return line.decode().strip()
    except UnicodeDecodeError:
        return line.decode("latin-1").strip()
