"""`just pci-ids`: the shipped pci.ids written anew from a package, and the names of GPUs that it changes.

The file is taken from the wheel that requirements/pci-ids.txt names by its hash; nothing of the package is run. A GPU's
name is its resource's name, so each one that changes belongs in the changelog.
"""

from __future__ import annotations

import datetime
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from gpuactors.core.values.naming import resource_name
from gpuactors.host.pci_ids import NVIDIA, SHIPPED, PciIds, date_of
from tests.release.version import CHECKOUT
from tests.vm.commands import ProvisionError, run

AGE_MAX: Final = datetime.timedelta(days=270)
"""Of the file at a release. Three months pass until a package has a list; a GPU is on the market for half a year before
an operator meets it."""


DIGEST: Final = CHECKOUT / "tests/release/pci-ids.sha256"
"""Of the file in the package: the shipped one is never edited, by hand or by a script that renames words."""


def too_old(date: str, today: datetime.date) -> str:
    """Why a pci.ids file of `date` (`2026-06-16`) is not released `today`, and what to do; empty if it is."""
    age = today - datetime.date.fromisoformat(date)
    if age <= AGE_MAX:
        return ""
    return (
        f"pci.ids is of {date}, {age.days} days old, and GPUs since then have no name: "
        "run 'just lock' and 'just pci-ids'"
    )


def changed_names(before: Path, after: Path) -> Mapping[str, tuple[str, str]]:
    """NVIDIA's models whose resource has another name in `after`, with both names. Models that had none are left out:
    their resource was named by the device id."""
    old, new = (PciIds(path).section(NVIDIA) for path in (before, after))
    named = {i: (resource_name(NVIDIA, i, old[i]), resource_name(NVIDIA, i, new.get(i))) for i in old}
    return {f"{NVIDIA}:{i}": names for i, names in named.items() if names[0] != names[1]}


def fetched(directory: Path) -> Path:
    """The file of the package, unpacked into `directory`. Raises ProvisionError where it is not one pci.ids file."""
    run((sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary", ":all:", "--require-hashes", "--dest", str(directory),
         "--requirement", str(CHECKOUT / "requirements/pci-ids.txt")))  # fmt: skip
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if re.search(r"(^|/)pci\.ids$", name)]
        if len(names) != 1:
            raise ProvisionError(f"{wheel.name} has {len(names)} files pci.ids, not one")
        file = directory / "pci.ids"
        file.write_bytes(packed.read(names[0]))
    if date_of(file) is None or not PciIds(file).section(NVIDIA):
        raise ProvisionError(f"{names[0]} of {wheel.name} is no pci.ids file with a date and NVIDIA's GPUs")
    return file


def main() -> int:
    """Write the file; print what it changes."""
    with tempfile.TemporaryDirectory(prefix="gpuactors-pci-ids-") as name:
        try:
            file = fetched(Path(name))
        except ProvisionError as error:
            print(f"just pci-ids: {error}", file=sys.stderr)
            return 1
        changed = changed_names(SHIPPED, file)
        print(f"pci.ids of {date_of(SHIPPED)} -> {date_of(file)}")
        for ids, (before, after) in changed.items():
            print(f"{ids}: {before} -> {after}")
        SHIPPED.write_bytes(file.read_bytes())
        DIGEST.write_text(f"{sha256(SHIPPED.read_bytes()).hexdigest()}\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
