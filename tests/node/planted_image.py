"""The image with one file changed or taken away, by one layer more: `docker build` would make the same of two lines."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = "opt/gpuactors/lib/python3.13/site-packages"
"""In the image."""

PACKAGE: Final = f"{PACKAGES}/gpuactors"
"""Of the daemon."""


def changed_image(layout: Path, to: Path, file: str, source: str | None) -> None:
    """Copies an OCI layout to `to`, with `file` of the package (`core/step.py`) changed to `source`, or gone (None)."""
    _with_layer(layout, to, _layer(file, source), f"a bug planted in {file}")


def with_package(
    layout: Path, to: Path, files: Mapping[str, bytes], beside: Mapping[str, bytes], why: str
) -> None:
    """Copies an OCI layout to `to`, with these files in place of the package's, and those of other packages beside."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        _put(tar, f"{PACKAGE}/.wh..wh..opq", b"")
        for name, content in files.items():
            _put(tar, f"{PACKAGE}/{name}", content)
        for name, content in beside.items():
            _put(tar, f"{PACKAGES}/{name}", content)
    _with_layer(layout, to, buffer.getvalue(), why)


def _with_layer(layout: Path, to: Path, layer: bytes, why: str) -> None:
    shutil.copytree(layout, to)
    index = _json(to / "index.json")
    (entry,) = index["manifests"]
    manifest = _json(_blob(to, entry["digest"]))
    config = _json(_blob(to, manifest["config"]["digest"]))
    config["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(layer).hexdigest()}")
    config["history"].append({"created_by": why})
    packed = gzip.compress(layer, mtime=0)
    manifest["layers"].append(
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
            "digest": _add(to, packed),
            "size": len(packed),
        }
    )
    content = json.dumps(config).encode()
    manifest["config"] |= {"digest": _add(to, content), "size": len(content)}
    content = json.dumps(manifest).encode()
    entry |= {"digest": _add(to, content), "size": len(content)}
    (to / "index.json").write_text(json.dumps(index))


def _layer(file: str, source: str | None) -> bytes:
    """The module, or a mark that it is gone; its bytecode, which the image never compares with its source, is gone in
    both cases."""
    directory, _, name = f"{PACKAGE}/{file}".rpartition("/")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        if source is None:
            _put(tar, f"{directory}/.wh.{name}", b"")
        else:
            _put(tar, f"{directory}/{name}", source.encode())
        _put(tar, f"{directory}/__pycache__/.wh.{name.removesuffix('.py')}.cpython-313.pyc", b"")
    return buffer.getvalue()


def _put(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _add(layout: Path, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    _blob(layout, digest).write_bytes(content)
    return digest


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found
