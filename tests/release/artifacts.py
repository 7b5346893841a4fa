"""Everything that a release consists of, built from the clone that this file is in: `python -m tests.release.artifacts
DIRECTORY`. The same commit gives the same bytes; `make.py` sees to it that this is so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.deploy.tools import HELM
from tests.release.emulation import ARCHITECTURES
from tests.release.image import Image, build_image
from tests.release.sbom import Built, sbom_of
from tests.release.version import CHECKOUT, commit_time, version
from tests.vm.commands import ProvisionError, run

CHART: Final = CHECKOUT / "deploy" / "chart" / "gpuactors"

DISTRIBUTIONS: Final = {
    "gpuactors": CHECKOUT,
    "gpuactors_simulation": CHECKOUT / "src" / "gpuactors_simulation",
}
"""Where the pyproject.toml of each Python package is, by the name of its files."""

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
EMPTY: Final = "application/vnd.oci.empty.v1+json"
CYCLONEDX: Final = "application/vnd.cyclonedx+json"


def build_packages(name: str, directory: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of one of DISTRIBUTIONS, by hatchling. Raises ProvisionError."""
    build = (sys.executable, "-m", "hatchling", "build", "--directory", str(directory))
    run(build, cwd=DISTRIBUTIONS[name], environment={"SOURCE_DATE_EPOCH": str(commit_time())})
    (wheel,), (sdist,) = directory.glob(f"{name}-*.whl"), directory.glob(f"{name}-*.tar.gz")
    return wheel, sdist


def build_wheel_of(sdist: Path, directory: Path) -> Path:
    """The wheel that a packager makes of the sdist. Raises ProvisionError."""
    with tempfile.TemporaryDirectory() as name:
        unpack(sdist, Path(name))
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


def unpack(archive: Path, to: Path) -> None:
    """A tar archive of ours. (Debian 12's Python 3.11.2 does not know the argument `filter`.)"""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(to)


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


@dataclass(frozen=True, slots=True)
class Described:
    """An image with what it is made of."""

    image: Image
    architecture: str
    sbom: str


def write_image_archive(images: Sequence[Described], archive: Path) -> str:
    """One OCI layout in one file (`podman load -i`, `skopeo copy --all oci-archive:…`); returns its index's digest.

    The index names the image of each architecture, and the SBOM of each as an artifact whose subject is that image
    (image-spec, manifest.md); the annotations are by which BuildKit finds it.
    """
    with tempfile.TemporaryDirectory() as name:
        layout = Path(name)
        (layout / "blobs" / "sha256").mkdir(parents=True)
        of_images, of_sboms = [], []
        for one in images:
            for blob in (one.image.layout / "blobs" / "sha256").iterdir():
                shutil.copy(blob, layout / "blobs" / "sha256")
            content = (one.image.layout / "blobs" / one.image.manifest_digest.replace(":", "/")).read_bytes()
            subject = _descriptor(MANIFEST, content)
            of_images.append(subject | {"platform": {"architecture": one.architecture, "os": "linux"}})
            empty = _add(layout, EMPTY, b"{}")
            sbom = {
                "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": CYCLONEDX, "config": empty,
                "layers": [_add(layout, CYCLONEDX, one.sbom.encode())], "subject": subject,
            }  # fmt: skip
            of_sboms.append(
                _add(layout, MANIFEST, _bytes(sbom))
                | {
                    "artifactType": CYCLONEDX,
                    "platform": {"architecture": "unknown", "os": "unknown"},
                    "annotations": {
                        "vnd.docker.reference.type": "attestation-manifest",
                        "vnd.docker.reference.digest": one.image.manifest_digest,
                    },
                }
            )
        index = _bytes({"schemaVersion": 2, "mediaType": INDEX, "manifests": [*of_images, *of_sboms]})
        named = _add(layout, INDEX, index) | {"annotations": {"org.opencontainers.image.ref.name": version()}}
        (layout / "index.json").write_bytes(_bytes({"schemaVersion": 2, "manifests": [named]}))
        (layout / "oci-layout").write_bytes(_bytes({"imageLayoutVersion": "1.0.0"}))
        _write_tar(layout, archive)
    return str(named["digest"])


def _write_tar(directory: Path, archive: Path) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        entry.mtime = commit_time()
        return entry

    with tarfile.open(archive, "w") as tar:
        for path in sorted(directory.rglob("*")):
            tar.add(path, str(path.relative_to(directory)), recursive=False, filter=plain)


def _add(layout: Path, media_type: str, content: bytes) -> dict[str, Any]:
    descriptor = _descriptor(media_type, content)
    (layout / "blobs" / descriptor["digest"].replace(":", "/")).write_bytes(content)
    return descriptor


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def build_all(directory: Path) -> None:
    """All of them into `directory`, which is new. Raises ProvisionError."""
    directory.mkdir(parents=True)
    for name in DISTRIBUTIONS:
        build_packages(name, directory)
    build_chart(directory)
    name = f"gpuactors-{version()}-image"
    with tempfile.TemporaryDirectory() as scratch:
        images = []
        for architecture in ARCHITECTURES.values():
            image = build_image(Path(scratch) / architecture, architecture)
            sbom = sbom_of(Built(image.tree, image.manifest_digest, commit_time()))
            (directory / f"{name}-{architecture}.cdx.json").write_text(sbom, encoding="utf-8")
            images.append(Described(image, architecture, sbom))
            print(
                f"image for {architecture}: {image.manifest_digest}, {image.compressed_bytes() / 1e6:.1f} MB to fetch, "
                f"{image.tree_bytes() / 1e6:.1f} MB unpacked"
            )
        print(f"image {write_image_archive(images, directory / f'{name}.tar')}")


if __name__ == "__main__":
    build_all(Path(sys.argv[1]).resolve())
