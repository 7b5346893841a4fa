"""What of the image's build needs no root and builds nothing. The build itself is that of `just vm`, whose scenario
`privileges` runs it; `just release` compares two."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from tests.release import base
from tests.release.artifacts import write_image_archive
from tests.release.image import image_in, made_of
from tests.release.make import differences, sums_of
from tests.vm.apt import Source
from tests.vm.commands import ProvisionError


def a_layout(directory: Path) -> None:
    """An image of one layer of five bytes."""

    def blob(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        path = directory / "layout" / "blobs" / "sha256" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    config = blob(json.dumps({"config": {"Entrypoint": ["/x"]}}).encode())
    manifest = blob(json.dumps({"config": config, "layers": [blob(b"layer")]}).encode())
    (directory / "layout" / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    (directory / "rootfs").mkdir()
    (directory / "rootfs" / "file").write_bytes(b"seven b")
    (directory / "rootfs" / "link").hardlink_to(directory / "rootfs" / "file")


def test_an_image_says_what_it_is_and_how_large(tmp_path: Path) -> None:
    a_layout(tmp_path)
    image = image_in(tmp_path)
    assert image.configuration()["config"] == {"Entrypoint": ["/x"]}
    assert image.manifest_digest.startswith("sha256:")
    assert (image.compressed_bytes(), image.tree_bytes()) == (5, 7)


def test_its_archive_is_the_same_whenever_and_by_whomever_it_is_written(tmp_path: Path) -> None:
    archives = []
    for name in ("a", "b"):
        a_layout(tmp_path / name)
        write_image_archive(image_in(tmp_path / name), tmp_path / f"{name}.tar")
        (tmp_path / name / "layout" / "index.json").touch()
        archives.append((tmp_path / f"{name}.tar").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert "index.json" in tar.getnames()
        assert {entry.uid for entry in tar} == {0}


def test_it_is_built_anew_when_something_that_it_is_made_of_changes(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*\n!README.md\n!src\n**/__pycache__\n")
    (tmp_path / "README.md").write_text("one")
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    before = made_of(tmp_path)
    (tmp_path / "src" / "__pycache__" / "module.pyc").write_text("compiled")
    (tmp_path / "notes").write_text("not in the image")
    assert made_of(tmp_path) == before
    (tmp_path / "src" / "module.py").write_text("")
    assert made_of(tmp_path) != before


def test_the_base_is_made_of_the_machines_own_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"bookworm": "deb https://mirror.example/debian bookworm main\n"}

    def sources_of(suite: str, *, base: str) -> tuple[Source, ...]:
        return (Source(".list", asked[suite]),) if suite == base and suite in asked else ()

    monkeypatch.setattr(base, "sources_of", sources_of)
    (file,) = base.write_sources(tmp_path / "sources")
    assert file.read_text() == asked["bookworm"]
    del asked["bookworm"]
    with pytest.raises(ProvisionError, match="made of packages of bookworm"):
        base.write_sources(tmp_path / "none")


def test_two_builds_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, content in (("one", b"same"), ("other", b"same")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "wheel").write_bytes(content)
    one, other = tmp_path / "one", tmp_path / "other"
    assert differences(one, other) == []
    assert sums_of(one) == f"{hashlib.sha256(b'same').hexdigest()}  wheel\n"
    (other / "wheel").write_bytes(b"Same")
    (one / "sdist").write_bytes(b"")
    assert differences(one, other) == ["sdist", "wheel"]
