"""Images on the node, as a registry would have brought them."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.support.patience import patient


def add_image(layout: Path, *names: str) -> None:
    """Brings the image of an OCI layout onto the node, under these names."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        with tarfile.open(archive.name, "w") as tar:
            for path in sorted(layout.rglob("*")):
                tar.add(path, str(path.relative_to(layout)), recursive=False)
        _ctr(
            "images", "import", "--base-name", "docker.io/library/imported", "--digests", "--all-platforms",
            archive.name,
        )  # fmt: skip
    (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
    imported = [name for name in _ctr("images", "ls", "-q").split() if name.endswith(manifest["digest"])]
    for name in names:
        _ctr("images", "tag", "--force", imported[0], f"docker.io/library/{name}")
        _ctr("images", "label", f"docker.io/library/{name}", "io.cri-containerd.image=managed")


def _ctr(*words: str) -> str:
    done = subprocess.run(("ctr", *words), capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.returncode == 0, f"ctr {' '.join(words)}: {done.stderr}"
    return done.stdout
