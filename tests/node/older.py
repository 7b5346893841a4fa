"""An image of an older gpuactors, for updates to a newer one and back.

It is today's image with the package as an older commit has it, on today's Python. The requirements must be the same in
that commit as today; it was so when the commit was chosen.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.node.planted_image import with_package

CHECKOUT: Final = Path(__file__).resolve().parents[2]
COMMIT: Final = "0140e26f1aad8a2e722f3c3a9798fdf46cdc0463"
"""Of the day of 0.1.0 in CHANGELOG.md."""

CLAIMS_COMMIT: Final = "0d52833e5f603b3795adf2db2052866ed60608ea"
"""The last one before the core was rewritten: an update from it reads what the former core wrote of claims."""

SAME: Final = "requirements/runtime.txt"
PACKAGE: Final = "src/gpuactors/"
DEPLOY: Final = "deploy/"


@dataclass(frozen=True, slots=True)
class Older:
    """The older image, and what installs it."""

    image: str
    """Its name on the node."""
    layout: Path
    deploy: Path
    """The directory of that name, as of then: `kubectl apply -k` of its base or one of its overlays installs it."""
    what: str
    """In words."""


def older(layout: Path, directory: Path, commit: str = COMMIT) -> Older:
    """Makes the older image of today's (an OCI layout), and the manifests of then, in `directory`. A shallow clone
    lacks the commit: there both are today's. Raises AssertionError if the requirements have changed since."""
    image = f"gpuactors:at-{commit[:7]}"
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode != 0:
        return Older(
            image,
            layout,
            CHECKOUT / DEPLOY,
            "this clone is shallow: the older image is today's by another name",
        )
    assert _git("show", f"{commit}:{SAME}").stdout == (CHECKOUT / SAME).read_bytes(), (
        f"{SAME} has changed since {commit}: name a later commit in {__file__}"
    )
    for name, content in _files(commit, DEPLOY).items():
        (directory / DEPLOY / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / DEPLOY / name).write_bytes(content)
    with_package(layout, directory / "image", _files(commit, PACKAGE), f"the package as of {commit}")
    return Older(image, directory / "image", directory / DEPLOY, f"the older image is of {commit}")


def _files(commit: str, below: str) -> dict[str, bytes]:
    archive = _git("archive", commit, below)
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        opened = {member.name.removeprefix(below): tar.extractfile(member) for member in tar}
        return {name: file.read() for name, file in opened.items() if file is not None}


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    # Whoever runs the tests need not be who owns the checkout.
    return subprocess.run(
        ("git", "-c", "safe.directory=*", "-C", str(CHECKOUT), *words), capture_output=True, check=False
    )
