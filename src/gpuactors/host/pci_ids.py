"""Names of PCI ids, from a pci.ids file: the one that is shipped, or the operator's.

The host's own file is not used: a GPU's name is its resource's name, and must be the same on every node of a cluster,
whatever its distribution ships (Debian 12's name of an H100 differs from today's pci.ids, issue 10). Must not parse
more than is requested: the file has 40,000 lines, and a node has GPUs of one vendor. Format and origin:
https://pci-ids.ucw.cz/ (vendor lines at the start of a line, device lines after one tab).
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from msgspec import Struct

from gpuactors.core.values.quote import printable
from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import PCI_IDS, HostRoot
from gpuactors.ports.errors import HostError
from gpuactors.process.plain_files import read_plain

PCI_IDS_MAX_BYTES: Final = 16 * 1024 * 1024
"""Limit on a pci.ids file, unpacked; today's has 1.5 MB."""

SHIPPED: Final = Path(__file__).with_name("data") / "pci.ids"
"""The snapshot that comes with the program; its licence is beside it."""

NVIDIA: Final = "10de"

_DEVICE = re.compile(rb"\n\t([0-9a-f]{4})[ \t]+(.*)")
"""A device line, with the end of the line before it: that is found six times faster than the beginning of a line."""
_ID = re.compile(r"[0-9a-f]{4}")
_NO_DEVICE = re.compile(rb"\n(?![\t#]).*\S")
"""A line that ends a vendor's section."""
_DATE = re.compile(rb"^#\s*Date:\s*(\d{4}-\d\d-\d\d)\b", re.MULTILINE)
_HEAD_BYTES: Final = 4096
"""The date is in the comment that the file begins with, which has some 1,500 bytes."""


@final
class PciIds:
    """Finds names in `file`. A vendor's section is read at its first request, then kept as text: it has two thousand
    models, and a node a few of them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._sections: dict[str, bytes] = {}
        self._found: dict[tuple[str, str], str | None] = {}
        """The names of the models that were asked for: a thousand functions may be of one."""

    @classmethod
    def open(cls, explicit: str | os.PathLike[str] | None) -> PciIds:
        """Open the names for this run: from the `explicit` file alone, or from the shipped one.

        Raises `HostError` if the explicit file cannot be read, or is no pci.ids: every GPU's resource would have
        another name, and those on the node would be lost.
        """
        if explicit is None:
            return cls(SHIPPED)
        path = Path(explicit)
        if not _names(_section(_read(path), NVIDIA)):
            raise HostError(
                f"{path} has no device of vendor {NVIDIA}, so it is no pci.ids file with NVIDIA's GPUs: name one with "
                "--pci-ids, or leave the option out to use the shipped one"
            )
        return cls(path)

    def lookup(self, vendor: str, device: str) -> str | None:
        """Return the name of a device id; both ids are four hex digits in lower case.

        Raises `HostError` if the file has become unreadable: a GPU must not change its resource's name because of that.
        """
        model = vendor, device
        if model not in self._found:
            self._found[model] = _name(self._of_vendor(vendor), device)
        return self._found[model]

    def section(self, vendor: str) -> Mapping[str, str]:
        """Return the names of all devices of a vendor by their ids; empty if the file does not know it. Raises
        `HostError`."""
        return _names(self._of_vendor(vendor))

    def _of_vendor(self, vendor: str) -> bytes:
        # Inspections run in threads side by side; two that read a section at once put the same text there twice.
        section = self._sections.get(vendor)
        if section is None:
            section = self._sections[vendor] = _section(_read(self.file), vendor)
        return section


class Names(Struct, frozen=True):
    """Names of a node's models in one pci.ids file."""

    file: str
    date: str | None
    """The date in its head: `2026-06-16`."""
    names: Mapping[tuple[str, str], str | None]
    """The name by vendor and device id; None if the file has none."""


def names_in(file: Path, models: Iterable[tuple[str, str]]) -> Names:
    """Return the names of these models in `file`. Raises `HostError` if it cannot be read."""
    ids = PciIds(file)
    return Names(str(file), date_of(file), {model: ids.lookup(*model) for model in models})


def newest_other(used: Path, root: HostRoot) -> Path | None:
    """Return the newest of the shipped file and the host's own that is newer than `used`, by the date in its head; None
    if there is none, or `used` has no date. A file without NVIDIA's devices is none, as for `PciIds.open`. Raises
    `HostError` if `used` cannot be read."""
    dates = {used: date_of(used) or "9999"}
    for file in (SHIPPED, *(Path(root.real(path)) for path in PCI_IDS)):
        with suppress(HostError):
            if PciIds(file).section(NVIDIA):
                dates.setdefault(file, date_of(file) or "")
    newest = max(dates, key=lambda file: dates[file])
    return newest if dates[newest] > dates[used] else None


def date_of(file: Path) -> str | None:
    """Return the date in the head of a pci.ids file, as `2026-06-16`; None if it has none. Raises `HostError`."""
    date = _DATE.search(_read(file)[:_HEAD_BYTES])
    return date[1].decode() if date is not None else None


def _read(path: Path) -> bytes:
    try:
        content = read_plain(path, PCI_IDS_MAX_BYTES)
        if path.suffix == ".gz":
            with gzip.open(io.BytesIO(content)) as packed:
                content = packed.read(PCI_IDS_MAX_BYTES)
        return content
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError):
            raise_if_short(error, str(path))
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise HostError(
            f"the names of PCI ids cannot be read from {path} ({problem}): give a readable pci.ids file with "
            "--pci-ids, or leave the option out to use the shipped one"
        ) from error


def _section(content: bytes, vendor: str) -> bytes:
    """Return the device lines of a vendor, from the end of the vendor's line on; empty if it is not there."""
    line = re.escape(vendor.encode()) + rb"\s.*"
    heading = re.compile(line).match(content) or re.compile(rb"\n" + line).search(content)
    if not vendor or heading is None:
        return b""
    end = _NO_DEVICE.search(content, heading.end())
    return content[heading.end() : end.start() if end is not None else len(content)]


def _name(section: bytes, device: str) -> str | None:
    """Return the name of one device of a section."""
    if not _ID.fullmatch(device):
        return None
    line = re.compile(rb"\n\t" + device.encode() + rb"[ \t]+(.*)").search(section)
    return _text(line[1]) if line is not None else None


def _names(section: bytes) -> Mapping[str, str]:
    """Return the names of a section's devices. The first of two equal ids counts, as in NVIDIA's plugin."""
    names: dict[str, str] = {}
    for device, name in _DEVICE.findall(section):
        names.setdefault(device.decode(), _text(name))
    return names


def _text(line: bytes) -> str:
    # UTF-8 by its maintainers' word; older copies have single lines in Latin-1.
    try:
        return printable(line.decode().strip())
    except UnicodeDecodeError:
        return printable(line.decode("latin-1").strip())
