"""The origin of a release as an in-toto statement (SLSA provenance, slsa.dev/spec/v1.0/provenance), and the check that
tag, version and changelog agree."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"


def provenance(digests: Mapping[str, str], *, revision: str, tag: str, source: str) -> str:
    """The statement about files with these SHA-256 digests. It names the recipe; the signature says who ran it.
    `source`: the repository's public address, empty if it has none; `tag`: of the commit, empty if it has none."""
    repository = {"digest": {"gitCommit": revision}} | ({"uri": f"git+{source}"} if source else {})
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": "tag:gpuactors,2026:do-release",
                "externalParameters": {"recipe": "./do release", "tag": tag},
                "resolvedDependencies": [repository],
            },
            "runDetails": {"builder": {"id": "tag:gpuactors,2026:tests/release/make.py"}},
        },
    }
    return json.dumps(statement, indent=2) + "\n"


def tag_of(tags: Sequence[str], version: str, changelog: str) -> str:
    """The tag of a commit of this version with this changelog; empty if it has none, as a trial has not. Raises
    ValueError where tag, version and changelog differ."""
    ours = [tag for tag in tags if re.match(r"v\d", tag)]
    if not ours:
        return ""
    if ours != [f"v{version}"]:
        raise ValueError(
            f"the commit is tagged {', '.join(ours)}, and pyproject.toml has the version {version}"
        )
    heads = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    dated = [name for name, date in heads if date]
    if dated[:1] != [version]:
        raise ValueError(
            f"the commit is tagged {ours[0]}, and CHANGELOG.md has no dated section {version} first"
        )
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## )", changelog, re.MULTILINE | re.DOTALL)
    if unreleased is not None and unreleased[1].strip():
        raise ValueError(f"the commit is tagged {ours[0]}, and CHANGELOG.md has entries that are unreleased")
    return ours[0]
