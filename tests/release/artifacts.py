"""Everything that a release consists of, built from the clone that this file is in: `python -m tests.release.artifacts
DIRECTORY`. The same commit gives the same bytes; `make.py` sees to it that this is so.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from tests.deploy.tools import HELM
from tests.release.image import Image, build_image
from tests.release.sbom import Built, sbom_of
from tests.release.version import CHECKOUT, commit_time, version
from tests.vm.commands import ProvisionError, run

CHART: Final = CHECKOUT / "deploy" / "chart" / "gpuactors"

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def build_packages(directory: Path, checkout: Path = CHECKOUT) -> tuple[Path, Path]:
    """The wheel and the sdist, by hatchling. Raises ProvisionError."""
    build = (sys.executable, "-m", "hatchling", "build", "--directory", str(directory))
    run(build, cwd=checkout, environment={"SOURCE_DATE_EPOCH": str(commit_time())})
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, sdist


def build_wheel_of(sdist: Path, directory: Path) -> Path:
    """The wheel that a packager makes of the sdist. Raises ProvisionError."""
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        (unpacked,) = Path(name).iterdir()
        build = (
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "--target",
            "wheel",
            "--directory",
            str(directory),
        )
        run(build, cwd=unpacked, environment={"SOURCE_DATE_EPOCH": str(commit_time())})
    (wheel,) = directory.glob("*.whl")
    return wheel


def build_chart(directory: Path) -> Path:
    """The chart as Helm packs it. Raises ProvisionError."""
    if not HELM.is_file():
        raise ProvisionError("there is no Helm in this environment: run `python -m tests.deploy.tools`")
    with tempfile.TemporaryDirectory() as name:
        chart = Path(shutil.copytree(CHART, Path(name) / CHART.name))
        # Helm writes down when each file was changed.
        for path in (chart, *chart.rglob("*")):
            os.utime(path, (commit_time(), commit_time()))
        run((str(HELM), "package", str(chart), "--destination", str(directory)))
    (package,) = directory.glob("*.tgz")
    return package


def write_image_archive(image: Image, archive: Path) -> None:
    """The OCI layout as one file: `podman load -i`, `skopeo copy oci-archive:…`."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        entry.mtime = commit_time()
        return entry

    with tarfile.open(archive, "w") as tar:
        for path in sorted(image.layout.rglob("*")):
            tar.add(path, str(path.relative_to(image.layout)), recursive=False, filter=plain)


def build_all(directory: Path) -> Image:
    """All of them into `directory`, which is new. Raises ProvisionError."""
    directory.mkdir(parents=True)
    build_packages(directory)
    build_chart(directory)
    with tempfile.TemporaryDirectory() as scratch:
        image = build_image(Path(scratch) / "image")
        name = f"gpuactors-{version()}-image-{_ARCHITECTURES[platform.machine()]}"
        write_image_archive(image, directory / f"{name}.tar")
        sbom = sbom_of(Built(image.tree, image.manifest_digest, commit_time()))
        (directory / f"{name}.cdx.json").write_text(sbom, encoding="utf-8")
        print(f"image {image.manifest_digest}")
        print(
            f"image {image.compressed_bytes() / 1e6:.1f} MB to fetch, {image.tree_bytes() / 1e6:.1f} MB unpacked"
        )
    return image


if __name__ == "__main__":
    build_all(Path(sys.argv[1]).resolve())
