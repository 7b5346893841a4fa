"""An image of an older gpuactors, for updates to a newer one and back.

It is today's image with the package as an older commit has it, on today's Python, and the packages that it required and
today's does not. Those that both require must be of the same version; it was so when the commit was chosen.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.node.planted_image import with_package

CHECKOUT: Final = Path(__file__).resolve().parents[2]
COMMIT: Final = "0140e26f1aad8a2e722f3c3a9798fdf46cdc0463"
"""Of the day of 0.1.0 in CHANGELOG.md."""

CLAIMS_COMMIT: Final = "0d52833e5f603b3795adf2db2052866ed60608ea"
"""The last one before the core was rewritten: an update from it reads what the former core wrote of claims."""

REQUIRED: Final = "requirements/runtime.txt"
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
    lacks the commit: there both are today's. Raises AssertionError if a version of what both require has changed."""
    image = f"gpuactors:at-{commit[:7]}"
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode != 0:
        return Older(
            image,
            layout,
            CHECKOUT / DEPLOY,
            "this clone is shallow: the older image is today's by another name",
        )
    for name, content in _files(commit, DEPLOY).items():
        (directory / DEPLOY / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / DEPLOY / name).write_bytes(content)
    package, beside = _files(commit, PACKAGE), _packages_of_then(commit, directory)
    with_package(layout, directory / "image", package, beside, f"the package as of {commit}")
    return Older(image, directory / "image", directory / DEPLOY, f"the older image is of {commit}")


def _packages_of_then(commit: str, directory: Path) -> dict[str, bytes]:
    """The files of the packages that the older commit required and today's does not, by their path below
    site-packages."""
    then = _required(_git("show", f"{commit}:{REQUIRED}").stdout.decode())
    now = _required((CHECKOUT / REQUIRED).read_text(encoding="utf-8"))
    other = [name for name in then.keys() & now.keys() if then[name] != now[name]]
    assert not other, f"{', '.join(other)} changed since {commit}: name a later commit in {__file__}"
    gone = "".join(then[name] for name in sorted(then.keys() - now.keys()))
    if not gone:
        return {}
    wanted, wheels = directory / "requirements.txt", directory / "wheels"
    wanted.write_text(gone, encoding="utf-8")
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes")
    subprocess.run(
        (*download, "--only-binary=:all:", f"--dest={wheels}", f"--requirement={wanted}"), check=True
    )
    found: dict[str, bytes] = {}
    for path in sorted(wheels.iterdir()):
        assert path.name.endswith("-none-any.whl"), (
            f"{path.name} is for one Python only, perhaps not the image's"
        )
        with zipfile.ZipFile(path) as wheel:
            found |= {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    return found


def _required(text: str) -> dict[str, str]:
    """The lines of each package, by its name."""
    entries = re.findall(r"^[a-z0-9][^\n]*(?:\n[ ]+[^\n]*)*\n", text, re.MULTILINE)
    return {entry.partition("==")[0]: entry for entry in entries}


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
