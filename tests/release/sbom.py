"""What an image is made of, as CycloneDX 1.6 in JSON: Debian's packages as dpkg had them, Python's as their
metadata does. The same image gives the same bytes.

Of a Debian package the licence is not said: its copyright file in the image is a text, not an SPDX expression.
"""

from __future__ import annotations

import email
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME: Final = "gpuactors"

DPKG_STATUS: Final = "var/lib/dpkg/status.d"
DISTRIBUTION: Final = "debian-13"
SITE_PACKAGES: Final = "opt/gpuactors/lib/python3*/site-packages"


@dataclass(frozen=True, slots=True)
class Built:
    """The image that is described: its files, its digest, and the time (seconds) that all of it has."""

    tree: Path
    manifest_digest: str
    time: int


def sbom_of(built: Built) -> str:
    """The document, indented. Raises ValueError where the schema refuses it."""
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"pkg:oci/{NAME}@{built.manifest_digest}"))
    bom.metadata.timestamp = datetime.fromtimestamp(built.time, UTC)
    python: dict[str, Distribution] = {
        canonicalize_name(found.name): found for found in _python_packages(built.tree)
    }
    components = {name: _of_python(found) for name, found in python.items()}
    debian = [_of_debian(fields) for fields in _debian_packages(built.tree)]
    algorithm, _, digest = built.manifest_digest.partition(":")
    assert algorithm == "sha256"
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER, name=NAME, version=python[NAME].version, bom_ref=f"image:{digest}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )  # fmt: skip
    bom.components.update(components.values(), debian)
    bom.register_dependency(bom.metadata.component, [components[NAME], *debian])
    for name, found in python.items():
        bom.register_dependency(components[name], [components[needed] for needed in _needs(found, python)])
    text: str = JsonV1Dot6(bom).output_as_string(indent=2)
    check(text)
    return text + "\n"


def check(text: str) -> None:
    """Raises ValueError where CycloneDX' own schema, taken strictly, refuses the document."""
    # 2 s, which whoever collects the tests need not spend.
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error is not None:
        raise ValueError(f"this is no CycloneDX {SchemaVersion.V1_6.to_version()}: {error}")


def _python_packages(tree: Path) -> Iterator[Distribution]:
    (site_packages,) = tree.glob(SITE_PACKAGES)
    yield from distributions(path=[str(site_packages)])


def _of_python(found: Distribution) -> Component:
    licences = (found.metadata[key] for key in ("License-Expression", "License") if key in found.metadata)
    licence = next(licences, "")
    name = canonicalize_name(found.name)
    return Component(
        type=ComponentType.APPLICATION if name == NAME else ComponentType.LIBRARY,
        name=found.name,
        version=found.version,
        purl=(purl := PackageURL("pypi", name=name, version=found.version)),
        bom_ref=purl.to_string(),
        # A text of many lines, as some have there, is no name.
        licenses=[LicenseFactory().make_from_string(licence)] if licence and "\n" not in licence else (),
    )


def _needs(found: Distribution, installed: dict[str, Distribution]) -> Iterator[str]:
    """What it requires among what is there: a condition that did not hold left nothing there."""
    for requirement in map(Requirement, found.requires or ()):
        name = canonicalize_name(requirement.name)
        if name in installed and "extra ==" not in str(requirement.marker):
            yield name


def _debian_packages(tree: Path) -> Iterator[dict[str, str]]:
    for file in sorted((tree / DPKG_STATUS).iterdir()):
        yield dict(email.message_from_string(file.read_text(encoding="utf-8")))


def _of_debian(fields: dict[str, str]) -> Component:
    name, version = fields["Package"], fields["Version"]
    # As distributions' advisories name it: by the source package, whose version is only said where it differs.
    source, _, of_source = fields.get("Source", name).partition(" ")
    upstream = f"{source}@{of_source.strip('()') or version}"
    purl = PackageURL(
        "deb",
        "debian",
        name,
        version,
        {"arch": fields["Architecture"], "distro": DISTRIBUTION, "upstream": upstream},
    )
    return Component(
        type=ComponentType.LIBRARY, name=name, version=version, purl=purl, bom_ref=purl.to_string(),
        description=fields["Description"].partition("\n")[0],
    )  # fmt: skip
