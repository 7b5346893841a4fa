"""QEMU of a newer Debian in a directory of its own, with its own libc: installed nowhere, needs no root.

Debian 12 has QEMU 7.2. The machine needs `vfio-user-pci`, which QEMU has since 10.1, and Debian since the backports of
13. So QEMU and everything that it depends on, down to libc, is unpacked side by side and started by its own dynamic
linker (ld.so(8)), which never looks at the machine's libraries. Must not write outside the directories it is given.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.vm.apt import codename, private_apt, sources_of
from tests.vm.commands import ProvisionError, apt_get, run

QEMU_SUITE: Final = "trixie-backports"

BASE_SUITE: Final = "trixie"
"""Where most of what QEMU needs comes from, libc among it."""

QEMU_PACKAGE: Final = "qemu-system-x86"

PROGRAM: Final = "qemu-system-x86_64"

STARTER: Final = f"""\
#!/bin/sh
# {PROGRAM} of Debian's {QEMU_SUITE} with the libraries, modules and firmware that are unpacked beside it.
root=${{0%/*}}
libraries=$root/usr/lib/x86_64-linux-gnu
# Without this it tries the modules of a QEMU that the machine may have, and aborts.
export QEMU_MODULE_DIR="$libraries/qemu"
# The kernel names a process after what it executes, here the dynamic linker; -name names it as on any other node.
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$root/usr/bin/{PROGRAM}" \\
    -name process=qemu-system-x86 -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@"
"""


def starter(root: Path) -> Path:
    """The program to start in `root`, wherever that is moved or mounted. It is there only if everything else is."""
    return root / PROGRAM


def unpack_qemu(root: Path) -> str:
    """Fetch QEMU with everything that it depends on and unpack it as `root`, which is replaced.

    90 packages, 38 MB, after 10 MB of lists; 172 MB unpacked. Returns what QEMU says of its version. Raises
    ProvisionError.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".fetch-") as scratch:
        unpacked = Path(scratch) / "root"
        for archive in _download(Path(scratch) / "apt"):
            run(("dpkg-deb", "--extract", str(archive), str(unpacked)))
        program = starter(unpacked)
        program.write_text(STARTER, encoding="ascii")
        program.chmod(0o755)
        version = run((str(program), "--version")).splitlines()[0]
        if root.exists():
            shutil.rmtree(root)
        # The rename is last: a directory under its final name is complete.
        unpacked.rename(root)
    return version


def _download(directory: Path) -> list[Path]:
    """The packages, fetched by a private apt in `directory`."""
    own = codename()
    sources = tuple(source for suite in (BASE_SUITE, QEMU_SUITE) for source in sources_of(suite, base=own))
    if not sources:
        raise ProvisionError(
            f"apt has no source of the suite {own or 'that this machine runs'} to read {QEMU_SUITE} from: "
            "is this Debian 12 with its own package sources?"
        )
    options = private_apt(directory, sources)
    trouble = ""
    try:
        apt_get(*options, "update")
    except ProvisionError as error:
        # A third party's source that has no such suite fails the whole command, after Debian's own lists have come.
        trouble = f"\n{error}"
    try:
        # Nothing counts as installed there, so this fetches every dependency.
        apt_get(
            *options, "--target-release", QEMU_SUITE, "--no-install-recommends", "--download-only",
            "install", QEMU_PACKAGE,
        )  # fmt: skip
    except ProvisionError as error:
        raise ProvisionError(
            f"QEMU of {QEMU_SUITE} cannot be had through this machine's apt. Where a key is missing, bring "
            f"debian-archive-keyring up to date. {error}{trouble}"
        ) from None
    return sorted((directory / "cache" / "archives").glob("*.deb"))
