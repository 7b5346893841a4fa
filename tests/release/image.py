"""The image of the daemon, built where there is no container engine: `python -m tests.release.image [--arch
ARCHITECTURE] [DIRECTORY]`.

Debian's buildah carries out deploy/Containerfile in a chroot; the image that it begins with is a stand-in (`base.py`).
Needs root, for chroot and mounts. Everything happens on a tmpfs: an image is thousands of small files. The same commit
and the same packages give the same bytes. Another architecture's is started by emulation (`emulation.py`).
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.release.base import NAME, make_base, write_sources
from tests.release.emulation import ARCHITECTURES, own_architecture, running
from tests.release.version import commit_time, revision, source, version
from tests.vm.commands import ProvisionError, install, need_root, run

CHECKOUT: Final = Path(__file__).resolve().parents[2]
CONTAINERFILE: Final = CHECKOUT / "deploy" / "Containerfile"

IMAGE_DIRECTORY: Final = CHECKOUT / "var" / "image"
"""Of the image that the virtual machine runs; git-ignored."""

STAMP: Final = "made-of"
"""The file beside an image that says what it was made of."""

TOOLS: Final = ("buildah", "mmdebstrap")
"""Debian's packages, and their programs."""

SCRATCH_PREFIX: Final = "gpuactors-image-"
"""Of the directory in which an image is built."""

SCRATCH_MIB: Final = 4096
"""Of the tmpfs, at most. Seen: 0.9 GB, as the store keeps a whole tree for each stage."""

_SOURCES: Final = "/etc/apt/sources.list.d"
"""Where the machine's sources are mounted during the build, and its pip's settings beside them: a directory that the
base has, so that the mounts leave no trace in the image."""

_PIP_CONFIG: Final = "pip.conf"
_PIP_KEYS: Final = (
    "index-url",
    "extra-index-url",
    "trusted-host",
    "proxy",
    "cert",
    "timeout",
    "default-timeout",
)


@dataclass(frozen=True, slots=True)
class Image:
    """What was built: an OCI image layout, and the same image's files as a container sees them."""

    layout: Path
    tree: Path

    @property
    def manifest_digest(self) -> str:
        """By which a registry names it: `sha256:…`."""
        (entry,) = json.loads((self.layout / "index.json").read_bytes())["manifests"]
        digest: str = entry["digest"]
        return digest

    def manifest(self) -> dict[str, Any]:
        """Its layers, with their compressed sizes, and its configuration."""
        return self._json(self.manifest_digest)

    def configuration(self) -> dict[str, Any]:
        """Entry point, environment, labels."""
        return self._json(self.manifest()["config"]["digest"])

    def compressed_bytes(self) -> int:
        """What a node fetches."""
        return sum(int(layer["size"]) for layer in self.manifest()["layers"])

    def tree_bytes(self) -> int:
        """What it has on the disk then: regular files, each once."""
        files = {}
        for directory, _, names in os.walk(self.tree):
            for status in (os.lstat(os.path.join(directory, name)) for name in names):
                files[status.st_dev, status.st_ino] = status.st_size
        return sum(files.values())

    def _json(self, digest: str) -> dict[str, Any]:
        content = (self.layout / "blobs" / digest.replace(":", "/")).read_bytes()
        assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
        found: dict[str, Any] = json.loads(content)
        return found


def image_in(directory: Path) -> Image:
    """The image that `build_image(directory)` has made, or will."""
    return Image(directory / "layout", directory / "rootfs")


def build_image(directory: Path, architecture: str = "") -> Image:
    """Build it into `directory`, which is replaced; by default for this machine's architecture. Raises
    ProvisionError."""
    need_root("./do image")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        install(*missing)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    image = image_in(directory)
    wanted = made_of()
    architecture = architecture or own_architecture()
    with _scratch() as scratch, running(architecture):
        _build(_Buildah(scratch), image, architecture)
    # Last: an interrupted build leaves none.
    (directory / STAMP).write_text(wanted, encoding="ascii")
    return image


def have_image(directory: Path = IMAGE_DIRECTORY) -> Image:
    """The image of this checkout as it is now, built unless it is there. Raises ProvisionError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = directory / STAMP
        if not stamp.is_file() or stamp.read_text(encoding="ascii") != made_of():
            build_image(directory)
    return image_in(directory)


def made_of(checkout: Path = CHECKOUT) -> str:
    """A digest of everything in the checkout that the image is made of, and of what makes it."""
    digest = hashlib.sha256()
    ignored = (checkout / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [checkout / line.removeprefix("!") for line in ignored if line.startswith("!")]
    makers = [CONTAINERFILE, *(Path(__file__).with_name(name) for name in ("base.py", "image.py"))]
    for path in sorted([*makers, *(inner for top in let_through for inner in (top, *top.rglob("*")))]):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


# --- buildah ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Buildah:
    """Debian's buildah with a store of its own in `scratch`, which nothing else on the machine sees."""

    scratch: Path

    def __call__(self, command: str, *arguments: str) -> str:
        store = ("--root", str(self.scratch / "store"), "--runroot", str(self.scratch / "run"))
        return run(
            ("buildah", *store, "--storage-driver", "vfs", command, *arguments),
            environment=self.environment,
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """Also for mmdebstrap: temporary files where there is room, and one time for all files."""
        return {"TMPDIR": str(self.scratch), "SOURCE_DATE_EPOCH": str(commit_time())}


def _build(buildah: _Buildah, image: Image, architecture: str) -> None:
    settings = buildah.scratch / "settings"
    sources = write_sources(settings)
    _write_pip_settings(settings)
    make_base(buildah.scratch / "base.tar", sources, buildah.environment)
    one_time = ("--isolation", "chroot", "--timestamp", str(commit_time()))
    recipe = buildah.scratch / "base"
    recipe.write_text('FROM scratch\nADD base.tar /\nCMD ["bash"]\n', encoding="ascii")
    buildah("build", *one_time, "--file", str(recipe), "--tag", NAME, str(buildah.scratch))
    buildah(
        "build", *one_time, "--platform", f"linux/{architecture}", "--pull-never", "--layers=false", "--network=host",
        "--volume", f"{settings}:{_SOURCES}:ro",
        "--build-arg", f"PIP_CONFIG_FILE={_SOURCES}/{_PIP_CONFIG}",
        # This buildah (1.28) does not fill them in by itself.
        "--build-arg", f"BUILDPLATFORM=linux/{own_architecture()}", "--build-arg", f"TARGETARCH={architecture}",
        "--label", f"org.opencontainers.image.revision={revision()}",
        *(("--label", f"org.opencontainers.image.source={where}") if (where := source()) else ()),
        "--file", str(CONTAINERFILE), "--tag", "gpuactors", str(CHECKOUT),
    )  # fmt: skip
    buildah("push", "--format", "oci", "gpuactors", f"oci:{image.layout}:gpuactors:{version()}")
    container = buildah("from", "--pull-never", "--arch", architecture, "gpuactors").strip()
    run(("cp", "--archive", buildah("mount", container).strip(), str(image.tree)))


# --- what the machine knows ---------------------------------------------------------------------------------


def _write_pip_settings(directory: Path) -> None:
    """From where pip fetches on this machine, as a pip.conf; a certificate of its own comes along. Directories of the
    machine do not: what the image is made of is an index's."""
    settings: dict[str, str] = {}
    for line in run((sys.executable, "-m", "pip", "config", "list")).splitlines():
        key, _, value = line.partition("=")
        # A variable stands after the files, and goes before them.
        settings[key.rpartition(".")[2]] = ast.literal_eval(value)
    given = {key: settings[key] for key in _PIP_KEYS if key in settings and "file:" not in settings[key]}
    if "cert" in given:
        shutil.copy(given["cert"], directory / "certificates.pem")
        given["cert"] = f"{_SOURCES}/certificates.pem"
    lines = [f"{key} = {value}\n" for key, value in given.items()]
    (directory / _PIP_CONFIG).write_text("".join(["[global]\n", *lines]), encoding="utf-8")


@contextmanager
def _scratch() -> Iterator[Path]:
    """A tmpfs of our own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as name:
        run(("mount", "-t", "tmpfs", "-o", f"mode=700,size={SCRATCH_MIB}m", "gpuactors-image", name))
        try:
            yield Path(name)
        finally:
            # Lazily: what a step left running would hold it.
            run(("umount", "--lazy", name))


def main() -> int:
    """Build the image, and say what it is."""
    parser = argparse.ArgumentParser(prog="./do image", description="Builds the image.")
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES.values()), default=own_architecture())
    parser.add_argument("directory", nargs="?", type=Path, default=IMAGE_DIRECTORY)
    options = parser.parse_args()
    started = time.monotonic()
    try:
        image = build_image(options.directory.resolve(), options.arch)
    except ProvisionError as error:
        print(f"tests.release.image: {error}", file=sys.stderr)
        return 1
    print(f"{image.layout}: {image.manifest_digest}")
    print(f"{image.compressed_bytes() / 1e6:.1f} MB to fetch, {image.tree_bytes() / 1e6:.1f} MB unpacked")
    print(f"built in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
