"""The statement about a release, and its tag."""

from __future__ import annotations

import json

import pytest

from tests.release.provenance import provenance, tag_of

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-11-26\n\n- new\n\n## [1.1.0] - 2026-10-01\n"


def test_it_names_each_file_and_the_commit() -> None:
    said = json.loads(
        provenance(
            {"b.whl": "2" * 64, "a.tar": "1" * 64},
            revision="f" * 40,
            tag="v1.2.0",
            source="https://host.example/r",
        )
    )
    assert [(one["name"], one["digest"]["sha256"][0]) for one in said["subject"]] == [
        ("a.tar", "1"),
        ("b.whl", "2"),
    ]
    definition = said["predicate"]["buildDefinition"]
    assert definition["resolvedDependencies"] == [
        {"digest": {"gitCommit": "f" * 40}, "uri": "git+https://host.example/r"}
    ]
    assert definition["externalParameters"]["tag"] == "v1.2.0"


def test_a_repository_that_is_nowhere_public_has_no_address() -> None:
    said = json.loads(provenance({}, revision="f" * 40, tag="", source=""))
    assert said["predicate"]["buildDefinition"]["resolvedDependencies"] == [
        {"digest": {"gitCommit": "f" * 40}}
    ]


def test_tag_version_and_changelog_agree() -> None:
    assert tag_of(["v1.2.0", "nightly"], "1.2.0", CHANGELOG) == "v1.2.0"
    assert tag_of(["nightly"], "1.2.0", CHANGELOG) == ""


@pytest.mark.parametrize(
    ("tags", "version", "changelog", "why"),
    [
        (["v1.1.0"], "1.2.0", CHANGELOG, r"tagged v1\.1\.0, and pyproject\.toml has the version 1\.2\.0"),
        (["v1.3.0"], "1.3.0", CHANGELOG, r"no dated section 1\.3\.0 first"),
        (["v1.1.0"], "1.1.0", CHANGELOG, r"no dated section 1\.1\.0 first"),
        (
            ["v1.2.0"],
            "1.2.0",
            CHANGELOG.replace("ed]\n", "ed]\n\n- more\n", 1),
            "entries that are unreleased",
        ),
    ],
)
def test_where_they_differ_there_is_no_release(
    tags: list[str], version: str, changelog: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        tag_of(tags, version, changelog)
