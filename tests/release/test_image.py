"""What of the image's build needs no root and builds nothing. The build itself is that of `just vm`, whose scenario
`privileges` runs it; `just release` compares two."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.release import base
from tests.release.artifacts import Described, unpack, write_image_archive
from tests.release.emulation import own_architecture, registration
from tests.release.image import image_in, made_of
from tests.release.make import differences, sums_of
from tests.vm.apt import sources_of
from tests.vm.commands import ProvisionError


def a_layout(directory: Path, layer: bytes = b"layer") -> None:
    """An image of one layer of five bytes."""

    def blob(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        path = directory / "layout" / "blobs" / "sha256" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    config = blob(json.dumps({"config": {"Entrypoint": ["/x"]}}).encode())
    manifest = blob(json.dumps({"config": config, "layers": [blob(layer)]}).encode())
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
        images = [Described(image_in(tmp_path / name), "amd64", '{"bomFormat": "CycloneDX"}')]
        write_image_archive(images, tmp_path / f"{name}.tar")
        (tmp_path / name / "layout" / "index.json").touch()
        archives.append((tmp_path / f"{name}.tar").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {"index.json", "oci-layout"} <= {*tar.getnames()}
        assert {entry.uid for entry in tar} == {0}


def test_an_archive_has_each_architecture_and_its_sbom_attached(tmp_path: Path) -> None:
    images = []
    for architecture in ("amd64", "arm64"):
        a_layout(tmp_path / architecture, layer=architecture.encode())
        images.append(Described(image_in(tmp_path / architecture), architecture, f"of {architecture}"))
    digest = write_image_archive(images, tmp_path / "image.tar")
    unpack(tmp_path / "image.tar", tmp_path / "layout")

    def blob(found: dict[str, Any]) -> bytes:
        content: bytes = (tmp_path / "layout" / "blobs" / found["digest"].replace(":", "/")).read_bytes()
        assert found["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert found["size"] == len(content)
        return content

    (named,) = json.loads((tmp_path / "layout" / "index.json").read_bytes())["manifests"]
    assert named["digest"] == digest
    found = json.loads(blob(named))["manifests"]
    assert [entry["platform"]["architecture"] for entry in found] == ["amd64", "arm64", "unknown", "unknown"]
    for one, image, attached in zip(images, found[:2], found[2:], strict=True):
        assert image["digest"] == one.image.manifest_digest
        (layer,) = json.loads(blob(image))["layers"]
        assert blob(layer) == one.architecture.encode()
        artifact = json.loads(blob(attached))
        assert artifact["artifactType"] == "application/vnd.cyclonedx+json"
        assert artifact["subject"] == {key: image[key] for key in ("mediaType", "digest", "size")}
        assert attached["annotations"]["vnd.docker.reference.digest"] == image["digest"]
        assert [blob(layer).decode() for layer in artifact["layers"]] == [one.sbom]


def test_a_program_of_another_architecture_is_told_by_its_elf_header() -> None:
    line = registration("x", "arm64", Path("/q")).decode()
    assert line.startswith(":x:M::")
    magic, mask = (bytes.fromhex(part.replace("\\x", "")) for part in line.split(":")[4:6])
    assert line.endswith(":/q:F")
    own = Path(sys.executable).read_bytes()[: len(magic)]
    other = own[:18] + (0xB7).to_bytes(2, "little")

    def matches(header: bytes) -> bool:
        return all((a ^ b) & m == 0 for a, b, m in zip(header, magic, mask, strict=True))

    assert matches(other)
    assert matches(own) is (own_architecture() == "arm64")


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
    etc_apt = tmp_path / "etc"
    (etc_apt / "sources.list.d").mkdir(parents=True)
    own = [f"deb https://mirror.example/debian {suite} main\n" for suite in ("bookworm", "bookworm-updates")]
    (etc_apt / "sources.list").write_text("".join(own))
    monkeypatch.setattr(base, "codename", lambda: "bookworm")
    monkeypatch.setattr(base, "sources_of", functools.partial(sources_of, etc_apt=etc_apt))
    written = [file.read_text() for file in base.write_sources(tmp_path / "sources")]
    assert written == [line.replace("bookworm", "trixie") for line in own]
    (etc_apt / "sources.list").unlink()
    with pytest.raises(ProvisionError, match="made of packages of trixie"):
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
