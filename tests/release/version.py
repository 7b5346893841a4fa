"""What a release is named by, each read from one place: the version from pyproject.toml, the time and the revision from
git."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Final

from tests.vm.commands import run

CHECKOUT: Final = Path(__file__).resolve().parents[2]


def version(checkout: Path = CHECKOUT) -> str:
    """As pyproject.toml has it; everything else that names one is compared with it (test_version.py)."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    found: str = project["project"]["version"]
    return found


@cache
def commit_time() -> int:
    """SOURCE_DATE_EPOCH: when the last commit was made, in seconds. Raises ProvisionError outside of a clone."""
    return int(_git("log", "-1", "--format=%ct"))


@cache
def revision() -> str:
    """The last commit. Raises ProvisionError outside of a clone."""
    return _git("rev-parse", "HEAD")


@cache
def tags() -> tuple[str, ...]:
    """Of the last commit. Raises ProvisionError outside of a clone."""
    return tuple(_git("tag", "--points-at", "HEAD").split())


@cache
def source() -> str:
    """Where the repository is public: `Source` of pyproject.toml's urls, or the address that it was cloned from if that
    is one of the web without a name or a password in it; else empty."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    remote = run(
        ("git", "-c", "safe.directory=*", "-C", str(CHECKOUT), "config", "--default", "", "remote.origin.url")
    )
    found: str = project.get("urls", {}).get("Source", remote.strip())
    return found if found.startswith("https://") and "@" not in found else ""


def _git(*arguments: str) -> str:
    # Whoever builds need not be who owns the checkout (a container, a pipeline).
    return run(("git", "-c", "safe.directory=*", "-C", str(CHECKOUT), *arguments)).strip()
