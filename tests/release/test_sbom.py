"""The list of an image's components, of a small tree that has both kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.release.sbom import DPKG_STATUS, Built, check, sbom_of

STATUS = """\
Package: libudev1
Status: install ok installed
Architecture: amd64
Source: systemd (257.13-1)
Version: 257.13-1~deb13u1
Description: libudev shared library
 This library provides access to udev device information.
"""

METADATA = {
    "gpuactors-9.9.dist-info": "Name: gpuactors\nVersion: 9.9\nLicense-Expression: Apache-2.0\n"
    "Requires-Dist: PyYAML>=6\n"
    'Requires-Dist: rich>=14; extra == "live"\nRequires-Dist: tomli; python_version < "3.11"\n',
    "pyyaml-6.0.dist-info": "Name: PyYAML\nVersion: 6.0\nLicense: MIT\n",
}

DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / DPKG_STATUS).mkdir(parents=True)
    (tmp_path / DPKG_STATUS / "libudev1").write_text(STATUS)
    for name, text in METADATA.items():
        directory = tmp_path / "opt/gpuactors/lib/python3.13/site-packages" / name
        directory.mkdir(parents=True)
        (directory / "METADATA").write_text(f"Metadata-Version: 2.4\n{text}")
    return tmp_path


def test_it_has_what_is_installed_from_debian_and_for_python(tree: Path) -> None:
    text = sbom_of(Built(tree, DIGEST, 0))
    found = json.loads(text)
    image = found["metadata"]["component"]
    assert (image["name"], image["version"], image["type"]) == ("gpuactors", "9.9", "container")
    assert image["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert found["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"
    debian = (
        "pkg:deb/debian/libudev1@257.13-1~deb13u1?arch=amd64&distro=debian-13&upstream=systemd%40257.13-1"
    )
    program, library = "pkg:pypi/gpuactors@9.9", "pkg:pypi/pyyaml@6.0"
    assert {component["purl"] for component in found["components"]} == {debian, program, library}
    licences = {c["name"]: c["licenses"][0]["license"]["id"] for c in found["components"] if "licenses" in c}
    assert licences == {"gpuactors": "Apache-2.0", "PyYAML": "MIT"}
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in found["dependencies"]}
    assert needs == {image["bom-ref"]: [debian, program], debian: [], program: [library], library: []}


def test_the_same_image_gives_the_same_bytes(tree: Path) -> None:
    built = Built(tree, DIGEST, 1_795_000_000)
    assert sbom_of(built) == sbom_of(built)


def test_the_schema_is_really_asked(tree: Path) -> None:
    found = json.loads(sbom_of(Built(tree, DIGEST, 0)))
    found["components"][0]["type"] = "gadget"
    with pytest.raises(ValueError, match="no CycloneDX"):
        check(json.dumps(found))
